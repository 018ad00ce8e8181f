"""A run: its folder, its log, its checkpoints, and the loop from the first step to the last.

    RUN/config.json      model and training as resolved
    RUN/log.jsonl        a row for each logged step, each evaluation, each event
    RUN/checkpoints/     what the run goes on from after a kill, a full disk or Ctrl-C

A run that finds a checkpoint of its own model in its folder resumes from it.
"""

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from modepth import checkpoint
from modepth.adopted import AnyConfig
from modepth.agreement import check_same_run, check_same_start, setting
from modepth.config import Mode, TrainConfig, model_config_to_dict
from modepth.cutoffs import cutoff_weight_at, move_cutoffs
from modepth.data import TokenFile, check_ids, global_batch_rows, num_windows, open_tokens, rank_rows, read_windows
from modepth.interruption import Interruption
from modepth.model import Decoder
from modepth.parallel import spread
from modepth.restore import load_model, load_optimizer, model_tensors, optimizer_tensors, pieces
from modepth.run_folder import RunLock, prepare_run
from modepth.run_folder import steps as saved_steps
from modepth.runlog import RunLog
from modepth.schedule import flops_until, learning_rate_at, num_steps, routing_at, window_length
from modepth.textfile import replace_text
from modepth.train import (
    StepResult,
    evaluate,
    experts_row,
    make_optimizer,
    routing_row,
    train_step,
    windows_to_batch,
)
from modepth.world import World

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
SAME_SIGNAL_SECONDS = 1.0  # under torchrun a signal may come twice


class Data(NamedTuple):
    """The token files of a run: trained on, and measured on while it trains."""

    train: TokenFile
    validation: TokenFile


class Stopped(Exception):  # noqa: N818 - not an error
    """A signal ended the run after a step, which is saved; `signal` is its number."""

    def __init__(self, signal: int) -> None:
        super().__init__(f"stopped by signal {signal}; the same command goes on from here")
        self.signal = signal


class DivergedError(Exception):
    """Update after update could not be applied."""


def open_data(folder: str | Path, model: AnyConfig, world: World = ALONE) -> Data:
    """The training and validation tokens of a prepared folder; if one rank cannot use them all raise."""
    opened: list[TokenFile] = []
    checkpoint.in_step(
        world.exchange, lambda: opened.extend(open_split(folder, split, model) for split in Data._fields)
    )
    return Data(*opened)


def open_split(folder: str | Path, split: str, model: AnyConfig) -> TokenFile:
    """The tokens of one split, each seen to be in the model's vocabulary."""
    tokens = open_tokens(Path(folder) / f"{split}.tokens")
    if tokens.vocab_size > model.vocab_size:
        raise ValueError(
            f"{tokens.path}: its vocabulary of {tokens.vocab_size} is more than the model's "
            f"vocab_size {model.vocab_size}"
        )
    check_ids(tokens)
    return tokens


def train(
    model: Decoder,
    config: TrainConfig,
    data: Data,
    run: str | Path,
    *,
    world: World = ALONE,
    on_start: Callable[[Path], None] = lambda folder: None,
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """Train `model` to the end of its schedule, going on from the newest checkpoint of the folder `run`.

    Returns the row of the final evaluation. On the first rank `on_start` is handed the folder once it is
    locked and its checkpoint fits, and `on_row` each row as it is logged.
    """
    check_same_start(world, model, model.config, config, data._asdict())
    check_possible(model.config, config, data, world)
    steps = num_steps(config, model.config)
    with ExitStack() as stack:
        take_folder(run, world, stack)
        interruption = stack.enter_context(Interruption(SAME_SIGNAL_SECONDS if world.size > 1 else 0.0))
        loop = Loop(model, config, data, Path(run), world, steps, on_row)
        first = loop.resume()
        if world.is_first:
            on_start(Path(run))
        for step in range(first, steps):
            loop.do(step)
            signal = world.highest(interruption.signal or 0)
            if signal or (step + 1) % config.save_every == 0 or step + 1 == steps:
                loop.save(step + 1)
            if signal:
                raise Stopped(signal)
        return loop.final_row()


def check_possible(model: AnyConfig, config: TrainConfig, data: Data, world: World) -> None:
    """Raise now for what would end the run in its first step or its first evaluation."""
    length = window_length(config, model)
    if length > model.max_length:
        raise ValueError(f"length must be at most the model's max_length {model.max_length}, got {length}")
    rank_rows(np.arange(config.batch_size), rank=world.rank, world_size=world.size)
    for tokens in data:
        num_windows(tokens, length)


def take_folder(run: str | Path, world: World, stack: ExitStack) -> None:
    """Hold the folder of a run, on the first rank, until `stack` closes; if one rank cannot use it all raise."""

    def take() -> None:
        if world.is_first:
            checkpoint.sweep_leftovers(stack.enter_context(RunLock(prepare_run(run))))

    def look() -> None:
        if not (Path(run) / "checkpoints").is_dir():
            raise ValueError(f"{run}: not the folder that the first process sees; put it where all machines share it")

    checkpoint.in_step(world.exchange, take)
    checkpoint.in_step(world.exchange, look)


class Loop:
    """The things a run holds while it trains."""

    def __init__(
        self,
        model: Decoder,
        config: TrainConfig,
        data: Data,
        folder: Path,
        world: World,
        steps: int,
        on_row: Callable[[dict[str, Any]], None],
    ) -> None:
        self.model = model.to(world.device).train()
        self.model.checkpoint_activations = config.checkpoint_activations
        self.config, self.data, self.folder, self.world, self.steps = config, data, folder, world, steps
        self.on_row = on_row
        self.length = window_length(config, model.config)
        self.forward = spread(self.model, config, world)
        self.optimizer = make_optimizer(self.model, config)  # of the parameters as they are spread
        self.log = RunLog(folder)
        self.num_bad = 0
        self.peak = measured_peak(world.device)
        self.started = time.perf_counter()

    # -- one step

    def do(self, step: int) -> None:
        """The step numbered `step`: what it sees and how it is done follow from its number alone."""
        start = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(step, self.steps, self.config)
        torch.manual_seed((self.config.seed * 1_000_003 + step) * 1_000_003 + self.world.rank)  # of dropout
        own = self.model.config.routing
        options = {} if own is None else {"routing": routing_at(step, self.steps, self.config, own)}
        rows = global_batch_rows(
            self.data.train, seed=self.config.seed, step=step, batch_size=self.config.batch_size, length=self.length
        )
        rows = rank_rows(rows, rank=self.world.rank, world_size=self.world.size)
        batch = windows_to_batch(read_windows(self.data.train, rows, self.length)).to(self.world.device)
        result = train_step(self.forward, self.optimizer, batch, self.config, self.world, **options)
        if result.problem is None:
            move_cutoffs(self.model, result.cutoffs, cutoff_weight_at(step))
        self.account(step, result, time.perf_counter() - start)
        if (step + 1) % self.config.eval_every == 0 and step + 1 < self.steps:
            self.measure(step + 1)

    def account(self, step: int, result: StepResult, seconds: float) -> None:
        """Log the step; stop a run that cannot go on."""
        if result.problem is not None:
            self.num_bad += 1
            self.add_row({"step": step, "event": "update not applied", "reason": f"{result.problem} is not finite"})
            if self.num_bad == self.config.max_bad_steps:
                raise DivergedError(
                    f"{self.num_bad} updates in a row could not be applied, the last at step {step}: {result.problem} "
                    "is not finite; the weights are those of the last good step: lower learning_rate or clip"
                )
            return
        self.num_bad = 0
        if step % self.config.log_every == 0 or step + 1 == self.steps:
            rate = (self.flops_until(step + 1) - self.flops_until(step)) / seconds
            choices = {str(decided.layer): experts_row(decided) for decided in result.experts}
            self.add_row(
                {
                    "step": step,
                    "loss": result.loss,
                    "router_losses": result.router_losses,
                    "gradient_norm": result.gradient_norm,
                    "learning_rate": self.optimizer.param_groups[0]["lr"],
                    "tokens_per_second": result.num_tokens / seconds,
                    "flops_per_second": rate,
                    "share_of_peak": rate / self.peak,
                    "flops": self.flops_until(step + 1),
                    "layers": {str(routing.layer): routing_row(routing) for routing in result.routings},
                    **({"experts": choices} if choices else {}),
                }
            )

    def measure(self, step: int) -> dict[str, Any]:
        """Validation loss after `step` steps, as a row; of one whose training looks ahead also in that mode."""
        validation = self.evaluate("causal")
        if self.model.config.looks_ahead:
            validation["topk_loss"] = self.evaluate("topk")["loss"]
        return self.add_row({"step": step, "validation": validation, "flops": self.flops_until(step)})

    def flops_until(self, step: int) -> int:
        return flops_until(step, self.steps, self.config, self.model.config)

    def evaluate(self, mode: Mode) -> dict[str, float]:
        return evaluate(
            self.model,
            self.data.validation,
            length=self.length,
            num_windows=self.config.eval_windows,
            batch_size=self.config.micro_batch or max(1, self.config.batch_size // self.world.size),
            world=self.world,
            mode=mode,
        )

    def final_row(self) -> dict[str, Any]:
        """The measurement at the end, taken once however often a finished run is started."""
        done = [row for row in self.log.rows() if row["step"] == self.steps and "validation" in row]
        found: list[dict[str, Any]] = self.world.exchange(done[-1:])[0]
        return found[0] if found else self.measure(self.steps)

    def add_row(self, row: dict[str, Any]) -> dict[str, Any]:
        row = {**row, "seconds": round(time.perf_counter() - self.started, 3)}
        if self.world.is_first:
            self.log.add(row)
            self.on_row(row)
        return row

    # -- saving and going on

    def save(self, step: int) -> None:
        """A checkpoint of the state after `step` steps."""
        state = {"step": step, "model": model_config_to_dict(self.model.config), "train": asdict(self.config)}
        checkpoint.save(
            self.folder,
            step,
            {
                "model": pieces(model_tensors(self.model)),
                "optimizer": pieces(optimizer_tensors(self.model, self.optimizer)),
            },
            state | {"setting": setting(self.config, self.data.train, self.world)},
            rank=self.world.rank,
            exchange=self.world.exchange,
        )
        if self.world.is_first:
            checkpoint.keep_newest(self.folder, step, self.config.keep_checkpoints)

    def resume(self) -> int:
        """Load the newest checkpoint if there is one; the step to go on with."""
        found = checkpoint.newest(self.folder)
        step = 0 if found is None else found.step
        if len(set(self.world.exchange(step))) > 1:
            raise ValueError(f"{self.folder}: the processes see different checkpoints; is the folder shared?")
        if found is None and saved_steps(self.folder):
            raise ValueError(
                f"{self.folder}: none of its checkpoints can be used: put a good one back, or choose another run folder"
            )
        if step > self.steps:
            raise ValueError(
                f"{self.folder}: is at step {step} already, got {self.steps} steps: ask for more, "
                "or choose another run folder"
            )
        changed = ""
        if found is not None:
            changed = check_same_run(found, self.model.config, self.config, self.data.train, self.world)
            checkpoint.in_step(self.world.exchange, lambda: self.load(found))
        if self.world.is_first:
            write_config(self.folder, self.model.config, self.config)
            self.log.drop_from(step)
        if changed:
            self.add_row({"step": step, "event": "config changed", "reason": changed})
        return step

    def load(self, found: checkpoint.Checkpoint) -> None:
        load_model(self.model, found)
        load_optimizer(self.model, self.optimizer, found)


def write_config(folder: Path, model: AnyConfig, config: TrainConfig) -> None:
    whole = {"model": model_config_to_dict(model), "train": asdict(config)}
    replace_text(folder / "config.json", json.dumps(whole, indent=1) + "\n")


def measured_peak(device: torch.device) -> float:
    """FLOP/s of a large matrix product, what utilisation is a share of."""
    a = torch.randn(1024, 1024, device=device)
    rates = []
    for _ in range(6):
        start = time.perf_counter()
        (a @ a).sum().item()
        rates.append(2 * 1024**3 / (time.perf_counter() - start))
    return max(rates)
