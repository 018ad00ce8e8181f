"""Where the trials of a sweep run: processes of this machine, or jobs of a Slurm cluster through submitit.

An executor starts the trial of a folder and gives back a job, which says whether it has ended and can be stopped. What
a trial came to is in its folder, not in the job: a job that vanished is a trial without a result.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from modepth.sweep import trial

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
STOP_SECONDS = 60.0  # to finish a step and save it


class Job(Protocol):
    def ended(self) -> str | None:
        """How it ended, in words; None while it runs."""

    def stop(self) -> None:
        """Ask it to save and end."""

    def wait(self) -> None:
        """Once stopped, until it has ended."""


class Executor(Protocol):
    def start(self, folder: Path) -> Job: ...


# -- this machine


class Local:
    """A process for each trial, with so many threads."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def start(self, folder: Path) -> "LocalJob":
        return LocalJob(folder, self.threads)


class LocalJob:
    def __init__(self, folder: Path, threads: int) -> None:
        with (folder / "output.txt").open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "modepth.sweep.trial", str(folder)],
                env=os.environ | dict.fromkeys(THREAD_VARIABLES, str(threads)),
                stdin=subprocess.PIPE,  # closes when we end, however we do
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is ours to pass on
            )

    def ended(self) -> str | None:
        code = self.process.poll()
        if code is None:
            return None
        assert self.process.stdin is not None
        self.process.stdin.close()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def stop(self) -> None:
        self.process.terminate()

    def wait(self) -> None:
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


# -- Slurm


class Submitted:
    """A submitit job for each trial; `parameters` are submitit's own, such as timeout_min or slurm_partition."""

    def __init__(self, folder: Path, parameters: Mapping[str, Any], *, threads: int, cluster: str = "slurm") -> None:
        try:
            import submitit  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise ImportError("--executor slurm needs submitit: pip install 'modepth[slurm]'") from error
        try:
            self.executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
            self.executor.update_parameters(**{"name": "modepth", "cpus_per_task": threads, **parameters})
        except RuntimeError as error:
            raise ValueError(f"--executor slurm: {error} (on one machine: --executor local)") from error
        except (NameError, TypeError, AssertionError) as error:
            raise ValueError(f"slurm: {str(error).splitlines()[0]} See submitit's parameters.") from error

    def start(self, folder: Path) -> "SubmittedJob":
        return SubmittedJob(self.executor.submit(TrialCall(folder.resolve())))


class SubmittedJob:
    def __init__(self, job: Any) -> None:
        self.job = job

    def ended(self) -> str | None:
        return f"its job {self.job.job_id} is {self.job.state}" if self.job.done() else None

    def stop(self) -> None:
        self.job.cancel()

    def wait(self) -> None:
        end = time.monotonic() + STOP_SECONDS
        while not self.job.done() and time.monotonic() < end:
            time.sleep(0.1)


class TrialCall:
    """What a submitit job does; before its time limit submitit asks for `checkpoint` and queues it again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self) -> int:
        return trial.main(self.folder)

    def checkpoint(self) -> Any:
        from submitit.helpers import DelayedSubmission  # noqa: PLC0415 - an extra

        return DelayedSubmission(self)  # it goes on from its last checkpoint
