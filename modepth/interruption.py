"""Stopping politely: the first SIGTERM or Ctrl-C is remembered, a second one ends the process at once."""

import os
import signal
import time
from types import FrameType
from typing import Any


class Interruption:
    """While open, holds the number of the signal that came, or None.

    What follows it within `same_seconds` is the same signal: Slurm tells torchrun and its processes, and torchrun
    tells its processes again.

    >>> with Interruption() as interruption:
    ...     os.kill(os.getpid(), signal.SIGTERM)
    ...     print(interruption.signal == signal.SIGTERM)
    True
    """

    def __init__(self, same_seconds: float = 0.0) -> None:
        self.same_seconds = same_seconds
        self.came = 0.0
        self.signal: int | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        self.before = {number: signal.signal(number, self.note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self.came = number, time.monotonic()
        elif time.monotonic() - self.came >= self.same_seconds:
            os._exit(128 + number)
