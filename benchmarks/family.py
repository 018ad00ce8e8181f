"""The family at equal training FLOPs: dense, MoD, early exit, MoE, MoDE, and their controls.

    python benchmarks/family.py DATA OUT [--budget F] [--depth N] [--seeds N] [--jobs N] [--plan]

DATA is what `modepth data prepare` wrote. All arms have one width, and as many layers as bring their FLOPs of a forward
pass nearest to those of the dense model of that depth. Steps follow from the budget. The runs are those of `modepth
sweep`, so a study that was stopped goes on where it was: OUT/results.jsonl has a row for each arm and seed,
OUT/sweep.yaml is the sweep, OUT/table.md what came of it. Loss is that of the test split, causal, which is how a model
generates, beside that of the mode in which it trained. The last line is JSON.

    modepth data prepare stdlib data/stdlib
    python benchmarks/family.py data/stdlib results/family --plan
    python benchmarks/family.py data/stdlib results/family --jobs 2
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from modepth.cli import main as modepth
from modepth.sweep.config import sweep_from_dict
from modepth.sweep.results import Results, Row

CAPACITY, EXPERTS = 0.125, 4
MOD = {"capacity": CAPACITY, "every": 2}
# A token passes an exit every second layer, and three of four go on.
EXIT = {"capacity": 0.75, "every": 2, "flow": "exit"}
ARMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "mod": {"routing": MOD},
    "mod_random": {"routing": {**MOD, "selection": "random"}},
    "early_exit": {"routing": EXIT},
    "moe": {"experts": {"num_experts": EXPERTS}},
    "moe_reduced": {"experts": {"num_experts": EXPERTS, "capacity_factor": 0.5}},
    "mode_staged": {"routing": MOD, "experts": {"num_experts": EXPERTS}},
    "mode_integrated": {"experts": {"num_experts": EXPERTS, "num_noops": EXPERTS}},
}


def study(data: Path, out: Path, budget: float, depth: int, seeds: int) -> dict[str, Any]:
    """The sweep as plain data, as its YAML file holds it."""
    return {
        "data": str(data),
        "out": str(out),
        "dial": {"width_per_layer": 128 / 6, "head_dim": 32, "learning_rate": 3e-3, "at_width": 128},
        "model": {"max_length": 256},
        "train": {"batch_size": 8, "eval_every": 10_000, "save_every": 100, "keep_checkpoints": 1},
        "baseline": "dense",
        "repeats": "flag",
        "keep": False,
        "test_windows": 512,
        "arms": {name: {"model": model} for name, model in ARMS.items()},
        "grids": [{"budgets": [budget], "depths": [depth], "seeds": list(range(seeds))}],
    }


def table(rows: Sequence[Row]) -> list[dict[str, str]]:
    """A line for each arm: what it is, and its test loss over the seeds, less the dense model's of the same seed."""
    finished = [row for row in rows if row.finished and row.test_loss is not None]
    dense = {row.seed: row.test_loss for row in finished if row.arm == "dense"}
    lines = []
    for arm in ARMS:
        own = [row for row in finished if row.arm == arm]
        if own:
            paired = [row.test_loss - dense[row.seed] for row in own if row.seed in dense]
            lines.append(
                {
                    "arm": arm,
                    "layers": str(own[0].layers),
                    "parameters": f"{own[0].params:,}",
                    "FLOPs a token": f"{own[0].flops_per_token:,.0f}",
                    "steps": f"{own[0].steps:,}",
                    "seeds": str(len(own)),
                    "loss, causal": spread([row.test_loss for row in own]),
                    "loss, as trained": spread([row.test_topk_loss for row in own if row.test_topk_loss is not None]),
                    "less dense": spread(paired, sign="+"),
                }
            )
    return lines


def spread(values: Sequence[float], sign: str = "") -> str:
    """The mean, and half of the distance from the lowest to the highest."""
    return f"{mean(values):{sign}.4f} ± {(max(values) - min(values)) / 2:.4f}" if values else ""


def markdown(lines: Sequence[Mapping[str, str]]) -> str:
    cells = [list(lines[0]), ["---"] * len(lines[0]), *([*line.values()] for line in lines)]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--budget", type=float, default=1e13, help="training FLOPs of a run (default: %(default)g)")
    parser.add_argument("--depth", type=int, default=6, help="layers of the dense model (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: %(default)s)")
    parser.add_argument("--plan", action="store_true", help="print the runs and the expected time; start nothing")
    options = parser.parse_args()
    config = study(options.data, options.out, options.budget, options.depth, options.seeds)
    sweep_from_dict(config)  # a mistake is told before anything is written
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "sweep.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    code = modepth(["sweep", "plan" if options.plan else "run", str(path), "--jobs", str(options.jobs)])
    if code or options.plan:
        return code
    lines = table(Results(options.out / "results.jsonl").rows())
    if lines:
        (options.out / "table.md").write_text(markdown(lines))
        print(f"\n{markdown(lines)}")
    print(json.dumps({"table": str(options.out / "table.md"), "arms": lines}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
