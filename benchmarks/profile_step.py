"""Where the time of a training step goes, dense and routed, and what of it lies above the FLOPs.

    python benchmarks/profile_step.py [--dims 256 512] [--lengths 256 1024] [--rounds 9] [--threads 2] [--out FILE]

Every operator of a step of `modepth train` is timed by itself, as torch dispatches it; "between" is the rest of the
step, the clocks included. Not by torch's profiler: what that keeps breaks up the heap, so that memory which a step
would use again is asked of the system again, and writing looks several times as slow as it is.

"Above" is the routed step's time less the dense one's times the ratio of FLOPs, as a share of the routed step. Dense
and routed steps in turns, wall time; medians over the rounds. Last line: JSON.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from parts import training_step
from torch.utils._python_dispatch import TorchDispatchMode

from modepth import Transformer
from modepth.allocator import keep_freed_memory
from modepth.bench.contest import LAYERS, TOKENS, Shape

CAPACITY = 0.125
# The first that an operator's name begins with is its kind.
KINDS = {
    "products, attention": ("mm", "addmm", "bmm", "baddbmm", "_linear_pointwise", "_scaled_dot_product"),
    "clipping, optimiser": ("_foreach", "_fused_adamw"),
    "selecting, moving": ("sort", "cumsum", "gather", "scatter", "index", "embedding", "where", "lerp"),
    "exponentials": ("exp", "silu", "log", "sigmoid"),
    "other arithmetic": ("",),
}
BETWEEN = "between"


def kind_of(operator: str) -> str:
    return next(kind for kind, prefixes in KINDS.items() if operator.startswith(prefixes))


class Clocks(TorchDispatchMode):
    """Times every operator inside the block, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.perf_counter()
        out = operator(*args, **(kwargs or {}))
        self.seconds[kind_of(operator._opname)] += time.perf_counter() - start
        return out


def seconds_by_kind(step: Callable[[], float]) -> dict[str, float]:
    with Clocks() as clocks:
        whole = step()
    return {**clocks.seconds, BETWEEN: whole - clocks.seconds.total()}


def profile(shape: Shape, rounds: int) -> dict[str, Any]:
    config = shape.config
    steps = [training_step(Transformer(each).train()) for each in (replace(config, routing=None), config)]
    for step in steps * 2:  # until the heap is as large as it will be
        step()
    taken = [[seconds_by_kind(step) for step in steps] for _ in range(rounds)]

    def milliseconds(side: int, kind: str) -> float:
        return round(1000 * statistics.median(sides[side].get(kind, 0.0) for sides in taken), 2)

    return {
        "dim": shape.dim,
        "length": shape.length,
        "capacity": shape.capacity,
        "flop_ratio": round(shape.flop_ratio, 4),
        **{
            name: {kind: milliseconds(side, kind) for kind in (*KINDS, BETWEEN)}
            for side, name in enumerate(("dense", "routed"))
        },
    }


def show(row: dict[str, Any]) -> None:
    dense, routed = row["dense"], row["routed"]
    total = sum(routed.values())
    print(f"\nwidth {row['dim']}, T = {row['length']}, FLOPs {row['flop_ratio']}")
    print(f"{'':22}{'dense, ms':>11}{'routed, ms':>12}{'above':>9}")
    for kind in dense:
        above = (routed[kind] - row["flop_ratio"] * dense[kind]) / total
        print(f"{kind:22}{dense[kind]:11.1f}{routed[kind]:12.1f}{above:9.2%}")
    above = 1 - row["flop_ratio"] * sum(dense.values()) / total
    print(f"{'sum':22}{sum(dense.values()):11.1f}{total:12.1f}{above:9.2%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=[256, 512], choices=LAYERS)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--rounds", type=int, default=9, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="also write the rows here, as JSON lines")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    keep_freed_memory()
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("")
    rows = []
    for dim in options.dims:
        for length in options.lengths:
            rows.append(profile(Shape("train", dim, length, TOKENS // length, CAPACITY), options.rounds))
            show(rows[-1])
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    print(json.dumps({"rows": rows, "torch": torch.__version__, "threads": options.threads}))


if __name__ == "__main__":
    main()
