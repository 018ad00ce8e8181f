"""How many FLOPs a second a training step does, for the time that a plan announces."""

import statistics
import time
from collections.abc import Iterable

import torch

from modepth.model import Transformer
from modepth.schedule import step_flops
from modepth.sweep.plan import PlannedRun
from modepth.sweep.results import Row
from modepth.train import make_optimizer, train_step, windows_to_batch
from modepth.world import join_world

STEPS = 3  # timed, after one that sets kernels up


def rate_of_rows(rows: Iterable[Row]) -> float | None:
    """The median rate of finished runs, each by its median step."""
    rates = [row.training_flops / (row.steps * row.step_seconds) for row in rows if row.step_seconds]
    return statistics.median(rates) if rates else None


def measured_rate(run: PlannedRun, threads: int) -> float:
    """The rate of a few steps of this run, on random tokens."""
    world, before = join_world(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = Transformer(run.model).to(world.device).train()
        optimizer = make_optimizer(model, run.train)
        tokens_BT = torch.randint(run.model.vocab_size, (run.train.batch_size, run.length + 1))
        batch = windows_to_batch(tokens_BT).to(world.device)
        seconds = []
        for _ in range(1 + STEPS):
            start = time.perf_counter()
            train_step(model, optimizer, batch, run.train, world)
            seconds.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return step_flops(run.train, run.model) / statistics.median(seconds[1:])
