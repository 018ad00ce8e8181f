"""The folder of a run: made and tried before work begins, held by one process at a time, checkpoints by step.

The system frees the lock however its process ends, SIGKILL included. Needs flock: Linux or macOS.
"""

import fcntl
import os
import re
import tempfile
from pathlib import Path
from typing import IO

from modepth.validation import check_count


def prepare_run(run: str | Path) -> Path:
    """Make the folder of a run, and see that files can be written there before work begins."""
    folder = Path(run) / "checkpoints"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{run}: cannot be written: {error.strerror} (name a folder that can)") from error
    return Path(run)


STEP = re.compile(r"step-\d{8,}", re.ASCII)


def step_folder(run: str | Path, step: int) -> Path:
    check_count("step", step, low=0)
    return Path(run) / "checkpoints" / step_name(step)


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def steps(run: str | Path) -> list[int]:
    """The steps that have a checkpoint, complete or harmed, in order."""
    folder = Path(run) / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name[5:]) for name in names if STEP.fullmatch(name) and name == step_name(int(name[5:])))


class RunLock:
    """Holds a run for one process: `with RunLock(run) as lock`. A second one is refused."""

    def __init__(self, run: str | Path) -> None:
        self.run = Path(run)
        self.file: IO[str] | None = None

    def __enter__(self) -> "RunLock":
        path = self.run / ".lock"
        try:
            file = path.open("a+")
        except OSError as error:
            raise ValueError(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = file.read(20).strip()
            file.close()
            if not isinstance(error, BlockingIOError):
                raise ValueError(f"{path}: cannot be locked: {error.strerror}") from error
            raise ValueError(
                f"{self.run}: in use by process {holder or '(not known)'} (wait for it, end it, or name another folder)"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        self.file = file
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            # Closing alone would leave it locked while a forked child lives.
            fcntl.flock(self.file, fcntl.LOCK_UN)
            self.file.close()
            self.file = None
