"""How far a long command is: a bar on a terminal, a plain line now and then elsewhere; always on stderr."""

import sys
import time
from typing import Any

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 10.0


class ByteProgress:
    """Called with (stage, bytes so far, bytes in all where known); a new stage ends the one before.

    >>> with ByteProgress() as progress:
    ...     progress("reading", 512, 1024)
    """

    def __init__(self) -> None:
        self.stage = ""
        self.done = 0
        self.bar: tqdm[Any] | None = None
        self.last_line = time.monotonic()

    def __enter__(self) -> "ByteProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self.end_stage()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        if stage != self.stage:
            self.end_stage()
            self.stage = stage
            if sys.stderr.isatty():
                self.bar = tqdm(desc=stage, total=total, unit="B", unit_scale=True, file=sys.stderr)
        self.done = done
        if self.bar is not None:
            self.bar.update(done - self.bar.n)
        elif time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES:
            self.print_line()

    def end_stage(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        elif self.stage:
            self.print_line()
        self.stage = ""

    def print_line(self) -> None:
        self.last_line = time.monotonic()
        print(f"{self.stage}: {self.done:,} bytes", file=sys.stderr, flush=True)
