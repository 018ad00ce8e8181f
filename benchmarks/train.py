"""A training step of routed decoders against the dense one of the same shape, beside the FLOP ratio.

    python benchmarks/train.py [--quick] [--rounds N] [--out FILE]

A step is the loop's own: forward, backward, clipping, AdamW. One process, float32, the models interleaved
within each round; a time ratio is the median over the rounds. FLOP ratios include logits, causal attention
counted half. Then what the loop adds to forward, backward and optimiser, as a share of its step: reading the
batch, counting, clipping, agreeing, logging. Last line: JSON.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from modepth import ModelConfig, RoutingConfig, Transformer, flops
from modepth.config import TrainConfig
from modepth.data import TokenWriter, open_tokens
from modepth.run import ALONE, Data, Loop
from modepth.run_folder import prepare_run
from modepth.train import make_optimizer, train_step, windows_to_batch

SHAPES = [(256, 256), (256, 1024), (512, 256), (512, 1024)]  # width, tokens of a row
VOCABULARY = 2048
QUICK_SECONDS = 22  # for the rounds of all shapes
LOOP_STEPS = 20


def measure(dense: ModelConfig, capacities: tuple[float, ...], tokens: int, rounds: int, seconds: float) -> list[dict]:
    """A row for each capacity; rounds end when `seconds` are over, but not before the first."""
    until = time.perf_counter() + seconds
    configs = [dense] + [replace(dense, routing=RoutingConfig(capacity=capacity, every=2)) for capacity in capacities]
    length, training = dense.max_length, TrainConfig(steps=1)
    models = [Transformer(config).train() for config in configs]
    optimizers = [make_optimizer(model, training) for model in models]
    batch = windows_to_batch(torch.randint(VOCABULARY, (tokens // length, length + 1)))

    def step_seconds(number: int) -> float:
        start = time.perf_counter()
        train_step(models[number], optimizers[number], batch, training, ALONE)
        return time.perf_counter() - start

    for number in range(len(models)):
        step_seconds(number)
    times: list[list[float]] = []
    while not times or (len(times) < rounds and time.perf_counter() < until):
        times.append([step_seconds(number) for number in range(len(models))])
    rows = []
    for number, config in enumerate(configs[1:], start=1):
        ratios = sorted(row[number] / row[0] for row in times)
        ours, theirs = (flops.training_flops(each, length, half_causal=True) for each in (config, dense))
        rows.append(
            {
                "d": dense.dim,
                "T": length,
                "capacity": capacities[number - 1],
                "time_ratio": round(statistics.median(ratios), 4),
                "flop_ratio": round(ours / theirs, 4),
                "lowest": round(ratios[0], 4),
                "highest": round(ratios[-1], 4),
                "rounds": len(times),
                "layers": dense.num_layers,
                "tokens": tokens,
                "dense_ms": round(1000 * statistics.median(row[0] for row in times), 1),
            }
        )
    return rows


def loop_overhead(config: ModelConfig, steps: int) -> float:
    """The share of the loop's time that is not forward, backward or optimiser."""
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "some.tokens"
        writer = TokenWriter(tokens, VOCABULARY)
        writer.add(torch.randint(VOCABULARY, (2**18,)).tolist(), num_bytes=2**18)
        writer.finish()
        run = prepare_run(Path(folder) / "run")
        training = TrainConfig(steps=steps + 1, batch_size=4096 // config.max_length)
        data = Data(open_tokens(tokens), open_tokens(tokens))
        loop = Loop(Transformer(config), training, data, run, ALONE, steps + 1, lambda row: None)
        loop.do(0)
        start = time.perf_counter()
        with core_seconds(loop.model, loop.optimizer) as core:
            for step in range(1, steps + 1):
                loop.do(step)
        return 1 - sum(core) / (time.perf_counter() - start)


@contextmanager
def core_seconds(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[list[float]]:
    """A list to which each forward, backward and update inside the block adds its seconds."""
    seconds: list[float] = []
    started: list[float] = []

    def begin(*_: object) -> None:
        started.append(time.perf_counter())

    def end(*_: object) -> None:
        seconds.append(time.perf_counter() - started.pop())

    backward = torch.Tensor.backward

    def timed_backward(self: torch.Tensor) -> None:
        begin()
        backward(self)
        end()

    hooks = [model.register_forward_pre_hook(begin), model.register_forward_hook(end)]
    hooks += [optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(end)]
    torch.Tensor.backward = timed_backward  # type: ignore[method-assign,assignment]
    try:
        yield seconds
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer layers, tokens and rounds: under 45 seconds")
    parser.add_argument("--rounds", type=int, default=9, help="rounds a shape (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="also write the rows here, as JSON lines")
    options = parser.parse_args()
    torch.manual_seed(0)
    layers, tokens, capacities = (5, 2048, (0.125,)) if options.quick else (9, 4096, (0.125, 0.5))
    print(f"{'d':>5} {'T':>5} {'capacity':>8} {'time':>7} {'FLOPs':>7} {'time/FLOPs':>10}  (routed / dense)")
    rows = []
    until = time.perf_counter() + QUICK_SECONDS if options.quick else float("inf")
    for number, (dim, length) in enumerate(tqdm(SHAPES, unit="shape", leave=False)):
        shape = ModelConfig(vocab_size=VOCABULARY, num_layers=layers, dim=dim, num_heads=dim // 64, max_length=length)
        share = (until - time.perf_counter()) / (len(SHAPES) - number)
        for row in measure(shape, capacities, tokens, options.rounds, share):
            rows.append(row)
            tqdm.write(
                f"{row['d']:5} {row['T']:5} {row['capacity']:8} {row['time_ratio']:7.3f} {row['flop_ratio']:7.3f} "
                f"{row['time_ratio'] / row['flop_ratio']:10.3f}"
            )
    small = ModelConfig(vocab_size=VOCABULARY, num_layers=layers, dim=256, num_heads=4, max_length=256)
    overhead = loop_overhead(replace(small, routing=RoutingConfig()), 3 if options.quick else LOOP_STEPS)
    print(f"the loop's own share of a step at d = 256, T = 256, capacity 0.125: {100 * overhead:.2f} %")
    machine = {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("".join(json.dumps({**row, **machine}) + "\n" for row in rows))
    print(json.dumps({"rows": rows, "loop_overhead": round(overhead, 5), **machine}))


if __name__ == "__main__":
    main()
