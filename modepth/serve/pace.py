"""How much of a prompt a machine can read beside a row that generates, without holding it up: measured, not guessed."""

import statistics
import time
from dataclasses import replace

from modepth.cache import Cache
from modepth.generation import inference
from modepth.model import Transformer
from modepth.serve.limits import LONGER, Limits

ROUNDS, ROWS, PROMPT = 5, 8, 33
LEAST = 1e-6  # seconds: no prompt costs nothing


def with_measured_piece(limits: Limits, model: Transformer) -> Limits:
    """The limits, with pieces that lengthen a step by LONGER: of a prompt's tokens, beside rows that generate.

    >>> from modepth import ModelConfig
    >>> model = Transformer(ModelConfig(vocab_size=101, num_layers=2, dim=32, num_heads=2))
    >>> 1 <= with_measured_piece(Limits(), model).prompt_piece <= 512
    True
    """
    length = min(PROMPT, model.config.max_length)
    one = step_seconds(model, [1])
    a_row = max(0.0, step_seconds(model, [1] * ROWS) - one) / (ROWS - 1)
    a_token = max(LEAST, step_seconds(model, [length]) - one) / max(1, length - 1)
    most = limits.prompt_alone
    return replace(
        limits,
        prompt_piece=int(min(most, max(1, LONGER * one / a_token))),
        row_piece=min(float(most), LONGER * a_row / a_token),
    )


def step_seconds(model: Transformer, counts: list[int]) -> float:
    """Of a step in which rows read so many tokens, the median; the first, which warms up, does not count."""
    times = []
    with inference(model):
        for _ in range(ROUNDS + 1):
            start = time.perf_counter()
            model.extend([[0] * count for count in counts], [Cache(model.config) for _ in counts])
            times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
