"""What a user writes to compare models at equal training FLOPs: arms, and grids of budgets, sizes and seeds.

Only what the arms share and where they differ is written down; the dial and the budgets say the rest. Fields of
models and training are kept as plain data here and checked when the plan builds each run's own config.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from modepth.config import build, read_plain
from modepth.validation import check_choice, check_count, check_flag, check_instance, check_number, check_seed, shown

Size = Literal["flops", "depth"]
Repeats = Literal["refuse", "flag"]
Fields = Mapping[str, Any]

NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*")  # of an arm: part of a folder's name
SET_BY = {
    "model": {"num_layers": "the depths", "dim": "the dial", "num_heads": "the dial"},
    "train": {
        "steps": "the budgets",
        "tokens": "the budgets",
        "target_flops": "the budgets",
        "learning_rate": "the dial and an arm's learning_rate_factor",
        "seed": "the seeds",
    },
}


@dataclass(frozen=True, kw_only=True)
class Dial:
    """One number, the depth of the dense model, sets the others. It may lie between two whole ones, for sizes between.

    layers         the whole number nearest to the depth, of the dense model
    width          depth * width_per_layer, to the nearest multiple of head_dim, or of 2 * num_heads if that is given
    heads          width / head_dim, or num_heads
    learning rate  learning_rate * (at_width / width) ** power * (at_budget / budget) ** budget_power

    >>> dial = Dial(width_per_layer=24, head_dim=32, learning_rate=1e-3, at_width=64, at_budget=1e13, budget_power=0.5)
    >>> dial.width(4), dial.heads(4), dial.rate(11, budget=1e13), dial.rate(11, budget=4e13)
    (96, 3, 0.0005, 0.00025)
    >>> dial.layers(5.4), dial.width(5.4)
    (5, 128)
    """

    width_per_layer: float = 32.0
    head_dim: int = 32
    num_heads: int | None = None
    learning_rate: float = 3e-3
    at_width: int = 128
    power: float = 0.5
    at_budget: float = 1e13
    budget_power: float = 0.0

    def __post_init__(self) -> None:
        check_count("head_dim", self.head_dim, low=2)
        if self.num_heads is not None:
            check_count("num_heads", self.num_heads, low=1)
        check_count("at_width", self.at_width, low=1)
        for name in ("width_per_layer", "learning_rate", "power", "budget_power"):
            check_number(name, getattr(self, name), low=0.0)
        check_number("at_budget", self.at_budget, low=1.0)

    def layers(self, depth: float) -> int:
        return int(depth + 0.5)

    def width(self, depth: float) -> int:
        unit = self.head_dim if self.num_heads is None else 2 * self.num_heads  # rotations are of pairs
        return unit * max(1, int(depth * self.width_per_layer / unit + 0.5))

    def heads(self, depth: float) -> int:
        return self.width(depth) // self.head_dim if self.num_heads is None else self.num_heads

    def rate(self, depth: float, budget: float) -> float:
        by_width = (self.at_width / self.width(depth)) ** self.power
        return float(self.learning_rate * by_width * (self.at_budget / budget) ** self.budget_power)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One of the things compared: what it changes in the model and the training of all.

    model                 fields of ModelConfig, `routing` among them; routing null is a dense model
    train                 fields of TrainConfig
    learning_rate_factor  times the learning rate of the dial
    size                  flops: as many layers as come nearest to the dense model's FLOPs of a forward pass; depth: as
                          many as the dense model has
    """

    model: Fields = field(default_factory=dict)
    train: Fields = field(default_factory=dict)
    learning_rate_factor: float = 1.0
    size: Size = "flops"

    def __post_init__(self) -> None:
        for part in ("model", "train"):
            check_fields(part, getattr(self, part))
        check_number("learning_rate_factor", self.learning_rate_factor, low=0.0)
        check_choice("size", self.size, Size)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Budgets x depths x arms x seeds; arms None: all of them.

    >>> Grid(budgets=(1e12, 3e12), depths=(3, 4, 6)).seeds
    (0,)
    """

    budgets: tuple[float, ...]
    depths: tuple[float, ...]
    seeds: tuple[int, ...] = (0,)
    arms: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("budgets", "depths", "seeds", "arms"):
            values = getattr(self, name)
            if values is not None and (not isinstance(values, tuple) or not values):
                raise ValueError(f"{name} must be a list of one or more, got {shown(values)}")
        for budget in self.budgets:
            check_number("budgets", budget, low=1.0)
        for depth in self.depths:
            check_number("depths", depth, low=1.0)
        for seed in self.seeds:
            check_seed("seeds", seed)


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """A sweep; paths are relative to where the command is given.

    data          a folder that `modepth data prepare` wrote
    out           the folder of the results
    model, train  fields that all arms share; vocab_size is that of the data unless given
    baseline      the arm that the others are compared with; None: the first that is dense, else the first
    repeats       refuse: no run may see a token twice; flag: it may, and its row says how often
    test_windows  windows of the test split that a finished run is measured on; None: all
    threads       of each run
    keep          keep the checkpoints of finished runs
    slurm         what submitit is told with --executor slurm, such as timeout_min and slurm_partition
    """

    data: str
    out: str
    arms: Mapping[str, Arm]
    grids: tuple[Grid, ...]
    dial: Dial = field(default_factory=Dial)
    model: Fields = field(default_factory=dict)
    train: Fields = field(default_factory=dict)
    baseline: str | None = None
    repeats: Repeats = "refuse"
    test_windows: int | None = None
    threads: int = 1
    keep: bool = True
    slurm: Fields = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("data", "out"):
            check_instance(name, getattr(self, name), str)
        for part in ("model", "train"):
            check_fields(part, getattr(self, part))
        check_instance("dial", self.dial, Dial)
        check_instance("slurm", self.slurm, dict)
        self.check_arms()
        check_choice("repeats", self.repeats, Repeats)
        if self.test_windows is not None:
            check_count("test_windows", self.test_windows, low=1)
        check_count("threads", self.threads, low=1)
        check_flag("keep", self.keep)

    def check_arms(self) -> None:
        for name in self.arms:
            if not isinstance(name, str) or not NAME.fullmatch(name):
                raise ValueError(f"arms: a name must be of letters, digits, '_', '.' and '-', got {shown(name)}")
        named = [*(name for grid in self.grids for name in grid.arms or ()), *filter(None, [self.baseline])]
        for name in named:
            if name not in self.arms:
                raise ValueError(f"there is no arm {shown(name)}: name one of {', '.join(self.arms)}")


def check_fields(part: str, data: object) -> None:
    """Fields of a model or a training, without those that the sweep itself sets."""
    if not isinstance(data, dict):
        raise ValueError(f"{part} must be a mapping of fields, got {shown(data)}")
    for name, by in SET_BY[part].items():
        if name in data:
            raise ValueError(f"{part}.{name} is set by {by}: leave it out")


# -- reading


def read_sweep(path: str | Path) -> SweepConfig:
    """A SweepConfig from a YAML or JSON file; every error names the file and the field."""
    try:
        return sweep_from_dict(read_plain(path))
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(str(path)) else f"{path}: {text}") from error


def sweep_from_dict(data: Fields) -> SweepConfig:
    """A SweepConfig from plain data, refusing what it does not know."""
    arms, grids = data.get("arms"), data.get("grids")
    if not isinstance(arms, Mapping) or not arms:
        raise ValueError(f"arms must be a mapping of one or more names to what they change, got {shown(arms)}")
    if not isinstance(grids, list) or not grids:
        raise ValueError(f"grids must be a list of one or more mappings of Grid fields, got {shown(grids)}")
    known = {
        "arms": {name: build(Arm, {} if arm is None else arm, f"arms.{name}.", {}) for name, arm in arms.items()},
        "grids": tuple(build(Grid, grid, f"grids[{number}].", {}) for number, grid in enumerate(grids)),
    }
    sweep: SweepConfig = build(SweepConfig, {**data, **known}, "", {"dial": Dial})
    return sweep
