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


class StepProgress:
    """Called with the rows of a run: a bar with the last loss on a terminal, plain lines elsewhere.

    >>> with StepProgress(10) as progress:
    ...     progress({"step": 4, "loss": 2.5, "tokens_per_second": 1000.0})
    """

    def __init__(self, steps: int, *, title: str = "", quiet: bool = False) -> None:
        self.steps, self.title, self.quiet = steps, title, quiet
        self.bar: tqdm[Any] = tqdm(
            desc=title or None, total=steps, unit="step", disable=quiet or not sys.stderr.isatty(), file=sys.stderr
        )
        self.last_line = 0.0

    def __enter__(self) -> "StepProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def say(self, text: str) -> None:
        if not self.quiet:
            tqdm.write(f"{self.title}: {text}" if self.title else text, file=sys.stderr)

    def __call__(self, row: dict[str, Any]) -> None:
        if "validation" in row:
            self.say(f"step {row['step']}: validation loss {row['validation']['loss']:.4f}")
        elif "event" in row:
            self.say(f"step {row['step']}: {row['event']}: {row['reason']}")
        elif not self.bar.disable:
            self.bar.set_postfix(loss=f"{row['loss']:.4f}", tokens_per_s=f"{row['tokens_per_second']:,.0f}")
            self.bar.update(row["step"] + 1 - self.bar.n)
        elif time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES:
            self.last_line = time.monotonic()
            self.say(
                f"step {row['step']} of {self.steps}: loss {row['loss']:.4f}, {row['tokens_per_second']:,.0f} tokens/s"
            )
