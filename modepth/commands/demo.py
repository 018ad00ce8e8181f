"""`modepth demo`: a dense and a Mixture-of-Depths decoder at equal training FLOPs, in a few minutes."""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from modepth.commands.table import print_columns
from modepth.config import ModelConfig, RoutingConfig, TrainConfig
from modepth.corpus import Corpus
from modepth.loading import load_native
from modepth.model import Transformer
from modepth.preparation import prepare
from modepth.progress import ByteProgress, StepProgress
from modepth.run import open_data, train
from modepth.run_data import remember_data
from modepth.schedule import num_steps
from modepth.tokenizer import load_tokenizer

EXAMPLES = """\
examples:
  modepth demo
  modepth demo runs/demo --target-flops 1e12

The same command again goes on where it was stopped.
"""
DENSE = ModelConfig(vocab_size=2048, num_layers=7, dim=128, num_heads=4, max_length=256)
MODELS = {"dense": DENSE, "MoD": replace(DENSE, routing=RoutingConfig(capacity=0.125, every=2))}
TRAINING = TrainConfig(
    target_flops=7e12, batch_size=8, learning_rate=2e-3, eval_every=100, eval_windows=128, save_every=200, log_every=5
)


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "demo",
        help="train a dense and a routed model at equal FLOPs, and compare them",
        description="Train a dense and a Mixture-of-Depths decoder on Python's own standard library with the same "
        "training FLOPs; print a table, write a page with pictures. The last line is JSON.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="OUT", nargs="?", default="demo", help="default: %(default)s")
    parser.add_argument(
        "--target-flops",
        type=float,
        default=TRAINING.target_flops,
        metavar="N",
        help="training FLOPs of each model (default: %(default)g)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    # Here, so that the command says what is missing before it trains, and the others need no matplotlib.
    from modepth.comparison import Opened, compare  # noqa: PLC0415

    started = time.monotonic()
    out = Path(options.folder)
    config = replace(TRAINING, target_flops=options.target_flops)
    steps = {name: num_steps(config, model) for name, model in MODELS.items()}
    data = out / "data"
    prepare_once(data)
    for name, model in MODELS.items():
        with StepProgress(steps[name], title=name) as progress:
            train_arm(model, config, data, out / name, progress)
    opened = {name: Opened(out / name, load_native(out / name)) for name in MODELS}
    table, written = compare(
        opened,
        open_data(data, DENSE).validation,
        load_tokenizer(data),
        out,
        title="Dense and Mixture-of-Depths at equal training FLOPs",
        intro=intro(config),
    )
    print_columns(table)
    print("\nwritten:", *written, sep="\n  ")
    seconds = round(time.monotonic() - started, 1)
    print(json.dumps({"seconds": seconds, "runs": table, "written": [str(path) for path in written]}))


def prepare_once(folder: Path) -> None:
    if folder.exists():
        return  # complete: it appears only then
    with ByteProgress() as progress:
        prepare(Corpus(sources=("stdlib",)), folder, tokenizer=f"bpe:{DENSE.vocab_size}", report=progress)


def train_arm(
    model: ModelConfig, config: TrainConfig, data: Path, folder: Path, on_row: Callable[[dict[str, Any]], None]
) -> None:
    torch.manual_seed(config.seed)
    tokens = open_data(data, model)
    train(Transformer(model), config, tokens, folder, on_start=lambda run: remember_data(run, data), on_row=on_row)


def intro(config: TrainConfig) -> str:
    return (
        f"Two decoders of the same shape, trained on Python's own standard library with {config.target_flops:.3g} "
        "FLOPs each (forward and backward, logits included, causal attention counted half). Where the routed one "
        "skips, its steps are cheaper, so it takes more of them.\n\n"
        "The validation loss is that of the causal model, which decides about each token without seeing those after "
        "it; 'top-k' is the loss with the routing of training, which looks ahead. One seed, small models, a short "
        "run: this shows how it works, not whether it pays."
    )
