"""A run's rows: one JSON object a line, in RUN/log.jsonl. Figures and tables read these, never printed text."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modepth.textfile import cannot_write, replace_text


class RunLog:
    """Appends rows; a resumed run first drops those of the steps that it will do again."""

    def __init__(self, run: str | Path) -> None:
        self.path = Path(run) / "log.jsonl"

    def add(self, row: dict[str, Any]) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def rows(self) -> Iterator[dict[str, Any]]:
        """All rows that are whole: a kill may have cut the last one."""
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError:
                    return

    def rows_from(self, offset: int) -> tuple[list[dict[str, Any]], int]:
        """The whole rows after the first `offset` bytes, and how many bytes there are until after the last of them."""
        rows = []
        with self.path.open("rb") as file:
            file.seek(offset)
            for line in file:
                try:
                    row = json.loads(line) if line.endswith(b"\n") else None  # it is being written
                except ValueError:
                    row = None
                if not isinstance(row, dict):
                    break
                rows.append(row)
                offset += len(line)
        return rows, offset

    def drop_from(self, step: int) -> None:
        """Forget what comes after `step` steps, and a cut last row; a measurement after them stays."""
        kept = [row for row in self.rows() if row["step"] < step or (row["step"] == step and "validation" in row)]
        replace_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))
