"""From a sweep's config to its runs: pure, and nothing has started when it is done.

A run is an arm at a budget, a depth of the dial and a seed. The dial gives width, heads and learning rate; the arm
gets as many layers as come nearest to the FLOPs of a forward pass of the dense model of that depth, so that what
routing saves is spent on depth; `modepth.flops` then turns the budget into steps.

A run is known by its id: a readable part, and a hash of all that its result depends on. So a config may grow by
grids and arms and keep the results that it has, while a changed learning rate or other data make new runs.
"""

import bisect
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from modepth import flops
from modepth.config import ModelConfig, RoutingConfig, TrainConfig, build, model_config_to_dict
from modepth.data import SPLITS, open_tokens
from modepth.flags import laid_over
from modepth.schedule import flops_until, num_steps, step_flops, window_length
from modepth.sweep.config import Arm, SweepConfig
from modepth.sweep.results import Cell
from modepth.validation import check_count

WITHOUT_EFFECT = ("eval_every", "save_every", "keep_checkpoints", "log_every")  # on the result of a run
MAX_LAYERS = 1000
NO_COST = 0.1  # of the first layer: `every` more layers that cost less will hardly add up to a dense model's
START_SECONDS = 5.0  # of a run: a process, its imports, its data


class DataFacts(NamedTuple):
    """What a plan needs to know of prepared data: a hash of all splits, and tokens by split."""

    hash: str
    vocab_size: int
    tokens: Mapping[str, int]

    def windows(self, split: str, length: int) -> int:
        number = (self.tokens[split] - 1) // length
        if number < 1:
            raise ValueError(
                f"the {split} split has {self.tokens[split]:,} tokens, less than a window of {length} and the token "
                "after it: prepare more text, or lower model.max_length or train.length"
            )
        return number


def read_facts(folder: str | Path) -> DataFacts:
    if not Path(folder).is_dir():
        raise ValueError(
            f"data: there is no folder {folder}: write it with `modepth data prepare SOURCE {folder}`, or name another"
        )
    files = {split: open_tokens(Path(folder) / f"{split}.tokens") for split in SPLITS}
    whole = hashlib.sha256("".join(file.sha256 for file in files.values()).encode()).hexdigest()
    return DataFacts(whole[:16], files["train"].vocab_size, {split: int(file.count) for split, file in files.items()})


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run: what it is, and what follows from that.

    epochs   how often its training goes through the data; at most 1 where no token is seen twice
    """

    arm: str
    budget: float
    depth: float
    seed: int
    model: ModelConfig
    train: TrainConfig
    data_hash: str
    epochs: float

    @cached_property
    def id(self) -> str:
        train = {name: value for name, value in asdict(self.train).items() if name not in WITHOUT_EFFECT}
        whole = [model_config_to_dict(self.model), train, self.data_hash]
        digest = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.arm}-{self.budget:.4g}-d{self.depth:g}-s{self.seed}-{digest}".replace("+", "")

    @cached_property
    def steps(self) -> int:
        return num_steps(self.train, self.model)

    @property
    def length(self) -> int:
        return window_length(self.train, self.model)

    @property
    def tokens(self) -> int:
        return self.steps * self.train.batch_size * self.length

    @property
    def training_flops(self) -> int:
        return flops_until(self.steps, self.steps, self.train, self.model)

    @property
    def flops_per_token(self) -> float:
        return flops.forward_flops(self.model, self.length, half_causal=True) / self.length

    def facts(self) -> dict[str, Any]:
        """The fields of its row that are known before it starts; `_full` counts all of attention, not the half."""
        return {
            "id": self.id,
            "arm": self.arm,
            "budget": self.budget,
            "depth": self.depth,
            "seed": self.seed,
            "layers": self.model.num_layers,
            "width": self.model.dim,
            "heads": self.model.num_heads,
            "params": flops.num_parameters(self.model),
            "flops_per_token": self.flops_per_token,
            "flops_per_token_full": flops.forward_flops(self.model, self.length) / self.length,
            "training_flops": self.training_flops,
            "training_flops_full": self.steps * step_flops(self.train, self.model, half_causal=False),
            "steps": self.steps,
            "tokens": self.tokens,
            "epochs": self.epochs,
            "learning_rate": self.train.learning_rate,
            "data_hash": self.data_hash,
            "config": {"model": model_config_to_dict(self.model), "train": asdict(self.train)},
        }


def plan_runs(config: SweepConfig, data: DataFacts) -> list[PlannedRun]:
    """All runs, each once, arms of one size and seed side by side."""
    runs: dict[Cell, PlannedRun] = {}
    for cell in cells(config):
        name, budget, depth, seed = cell
        try:
            runs[cell] = plan_run(config, data, name, budget, depth, seed)
        except (ValueError, OverflowError) as error:
            reason = str(error)
            if isinstance(error, OverflowError):
                reason = "width or learning rate is beyond any float: lower width_per_layer and the powers of the dial"
            raise ValueError(f"arm {name} at depth {depth:g} and budget {budget:g}: {reason}") from error
    if config.repeats == "refuse":
        check_repeats(list(runs.values()), data)
    return list(runs.values())


def cells(config: SweepConfig) -> list[Cell]:
    """What the grids ask for, each once."""
    asked = (
        (name, float(budget), depth, seed)
        for grid in config.grids
        for budget in grid.budgets
        for depth in grid.depths
        for seed in grid.seeds
        for name in grid.arms or config.arms
    )
    return list(dict.fromkeys(asked))


def plan_run(config: SweepConfig, data: DataFacts, name: str, budget: float, depth: float, seed: int) -> PlannedRun:
    arm = config.arms[name]
    train: TrainConfig = build(
        TrainConfig,
        {
            **laid_over(dict(config.train), dict(arm.train)),
            "target_flops": budget,
            "learning_rate": config.dial.rate(depth, budget) * arm.learning_rate_factor,
            "seed": seed,
        },
        where="train.",
    )
    model = size_arm(config, data, arm, depth, train.length)
    length = window_length(train, model)
    if length > model.max_length:
        raise ValueError(f"train.length must be at most model.max_length {model.max_length}, got {length}")
    for split in SPLITS:
        data.windows(split, length)
    epochs = num_steps(train, model) * train.batch_size / data.windows("train", length)
    return PlannedRun(
        arm=name,
        budget=budget,
        depth=depth,
        seed=seed,
        model=model,
        train=train,
        data_hash=data.hash,
        epochs=epochs,
    )


# -- sizes


def size_arm(config: SweepConfig, data: DataFacts, arm: Arm, depth: float, length: int | None) -> ModelConfig:
    """The arm's model at a depth of the dial, its layers counted or matched to the dense model."""
    if depth > MAX_LAYERS:
        raise ValueError(f"depths must be at most {MAX_LAYERS}, got {depth:g}")
    shape = {"dim": config.dial.width(depth), "num_heads": config.dial.heads(depth)}
    shared = {"vocab_size": data.vocab_size, **config.model, **shape}
    own = laid_over(shared, dict(arm.model))
    check_count("model.vocab_size", own["vocab_size"], low=1)
    if own["vocab_size"] < data.vocab_size:
        raise ValueError(f"model.vocab_size must be at least the data's {data.vocab_size}, got {own['vocab_size']}")
    if arm.size == "depth":
        return with_layers(own, config.dial.layers(depth))
    dense = flops.dense(with_layers({**shared, "routing": None}, config.dial.layers(depth)))
    return nearest_layers(own, forward(dense, length), length)


def with_layers(fields: Mapping[str, Any], num_layers: int) -> ModelConfig:
    model: ModelConfig = build(ModelConfig, {**fields, "num_layers": num_layers}, where="model.")
    return model


def forward(model: ModelConfig, length: int | None) -> int:
    return flops.forward_flops(model, length or model.max_length, half_causal=True)


def nearest_layers(fields: Mapping[str, Any], target: int, length: int | None) -> ModelConfig:
    """The model whose forward FLOPs are nearest to `target`; of two as near, the one with fewer layers.

    Where every so many layers are routed, in whole periods: each routed layer stands between two that are not.
    """
    deepest = with_layers(fields, MAX_LAYERS)
    routing = deepest.routing
    period = 1 if routing is None or routing.layers is not None else routing.every
    numbers = range(fewest_layers(routing), MAX_LAYERS + 1, period)

    def of(number: int) -> ModelConfig:
        return replace(deepest, num_layers=number)

    def cost(number: int) -> int:
        return forward(of(number), length)

    # Doubled, then halved: counting up would be quadratic in the layers.
    end = 1
    while end < len(numbers) and cost(numbers[end - 1]) < target:
        check_growing(of(numbers[end - 1]), length)
        end *= 2
    enough = bisect.bisect_left(numbers, target, hi=min(end, len(numbers)), key=cost)
    if enough == 0:
        return of(numbers[0])
    check_growing(of(numbers[enough - 1]), length)
    if enough == len(numbers):
        raise ValueError(f"{MAX_LAYERS} layers do not reach the dense model's FLOPs: lower the depth")
    fewer, more = numbers[enough - 1], numbers[enough]
    return of(more if cost(more) - target < target - cost(fewer) else fewer)


def check_growing(model: ModelConfig, length: int | None) -> None:
    """Raise if more layers would cost nearly nothing: where tokens leave for good, each has fewer to compute."""
    routing = model.routing
    if routing is None or routing.flow == "rejoin":
        return
    deeper = replace(model, num_layers=model.num_layers + routing.every)
    layer = flops.layer_flops(model, length or model.max_length, half_causal=True)[0].total
    if forward(deeper, length) - forward(model, length) < NO_COST * layer:
        raise ValueError(
            f"layers beyond {model.num_layers} cost nearly nothing, since tokens leave on the way: the dense model's "
            "FLOPs are not reached; raise routing.capacity or routing.every, or set the arm's size to depth"
        )


def fewest_layers(routing: RoutingConfig | None) -> int:
    """How many layers it takes to route one."""
    if routing is None:
        return 1
    return max(routing.layers) + 1 if routing.layers is not None else max(routing.every, 2) + 1


# -- data


def check_repeats(runs: Sequence[PlannedRun], data: DataFacts) -> None:
    """Raise if a run would see a token twice."""
    over = [run for run in runs if run.epochs > 1]
    if over:
        worst = max(over, key=lambda run: run.epochs)
        have = data.windows("train", worst.length) * worst.length
        raise ValueError(
            f"{len(over)} of {len(runs)} runs would see a token twice; the worst, {worst.arm} at depth {worst.depth:g} "
            f"and budget {worst.budget:g}, needs {worst.tokens:,} tokens of the {have:,} in whole windows: lower the "
            "budget, leave out small depths, prepare more text, or set repeats: flag"
        )


# -- time


def measuring_flops(run: PlannedRun, data: DataFacts, test_windows: int | None) -> int:
    """FLOPs of a run's evaluations, while it trains and of the test split; in both modes where training looks ahead."""
    times = max(1, -(-run.steps // run.train.eval_every))
    windows = times * min(run.train.eval_windows, data.windows("validation", run.length))
    test = data.windows("test", run.length)
    windows += test if test_windows is None else min(test_windows, test)
    return windows * forward(run.model, run.length) * (2 if run.model.looks_ahead else 1)


def expected_seconds(
    runs: Sequence[PlannedRun], data: DataFacts, config: SweepConfig, *, flops_per_second: float, jobs: int
) -> float:
    """How long the runs take, `jobs` at a time, each at `flops_per_second`."""
    total = sum(run.training_flops + measuring_flops(run, data, config.test_windows) for run in runs)
    longest = max((run.training_flops for run in runs), default=0)
    return max(total / jobs, longest) / flops_per_second + len(runs) * START_SECONDS / jobs
