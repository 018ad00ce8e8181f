"""Small sweeps for the tests: data, a config that takes seconds, and rows that were never run."""

import copy
import os
import sys

import yaml

from modepth.cli import main
from modepth.sweep import trial
from modepth.sweep.config import sweep_from_dict
from modepth.sweep.plan import DataFacts
from modepth.sweep.results import Row
from tests.processes import PROCESSES

FACTS = DataFacts("0123456789abcdef", 257, {"train": 1_000_000, "validation": 20_000, "test": 20_000})
CONFIG = {
    "data": "data",
    "out": "out",
    "dial": {"width_per_layer": 4, "head_dim": 4, "learning_rate": 3e-3, "at_width": 8},
    "model": {"max_length": 16},
    "train": {"batch_size": 2, "eval_every": 4, "eval_windows": 3, "save_every": 2, "log_every": 1},
    "test_windows": 3,
    "arms": {"dense": {}, "mod": {"model": {"routing": {"capacity": 0.25, "predictor": 3}}}},
    "grids": [{"budgets": [2e7], "depths": [2, 3]}],
}


def changed(**changes):
    """The config as plain data, with other values at dotted paths, written with two underscores."""
    data = copy.deepcopy(CONFIG)
    for path, value in changes.items():
        *parents, leaf = path.split("__")
        branch = data
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[leaf] = value
    return data


def sweep(**changes):
    return sweep_from_dict(changed(**changes))


def prepare_text(folder):
    """Prepared bytes of some text, 257 ids."""
    (folder / "text").mkdir()
    for number in range(120):
        text = f"document {number}: " + "to be or not to be, that is the question. " * 9
        (folder / "text" / f"{number}.txt").write_text(text)
    assert main(["data", "prepare", str(folder / "text"), str(folder / "data"), "--tokenizer", "bytes"]) == 0
    return folder / "data"


def write_config(folder, data, **changes):
    """A config file for this data, results beside it."""
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(changed(data=str(data), out=str(folder / "out"), **changes), sort_keys=False))
    return path


def new_row(**changes):
    """A row of a finished run, which was none."""
    row = {
        "arm": "dense",
        "budget": 1e13,
        "depth": 4,
        "seed": 0,
        "layers": 4,
        "width": 128,
        "heads": 4,
        "params": 1_000_000,
        "flops_per_token": 2e6,
        "flops_per_token_full": 2.2e6,
        "training_flops": 10**13,
        "training_flops_full": 11 * 10**12,
        "steps": 1000,
        "tokens": 1_600_000,
        "epochs": 0.5,
        "learning_rate": 1e-3,
        "data_hash": "d",
        "config": {"model": {"routing": None}, "train": {}},
        "status": "finished",
        "validation_loss": 3.0,
        "test_loss": 3.1,
        "step_seconds": 0.5,
        "hardware": "a CPU",
        "torch": "2",
        "threads": 1,
        "jobs": 1,
    } | changes
    row.setdefault("id", f"{row['arm']}-{row['budget']:g}-d{row['depth']}-s{row['seed']}")
    return Row(**row)


def failed_row(**changes):
    nothing = dict.fromkeys(["validation_loss", "test_loss", "step_seconds"])
    return new_row(status="failed", reason="diverged: the loss is not finite", **nothing, **changes)


class Forked:
    """A local executor for the tests: each trial is a real process, but torch is imported once."""

    def __init__(self, threads):
        self.threads = threads  # the trial sets them itself

    def start(self, folder):
        return ForkedJob(folder)


class ForkedJob:
    def __init__(self, folder):
        self.process = PROCESSES.Process(target=be_trial, args=(folder,), daemon=True)
        self.process.start()

    def ended(self):
        code = self.process.exitcode
        return None if code is None else f"ended with exit code {code}"

    def stop(self):
        self.process.terminate()

    def wait(self):
        self.process.join()


def be_trial(folder):
    with (folder / "output.txt").open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.exit(trial.main(folder))
