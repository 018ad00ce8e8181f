"""Models of one shape against one another, in turns, each in a process of its own.

A cell is a task at a shape. In each round every contestant does the task once; what is compared is each round's ratio
to our dense model, by its median. A cell that is done is a row for each contestant, written at once.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from modepth import flops
from modepth.bench.peers import PEERS, peer_python
from modepth.config import ModelConfig, RoutingConfig

Task = Literal["train", "prefill", "decode"]

HERE = Path(__file__).parent
VOCABULARY = 2048
TOKENS = 4096  # of a training step and of a prefill
# Of training and prefill, by width: what six processes have the memory for, and odd, so that every implementation means
# the same by every other layer.
LAYERS = {256: 9, 512: 7, 1024: 5}
DECODE_LAYERS, PROMPT, NEW_TOKENS = 12, 479, 33  # the first new token is the prompt's


class Contestant(NamedTuple):
    file: str
    routed: bool
    tasks: tuple[Task, ...] = ("train", "prefill", "decode")
    compiled: bool = False


CONTESTANTS = {
    "dense": Contestant("native", routed=False),
    "routed": Contestant("native", routed=True),
    "llama": Contestant("llama", routed=False),
    "converted": Contestant("converted", routed=True),
    # These do not generate as they trained.
    "soup": Contestant("soup", routed=True, tasks=("train", "prefill")),
    "mixture_of_depth": Contestant("mixture_of_depth", routed=True, tasks=("train", "prefill")),
    "dense_compiled": Contestant("native", routed=False, tasks=("train",), compiled=True),
    "routed_compiled": Contestant("native", routed=True, tasks=("train",), compiled=True),
    "llama_compiled": Contestant("llama", routed=False, tasks=("train",), compiled=True),
    "soup_compiled": Contestant("soup", routed=True, tasks=("train",), compiled=True),
}
OURS = ("dense", "routed")  # in every cell: what all are compared with, and what it is about
OTHERS = tuple(name for name, kind in CONTESTANTS.items() if name not in OURS)
UNCOMPILED_OTHERS = tuple(name for name in OTHERS if not CONTESTANTS[name].compiled)


@dataclass(frozen=True)
class Shape:
    """What all contestants of a cell have in common."""

    task: Task
    dim: int
    length: int
    batch: int
    capacity: float

    @property
    def num_layers(self) -> int:
        return DECODE_LAYERS if self.task == "decode" else LAYERS[self.dim]

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(
            vocab_size=VOCABULARY,
            num_layers=self.num_layers,
            dim=self.dim,
            num_heads=max(1, self.dim // 64),
            max_length=self.length,
            routing=RoutingConfig(capacity=self.capacity, every=2),
        )

    def order(self, routed: bool, threads: int, compiled: bool = False) -> dict[str, Any]:
        """As a worker is told it."""
        config = self.config
        return {
            "task": self.task,
            "vocab_size": config.vocab_size,
            "num_layers": config.num_layers,
            "dim": config.dim,
            "num_heads": config.num_heads,
            "mlp_width": config.mlp_width,
            "length": self.length,
            "batch": self.batch,
            "threads": threads,
            "capacity": self.capacity if routed else None,
            "routed_layers": list(config.routed_layers),
            "compiled": compiled,
        }

    @property
    def flop_ratio(self) -> float:
        """Of a training step, and of a prefill: causal attention counted half, logits included."""
        config = self.config
        ours, dense = (
            flops.training_flops(each, self.length, half_causal=True) for each in (config, flops.dense(config))
        )
        return ours / dense


class Worker:
    """A contestant's process; leaving the block ends it."""

    def __init__(self, name: str, python: Path, threads: int) -> None:
        self.name, self.threads, self.kind = name, threads, CONTESTANTS[name]
        self.built: dict[str, Any] = {}
        self.process = subprocess.Popen(
            [python, HERE / "worker.py", HERE / "contestants" / f"{self.kind.file}.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )

    def build(self, shape: Shape) -> None:
        self.built = self.do("build", shape=shape.order(self.kind.routed, self.threads, self.kind.compiled))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self.process:  # closes the pipes and waits
            pass

    def do(self, what: str, **options: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"do": what, **options}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"ended with code {self.process.wait()}"}
        if "error" in answer:
            raise ValueError(f"{self.name} cannot {what}: {answer['error']}")
        return answer


def contestants(task: Task, peers: Path | None, beside: Collection[str]) -> Iterator[tuple[str, Path]]:
    """Who takes part, and with which Python."""
    for name, kind in CONTESTANTS.items():
        if task not in kind.tasks or name not in (*OURS, *beside):
            continue
        python = Path(sys.executable)
        if kind.file in PEERS:
            found = None if peers is None else peer_python(peers, kind.file)
            if found is None:
                continue
            python = found
        yield name, python


def run_cell(
    shape: Shape, rounds: int, threads: int, peers: Path | None, beside: Collection[str] = UNCOMPILED_OTHERS
) -> list[dict[str, Any]]:
    """A row for each contestant, ours and those `beside`; a peer that fails has a row that says so."""
    told = {**asdict(shape), "num_layers": shape.num_layers, "flop_ratio": round(shape.flop_ratio, 4)}
    order = {"prompt": PROMPT, "count": NEW_TOKENS} if shape.task == "decode" else {}
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        workers = []
        for name, python in contestants(shape.task, peers, beside):
            worker = stack.enter_context(Worker(name, python, threads))
            try:
                worker.build(shape)
                worker.do(shape.task, **order)  # once for nothing: memory is asked for, or a graph compiled
                workers.append(worker)
            except ValueError as error:
                if worker.kind.file not in PEERS:
                    raise
                rows.append({"contestant": name, **told, "failed": str(error)})
        taken = [[worker.do(shape.task, **order) for worker in workers] for _ in range(rounds)]
        times = {worker.name: [answers[n] for answers in taken] for n, worker in enumerate(workers)}
        for worker in workers:
            row = {"contestant": worker.name, **told, **compared(times, worker.name), **worker.built}
            if shape.task == "train":
                row["peak_bytes"] = worker.do("memory")["peak"]
            rows.append({**row, "rounds": rounds, "threads": threads})
    return rows


def compared(times: Mapping[str, Sequence[Mapping[str, float]]], name: str) -> dict[str, float]:
    """Milliseconds, and the ratio to our dense model; for generation also what skipping could save at best."""
    pairs = list(zip(times[name], times["dense"], strict=True))
    ratios = sorted(own["seconds"] / dense["seconds"] for own, dense in pairs)
    row = {
        "ms": 1000 * statistics.median(own["seconds"] for own, _ in pairs),
        "of_dense": statistics.median(ratios),
        "lowest": ratios[0],
        "highest": ratios[-1],
    }
    if name == "routed" and pairs[0][1].get("blocks"):
        # The dense step, in which the routed layers' blocks take what they took for the tokens that were routed.
        row["ideal_of_dense"] = statistics.median(
            (dense["seconds"] - dense["blocks"] + own["blocks"]) / dense["seconds"] for own, dense in pairs
        )
    return {key: round(value, 4) for key, value in row.items()}
