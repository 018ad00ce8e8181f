"""Carrying a plan out: so many trials at a time, a row for each as it ends, until none is left.

    OUT/results.jsonl   the rows
    OUT/sweep.json      the config, so that who has the folder knows the order of the arms and the baseline
    OUT/runs/ID/        the folder of each run

A run that has a row is done, failed ones too unless asked to be tried again. One without a row goes on from where its
folder stands, which may be at its end. A trial that diverges, crashes or is killed becomes a row that says so, and the
others go on. Stopped by a signal, the sweep lets its trials save, and writes no rows for them.
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from modepth.files import read_json
from modepth.interruption import Interruption
from modepth.run import Stopped
from modepth.run_folder import RunLock
from modepth.sweep.config import SweepConfig, read_sweep
from modepth.sweep.executors import Executor, Job
from modepth.sweep.plan import PlannedRun
from modepth.sweep.results import Results, Row
from modepth.sweep.trial import read_result
from modepth.textfile import replace_text

POLL_SECONDS = 0.1
LOOK_SECONDS = 2.0  # between looks at how far the running trials are
TAIL_BYTES = 2**16  # of a log, where its last rows are


@dataclass(frozen=True)
class Progress:
    """How far a sweep is: runs with a row, failed ones among them; FLOPs done, and those of failed runs."""

    num_done: int
    num_failed: int
    flops: float
    flops_given_up: float
    row: Row | None  # that has just been added


def results_of(config: SweepConfig) -> Results:
    return Results(Path(config.out) / "results.jsonl")


def check_test_windows(config: SweepConfig, runs: Iterable[PlannedRun]) -> None:
    """Raise if a run was measured on another part of the test split: its id is the same, and its loss is not."""
    for run in runs:
        folder = run_folder(config, run)
        if (folder / "result.json").exists() and (folder / "trial.json").exists():
            before = read_json(folder / "trial.json")["test_windows"]
            if before != config.test_windows:
                raise ValueError(
                    f"test_windows is {config.test_windows}, and {folder} was measured with {before}: their test "
                    "losses cannot be compared; set it back, or name another folder as `out`"
                )


def keep_config(config: SweepConfig, out: Path) -> None:
    replace_text(out / "sweep.json", json.dumps(asdict(config), indent=1) + "\n")


def config_of(out: Path) -> SweepConfig | None:
    """The config that a sweep's folder was last run with, if that is known."""
    path = out / "sweep.json"
    return read_sweep(path) if path.exists() else None


def run_folder(config: SweepConfig, run: PlannedRun) -> Path:
    return Path(config.out) / "runs" / run.id


def run_sweep(
    config: SweepConfig,
    runs: Sequence[PlannedRun],
    executor: Executor,
    *,
    jobs: int = 1,
    retry: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> list[Row]:
    """Carry out the runs that have no row yet, `jobs` at a time; the rows of all, in the order of the plan.

    retry   try failed ones again
    """
    out = prepare_out(config)
    with RunLock(out), Interruption() as interruption:
        check_test_windows(config, runs)
        keep_config(config, out)
        ids = {run.id for run in runs}
        results = results_of(config)
        failed = {row.id for row in results.rows() if row.id in ids and not row.finished} if retry else set()
        rows = {row.id: row for row in results.keep(without=failed) if row.id in ids}
        loop = Loop(config, executor, jobs, results, rows, on_progress)
        loop.work([run for run in runs if run.id not in rows], interruption)
        return [rows[run.id] for run in runs]


def prepare_out(config: SweepConfig) -> Path:
    out = Path(config.out)
    try:
        (out / "runs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{out}: cannot be written: {error.strerror} (name a folder that can, as `out`)") from error
    return out


class Loop:
    """The trials that wait and run, and the rows of those that ended."""

    def __init__(
        self,
        config: SweepConfig,
        executor: Executor,
        jobs: int,
        results: Results,
        rows: dict[str, Row],
        on_progress: Callable[[Progress], None],
    ) -> None:
        self.config, self.executor, self.jobs = config, executor, jobs
        self.results, self.rows, self.on_progress = results, rows, on_progress
        self.running: dict[str, tuple[PlannedRun, Job]] = {}
        self.looked = 0.0

    def work(self, waiting: list[PlannedRun], interruption: Interruption) -> None:
        waiting = list(reversed(waiting))
        try:
            while waiting or self.running:
                while waiting and len(self.running) < self.jobs:
                    self.start(waiting.pop())
                self.collect()
                if interruption.signal is not None:
                    raise Stopped(interruption.signal)
                self.look()
                time.sleep(POLL_SECONDS)
        finally:
            jobs = [job for _, job in self.running.values()]
            for job in jobs:
                job.stop()
            for job in jobs:
                job.wait()

    def start(self, run: PlannedRun) -> None:
        folder = run_folder(self.config, run)
        folder.mkdir(exist_ok=True)
        (folder / "failure.txt").unlink(missing_ok=True)  # of the try before: this one may be killed before it begins
        trial = {
            "config": run.facts()["config"],
            "data": str(Path(self.config.data).resolve()),
            "test_windows": self.config.test_windows,
            "threads": self.config.threads,
            "jobs": self.jobs,
            "keep": self.config.keep,
        }
        replace_text(folder / "trial.json", json.dumps(trial, indent=1) + "\n")
        self.running[run.id] = (run, self.executor.start(folder))

    def collect(self) -> None:
        """A row for each trial that has ended."""
        for run, job in list(self.running.values()):
            how = job.ended()
            if how is not None:
                row = row_of(run, run_folder(self.config, run), how)
                self.results.add(row)
                self.rows[run.id] = row
                del self.running[run.id]
                self.tell(row)

    def look(self) -> None:
        if time.monotonic() - self.looked > LOOK_SECONDS:
            self.looked = time.monotonic()
            self.tell(None)

    def tell(self, row: Row | None) -> None:
        failed = [row.training_flops for row in self.rows.values() if not row.finished]
        done = sum(row.training_flops for row in self.rows.values() if row.finished)
        under_way = sum(logged_flops(run_folder(self.config, run)) for run, _ in self.running.values())
        self.on_progress(Progress(len(self.rows), len(failed), done + under_way, sum(failed), row))


def row_of(run: PlannedRun, folder: Path, how: str) -> Row:
    """The row of a trial that has ended in the way `how`."""
    result = read_result(folder)
    if result is not None:
        return Row(**run.facts(), **result, status="finished")
    failure = folder / "failure.txt"
    reason = failure.read_text(encoding="utf-8").strip() if failure.exists() else f"{how}; see {folder / 'output.txt'}"
    return Row(**run.facts(), status="failed", reason=reason)


def logged_flops(folder: Path) -> float:
    """Training FLOPs of a run so far, by the end of its log."""
    try:
        with (folder / "log.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return 0.0  # not begun
    return next((row["flops"] for row in whole_rows(reversed(lines)) if "flops" in row), 0.0)


def whole_rows(lines: Iterable[bytes]) -> Iterable[dict[str, Any]]:
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue  # cut by the end of what was read
