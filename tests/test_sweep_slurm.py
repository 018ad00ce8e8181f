"""Sweeps through submitit, by its local executor: we have no cluster."""

import os
import signal
import sys

import pytest

from modepth.cli import main
from modepth.run_folder import steps
from modepth.sweep.config import read_sweep
from modepth.sweep.executors import Submitted, TrialCall
from modepth.sweep.plan import plan_runs, read_facts
from modepth.sweep.run import run_sweep
from tests.sweeps import prepare_text, write_config


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare_text(tmp_path_factory.mktemp("prepared"))


def read(path):
    config = read_sweep(path)
    return config, plan_runs(config, read_facts(config.data))


def executor_of(config, folder, **parameters):
    return Submitted(folder / "submitit", {**config.slurm, **parameters}, threads=1, cluster="local")


def test_a_sweep_runs_as_jobs_and_a_failed_one_is_passed_over(data, tmp_path):
    slurm = {"timeout_min": 5, "slurm_partition": "cpu"}
    config, runs = read(write_config(tmp_path, data, grids=[{"budgets": [1e7], "depths": [2]}], slurm=slurm))
    broken = tmp_path / "out" / "runs" / runs[0].id
    broken.mkdir(parents=True)
    (broken / "checkpoints").write_text("in the way")
    failed, finished = run_sweep(config, runs, executor_of(config, tmp_path), jobs=2)
    assert failed.reason.startswith("crashed: ValueError")
    assert finished.finished
    assert finished.test_topk_loss is not None


def test_a_killed_job_is_recorded_and_a_time_limit_queues_it_again(data, tmp_path):
    arms = {"dense": {}}
    path = write_config(tmp_path, data, grids=[{"budgets": [4e8], "depths": [2]}], arms=arms)
    config, (run,) = read(path)
    folder = tmp_path / "out" / "runs" / run.id
    executor = executor_of(config, tmp_path, timeout_min=5)
    acted = []

    def act(progress):
        """First the signal that comes before a time limit; when it trains again, a kill."""
        holder = (folder / ".lock").read_text().strip() if steps(folder) else ""
        if holder and holder not in acted:
            os.kill(int(holder), signal.SIGKILL if acted else signal.SIGUSR2)
            acted.append(holder)

    (row,) = run_sweep(config, [run], executor, on_progress=act)
    assert len(acted) == 2
    assert row.status == "failed"
    assert "its job " in row.reason


def test_a_job_can_be_cancelled(data, tmp_path):
    config, _ = read(write_config(tmp_path, data))
    folder = tmp_path / "run"
    folder.mkdir()
    job = executor_of(config, tmp_path).start(folder)
    assert job.ended() is None
    job.stop()
    job.wait()
    assert job.ended() is not None


def test_what_is_queued_again_is_the_same_trial(tmp_path):
    again = TrialCall(tmp_path).checkpoint()
    assert again.function.folder == tmp_path


def test_without_submitit_the_error_says_what_to_install(data, tmp_path, monkeypatch, capsys):
    path = write_config(tmp_path, data)
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert main(["sweep", "run", str(path), "--executor", "slurm"]) == 2
    assert capsys.readouterr().err == (
        "modepth sweep run: --executor slurm needs submitit: pip install 'modepth[slurm]'\n"
    )
    assert not (tmp_path / "out").exists()


def test_without_slurm_the_error_says_what_to_do(data, tmp_path, capsys):
    path = write_config(tmp_path, data)
    assert main(["sweep", "run", str(path), "--executor", "slurm"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("(on one machine: --executor local)")


def test_a_parameter_that_submitit_does_not_know_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"^slurm: .*'timeout_minutes'\. See submitit's parameters\.$"):
        Submitted(tmp_path, {"timeout_minutes": 5}, threads=1, cluster="local")
