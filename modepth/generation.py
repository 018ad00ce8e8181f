"""Generation: prefill, then one token at a time, for any number of rows of any length.

    stream(model, prompts)     tokens as they come
    generate(model, prompts)   all of them

A `Row` is one request: its tokens, its cache, how it is sampled. One step is `read_next`, which feeds every row some
of what it has not yet read, a prompt, a piece of one or its last token, in one pass over the layers, of which each
computes only the tokens that it routes; and `draw_next`, which gives a new token to the rows that have read all of
theirs. What a row says does not depend on its neighbours, so rows may join and leave between steps: the server's do.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from modepth.cache import Cache
from modepth.config import RoutingConfig
from modepth.experts import ExpertRouting
from modepth.model import Transformer, check_tokens
from modepth.routing import Routing
from modepth.sampling import Sampling, draw, new_generator
from modepth.text_stream import TextStream
from modepth.tokenizer import Tokenizer
from modepth.validation import check_count

Reason = Literal["stop", "length", "context"]  # a stop token or text; max_tokens; the model's max_length
Prompt = str | Sequence[int]
GREEDY = Sampling()


class Emitted(NamedTuple):
    """One new token of a row."""

    row: int
    token: int
    text: str  # what can be shown by now; "" without a tokenizer
    reason: Reason | None  # why it is the last one, None if it is not


class Generated(NamedTuple):
    """The continuation of one prompt."""

    tokens: list[int]
    text: str  # "" without a tokenizer
    reason: Reason
    layers: list[tuple[int, ...]] | None  # on request: those that computed each token that was read, the prompt's too


class Row:
    """A request on its way."""

    def __init__(self, model: Transformer, prompt: Sequence[int], sampling: Sampling, text: TextStream | None) -> None:
        config = model.config
        if not prompt:
            raise ValueError("is empty: give at least one token, for instance the end of text")
        if len(prompt) > config.max_length:
            raise ValueError(f"{len(prompt)} tokens are more than the model's max_length {config.max_length}")
        check_tokens(torch.tensor([list(prompt)]), config.vocab_size)
        if sampling.stop_strings and text is None:
            raise ValueError("stop_strings need a tokenizer: generate(..., tokenizer=...)")
        self.tokens = list(prompt)  # read and to be read
        self.num_prompt = len(prompt)
        self.sampling, self.text = sampling, text
        self.cache = Cache(config, expected=len(prompt) + sampling.max_tokens)
        self.generator = new_generator(sampling)
        self.reason: Reason | None = None
        self.layers: list[tuple[int, ...]] = []

    @property
    def num_unread(self) -> int:
        return len(self.tokens) - self.cache.length

    def accept(self, logits_V: Tensor) -> tuple[int, str]:
        """Draw the next token; the token and what can be shown by now."""
        token = draw(logits_V, self.sampling, self.tokens, self.generator)
        self.tokens.append(token)
        shown = ""
        if token in self.sampling.stop_ids:
            self.reason = "stop"  # it has no text: it says that the text has ended
        elif self.text is not None:
            shown = self.text.add(token)
            self.reason = "stop" if self.text.stopped else None
        if self.reason is None and len(self.tokens) - self.num_prompt == self.sampling.max_tokens:
            self.reason = "length"
        elif self.reason is None and self.cache.length == self.cache.config.max_length:
            self.reason = "context"
        if self.reason is not None and self.text is not None:
            shown += self.text.finish()
        return token, shown


class Reading(NamedTuple):
    """What a step read: some next tokens of each row, their states, row after row, and what the layers decided."""

    rows: Sequence[Row]
    parts: list[slice]  # where each row's tokens are among all N
    states_ND: Tensor
    decided: tuple[Routing | ExpertRouting, ...]

    @property
    def routings(self) -> list[Routing]:
        """Of the routed layers, in order."""
        return [each for each in self.decided if isinstance(each, Routing)]

    def layers_used(self, number: int) -> list[tuple[int, ...]]:
        """The layers that computed each token of a row."""
        config, part = self.rows[number].cache.config, self.parts[number]
        chosen = {routing.layer: routing.chosen_BT[0, part].tolist() for routing in self.routings}
        by = {layer: config.decided_by(layer) for layer in range(config.num_layers)}
        return [
            tuple(layer for layer, decides in by.items() if decides is None or chosen[decides][place])
            for place in range(part.stop - part.start)
        ]


def read_next(
    model: Transformer, rows: Sequence[Row], counts: Sequence[int], routing: RoutingConfig | None = None
) -> Reading:
    """Read the next `counts` tokens of the rows, all together."""
    starts = [row.cache.length for row in rows]
    tokens = [row.tokens[start : start + count] for row, start, count in zip(rows, starts, counts, strict=True)]
    states_ND, decided = model.extend(tokens, [row.cache for row in rows], routing=routing)
    check_all(decided)
    ends = list(itertools.accumulate(counts))
    return Reading(rows, [slice(end - count, end) for end, count in zip(ends, counts, strict=True)], states_ND, decided)


def next_logits(model: Transformer, reading: Reading) -> dict[int, Tensor]:
    """Those of the next token, by the number of the row, of each that has read all of its own. Changes no row."""
    ready = [number for number, row in enumerate(reading.rows) if row.num_unread == 0]
    if not ready:
        return {}
    logits_RV = model.lm_head(reading.states_ND[[reading.parts[number].stop - 1 for number in ready]])
    if not logits_RV.isfinite().all():
        raise FloatingPointError("the logits are not finite: look for an overflow in the layers, or NaN in the weights")
    return dict(zip(ready, logits_RV, strict=True))


def draw_next(model: Transformer, reading: Reading) -> list[Emitted]:
    """A new token for each row that has read all of its own."""
    return [draw_row(reading, number, logits_V) for number, logits_V in next_logits(model, reading).items()]


def draw_row(reading: Reading, number: int, logits_V: Tensor) -> Emitted:
    row = reading.rows[number]
    token, shown = row.accept(logits_V)
    return Emitted(number, token, shown, row.reason)


def advance(
    model: Transformer,
    rows: Sequence[Row],
    *,
    routing: RoutingConfig | None = None,
    chunk: int | None = None,
    on_read: Callable[[Reading], None] = lambda reading: None,
) -> list[Emitted]:
    """One step of all rows, each reading at most `chunk` tokens."""
    counts = [row.num_unread if chunk is None else min(chunk, row.num_unread) for row in rows]
    reading = read_next(model, rows, counts, routing)
    on_read(reading)
    return draw_next(model, reading)


def check_all(decided: Sequence[Routing | ExpertRouting]) -> None:
    """Raise if a score is not finite; one look at all layers, since it is taken at every token."""
    routings = [each for each in decided if isinstance(each, Routing)]
    scores = [score for each in routings for score in (each.logit_BT, each.predicted_BT) if score is not None]
    scores += [each.logit_BTA.flatten(1) for each in decided if isinstance(each, ExpertRouting)]
    if scores and not torch.cat(scores, dim=1).isfinite().all():
        for each in decided:
            each.check()


def note_layers(reading: Reading) -> None:
    """Remember which layers computed each token that was just read."""
    for number, row in enumerate(reading.rows):
        row.layers += reading.layers_used(number)


@contextmanager
def inference(model: Transformer) -> Iterator[None]:
    """No gradients, no dropout; the model is left as it was."""
    training = model.training
    if training:  # else there is nothing to switch, and a walk over all modules would cost each token
        model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        if training:
            model.train()


def start_rows(
    model: Transformer,
    prompts: Sequence[Prompt],
    sampling: Sampling | Sequence[Sampling],
    tokenizer: Tokenizer | None,
) -> list[Row]:
    if isinstance(prompts, str) or not prompts:
        raise ValueError(f"prompts must be a list of one or more texts or token lists, got {prompts!r}")
    each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
    if len(each) != len(prompts):
        raise ValueError(f"give one Sampling, or one for each of the {len(prompts)} prompts, got {len(each)}")
    rows = []
    for number, (prompt, how) in enumerate(zip(prompts, each, strict=True), start=1):
        text = None if tokenizer is None else TextStream(tokenizer, how.stop_strings)
        try:
            rows.append(Row(model, prompt_tokens(prompt, tokenizer), how, text))
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}") from error
    return rows


def prompt_tokens(prompt: Prompt, tokenizer: Tokenizer | None) -> Sequence[int]:
    if not isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise ValueError("text needs a tokenizer: generate(..., tokenizer=load_tokenizer(RUN))")
    return tokenizer.encode(prompt)


def stream(
    model: Transformer,
    prompts: Sequence[Prompt],
    sampling: Sampling | Sequence[Sampling] = GREEDY,
    *,
    tokenizer: Tokenizer | None = None,
    routing: RoutingConfig | None = None,
    chunk: int | None = None,
) -> Iterator[Emitted]:
    """The new tokens of all prompts as they come; `row` is the number of the prompt."""
    yield from run_rows(model, start_rows(model, prompts, sampling, tokenizer), routing, chunk)


def run_rows(
    model: Transformer,
    rows: Sequence[Row],
    routing: RoutingConfig | None = None,
    chunk: int | None = None,
    on_read: Callable[[Reading], None] = lambda reading: None,
) -> Iterator[Emitted]:
    """Advance the rows until each has its reason to end."""
    if chunk is not None:
        check_count("chunk", chunk, low=1)
    number = {id(row): index for index, row in enumerate(rows)}
    going = list(rows)
    while going:
        with inference(model):
            emitted = advance(model, going, routing=routing, chunk=chunk, on_read=on_read)
        yield from (each._replace(row=number[id(going[each.row])]) for each in emitted)
        going = [row for row in going if row.reason is None]


def generate(
    model: Transformer,
    prompts: Sequence[Prompt],
    sampling: Sampling | Sequence[Sampling] = GREEDY,
    *,
    tokenizer: Tokenizer | None = None,
    routing: RoutingConfig | None = None,
    chunk: int | None = None,
    layers: bool = False,
) -> list[Generated]:
    """Continue every prompt, texts or lists of tokens, each as its own `sampling` says.

    routing   how to route, if not as the model's config says: another rule, or what `calibrate` returns
    chunk     read prompts in pieces of so many tokens; None: at once
    layers    also return which layers computed each token

    >>> from modepth import ModelConfig, Transformer
    >>> model = Transformer(ModelConfig(vocab_size=101, num_layers=2, dim=32, num_heads=2))
    >>> [len(each.tokens) for each in generate(model, [[1, 2, 3], [4]], Sampling(max_tokens=5))]
    [5, 5]
    """
    rows = start_rows(model, prompts, sampling, tokenizer)
    texts = [""] * len(rows)
    for each in run_rows(model, rows, routing, chunk, note_layers if layers else lambda reading: None):
        texts[each.row] += each.text
    return [
        Generated(row.tokens[row.num_prompt :], text, row.reason or "length", row.layers if layers else None)
        for row, text in zip(rows, texts, strict=True)
    ]
