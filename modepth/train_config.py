"""How a model is trained, as a user sets it. Read from files where all configs are: config.py."""

from dataclasses import dataclass
from typing import Literal

from modepth.validation import check_choice, check_count, check_flag, check_number, check_seed

Precision = Literal["bfloat16", "float16"]
Parallel = Literal["ddp", "fsdp"]
Optimizer = Literal["adamw", "muon"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a model is trained; exactly one of steps, tokens and target_flops says for how long.

    length            tokens of a training window; None: the model's max_length
    batch_size        windows of a step, over all processes
    micro_batch       windows of one forward in one process; None: all of the process's share at once
    optimizer         adamw; or muon, for the matrices of the layers, and adamw for the rest, at the same learning rate
    warmup            share of the run over which the learning rate rises
    final_fraction    of the learning rate, reached by a cosine at the end of the run
    capacity_warmup   share of the run over which the capacity falls from 1 to the model's own
    capacity_stages   number of levels on the way there
    max_bad_steps     stop after so many updates in a row that were not applied
    precision         of autocast; None: the precision of the weights
    parallel          with several processes: ddp, the whole model on each, or fsdp, its tensors shared out
    """

    steps: int | None = None
    tokens: int | None = None
    target_flops: float | None = None
    length: int | None = None
    batch_size: int = 16
    micro_batch: int | None = None
    optimizer: Optimizer = "adamw"
    learning_rate: float = 3e-3
    warmup: float = 0.05
    final_fraction: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    seed: int = 0
    capacity_warmup: float = 0.0
    capacity_stages: int = 8
    eval_every: int = 100
    eval_windows: int = 64
    save_every: int = 100
    keep_checkpoints: int = 2
    log_every: int = 10
    max_bad_steps: int = 5
    compile: bool = False
    checkpoint_activations: bool = False
    precision: Precision | None = None
    parallel: Parallel = "ddp"

    def __post_init__(self) -> None:
        given = [name for name in ("steps", "tokens", "target_flops") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"set exactly one of steps, tokens and target_flops, got {', '.join(given) or 'none'}")
        if self.target_flops is not None and self.capacity_warmup:
            raise ValueError(
                "capacity_warmup changes the FLOPs of a step: with it, give steps or tokens, not target_flops"
            )
        for name in ("steps", "tokens", "length", "micro_batch"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), low=1)
        if self.target_flops is not None:
            check_number("target_flops", self.target_flops, low=1.0)
        counts = ("batch_size", "capacity_stages", "eval_every", "eval_windows", "save_every", "keep_checkpoints")
        for name in (*counts, "log_every", "max_bad_steps"):
            check_count(name, getattr(self, name), low=1)
        check_seed("seed", self.seed)
        for name in ("learning_rate", "weight_decay", "clip"):
            check_number(name, getattr(self, name), low=0.0)
        for name in ("warmup", "capacity_warmup", "beta1", "beta2"):
            check_number(name, getattr(self, name), low=0.0, high=1.0)
        check_number("final_fraction", self.final_fraction, low=0.0, high=1.0)
        for name in ("compile", "checkpoint_activations"):
            check_flag(name, getattr(self, name))
        if self.precision is not None:
            check_choice("precision", self.precision, Precision)
        check_choice("parallel", self.parallel, Parallel)
        check_choice("optimizer", self.optimizer, Optimizer)
        if self.parallel == "fsdp" and self.optimizer == "muon":
            raise ValueError("optimizer 'muon' needs whole matrices, and parallel 'fsdp' cuts them: train with 'ddp'")
        if self.parallel == "fsdp" and self.compile:
            raise ValueError("compile does not go with parallel 'fsdp' yet: drop compile, or train with 'ddp'")
