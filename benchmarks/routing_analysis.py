"""What trained routers do: their scores, how well a predictor follows them, and which tokens they choose.

    python benchmarks/routing_analysis.py data/enwik8 sweeps/enwik8/runs/mod-* --out results/routing.jsonl

On windows of the test split, under the rule by which the model generates. Of each run: the loss; by routed layer, the
share of tokens chosen and the share whose sigmoid(score) is above one half; the entropy of the model's prediction, in
nats, of the tokens that were chosen so and so often, and its correlation with that number; the predictor's quality
against top-k, if there is one. One line of JSON a run.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from causal_rules import predictor_quality
from tqdm import tqdm

from modepth import record
from modepth.data import open_tokens, read_windows, spread_windows
from modepth.loading import load
from modepth.model import Transformer

ROWS = 4  # computed at once


@torch.no_grad()
def analyse(model: Transformer, windows_BT: torch.Tensor) -> dict:
    model.eval()
    entropies, depths, losses = [], [], []
    with record(model) as trace:
        for part_BT in tqdm(windows_BT.split(ROWS), desc="windows", leave=False):
            log_p_BTV = model(part_BT[:, :-1]).logits_BTV.log_softmax(-1)
            losses.append(-log_p_BTV.gather(-1, part_BT[:, 1:, None]).mean().item())
            entropies.append(-(log_p_BTV.exp() * log_p_BTV).sum(-1).numpy())
            depths.append(trace.depth())
    entropy, depth = np.concatenate(entropies).ravel(), np.concatenate(depths).ravel()
    scores, chosen = trace.scores()
    return {
        "loss": float(np.mean(losses)),
        "tokens": len(entropy),
        "share": {layer: round(float(each.mean()), 4) for layer, each in chosen.items()},
        "score_above_half": {layer: round(float((each > 0).mean()), 4) for layer, each in scores.items()},
        "entropy_by_times_chosen": {
            int(number): [round(float(entropy[depth == number].mean()), 4), int((depth == number).sum())]
            for number in np.unique(depth)
        },
        "entropy_of_chosen_less_others": {
            layer: round(float(entropy[each].mean() - entropy[~each].mean()), 4) for layer, each in chosen.items()
        },
        "correlation": round(float(np.corrcoef(entropy, depth)[0, 1]), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a folder that `modepth data prepare` wrote")
    parser.add_argument("runs", type=Path, nargs="+", help="folders of routed runs, with checkpoints")
    parser.add_argument("--windows", type=int, default=128, help="of the test split (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="also write the rows here, as JSON lines")
    options = parser.parse_args()
    rows = []
    for folder in options.runs:
        model = load(folder)
        if not model.config.routed_layers:
            parser.error(f"{folder} is a dense model: it routes no token")
        tokens, length = open_tokens(options.data / "test.tokens"), model.config.max_length
        windows_BT = read_windows(tokens, spread_windows(tokens, length, options.windows), length)
        row = {"run": folder.name, **analyse(model, windows_BT)}
        if model.config.routing.predictor is not None:
            row["predictor"] = predictor_quality(model, windows_BT)
        rows.append(json.dumps(row))
        print(rows[-1])
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("".join(row + "\n" for row in rows))


if __name__ == "__main__":
    main()
