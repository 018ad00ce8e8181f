"""How much of a prompt a machine can read beside a row that generates, without holding it up: measured, not guessed."""

import statistics
import time
from dataclasses import replace

from modepth.cache import Cache
from modepth.generation import inference
from modepth.model import Transformer
from modepth.serve.engine import LONGER, Limits

ROUNDS = 5


def with_measured_piece(limits: Limits, model: Transformer) -> Limits:
    """The limits, with the largest piece, a power of 2, that makes a step of one row longer by no more than LONGER.

    >>> from modepth import ModelConfig
    >>> model = Transformer(ModelConfig(vocab_size=101, num_layers=2, dim=32, num_heads=2))
    >>> with_measured_piece(Limits(prompt_alone=64), model).prompt_piece in (1, 2, 4, 8, 16, 32, 64)
    True
    """
    most = min(limits.prompt_alone, model.config.max_length - 1)
    alone, piece = step_seconds(model, 1), 1
    while 2 * piece <= most and step_seconds(model, 1 + 2 * piece) <= (1 + LONGER) * alone:
        piece *= 2
    return replace(limits, prompt_piece=piece)


def step_seconds(model: Transformer, num_tokens: int) -> float:
    """Of a step that reads so many tokens, the median; the first, which warms up, does not count."""
    times = []
    with inference(model):
        for _ in range(ROUNDS + 1):
            start = time.perf_counter()
            model.extend([[0] * num_tokens], [Cache(model.config)])
            times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
