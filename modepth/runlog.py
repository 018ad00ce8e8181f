"""A run's rows: one JSON object a line, in RUN/log.jsonl. Figures and tables read these, never printed text."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class RunLog:
    """Appends rows; a resumed run first drops those of the steps that it will do again."""

    def __init__(self, run: str | Path) -> None:
        self.path = Path(run) / "log.jsonl"

    def add(self, row: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self) -> Iterator[dict[str, Any]]:
        """All rows that are whole: a kill may have cut the last one."""
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError:
                    return

    def drop_from(self, step: int) -> None:
        """Forget what comes after `step` steps, and a cut last row; a measurement after them stays."""
        kept = [row for row in self.rows() if row["step"] < step or (row["step"] == step and "validation" in row)]
        part = self.path.with_suffix(".part")
        part.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        os.replace(part, self.path)
