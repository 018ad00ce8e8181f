"""Does it hold on a trained model? The loss under each causal rule beside that of top-k, and along the dial.

    python benchmarks/causal_rules.py DATA RUNS [--steps N] [--seeds N] [--out FILE]

DATA is what `modepth data prepare` wrote; RUNS keeps the trained models, so the script goes on where it was stopped.
Two arms, each with several seeds: `predictor`, whose routers have a predictor beside them and no other loss, and
`bce`, whose routers are trained to score above 0 what top-k takes. Thresholds are calibrated on validation, losses
are of the test split. One row for each arm, seed, rule and capacity; the last line is JSON.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch
from tqdm import tqdm

from modepth import LossWeights, ModelConfig, RoutingConfig, Transformer, calibrate, load
from modepth.config import TrainConfig
from modepth.data import open_tokens, read_windows, spread_windows
from modepth.routing import Routing
from modepth.run import open_data, train

CAPACITY = 0.125
DIAL = (0.05, 0.125, 0.25, 0.5, 1.0)
ARMS = {
    "predictor": RoutingConfig(capacity=CAPACITY, every=2, predictor=32),
    "bce": RoutingConfig(capacity=CAPACITY, every=2, losses=LossWeights(router=0.01)),
}
SHAPE = ModelConfig(vocab_size=2048, num_layers=7, dim=128, num_heads=4, max_length=256)
HELD_OUT, TEST = 768, 512  # windows to calibrate on, and to measure on
ROWS = 16  # computed at once


def trained(arm: str, seed: int, steps: int, data: Path, runs: Path) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(replace(SHAPE, routing=ARMS[arm]))
    config = TrainConfig(steps=steps, batch_size=16, seed=seed, eval_every=steps, save_every=60, learning_rate=2e-3)
    folder = runs / f"{arm}_{seed}"
    with tqdm(total=steps, desc=folder.name, unit="step") as bar:
        train(
            model, config, open_data(data, model.config), folder, on_row=lambda row: bar.update(row["step"] + 1 - bar.n)
        )
    return load(folder)


def windows(data: Path, split: str, count: int) -> torch.Tensor:
    tokens = open_tokens(data / f"{split}.tokens")
    return read_windows(tokens, spread_windows(tokens, SHAPE.max_length, count), SHAPE.max_length)


@torch.no_grad()
def measure(model: Transformer, windows_BT: torch.Tensor, mode: str, routing: RoutingConfig | None) -> dict:
    """Loss, and what each routed layer did."""
    losses, shares = [], []
    for part_BT in windows_BT.split(ROWS):
        out = model(part_BT[:, :-1], targets=part_BT[:, 1:], mode=mode, routing=routing)
        losses.append(out.loss.item())
        shares.append([each.chosen_BT.double().mean().item() for each in out.routings])
    means = [round(mean(layer), 4) for layer in zip(*shares, strict=True)]
    return {"loss": mean(losses), "shares": dict(zip(map(str, model.config.routed_layers), means, strict=True))}


@torch.no_grad()
def predictor_quality(model: Transformer, windows_BT: torch.Tensor) -> dict:
    """How well the predictor tells, layer by layer, what top-k takes."""
    decisions = [model(part_BT[:, :-1], mode="topk").routings for part_BT in windows_BT.split(ROWS)]
    return {str(layer[0].layer): quality(layer) for layer in zip(*decisions, strict=True)}


def quality(routings: Sequence[Routing]) -> dict:
    """Accuracy, precision, recall, F1 and the area under the ROC curve of one layer's predictor."""
    predicted_BT = torch.cat([routing.predicted_BT for routing in routings])
    chosen_BT = torch.cat([routing.chosen_BT for routing in routings])
    right = (chosen_BT & (predicted_BT >= 0)).sum().item()
    precision, recall = right / max(1, (predicted_BT >= 0).sum().item()), right / chosen_BT.sum().item()
    f1 = 2 * precision * recall / max(1e-9, precision + recall)
    accuracy = (chosen_BT == (predicted_BT >= 0)).double().mean().item()
    found = {
        "accuracy": accuracy,
        "precision": precision,
        "recall": recall,
        "f1": f1,
        "auc": area(predicted_BT, chosen_BT),
    }
    return {name: round(value, 4) for name, value in found.items()}


def area(score_BT: torch.Tensor, chosen_BT: torch.Tensor) -> float:
    """The probability that a chosen token scores above one that is not: the area under the ROC curve."""
    order = score_BT.flatten().argsort()
    ranks = torch.empty_like(order).scatter_(0, order, torch.arange(1, len(order) + 1)).double()
    chosen = chosen_BT.flatten()
    num_chosen, num_others = chosen.sum().item(), (~chosen).sum().item()
    return (ranks[chosen].sum().item() - num_chosen * (num_chosen + 1) / 2) / (num_chosen * num_others)


def rows_of(arm: str, seed: int, model: Transformer, held_out: torch.Tensor, test: torch.Tensor) -> list[dict]:
    name = {"arm": arm, "seed": seed}
    own = model.config.routing
    rows = [{**name, "rule": "top-k", "threshold": "none", "capacity": CAPACITY, **measure(model, test, "topk", None)}]
    for rule in ("cutoff", "predictor") if arm == "predictor" else ("cutoff", "router"):
        routing = replace(own, rule=rule)
        rows.append(
            {**name, "rule": rule, "threshold": "own", "capacity": CAPACITY, **measure(model, test, "causal", routing)}
        )
        if rule == "router":
            continue  # calibrated, it is the cutoff rule: both look at the router's score
        for capacity in DIAL:
            # At capacity 1 there is no threshold.
            dialled = replace(routing, capacity=1.0)
            if capacity < 1:
                dialled = calibrate(model, held_out[:, :-1], capacity, routing=routing)
            found = measure(model, test, "causal", dialled)
            rows.append({**name, "rule": rule, "threshold": "calibrated", "capacity": capacity, **found})
    if arm == "predictor":
        rows[0]["predictor"] = predictor_quality(model, test)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--steps", type=int, default=720, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="also write the rows here, as JSON lines")
    options = parser.parse_args()
    held_out, test = windows(options.data, "validation", HELD_OUT), windows(options.data, "test", TEST)
    rows = []
    for seed in range(options.seeds):
        for arm in ARMS:
            rows += rows_of(arm, seed, trained(arm, seed, options.steps, options.data, options.runs), held_out, test)
            for row in rows[-16:]:
                if (row["arm"], row["seed"], row["capacity"]) == (arm, seed, CAPACITY):
                    print(f"{arm} {seed} {row['rule']:9} {row['threshold']:10} {row['loss']:.4f} {row['shares']}")
            if options.out is not None:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(json.dumps({"rows": len(rows), "torch": torch.__version__, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
