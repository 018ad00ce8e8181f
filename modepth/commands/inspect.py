"""`modepth inspect`: what a run folder holds. Reads JSON, sizes, hashes and safetensors headers: no code, no weights.

The folder is read as if a stranger had written it, and nothing in it is changed, so a run may be training meanwhile.
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

from modepth.adopted import AdoptedConfig, AnyConfig, config_from_dict
from modepth.checkpoint import Checkpoint, open_step
from modepth.commands.table import print_table, printable, ratio
from modepth.config import ExpertsConfig, ModelConfig, TrainConfig, build, model_config_to_dict
from modepth.files import plain_size, read_json
from modepth.flops import dense, forward_flops, num_parameters
from modepth.run_folder import step_folder, steps
from modepth.runlog import RunLog
from modepth.schedule import flops_until, num_steps, window_length

EXAMPLES = """\
examples:
  modepth inspect runs/tiny
  modepth inspect runs/tiny --step 300

With --step, the run as it stood at that checkpoint: its config, and the log up to there.
"""
DEFAULTS = {each.name: each.default for each in fields(TrainConfig)}
EVENTS_SHOWN = 10

Row = Mapping[str, Any]
Cells = list[list[str]]


class Described(NamedTuple):
    """What a run says of itself."""

    model: AnyConfig
    train: TrainConfig


class Saved(NamedTuple):
    """A checkpoint as it was found: the bytes on disk, and what is wrong with it, None if nothing is."""

    step: int
    num_bytes: int
    harm: str | None


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "inspect",
        help="show what a run folder holds",
        description="The model, the training config, the checkpoints with their hashes verified, and where the run "
        "stands. Runs no code from the folder, loads no weights, changes nothing. The last line is JSON.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="RUN", help="the folder of the run")
    parser.add_argument("--step", type=int, metavar="N", help="look at the checkpoint of step N (default: all of them)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    folder = Path(options.folder)
    check_run(folder)
    if options.step is None:
        config, found = read_config(folder / "config.json"), look_at_checkpoints(folder)
    else:
        named = open_named(folder, options.step)
        config, found = read_config(named.folder / "state.json"), [Saved(named.step, folder_bytes(named.folder), None)]
    stand = stand_of(folder, config, found, options.step)
    show(config, found, stand)
    summary = {
        "run": options.folder,
        "step": options.step,
        "parameters": num_parameters(config.model),
        "routed_layers": config.model.routed_layers,
        **stand,
        "checkpoints": [each._asdict() for each in found],
        "model": model_config_to_dict(config.model),
        "train": asdict(config.train),
    }
    print(json.dumps(summary))


# -- reading


def check_run(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"{folder}: {'not a folder' if os.path.lexists(folder) else 'no such folder'}: name a run")
    if not os.path.lexists(folder / "config.json"):
        what = "has no config.json" if any(folder.iterdir()) else "is empty"
        raise ValueError(f"{folder}: not a run, it {what}: name a folder in which `modepth train` has begun")


def open_named(folder: Path, step: int) -> Checkpoint:
    """The checkpoint that the user names, refused if it is harmed."""
    known = steps(folder)
    if step not in known:
        there = f"there are {', '.join(map(str, known))}" if known else "there is none yet"
        raise ValueError(f"{folder}: no checkpoint of step {step}: {there}")
    return open_step(folder, step)


def read_config(path: Path) -> Described:
    data = read_json(path)
    try:
        if not isinstance(data, Mapping) or not isinstance(data.get("model"), Mapping):
            raise ValueError("expected the fields of a model under `model`")
        config = Described(
            model=config_from_dict(data["model"]), train=build(TrainConfig, data.get("train"), where="train.")
        )
        num_steps(config.train, config.model)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return config


def look_at_checkpoints(folder: Path) -> list[Saved]:
    """All checkpoints, harmed or not; one that a running training removes meanwhile is left out."""
    found = []
    for step in steps(folder):
        path = step_folder(folder, step)
        saved = Saved(step, folder_bytes(path), harm_of(folder, step))
        if os.path.lexists(path):
            found.append(saved)
    return found


def harm_of(folder: Path, step: int) -> str | None:
    """What is wrong with a checkpoint, its files named without their folder; None if nothing is."""
    try:
        open_step(folder, step)
    except (ValueError, OSError) as error:
        path = step_folder(folder, step)
        return str(error).replace(f"{path}{os.sep}", "").removeprefix(f"{path}: ")
    return None


def folder_bytes(folder: Path) -> int:
    try:
        return 0 if folder.is_symlink() else sum(path.lstat().st_size for path in folder.iterdir())
    except OSError:
        return 0


def stand_of(folder: Path, config: Described, found: Sequence[Saved], step: int | None) -> dict[str, Any]:
    """How far the run is by its log and checkpoints; with `step`, by the rows that a resume from there keeps."""
    path = folder / "log.jsonl"
    try:
        num_lines, rows = count_lines(path), list(RunLog(folder).rows())
        kept = [row for row in rows if step is None or row["step"] < step + ("validation" in row)]
        stand = last_of(kept)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error
    except (AttributeError, KeyError, RecursionError, TypeError) as error:
        raise ValueError(f"{path}: not the rows of a run: {error!r}") from error
    unharmed = [each.step for each in found if each.harm is None]
    return {
        "steps": num_steps(config.train, config.model),
        "steps_done": max([stand["steps_logged"], *unharmed]),
        "newest_unharmed": max(unharmed, default=None),
        **stand,
        "num_unread_lines": max(0, num_lines - len(rows)),
    }


def count_lines(path: Path) -> int:
    """Lines of a plain file, 0 if there is none; a link or a pipe is refused, as reading it might never end."""
    if not os.path.lexists(path):
        return 0
    plain_size(path)
    with path.open("rb") as file:
        return sum(1 for _ in file)


def last_of(rows: Sequence[Row]) -> dict[str, Any]:
    """The last of each kind of row, as numbers."""
    trained = next((row for row in reversed(rows) if "loss" in row), None)
    measured = next((row for row in reversed(rows) if "validation" in row), None)
    routed = next((row for row in reversed(rows) if row.get("layers")), None)
    events = [[row["step"], str(row["event"]), str(row.get("reason"))] for row in rows if "event" in row]
    return {
        "steps_logged": max((int(row["step"]) + ("loss" in row) for row in rows), default=0),
        "loss_step": trained and int(trained["step"]),
        "loss": trained and float(trained["loss"]),
        "validation_step": measured and int(measured["step"]),
        "validation": measured and numbers(measured["validation"]),
        "layers_step": routed and int(routed["step"]),
        "layers": {} if routed is None else {str(int(key)): numbers(each) for key, each in routed["layers"].items()},
        "num_events": len(events),
        "events": [dict(zip(("step", "event", "reason"), each, strict=True)) for each in events[-EVENTS_SHOWN:]],
    }


def numbers(values: Row) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


# -- showing


def show(config: Described, found: Sequence[Saved], stand: dict[str, Any]) -> None:
    """A table for each part that has something to say."""
    tables = {
        "Model": model_cells(config.model),
        "Training": training_cells(config),
        "Where it stands": stand_cells(stand),
        "Checkpoints": checkpoint_cells(found),
        f"Routed layers at step {stand['layers_step']}": layer_cells(stand["layers"]),
        f"Events, the last {len(stand['events'])} of {stand['num_events']}": event_cells(stand["events"]),
    }
    for title, cells in tables.items():
        if cells:
            print(title)
            print_table([[printable(cell) for cell in row] for row in cells])
            print()


def shape_cells(config: ModelConfig) -> Cells:
    return [
        ["width", f"{config.dim}"],
        ["heads", f"{config.num_heads}"],
        ["heads of keys and values", f"{config.kv_heads}"],
        ["feed-forward width", f"{config.mlp_width}"],
    ]


def family_cells(config: AdoptedConfig) -> Cells:
    return [["transformers model", str(config.transformers.get("model_type"))]]


def model_cells(config: AnyConfig) -> Cells:
    length, routing = config.max_length, config.routing
    cells = [
        *(family_cells(config) if isinstance(config, AdoptedConfig) else shape_cells(config)),
        ["layers", f"{config.num_layers}"],
        ["vocabulary", f"{config.vocab_size:,}"],
        ["longest sequence", f"{length:,}"],
        ["parameters", f"{num_parameters(config):,}"],
        [
            "routed layers",
            ", ".join(map(str, config.routed_layers)) or ("none" if config.looks_ahead else "none: a dense model"),
        ],
    ]
    ratio_to_dense = ratio(forward_flops(config, length), forward_flops(dense(config), length))
    if isinstance(config, ModelConfig) and config.experts is not None:
        cells += expert_cells(config, config.experts)
        if routing is None:
            cells.append(["FLOPs, of the dense model's", ratio_to_dense])
    if routing is None:
        return cells
    return [
        *cells,
        ["capacity", f"{routing.capacity:g}"],
        ["what is skipped", routing.part],
        *([["a token that is not chosen", routing.flow]] if routing.flow != "rejoin" else []),
        ["selection in training", routing.selection],
        ["rule in causal mode", routing.rule],
        ["gate", routing.gate],
        ["predictor width", "no predictor" if routing.predictor is None else f"{routing.predictor}"],
        ["FLOPs, of the dense model's", ratio_to_dense],
    ]


def expert_cells(config: ModelConfig, experts: ExpertsConfig) -> Cells:
    chooser = {"token": f"tokens, {experts.per_token} each", "expert": "experts"}[experts.choice]
    return [
        ["layers with experts", ", ".join(map(str, config.expert_layers))],
        ["experts, no-ops", f"{experts.num_experts}, {experts.num_noops}"],
        ["who chooses", chooser],
        ["room of an expert", f"{experts.capacity:g} of a row's tokens"],
    ]


def training_cells(config: Described) -> Cells:
    """What was set, its default beside it; the budget and what it comes to."""
    train, count = config.train, num_steps(config.train, config.model)
    tokens = count * train.batch_size * window_length(train, config.model)
    given = {name: value for name, value in asdict(train).items() if value != DEFAULTS[name]}
    return [
        ["", "set", "default"],
        *([name, shown(value), shown(DEFAULTS[name])] for name, value in given.items()),
        ["steps in all", shown(count), ""],
        ["tokens in all", shown(tokens), ""],
        ["FLOPs in all", f"{flops_until(count, count, train, config.model):.3e}", ""],
    ]


def stand_cells(stand: dict[str, Any]) -> Cells:
    validation = stand["validation"] or {}
    saved, unread = stand["newest_unharmed"], stand["num_unread_lines"]
    cells = [
        ["", "", "at step"],
        ["steps done", f"{stand['steps_done']:,} of {stand['steps']:,}", ""],
        ["training loss", shown(stand["loss"]), shown(stand["loss_step"])],
        ["validation loss", shown(validation.get("loss")), shown(stand["validation_step"])],
        ["bits a byte", shown(validation.get("bits_per_byte")), shown(stand["validation_step"])],
        ["events", shown(stand["num_events"]), ""],
        ["newest unharmed checkpoint", "none" if saved is None else "", shown(saved)],
    ]
    return [*cells, ["log lines not read", f"the last {unread}", ""]] if unread else cells


def checkpoint_cells(found: Sequence[Saved]) -> Cells:
    cells = [
        [
            str(each.step),
            f"{each.num_bytes:,}",
            "complete, hashes right" if each.harm is None else f"HARMED: {each.harm}",
        ]
        for each in found
    ]
    return [["step", "bytes", "state"], *cells] if cells else []


def layer_cells(layers: Mapping[str, Mapping[str, float]]) -> Cells:
    names = list(dict.fromkeys(name for values in layers.values() for name in values))
    cells = [[layer, *(shown(values.get(name)) for name in names)] for layer, values in layers.items()]
    return [["layer", *names], *cells] if cells else []


def event_cells(events: Sequence[Row]) -> Cells:
    cells = [[str(value) for value in event.values()] for event in events]
    return [["step", "event", "reason"], *cells] if cells else []


def shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if value else "0"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
