"""What is a layer worth if it computes only some tokens? Models of one width, all trained for as many updates.

    python benchmarks/worth.py DATA OUT [--layers N] [--dim D] [--steps N] [--capacities C ...] [--seeds S ...]

DATA is what `modepth data prepare` wrote. Every other layer is routed; its capacity goes from 0, the model without
these layers, to 1, the dense model. The loss that the whole layers save is their worth. A capacity pays where it saves
a larger share of that than its share of their FLOPs, and Mixture-of-Depths cannot win more than what lies between. Both
learned and random selection. A run that was finished is not repeated: OUT/rows.jsonl, a row a run; OUT/worth.png. The
last line is JSON.
"""

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from modepth import LossWeights, ModelConfig, RoutingConfig, Transformer
from modepth.config import TrainConfig
from modepth.data import open_tokens
from modepth.plots.style import COLUMN, DENSE, INK, ROUTED, SKIPPED, in_style, save_figure
from modepth.run import open_data, open_split, train
from modepth.schedule import step_flops
from modepth.train import evaluate
from modepth.world import join_world

TEST = 512  # windows
SELECTIONS = ("topk", "random")
SETTING = ("layers", "dim", "steps", "batch", "rate")  # what all runs that are compared have in common
Row = dict[str, Any]


def setting(options: argparse.Namespace) -> Row:
    return {name: getattr(options, name) for name in SETTING}


def model_of(options: argparse.Namespace, capacity: float, selection: str, vocab_size: int) -> ModelConfig:
    """The model in which every other layer has this capacity: none of them at 0, no router at 1."""
    losses = LossWeights(router=1e-4 if selection == "topk" else 0.0)
    routing = RoutingConfig(capacity=capacity or 1.0, every=2, gate="tanh", selection=selection, losses=losses)
    config = ModelConfig(
        vocab_size=vocab_size, num_layers=options.layers, dim=options.dim, num_heads=2, max_length=512, routing=routing
    )
    if 0 < capacity < 1:
        return config
    return replace(config, routing=None, num_layers=config.num_layers - (0 if capacity else len(config.routed_layers)))


def run(options: argparse.Namespace, capacity: float, selection: str, seed: int) -> Row:
    """One model, trained and measured in a process of its own."""
    torch.set_num_threads(1)
    tokens = open_tokens(options.data / "train.tokens")
    config = model_of(options, capacity, selection, tokens.vocab_size)
    how = TrainConfig(
        steps=options.steps,
        batch_size=options.batch,
        optimizer="muon",
        learning_rate=options.rate,
        warmup=0.02,
        beta2=0.975,
        seed=seed,
        eval_every=options.steps,
        save_every=options.steps,
        keep_checkpoints=1,
    )
    torch.manual_seed(seed)
    model = Transformer(config)
    name = "_".join(f"{value:g}" for value in (*setting(options).values(), capacity, seed))
    folder = options.out / "runs" / f"{selection}_{name}"
    train(model, how, open_data(options.data, config), folder)
    test = open_split(options.data, "test", config)
    measured = evaluate(model, test, length=512, num_windows=TEST, batch_size=4, world=join_world(), mode="causal")
    return {
        **setting(options),
        "capacity": capacity,
        "selection": selection,
        "seed": seed,
        "step_flops": step_flops(how, config),
        "test_loss": measured["loss"],
    }


def wanted(options: argparse.Namespace) -> list[tuple[float, str, int]]:
    ends = [(end, "topk", seed) for seed in options.seeds for end in (0.0, 1.0)]
    middle = [(c, way, seed) for seed in options.seeds for c in options.capacities for way in SELECTIONS]
    return ends + middle


def shares(rows: Sequence[Row]) -> dict[str, list[tuple[float, float, float]]]:
    """By selection: of each capacity its share of the whole layers' FLOPs, and of their worth, as means over seeds."""

    def means(name: str, capacity: float, selection: str) -> float:
        return mean(row[name] for row in rows if (row["capacity"], row["selection"]) == (capacity, selection))

    none, whole = ({name: means(name, end, "topk") for name in ("step_flops", "test_loss")} for end in (0.0, 1.0))
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in SELECTIONS}
    for capacity, way in sorted({(row["capacity"], row["selection"]) for row in rows if 0 < row["capacity"] < 1}):
        cost, worth = (
            (means(name, capacity, way) - none[name]) / (whole[name] - none[name])
            for name in ("step_flops", "test_loss")
        )
        found[way].append((capacity, cost, worth))
    return found


@in_style()
def draw(found: dict[str, list[tuple[float, float, float]]]) -> Figure:
    figure = Figure(figsize=(COLUMN, 2.6), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color=DENSE, label="as much as it costs")
    for (way, points), colour in zip(found.items(), (ROUTED, SKIPPED), strict=True):
        x, y = [0.0, *(cost for _, cost, _ in points), 1.0], [0.0, *(worth for _, _, worth in points), 1.0]
        axes.plot(x, y, marker="o", color=colour, markeredgecolor=INK, label={"topk": "learned"}.get(way, way))
    axes.set_xlabel("share of the layers' FLOPs")
    axes.set_ylabel("share of what they save in loss")
    axes.legend(frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--layers", type=int, default=3, help="of the dense model (default: %(default)s)")
    parser.add_argument("--dim", type=int, default=48, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=8, help="rows of 512 tokens in an update (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1.4e-2, help="learning rate (default: %(default)s)")
    parser.add_argument("--capacities", type=float, nargs="+", default=[0.125, 0.25, 0.5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: %(default)s)")
    options = parser.parse_args()
    path = options.out / "rows.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rows = [row for row in rows if setting(options).items() <= row.items()]
    done = {(row["capacity"], row["selection"], row["seed"]) for row in rows}
    todo = [each for each in wanted(options) if each not in done]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for row in tqdm(pool.map(run, [options] * len(todo), *zip(*todo, strict=True)), total=len(todo), unit="run"):
            rows.append(row)
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
    found = shares(rows)
    save_figure(draw(found), options.out / "worth.png")
    for way, points in found.items():
        for capacity, cost, worth in points:
            print(f"{way:7} capacity {capacity:5.3f}: {cost:4.0%} of the FLOPs, {worth:4.0%} of the worth")
    print(json.dumps({"shares": found, "rows": str(path)}))


if __name__ == "__main__":
    main()
