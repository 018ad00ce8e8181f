"""Forward + backward time of routed decoders against the dense one of the same shape, beside the FLOP ratio.

    python benchmarks/forward_backward.py [--quick] [--rounds N] [--out FILE]

One process, float32, the models interleaved within each round; a time ratio is the median over the
rounds. FLOP ratios include logits, causal attention counted half (and in full). Last line: JSON.
"""

import argparse
import json
import platform
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from modepth import ModelConfig, RoutingConfig, Transformer, flops

TOKENS = 4096  # in a batch
CAPACITIES = (0.125, 0.5)


def shapes(quick: bool) -> list[ModelConfig]:
    sizes = [(256, 256)] if quick else [(256, 256), (256, 1024), (512, 256), (512, 1024)]
    return [
        ModelConfig(vocab_size=2048, num_layers=9, dim=dim, num_heads=dim // 64, max_length=length)
        for dim, length in sizes
    ]


def step_seconds(model: Transformer, tokens_BT: torch.Tensor) -> float:
    start = time.perf_counter()
    out = model(tokens_BT[:, :-1], targets=tokens_BT[:, 1:], mode="topk")
    (out.loss + out.router_loss).backward()
    seconds = time.perf_counter() - start
    model.zero_grad()
    return seconds


def measure(dense: ModelConfig, rounds: int) -> list[dict[str, float]]:
    """A row for each capacity."""
    configs = [dense] + [replace(dense, routing=RoutingConfig(capacity=capacity, every=2)) for capacity in CAPACITIES]
    models = [Transformer(config) for config in configs]
    length = dense.max_length
    tokens_BT = torch.randint(dense.vocab_size, (TOKENS // length, length + 1))
    for model in models:
        step_seconds(model, tokens_BT)
    times = [[step_seconds(model, tokens_BT) for model in models] for _ in range(rounds)]
    rows = []
    for number, config in enumerate(configs[1:], start=1):
        ratios = sorted(row[number] / row[0] for row in times)
        flop_ratio, full_ratio = (
            flops.training_flops(config, length, half_causal=half)
            / flops.training_flops(dense, length, half_causal=half)
            for half in (True, False)
        )
        rows.append(
            {
                "d": dense.dim,
                "T": length,
                "capacity": CAPACITIES[number - 1],
                "time_ratio": round(statistics.median(ratios), 4),
                "lowest": round(ratios[0], 4),
                "highest": round(ratios[-1], 4),
                "flop_ratio": round(flop_ratio, 4),
                "flop_ratio_causal_full": round(full_ratio, 4),
                "dense_ms": round(1000 * statistics.median(row[0] for row in times), 1),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one shape, three rounds")
    parser.add_argument("--rounds", type=int, default=9, help="rounds a shape (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="also write the rows here, as JSON lines")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{'d':>5} {'T':>5} {'capacity':>8} {'time':>7} {'FLOPs':>7} {'time/FLOPs':>10}  (routed / dense)")
    rows = []
    for shape in tqdm(shapes(options.quick), unit="shape", leave=False):
        for row in measure(shape, 3 if options.quick else options.rounds):
            rows.append(row)
            tqdm.write(
                f"{row['d']:5} {row['T']:5} {row['capacity']:8} {row['time_ratio']:7.3f} {row['flop_ratio']:7.3f} "
                f"{row['time_ratio'] / row['flop_ratio']:10.3f}"
            )
    machine = {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("".join(json.dumps({**row, **machine}) + "\n" for row in rows))
    print(json.dumps({"rows": rows, **machine}))


if __name__ == "__main__":
    main()
