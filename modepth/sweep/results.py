"""The results of a sweep: OUT/results.jsonl, a row a run, one schema, no torch.

    identity   id (readable part and hash of the whole config), arm, budget, depth (of the dial), seed
    model      layers, width, heads, params (embeddings included)
    cost       flops_per_token of a forward pass and training_flops, logits included, causal attention counted half;
               `_full` counts all of it; steps, tokens, epochs, step_seconds (median)
    losses     causal (`validation_loss`, `test_loss`) and with top-k, which looks ahead; nats a token
    setting    learning_rate, threads, jobs (runs at a time), hardware, torch, data_hash, config
    outcome    status finished or failed, and the reason of the latter

Fits and choices use `validation_loss` (FITTED); what is reported of them is `test_loss` (REPORTED), which nothing was
chosen by. Each id has one row. A row is on the disk before the next run may start.
"""

import json
import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from modepth.textfile import cannot_write, replace_text

FITTED, REPORTED = "validation_loss", "test_loss"
Cell = tuple[str, float, float, int]  # arm, budget, depth, seed


def cell_name(cell: Cell) -> str:
    """What a run is called in a list of what was left out."""
    arm, budget, depth, seed = cell
    return f"{arm} at depth {depth:g}, budget {budget:g}, seed {seed}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a run was and came to; None is what a failed run, or a dense one, does not have."""

    id: str
    arm: str
    budget: float
    depth: float
    seed: int
    layers: int
    width: int
    heads: int
    params: int
    flops_per_token: float
    flops_per_token_full: float
    training_flops: int
    training_flops_full: int
    steps: int
    tokens: int
    epochs: float
    learning_rate: float
    data_hash: str
    config: dict[str, Any]
    status: str
    reason: str | None = None
    validation_loss: float | None = None
    validation_topk_loss: float | None = None
    test_loss: float | None = None
    test_topk_loss: float | None = None
    step_seconds: float | None = None
    hardware: str | None = None
    torch: str | None = None
    threads: int | None = None
    jobs: int | None = None

    @property
    def finished(self) -> bool:
        return self.status == "finished"

    @property
    def dense(self) -> bool:
        """Neither routed nor of experts."""
        model = self.config["model"]
        return model.get("routing") is None and model.get("experts") is None

    @property
    def cell(self) -> Cell:
        return self.arm, self.budget, self.depth, self.seed

    @property
    def name(self) -> str:
        return cell_name(self.cell)


class Results:
    """The rows of a sweep on the disk; one process writes them."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def rows(self) -> list[Row]:
        """All whole rows: a kill may have cut the last one. A damaged row elsewhere raises."""
        return list(self.read())

    def read(self) -> Iterator[Row]:
        try:
            lines = self.path.read_text(encoding="utf-8").split("\n") if self.path.exists() else [""]
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.path}: cannot be read: {error}") from error
        for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline was cut
            yield self.read_row(number, line)

    def read_row(self, number: int, line: str) -> Row:
        known = [each.name for each in fields(Row)]
        try:
            data = json.loads(line)
            other = sorted(set(data) ^ set(known))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.path}: line {number} is damaged: {error}; remove it") from error
        if other:
            raise ValueError(f"{self.path}: line {number} is not a row of this modepth: see {', '.join(other)}")
        return Row(**data)

    def keep(self, *, without: Collection[str] = ()) -> list[Row]:
        """Drop a cut last line and the rows of these ids; returns the others."""
        rows = [row for row in self.rows() if row.id not in without]
        text = "".join(as_line(row) for row in rows)
        if self.path.exists() and self.path.read_text(encoding="utf-8") != text:
            replace_text(self.path, text)
        return rows

    def add(self, row: Row) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(as_line(row))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise cannot_write(self.path, error) from error


def as_line(row: Row) -> str:
    return json.dumps(asdict(row), allow_nan=False) + "\n"


def check_unique(rows: Iterable[Row]) -> None:
    """Raise if two rows are of one arm, budget, depth and seed: then their configs differ, and so do the runs."""
    seen: dict[Cell, Row] = {}
    for row in rows:
        other = seen.setdefault(row.cell, row)
        if other is not row:
            raise ValueError(
                f"two runs are both {row.name}, of different configs: {other.id} and {row.id}; "
                "name the config: modepth sweep plot CONFIG"
            )
