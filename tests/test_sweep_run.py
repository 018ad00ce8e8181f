"""Sweeps as they are run: killed, crashed, diverged and run again, every run has one row and nothing is done twice."""

import contextlib
import io
import json
import os
import re
import signal
import sysconfig
import time
from pathlib import Path

import pytest
import torch
import yaml

from modepth.cli import main
from modepth.loading import load
from modepth.progress import SweepProgress
from modepth.run import ALONE, open_split
from modepth.run_folder import RunLock, steps
from modepth.sweep import trial
from modepth.sweep.config import read_sweep
from modepth.sweep.executors import Local
from modepth.sweep.plan import plan_runs, read_facts
from modepth.sweep.results import Results, as_line
from modepth.sweep.run import Loop, Progress, config_of, keep_config, logged_flops, run_sweep
from modepth.train import evaluate
from tests.documents import blocks, run_commands, smaller, text_of
from tests.processes import command
from tests.sweeps import Forked, changed, failed_row, new_row, prepare_text, sweep, write_config
from tests.test_report import read
from tests.training import contents, rows_of

# A trial takes seconds to import torch: where that is not what is tested, it is imported once.
QUICK = pytest.mark.usefixtures("quick")
SLOW = [{"budgets": [1.5e8], "depths": [2]}]  # long enough to be killed on the way


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare_text(tmp_path_factory.mktemp("prepared"))


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("modepth.commands.sweep.Local", Forked)


@pytest.fixture(scope="module")
def done(data, tmp_path_factory):
    """A whole sweep of 2 arms and 3 sizes, two runs at a time: its config file, and what was printed."""
    folder = tmp_path_factory.mktemp("done")
    path = write_config(folder, data, grids=[{"budgets": [1e7], "depths": [2, 3, 4]}])
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("modepth.commands.sweep.Local", Forked)
        assert main(["sweep", "run", str(path), "--jobs", "2"]) == 0
    return path, out.getvalue(), err.getvalue()


def planned(path):
    config = read_sweep(path)
    return plan_runs(config, read_facts(config.data))


def rows_at(path):
    return Results(path.parent / "out" / "results.jsonl").rows()


def wait_for(happened, process, seconds=60):
    end = time.monotonic() + seconds
    while not happened():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def holder(folder):
    """The process that has a run's folder."""
    text = (folder / ".lock").read_text().strip() if (folder / ".lock").exists() else ""
    return int(text) if text else None


def is_alive(process_id):
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


# -- a whole sweep


def test_a_sweep_leaves_one_row_a_run_that_says_what_it_was_and_came_to(done):
    path, printed, shown = done
    rows = {row.id: row for row in rows_at(path)}
    runs = planned(path)
    assert len(rows_at(path)) == len(rows) == 6
    assert json.loads(printed.splitlines()[-1]) == {
        "results": str(path.parent / "out" / "results.jsonl"),
        "finished": 6,
        "failed": 0,
    }
    for run in runs:
        row = rows[run.id]
        assert {name: getattr(row, name) for name in run.facts()} == json.loads(json.dumps(run.facts()))
        log = rows_of(path.parent / "out" / "runs" / run.id)
        measured = log[-1]["validation"]
        assert (row.validation_loss, row.validation_topk_loss) == (measured["loss"], measured.get("topk_loss"))
        assert row.training_flops == log[-1]["flops"]
        assert (row.validation_topk_loss is None) == (row.test_topk_loss is None) == (row.arm == "dense")
        assert row.test_loss != row.validation_loss
        rates = sorted(entry["tokens_per_second"] for entry in log if "loss" in entry)
        assert 32 / rates[-1] <= row.step_seconds <= 32 / rates[0]
        assert (row.status, row.reason, row.threads, row.jobs) == ("finished", None, 1, 2)
        assert row.torch == torch.__version__
        assert row.hardware.endswith("cores")
        assert f"{row.name}: validation loss {row.validation_loss:.4f}" in shown


def test_a_rows_test_losses_are_those_of_the_model_it_left_behind(done, data, capsys):
    path = done[0]
    for row in rows_at(path)[:2]:
        folder = path.parent / "out" / "runs" / row.id
        model = load(folder)
        assert model.config.num_layers == row.layers
        tokens = open_split(data, "test", model.config)
        window = {"length": 16, "num_windows": 3, "batch_size": 2, "world": ALONE}
        causal, topk = (evaluate(model, tokens, **window, mode=mode)["loss"] for mode in ("causal", "topk"))
        assert row.test_loss == causal
        assert row.test_topk_loss == (topk if row.arm == "mod" else None)
        assert (causal == topk) == (row.arm == "dense")
    assert main(["eval", str(folder)]) == 0  # the run knows its data and tokenizer


def test_run_again_does_nothing(done, capsys):
    path = done[0]
    before = contents(path.parent / "out")
    assert main(["sweep", "run", str(path)]) == 0
    assert contents(path.parent / "out") == before
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["finished"] == 6


def test_the_plan_says_what_is_left_before_anything_starts(done, data, tmp_path, capsys):
    assert main(["sweep", "plan", str(done[0])]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    summary = json.loads(last)
    runs = planned(done[0])
    assert (summary["runs"], summary["to_run"], summary["expected_seconds"]) == (6, 0, 0)
    assert summary["training_flops"] == sum(run.training_flops for run in runs)
    assert summary["tokens"] == sum(run.tokens for run in runs)
    assert table[0].split("  ")[0] == "arm"
    assert len([line for line in table if line.startswith(("dense ", "mod "))]) == 6
    new = write_config(tmp_path, data)
    assert main(["sweep", "plan", str(new), "--jobs", "2", "--flops-per-second", "1e6"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["to_run"] == 4
    assert 20 < summary["training_flops_to_run"] / 2e6 < summary["expected_seconds"] < 80
    assert main(["sweep", "plan", str(new)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["flops_per_second"] > 1e4
    assert not (tmp_path / "out").exists()


def test_fit_plot_and_report_read_the_rows(done, tmp_path, capsys):
    path = done[0]
    assert main(["sweep", "fit", str(path)]) == 0
    fit = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (fit["baseline"], fit["left_out"]) == ("dense", [])
    assert [(each["arm"], each["num_sizes"]) for each in fit["optima"]] == [("dense", 3), ("mod", 3)]
    losses = {(row.arm, row.depth): row.test_loss for row in rows_at(path)}
    for each in fit["comparisons"]:
        assert each["difference"] == losses["mod", each["depth"]] - losses["dense", each["baseline_depth"]]
    assert main(["sweep", "plot", str(path)]) == 0
    written = [Path(each) for each in json.loads(capsys.readouterr().out.splitlines()[-1])["written"]]
    assert written[0] == path.parent / "out" / "sweep.html"
    assert {each.stem for each in written[1:]} >= {"loss_against_parameters", "loss_against_forward_flops"}
    assert main(["report", str(path.parent / "out"), "--out", str(tmp_path / "page")]) == 0
    assert (tmp_path / "page" / "sweep.html").read_bytes() == written[0].read_bytes()
    page = read(written[0])
    assert len(page.of("img")) == len(written) - 1
    assert {row.id for row in rows_at(path)} <= set(page.text("th"))
    for each in written[1:]:
        assert each.with_suffix(".svg").exists()


def test_a_report_has_the_baseline_and_order_of_the_config_in_whatever_order_runs_ended(done, data, tmp_path):
    grids = [{"budgets": [1e7], "depths": [2, 3, 4]}, {"budgets": [1e8], "depths": [2]}]  # the last has no row yet
    path = write_config(tmp_path, data, grids=grids, baseline="mod")
    (tmp_path / "out").mkdir()
    rows = sorted(rows_at(done[0]), key=lambda row: (row.arm != "mod", row.depth))
    (tmp_path / "out" / "results.jsonl").write_text("".join(as_line(row) for row in rows))
    config = read_sweep(path)
    keep_config(config, tmp_path / "out")
    assert config_of(tmp_path / "out") == config
    assert main(["sweep", "plot", str(path)]) == 0
    assert main(["report", str(tmp_path / "out"), "--out", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page" / "sweep.html").read_bytes()
    assert page == (tmp_path / "out" / "sweep.html").read_bytes()
    assert b"relative to mod" in page


@QUICK
def test_a_config_that_grew_keeps_its_rows_and_runs_the_rest(done, data, tmp_path, capsys):
    path = write_config(tmp_path, data, grids=[{"budgets": [1e7], "depths": [2, 3, 4]}], arms={"dense": {}})
    (tmp_path / "out").mkdir()
    rows = rows_at(done[0])
    (tmp_path / "out" / "results.jsonl").write_text("".join(as_line(row) for row in rows if row.arm == "dense"))
    assert main(["sweep", "plan", str(path)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["to_run"] == 0
    grown = write_config(tmp_path, data, grids=[{"budgets": [1e7], "depths": [2], "seeds": [0, 5], "arms": ["dense"]}])
    assert main(["sweep", "run", str(grown)]) == 0
    after = rows_at(path)
    assert after[:3] == [row for row in rows if row.arm == "dense"]
    assert [(row.depth, row.seed) for row in after[3:]] == [(2, 5)]
    assert main(["sweep", "fit", str(grown)]) == 0  # which takes the rows of its own plan
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["optima"][0]["num_runs"] == 2


# -- what goes wrong


def test_a_killed_sweep_goes_on_without_repeating_what_is_finished(data, tmp_path, monkeypatch):
    grids = [{"budgets": [1e7], "depths": [2]}, *SLOW]
    path = write_config(tmp_path, data, grids=grids, arms={"dense": {}}, train__save_every=5)
    (slow,) = [tmp_path / "out" / "runs" / run.id for run in planned(path) if run.budget == 1.5e8]
    with command("-m", "modepth", "sweep", "run", path, "--jobs", "2") as process:
        wait_for(lambda: rows_at(path) and max(steps(slow), default=0) >= 10, process)
        orphan = holder(slow)
        assert is_alive(orphan)
        assert b"OPENBLAS_NUM_THREADS=1" in Path(f"/proc/{orphan}/environ").read_bytes().split(b"\0")
        process.kill()
        process.wait()
    finished = (tmp_path / "out" / "results.jsonl").read_text()
    before = {row.id: contents(tmp_path / "out" / "runs" / row.id) for row in rows_at(path)}
    deadline = time.monotonic() + 10
    while is_alive(orphan):
        assert time.monotonic() < deadline, "the trial outlives its sweep"
        time.sleep(0.01)
    with (tmp_path / "out" / "results.jsonl").open("a") as file:
        file.write('{"id": "cut by the ki')
    monkeypatch.setattr("modepth.commands.sweep.Local", Forked)
    assert main(["sweep", "run", str(path)]) == 0
    assert (tmp_path / "out" / "results.jsonl").read_text().startswith(finished)
    rows = rows_at(path)
    assert sorted(row.id for row in rows) == sorted(run.id for run in planned(path))
    assert all(row.finished for row in rows)
    assert {id: contents(tmp_path / "out" / "runs" / id) for id in before} == before
    done = [row["step"] for row in rows_of(slow) if "loss" in row]
    assert done == list(range(len(done)))
    seconds = [row["seconds"] for row in rows_of(slow)]
    assert seconds != sorted(seconds)  # the clock began anew, the steps did not


@QUICK
def test_a_sweep_killed_before_a_row_was_written_does_not_train_again(done, data, tmp_path):
    path = write_config(tmp_path, data, grids=[{"budgets": [1e7], "depths": [2, 3, 4]}])
    (tmp_path / "out").symlink_to(done[0].parent / "out")
    results = tmp_path / "out" / "results.jsonl"
    whole = results.read_text()
    logs = {log: log.read_bytes() for log in (tmp_path / "out" / "runs").glob("*/log.jsonl")}
    results.write_text("".join(whole.splitlines(keepends=True)[:-1]))
    try:
        assert main(["sweep", "run", str(path), "--jobs", "2"]) == 0
        assert results.read_text() == whole
        assert {log: log.read_bytes() for log in logs} == logs
    finally:
        results.write_text(whole)


@QUICK
def test_crashed_and_diverged_runs_are_recorded_and_passed_over(data, tmp_path, capsys):
    arms = {"crashes": {}, "dense": {}, "diverges": {"learning_rate_factor": 1e5}}
    path = write_config(tmp_path, data, grids=[{"budgets": [1e7], "depths": [2]}], arms=arms)
    runs = {run.arm: tmp_path / "out" / "runs" / run.id for run in planned(path)}
    runs["crashes"].mkdir(parents=True)
    (runs["crashes"] / "checkpoints").write_text("in the way")
    assert main(["sweep", "run", str(path)]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1])["failed"] == 2
    crashed, finished, diverged = rows_at(path)
    assert (crashed.status, finished.status, diverged.status) == ("failed", "finished", "failed")
    assert re.match(r"crashed: ValueError: .*: cannot be written: ", crashed.reason)
    assert diverged.reason.startswith("diverged: the validation loss is 5.549, no better than guessing, 5.549")
    assert diverged.validation_loss is diverged.test_loss is None
    for row in (crashed, diverged):
        assert f"failed: {row.name}: {row.reason}" in printed.out

    assert main(["sweep", "fit", str(path)]) == 0  # which names what it left out
    out = capsys.readouterr().out
    assert f"  {crashed.name}: crashed: ValueError" in out
    assert len(json.loads(out.splitlines()[-1])["left_out"]) == 2

    (runs["crashes"] / "checkpoints").unlink()
    assert main(["sweep", "run", str(path)]) == 0  # passed over, as it has a row
    assert rows_at(path) == [crashed, finished, diverged]
    assert main(["sweep", "run", str(path), "--retry"]) == 0
    rows = {row.arm: row for row in rows_at(path)}
    assert len(rows_at(path)) == 3
    assert (rows["crashes"].status, rows["diverges"].status) == ("finished", "failed")


def test_what_a_crashed_process_printed_is_kept(tmp_path):
    (tmp_path / "trial.json").write_text('{"threads": "two"}')
    job = Local(1).start(tmp_path)
    while (how := job.ended()) is None:
        time.sleep(0.01)
    assert how == "ended with exit code 1"
    assert (tmp_path / "failure.txt").read_text().startswith("crashed: RuntimeError: set_num_threads expects an int")
    assert "Traceback" in (tmp_path / "output.txt").read_text()


def test_updates_that_are_not_finite_are_a_divergence(data, tmp_path, monkeypatch):
    (run, *_) = planned(write_config(tmp_path, data))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trial.json").write_text(
        json.dumps({"threads": 1, "data": str(data), "config": run.facts()["config"]})
    )
    monkeypatch.setattr("modepth.train.not_finite", lambda loss, norm: "the loss")
    assert trial.main(tmp_path / "run") == 1
    reason = (tmp_path / "run" / "failure.txt").read_text()
    assert reason.startswith("diverged: 5 updates in a row could not be applied, the last at step 4: the loss")


def test_a_killed_trial_is_recorded_and_tried_again_from_its_checkpoint(data, tmp_path, monkeypatch):
    path = write_config(tmp_path, data, grids=SLOW, arms={"dense": {}})
    (run,) = planned(path)
    folder = tmp_path / "out" / "runs" / run.id
    with command("-m", "modepth", "sweep", "run", path) as process:
        wait_for(lambda: max(steps(folder), default=0) >= 10, process)
        os.kill(holder(folder), signal.SIGKILL)
        assert process.wait(60) == 0
    (row,) = rows_at(path)
    assert (row.status, row.reason) == ("failed", f"killed by SIGKILL; see {folder / 'output.txt'}")
    logged = (folder / "log.jsonl").read_text().splitlines()[:10]
    monkeypatch.setattr("modepth.commands.sweep.Local", Forked)
    assert main(["sweep", "run", str(path), "--retry"]) == 0
    (row,) = rows_at(path)
    assert row.finished
    assert (folder / "log.jsonl").read_text().splitlines()[:10] == logged  # their times too: they were not done again


def test_a_signal_lets_the_trials_save_and_leaves_no_row(data, tmp_path):
    path = write_config(tmp_path, data, grids=SLOW, arms={"dense": {}}, train__save_every=100_000)
    (run,) = planned(path)
    folder = tmp_path / "out" / "runs" / run.id
    with command("-m", "modepth", "sweep", "run", path) as process:
        wait_for(lambda: logged_flops(folder) > 0, process)
        process.terminate()
        assert process.wait(60) == 143
        assert "stopped by signal 15; the same command goes on from here" in process.stdout.read()
    assert rows_at(path) == []
    assert any((folder / "checkpoints").iterdir())
    assert not is_alive(holder(folder))


def test_a_trial_killed_before_it_begins_is_not_given_the_reason_of_the_try_before(data, tmp_path):
    path = write_config(tmp_path, data, grids=[{"budgets": [1e7], "depths": [2]}], arms={"dense": {}})
    (run,) = planned(path)
    folder = tmp_path / "out" / "runs" / run.id
    folder.mkdir(parents=True)
    (folder / "failure.txt").write_text("diverged: once\n")

    class Killed:
        def start(self, folder):
            return self

        def ended(self):
            return "killed by SIGKILL"

    (row,) = run_sweep(read_sweep(path), [run], Killed())
    assert row.reason == f"killed by SIGKILL; see {folder / 'output.txt'}"


def test_runs_measured_on_other_windows_of_the_test_split_are_not_mixed(done, data, tmp_path, capsys):
    (tmp_path / "out").symlink_to(done[0].parent / "out")
    before = contents(tmp_path / "out")
    grids = [{"budgets": [1e7], "depths": [2, 3, 4]}, {"budgets": [1e8], "depths": [2]}]
    path = write_config(tmp_path, data, grids=grids, test_windows=None)
    assert main(["sweep", "run", str(path)]) == 2
    assert re.search(r"test_windows is None, and .* was measured with 3: .* set it back", capsys.readouterr().err)
    assert contents(tmp_path / "out") == before


def test_two_processes_cannot_run_one_sweep(data, tmp_path, capsys):
    path = write_config(tmp_path, data)
    (tmp_path / "out").mkdir()
    with RunLock(tmp_path / "out"):
        assert main(["sweep", "run", str(path)]) == 2
    assert "in use by process" in capsys.readouterr().err


@QUICK
def test_checkpoints_need_not_be_kept(data, tmp_path):
    path = write_config(tmp_path, data, grids=[{"budgets": [1e7], "depths": [2]}], arms={"dense": {}}, keep=False)
    assert main(["sweep", "run", str(path)]) == 0
    (row,) = rows_at(path)
    assert not (tmp_path / "out" / "runs" / row.id / "checkpoints").exists()
    assert row.finished


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "CONFIG", "--jobs", "0"], "sweep run: --jobs must be a whole number >= 1, got 0"),
        (["plan", "CONFIG", "--flops-per-second", "-1"], "--flops-per-second must be a finite number >= 1.0, got -1.0"),
        (["plan", "BAD"], "unknown field arm; did you mean 'arms'?"),
        (["fit", "CONFIG"], "none of 0 rows is of a finished run"),
        (["plot", "CONFIG"], "none of 0 rows is of a finished run"),
        (["run", "NODATA"], "none: write it with `modepth data prepare SOURCE "),
        (["fit", "HALFDATA"], "train.tokens: cannot be read"),
        (["run", "OUTFILE"], "cannot be written: Not a directory (name a folder that can, as `out`)"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, data, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for name, changes in {
        "CONFIG": {"data": str(data), "out": str(tmp_path / "out")},
        "BAD": {"data": str(data), "arm": {}},
        "NODATA": {"data": str(tmp_path / "none")},
        "HALFDATA": {"data": str(tmp_path)},
        "OUTFILE": {"data": str(data), "out": str(tmp_path / "file" / "out")},
    }.items():
        (tmp_path / name).write_text(yaml.safe_dump(changed(**changes)))
    assert main(["sweep", *(str(tmp_path / each) if each.isupper() else each for each in arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()


# -- rows


def test_a_damaged_row_is_named_and_a_cut_one_dropped(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    rows = [new_row(), failed_row(seed=1)]
    for row in rows:
        results.add(row)
    assert results.rows() == rows
    text = results.path.read_text()
    results.path.write_text(text + '{"id": "a", "ar')
    assert results.rows() == rows
    assert results.keep() == rows
    assert results.path.read_text() == text
    assert results.keep(without={rows[0].id}) == rows[1:]
    results.path.write_text("{}\n" + text)
    with pytest.raises(ValueError, match=r"results.jsonl: line 1 is not a row of this modepth: see arm, budget, "):
        results.rows()
    results.path.write_text(text + "{\n")
    with pytest.raises(ValueError, match=r"results.jsonl: line 3 is damaged"):
        results.rows()


def test_rows_of_two_configs_are_not_drawn_together(tmp_path, capsys):
    results = Results(tmp_path / "results.jsonl")
    for id in ("one", "two"):
        results.add(new_row(id=id))
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page")]) == 2
    assert "of different configs: one and two; name the config: modepth sweep plot CONFIG" in capsys.readouterr().err
    assert main(["report", str(tmp_path), str(tmp_path / "other")]) == 2
    assert "is a sweep, which has a page of its own: give it alone" in capsys.readouterr().err


def test_a_report_of_nothing_says_what_is_missing(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "does not say what it was trained on: give --data" in capsys.readouterr().err
    (tmp_path / "sweep.json").write_text("{}")
    assert main(["report", str(tmp_path)]) == 2
    assert "a sweep of which no run has ended yet: see modepth sweep run" in capsys.readouterr().err


def test_progress_says_how_much_is_left(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr("modepth.progress.time.monotonic", lambda: now[0])
    with SweepProgress(8, 1e12) as progress:
        progress(2, 0, 2e11)  # done before
        now[0] += 60
        progress(3, 1, 4e11)
        now[0] += 1
        progress(3, 1, 5e11)  # too soon for a line
        now[0] += 59
        progress(4, 2, 5e11, 3e11)  # what failed is neither done nor left
    assert capsys.readouterr().err.splitlines() == [
        "2 of 8 runs, 20 % of the FLOPs",
        "3 of 8 runs, 1 failed, 40 % of the FLOPs, about 3 min left",
        "4 of 8 runs, 2 failed, 71 % of the FLOPs, about 80 s left",
    ]


def test_a_failed_run_is_neither_done_nor_left(tmp_path):
    told = []
    rows = {row.id: row for row in (new_row(id="whole", training_flops=5), failed_row(id="broken", training_flops=7))}
    Loop(sweep(out=str(tmp_path)), Forked(1), 1, Results(tmp_path / "results.jsonl"), rows, told.append).tell(None)
    assert told == [Progress(num_done=2, num_failed=1, flops=5, flops_given_up=7, row=None)]


# -- the page


@QUICK
def test_the_commands_of_the_page_on_sweeps_run(tmp_path, monkeypatch, capsys):
    text = text_of("sweeps.md")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stdlib").mkdir()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]:
        (tmp_path / "stdlib" / path.name).write_bytes(path.read_bytes()[:3000])
    (config,) = blocks(text, "yaml")
    small = {"budgets: [1e11, 3e11]": "budgets: [3e9]", "depths: [2, 3, 4, 5]": "depths: [2]"}
    small |= {"budgets: [1e11]": "budgets: [3e9]", "seeds: [1, 2]": "seeds: [1]", "depths: [3, 4]": "depths: [3]"}
    (tmp_path / "sweep.yaml").write_text(smaller(config, small))

    def on_done(line):
        assert json.loads(capsys.readouterr().out.splitlines()[-1]), line

    run_commands(text.replace("prepare stdlib ", "prepare ./stdlib "), on_done)
    for name in re.findall(r"^\| `(.+?)` \|", text, flags=re.MULTILINE):
        assert list((tmp_path / "sweeps" / "mine").glob(name)), name
