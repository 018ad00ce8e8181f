"""From logits to a token: greedy, or drawn after temperature, top-k and top-p, in that order.

Every request has its own generator, so what is drawn for it depends on its seed and its logits alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modepth.validation import check_count, check_number, check_seed


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one request is continued.

    max_tokens          new tokens at most
    temperature         0: always the likeliest token
    top_k               draw among so many of the likeliest; None: all
    top_p               draw among the likeliest that together reach this probability; None: all
    repetition_penalty  divides the positive and multiplies the negative logits of tokens that occurred
    stop_ids            tokens that end the text; the one that did is its last
    stop_strings        texts that end it, cut off; they need a tokenizer

    >>> Sampling(temperature=0.8, top_p=0.95, seed=1).max_tokens
    128
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_count("max_tokens", self.max_tokens, low=1)
        check_number("temperature", self.temperature, low=0.0)
        if self.top_k is not None:
            check_count("top_k", self.top_k, low=1)
        if self.top_p is not None and self.top_p != 1:
            check_number("top_p", self.top_p, low=0.0, high=1.0)
        check_number("repetition_penalty", self.repetition_penalty, low=0.0)
        if self.repetition_penalty == 0:
            raise ValueError("repetition_penalty must be more than 0, got 0 (1 leaves the logits as they are)")
        check_seed("seed", self.seed)
        for token in self.stop_ids:
            check_count("stop_ids", token, low=0)
        if any(not isinstance(text, str) or not text for text in self.stop_strings):
            raise ValueError(f"stop_strings must be texts of one or more characters, got {self.stop_strings!r}")


def new_generator(sampling: Sampling) -> torch.Generator:
    return torch.Generator().manual_seed(sampling.seed)


def draw(logits_V: Tensor, sampling: Sampling, seen: Iterable[int], generator: torch.Generator) -> int:
    """The next token of a request whose tokens so far are `seen`."""
    if sampling.repetition_penalty != 1:
        logits_V = penalized(logits_V, list(set(seen)), sampling.repetition_penalty)
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    # On the CPU in float64: the same numbers wherever the model runs.
    share_V = probabilities(logits_V.double().cpu(), sampling)
    return int(torch.multinomial(share_V, 1, generator=generator))


def penalized(logits_V: Tensor, seen: Sequence[int], penalty: float) -> Tensor:
    logits_V = logits_V.clone()
    logits_S = logits_V[seen]
    logits_V[seen] = torch.where(logits_S > 0, logits_S / penalty, logits_S * penalty)
    return logits_V


def probabilities(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """What a token is drawn from; equal logits are ranked by id.

    >>> probabilities(torch.tensor([0.0, 0.0, 1.0]).double(), Sampling(temperature=1.0, top_k=2)).count_nonzero()
    tensor(2)
    """
    # Less the highest first, so that a temperature near 0 cannot overflow.
    share_V = ((logits_V - logits_V.max()) / sampling.temperature).softmax(0)
    if sampling.top_k is None and sampling.top_p in (None, 1.0):
        return share_V
    order_V = logits_V.argsort(descending=True, stable=True)
    share_V = share_V[order_V]
    if sampling.top_k is not None:
        share_V[sampling.top_k :] = 0
        share_V = share_V / share_V.sum()
    if sampling.top_p is not None:
        before_V = share_V.cumsum(0) - share_V
        share_V[1:][before_V[1:] >= sampling.top_p] = 0  # the likeliest always stays
    return torch.zeros_like(share_V).scatter(0, order_V, share_V / share_V.sum())
