"""How far a long command is: a bar on a terminal, a plain line now and then elsewhere; always on stderr."""

import sys
import time
from typing import Any

from tqdm import tqdm

from modepth.formats import duration

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


class SweepProgress:
    """Called with how far a sweep is, by training FLOPs: a bar on a terminal, plain lines elsewhere.

    >>> with SweepProgress(num_runs=4, flops=1e12) as progress:
    ...     progress(num_done=1, num_failed=0, flops=2e11)
    """

    def __init__(self, num_runs: int, flops: float) -> None:
        self.num_runs, self.flops = num_runs, flops
        self.bar: tqdm[Any] = tqdm(
            total=flops, unit="FLOP", unit_scale=True, disable=not sys.stderr.isatty(), file=sys.stderr
        )
        self.first: tuple[float, float] | None = None  # when the first news came, and the FLOPs done by then
        self.last_line = 0.0

    def __enter__(self) -> "SweepProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def say(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr)

    def __call__(self, num_done: int, num_failed: int, flops: float, given_up: float = 0.0) -> None:
        now, total = time.monotonic(), self.flops - given_up
        if self.first is None:
            self.first = (now, flops)
            self.bar.initial = self.bar.n = flops
        runs = f"{num_done} of {self.num_runs} runs" + (f", {num_failed} failed" if num_failed else "")
        if not self.bar.disable:
            self.bar.total = total
            self.bar.set_postfix_str(runs)
            self.bar.update(flops - self.bar.n)
        elif now - self.last_line > SECONDS_BETWEEN_LINES:
            self.last_line = now
            left = (
                "" if (seconds := self.seconds_left(now, flops, total)) is None else f", about {duration(seconds)} left"
            )
            self.say(f"{runs}, {100 * flops / total if total else 100:.0f} % of the FLOPs{left}")

    def seconds_left(self, now: float, flops: float, total: float) -> float | None:
        """At the rate since the first news; None before there is one."""
        assert self.first is not None
        start, before = self.first
        return None if flops <= before else (total - flops) * (now - start) / (flops - before)
