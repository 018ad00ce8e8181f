"""`modepth train` and `modepth eval`: a run, from a config file and flags."""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from modepth.allocator import keep_freed_memory
from modepth.commands.table import print_table
from modepth.config import RunConfig, TrainConfig, build, read_plain
from modepth.flags import add_flags, flags_given, laid_over
from modepth.flops import forward_flops, num_parameters
from modepth.loading import load, require_transformers
from modepth.model import Decoder, Transformer
from modepth.progress import StepProgress
from modepth.run import ALONE, open_data, open_split, train
from modepth.run_data import copy_tokenizer, data_of, remember_data
from modepth.schedule import num_steps
from modepth.tracking import Tracker, check_tensorboard
from modepth.train import evaluate
from modepth.validation import check_count
from modepth.world import World, join_world

TRAIN_EXAMPLES = """\
examples:
  modepth data prepare stdlib data/stdlib
  modepth train runs/tiny --data data/stdlib --config recipes/tiny.yaml
  modepth train runs/half --data data/stdlib --config recipes/tiny.yaml --model.routing.capacity 0.5
  torchrun --nproc-per-node 2 -m modepth train runs/two --data data/stdlib --config recipes/tiny.yaml
  modepth train runs/tiny --data data/stdlib --config recipes/tiny.yaml --print_config
  modepth train runs/llama --data data/books --model models/llama-mod --train.steps 200 --train.learning_rate 1e-4

The same command again goes on where a run was stopped. A value of null means "absent".
"""
EVAL_EXAMPLES = """\
examples:
  modepth eval runs/tiny
  modepth eval runs/tiny --data data/other --split test --mode topk
"""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "train",
        help="train a model, or go on with its training",
        usage="modepth train RUN --data DIR [--config FILE] [--model DIR [--routers-only]] [--print_config] "
        "[--tensorboard] [--model.FIELD VALUE ...] [--train.FIELD VALUE ...]",
        description="Train a model on prepared data. Rows go to RUN/log.jsonl, checkpoints to RUN/checkpoints. "
        "The last line is JSON.",
        epilog=TRAIN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="RUN", help="the folder of the run, made if absent")
    parser.add_argument("--data", required=True, metavar="DIR", help="what `modepth data prepare` wrote")
    parser.add_argument("--config", metavar="FILE", help="YAML or JSON with `model` and `train`")
    parser.add_argument(
        "--model",
        metavar="DIR",
        type=Path,
        help="train the transformers model in DIR, routed by `modepth convert` or not",
    )
    parser.add_argument("--routers-only", action="store_true", help="of such a model, train the routers alone")
    parser.add_argument("--print_config", action="store_true", help="print the resolved config and stop")
    parser.add_argument(
        "--tensorboard", action="store_true", help="write the rows to RUN/tensorboard too (needs the extra track)"
    )
    add_flags(parser, RunConfig)
    parser.set_defaults(run=run_train)
    look = commands.add_parser(
        "eval",
        help="measure the loss of a run",
        description="Loss, perplexity and bits per byte of the newest checkpoint of a run. The last line is JSON.",
        epilog=EVAL_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    look.add_argument("folder", metavar="RUN", help="the folder of the run")
    look.add_argument("--data", metavar="DIR", help="prepared data (default: that of the run)")
    look.add_argument("--split", choices=["validation", "test"], default="test", help="default: %(default)s")
    look.add_argument("--mode", choices=["causal", "topk"], default="causal", help="default: %(default)s")
    look.add_argument(
        "--length", type=int, metavar="N", help="tokens of a window (default: as many as the run was trained on)"
    )
    look.add_argument("--batch-size", type=int, default=16, help="windows at a time (default: %(default)s)")
    look.set_defaults(run=run_eval)


class Job(NamedTuple):
    """What is to be trained, and how. The model is made after the seed is set."""

    make_model: Callable[[], Decoder]
    train: TrainConfig
    shown: dict[str, Any]  # the config, resolved
    source: Path | None = None  # the folder of a transformers model


def native_job(given: dict[str, Any]) -> Job:
    config: RunConfig = build(RunConfig, given, where="")
    return Job(lambda: Transformer(config.model), config.train, asdict(config))


def adopted_job(given: dict[str, Any], options: argparse.Namespace) -> Job:
    if "model" in given:
        raise ValueError("with --model the model is what DIR holds: leave `model` out of the config and the flags")
    require_transformers()
    from modepth.hf.adoption import Adopted, check_tokenizer  # noqa: PLC0415 - an extra, and slow to load
    from modepth.hf.folder import open_model  # noqa: PLC0415
    from modepth.hf.training import train_routers_only  # noqa: PLC0415

    def make_model() -> Decoder:
        check_tokenizer(options.model, Path(options.data))
        model = Adopted(open_model(options.model))
        if options.routers_only:
            train_routers_only(model)
        return model

    config: TrainConfig = build(TrainConfig, given.get("train", {}), where="train.")
    return Job(make_model, config, {"train": asdict(config)}, options.model)


def run_train(options: argparse.Namespace) -> None:
    in_file = {} if options.config is None else read_plain(options.config)
    given = laid_over(in_file, flags_given(options))
    if options.routers_only and options.model is None:
        raise ValueError("--routers-only needs --model DIR: the other weights of a new model must be trained too")
    job = native_job(given) if options.model is None else adopted_job(given, options)
    if options.print_config:
        print(yaml.safe_dump(json.loads(json.dumps(job.shown)), sort_keys=False), end="")
        return
    if options.tensorboard:
        check_tensorboard()
    keep_freed_memory()
    world = join_world()
    try:
        train_in(world, job, options)
    finally:
        world.close()


def train_in(world: World, job: Job, options: argparse.Namespace) -> None:
    torch.manual_seed(job.train.seed)
    model = job.make_model()
    data = open_data(options.data, model.config, world)
    steps = num_steps(job.train, model.config)
    with StepProgress(steps, quiet=not world.is_first) as show, Tracker() as track:

        def start(folder: Path) -> None:
            remember_data(folder, Path(options.data))
            if job.source is not None:
                copy_tokenizer(job.source, folder)
            if options.tensorboard:
                track.start(folder)

        def tell(row: dict[str, Any]) -> None:
            show(row)
            track(row)

        if world.is_first:
            show.say(
                f"{num_parameters(model.config):,} parameters, {steps:,} steps of {job.train.batch_size} windows, "
                f"{world.size} process{'es' if world.size > 1 else ''}"
            )
        last = train(
            model,
            job.train,
            data,
            options.folder,
            world=world,
            on_start=start,
            on_row=tell,
        )
    if world.is_first:
        print(json.dumps({"run": options.folder, **last}))


def run_eval(options: argparse.Namespace) -> None:
    folder = Path(options.folder)
    data = Path(options.data) if options.data is not None else data_of(folder)
    model = load(folder)
    length = trained_length(folder) or model.config.max_length if options.length is None else options.length
    check_count("length", length, low=1)
    tokens = open_split(data, options.split, model.config)
    result = evaluate(
        model,
        tokens,
        length=length,
        num_windows=tokens.count,
        batch_size=options.batch_size,
        world=ALONE,
        mode=options.mode,
    )
    per_token = forward_flops(model.config, length, half_causal=True) / length
    print_table(
        [
            ["", options.split],
            ["loss, nats a token", f"{result['loss']:.4f}"],
            ["perplexity", f"{result['perplexity']:.3f}"],
            ["bits a byte", f"{result['bits_per_byte']:.4f}"],
            ["parameters", f"{num_parameters(model.config):,}"],
            ["FLOPs a token", f"{per_token:,.0f}"],
        ]
    )
    print()
    print(json.dumps({"run": options.folder, "split": options.split, "mode": options.mode, **result}))


def trained_length(run: Path) -> int | None:
    """The windows' length in training, None where it was the longest that the model takes."""
    length: int | None = read_plain(run / "config.json").get("train", {}).get("length")
    return length
