"""Nothing is lost: training processes killed, stopped and left alone by others go on to the same bits."""

import json
import os
import random
import signal
import time
from contextlib import contextmanager

import pytest

from modepth.interruption import Interruption
from modepth.run_folder import steps
from tests import train_process
from tests.checkpoints import names_in
from tests.processes import PROCESSES, TIMEOUT, command, free_port, rank_environment, torchrun
from tests.training import assert_same_end, make_data, rows_of


def be_trainer(environment, *arguments):
    os.environ.update(environment)
    train_process.main(*arguments)


def start_trainer(run, data, changes, environment=None):
    """A training process, real, but with torch imported beforehand."""
    arguments = (environment or {}, str(run), str(data), json.dumps(changes))
    process = PROCESSES.Process(target=be_trainer, args=arguments, daemon=True)
    process.start()
    return process


@contextmanager
def killed_trainer(*arguments):
    process = start_trainer(*arguments)
    yield process
    process.kill()
    process.join()


def start_ranks(run, data, changes, size=2):
    """The same `size` times, without torchrun to look after them."""
    port = free_port()
    return [start_trainer(run, data, changes, rank_environment(rank, size, port)) for rank in range(size)]


def train_through(run, data, changes, size=1):
    processes = start_ranks(run, data, changes, size) if size > 1 else [start_trainer(run, data, changes)]
    for process in processes:
        process.join(90)
        assert process.exitcode == 0


def wait_until(happened, process, seconds=60):
    """Wait for something while the process lives."""
    end = time.monotonic() + seconds
    while not happened():
        assert is_alive(process), "ended too early"
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.002)


def is_alive(process):
    return process.is_alive() if hasattr(process, "is_alive") else process.poll() is None


def last_saved(run):
    return max(steps(run), default=0)


def last_logged(run):
    try:
        return max((row["step"] for row in rows_of(run) if "loss" in row), default=-1)
    except (FileNotFoundError, json.JSONDecodeError):  # not yet there, or being written
        return -1


# -- SIGKILL

EVERY_STEP = {"save_every": 1, "steps": 110, "eval_every": 40, "eval_windows": 2}


def kill_at_random(start_one, run, kills, start_seconds):
    """Start and SIGKILL so many times: while it starts, or in or between the first steps after a resume."""
    choose = random.Random(kills)
    for _ in range(kills):
        more = choose.randrange(4)
        goal = last_saved(run) + more
        with start_one() as process:  # whose end is a SIGKILL
            wait_until(lambda goal=goal: last_saved(run) >= goal, process)
            time.sleep(choose.uniform(0, 0.04 if more else start_seconds))
            assert is_alive(process), "finished before the last kill: give it more steps"


def test_a_run_killed_at_twenty_random_moments_ends_in_the_same_bytes(tmp_path):
    make_data(tmp_path)
    train_through(tmp_path / "whole", tmp_path, EVERY_STEP)
    kill_at_random(lambda: killed_trainer(tmp_path / "run", tmp_path, EVERY_STEP), tmp_path / "run", 20, 0.5)
    assert 0 < last_saved(tmp_path / "run") < 110
    train_through(tmp_path / "run", tmp_path, EVERY_STEP)
    assert_same_end(tmp_path / "run", tmp_path / "whole")


@pytest.mark.long
def test_a_command_killed_at_twenty_random_moments_ends_in_the_same_bytes(tmp_path):
    make_data(tmp_path)
    many = {**EVERY_STEP, "steps": 600}  # a fast machine does dozens in the seconds that a slow one starts in
    arguments = ("-m", "tests.train_process", tmp_path / "run", tmp_path, json.dumps(many))
    train_through(tmp_path / "whole", tmp_path, many)
    kill_at_random(lambda: command(*arguments), tmp_path / "run", 20, 5.0)
    with command(*arguments) as last:
        output, _ = last.communicate(timeout=90)
    assert last.returncode == 0, output
    assert_same_end(tmp_path / "run", tmp_path / "whole")


# -- one rank is killed

PLENTY = {"steps": 100_000, "save_every": 5, "keep_checkpoints": 1}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("killed", [0, 1])
def test_where_one_rank_is_killed_the_other_ends_by_itself_within_the_timeout(killed, parallel, tmp_path):
    make_data(tmp_path)
    processes = start_ranks(tmp_path / "run", tmp_path, PLENTY | {"parallel": parallel})
    wait_until(lambda: last_saved(tmp_path / "run") >= 5, processes[1 - killed])
    processes[killed].kill()
    processes[1 - killed].join(TIMEOUT + 5)
    assert processes[1 - killed].exitcode not in (0, None)


def read_pids(process, count):
    pids = {}
    while len(pids) < count:
        line = process.stdout.readline()
        assert line, "ended too early"
        if line.startswith('{"rank": '):
            pids[json.loads(line)["rank"]] = json.loads(line)["pid"]
    return pids


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_torchrun_restarts_after_a_kill_and_ends_in_the_same_bytes(parallel, tmp_path):
    changes = {"steps": 50, "save_every": 4, "eval_every": 40, "parallel": parallel}
    make_data(tmp_path)
    arguments = ("-m", "tests.train_process", tmp_path / "run", tmp_path, json.dumps(changes | {"sleep": 0.1}))
    with torchrun(2, *arguments, restarts=1) as agent:
        pids = read_pids(agent, 2)
        wait_until(lambda: last_saved(tmp_path / "run") >= 8, agent)
        os.kill(pids[1], signal.SIGKILL)
        restarted = read_pids(agent, 2)
        assert not set(pids.values()) & set(restarted.values())
        output, _ = agent.communicate(timeout=90)
    assert agent.returncode == 0, output
    train_through(tmp_path / "whole", tmp_path, changes, size=2)
    assert_same_end(tmp_path / "run", tmp_path / "whole")


# -- SIGTERM and Ctrl-C

STOPS = [(signal.SIGTERM, 143), (signal.SIGINT, 130)]


@pytest.mark.parametrize(("number", "code"), STOPS)
def test_a_signal_ends_a_run_after_its_step_and_the_run_goes_on_to_the_same_bytes(number, code, tmp_path):
    changes = {"steps": 50, "save_every": 1000, "eval_every": 1000}
    make_data(tmp_path)
    process = start_trainer(tmp_path / "run", tmp_path, changes | {"sleep": 0.1})
    wait_until(lambda: last_logged(tmp_path / "run") >= 3, process)
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == code
    assert last_saved(tmp_path / "run") == last_logged(tmp_path / "run") + 1 < 50
    for run in ("run", "whole"):
        train_through(tmp_path / run, tmp_path, changes)
    (tmp_path / "run" / "checkpoints" / names_in(tmp_path / "run")[0]).rename(tmp_path / "aside")
    assert_same_end(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(("number", "code"), STOPS)
def test_a_second_signal_ends_a_run_at_once(number, code, tmp_path):
    make_data(tmp_path)
    process = start_trainer(tmp_path / "run", tmp_path, {"sleep": 60})
    wait_until(lambda: last_logged(tmp_path / "run") == 0, process)
    os.kill(process.pid, number)
    process.join(0.5)
    assert process.is_alive()  # it is in the middle of its step
    os.kill(process.pid, number)
    process.join(10)
    assert process.exitcode == code
    assert last_saved(tmp_path / "run") == 0


def test_a_signal_that_comes_twice_at_once_to_many_processes_is_one(tmp_path):
    make_data(tmp_path)
    processes = start_ranks(tmp_path / "run", tmp_path, {"steps": 50, "save_every": 1000, "sleep": 0.4})
    wait_until(lambda: last_logged(tmp_path / "run") >= 1, processes[0])
    for _ in ("Slurm", "torchrun"):
        for process in processes:
            os.kill(process.pid, signal.SIGTERM)
        time.sleep(0.05)
    for process in processes:
        process.join(60)
        assert process.exitcode == 143
    assert last_saved(tmp_path / "run") == last_logged(tmp_path / "run") + 1


def test_what_comes_later_than_the_same_signal_would_ends_the_process(monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with Interruption(same_seconds=0.2) as interruption:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        assert (interruption.signal, ended) == (signal.SIGINT, [])
        time.sleep(0.25)
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended == [143]


@pytest.mark.long
def test_ctrl_c_to_torchrun_ends_all_ranks_after_their_step(tmp_path):
    changes = json.dumps({"steps": 100_000, "save_every": 100_000})
    make_data(tmp_path)
    with torchrun(2, "-m", "tests.train_process", tmp_path / "run", tmp_path, changes) as agent:
        wait_until(lambda: last_logged(tmp_path / "run") >= 3, agent)
        agent.send_signal(signal.SIGINT)
        agent.communicate(timeout=60)
    assert agent.returncode != 0
    assert last_saved(tmp_path / "run") == last_logged(tmp_path / "run") + 1
