"""What a request may want to know besides its tokens: each a `Watch` of the engine.

next_logprobs   how likely the token after each one that was read was, prompt included
drawn_logprobs  the same of new tokens alone

`modepth.depth` has two more: layers_used and router_scores.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from modepth.generation import Reading
from modepth.model import Transformer


class Alternative(NamedTuple):
    token: int
    logprob: float


class NextToken(NamedTuple):
    """How likely a token was, and the likeliest there."""

    logprob: float
    top: tuple[Alternative, ...]


def next_logprobs(model: Transformer, reading: Reading, number: int, top: int) -> list[NextToken]:
    """Of the tokens that follow those just read, as far as they are known: a prompt's, or the one just drawn."""
    row, part = reading.rows[number], reading.parts[number]
    first = row.cache.length - (part.stop - part.start) + 1
    return logprobs(model, reading, part.start, row.tokens[first : row.cache.length + 1], top)


def drawn_logprobs(model: Transformer, reading: Reading, number: int, top: int) -> list[NextToken]:
    row, part = reading.rows[number], reading.parts[number]
    new = row.tokens[max(row.cache.length, row.num_prompt) :]
    return logprobs(model, reading, part.stop - 1, new, top)


def logprobs(model: Transformer, reading: Reading, place: int, tokens: Sequence[int], top: int) -> list[NextToken]:
    """Of tokens, from the states from `place` on. In float64, before temperature and all that samples."""
    if not tokens:
        return []
    logits_KV = model.lm_head(reading.states_ND[place : place + len(tokens)])
    log_KV = logits_KV.double().log_softmax(-1).cpu()
    own_K = log_KV.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1).tolist()
    best = log_KV.topk(min(top, log_KV.shape[1]), dim=1)
    return [
        NextToken(own, tuple(map(Alternative, ids, values)))
        for own, ids, values in zip(own_K, best.indices.tolist(), best.values.tolist(), strict=True)
    ]
