"""A checkpoint is complete or absent, whatever ends the save: SIGKILL, an interrupt, a full disk."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from modepth import checkpoint, files
from modepth.checkpoint import keep_newest, newest, save, sweep_leftovers, whole
from modepth.run_folder import RunLock, prepare_run, step_folder, steps
from tests.checkpoints import assert_holds, names_in, save_seeded
from tests.processes import PROCESSES

STAGES = [
    "folder made",
    "middle of a file",  # not a stage that `save` announces
    "model written",
    "optimizer written",
    "state written",
    "manifest written",
    "folder synced",
    "old one set aside",  # only when a step is saved again
    "renamed",
    "done",
]


# -- killed


def save_and_die(run, step, seed, last_stage):
    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def dying_bytes(tensors):
        for number, chunk in enumerate(files.safetensors_bytes(tensors)):
            if number == 3:
                die()
            yield chunk

    if last_stage == "middle of a file":
        checkpoint.safetensors_bytes = dying_bytes
    with RunLock(run):
        save_seeded(run, step, seed, at_stage=lambda stage: die() if stage == last_stage else None)


def run_and_expect_kill(target, *arguments):
    process = PROCESSES.Process(target=target, args=arguments, daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def test_the_stages_are_all_of_them(tmp_path):
    seen = []
    save_seeded(tmp_path, 1)
    save_seeded(tmp_path, 1, at_stage=seen.append)
    assert seen == [stage for stage in STAGES if stage != "middle of a file"]


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "old one set aside"])
def test_a_save_killed_at_any_stage_leaves_a_complete_checkpoint_and_leftovers_are_swept(tmp_path, stage):
    save_seeded(tmp_path, 1)
    run_and_expect_kill(save_and_die, tmp_path, 2, 2, stage)
    complete = 2 if stage in ("renamed", "done") else 1
    assert_holds(newest(tmp_path), complete)
    assert (len(names_in(tmp_path)) > complete) == (complete == 1)  # there is something to sweep
    with RunLock(tmp_path) as lock:
        sweep_leftovers(lock)
    assert names_in(tmp_path) == ["step-00000001", "step-00000002"][:complete]
    assert_holds(newest(tmp_path), complete)


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_saved_again_and_killed_at_any_stage_is_the_old_or_the_new_one(tmp_path, stage):
    save_seeded(tmp_path, 1, seed=10)
    run_and_expect_kill(save_and_die, tmp_path, 1, 11, stage)
    with RunLock(tmp_path) as lock:
        sweep_leftovers(lock)
    assert_holds(newest(tmp_path), 11 if stage in ("renamed", "done") else 10)
    assert names_in(tmp_path) == ["step-00000001"]


def save_until_killed(run, first, done):
    with RunLock(run) as lock:
        sweep_leftovers(lock)
        for step in range(first, first + 10_000):
            save_seeded(run, step, rows=20_011)
            save_seeded(run, step, rows=20_011)
            done.send(step)
            keep_newest(run, step, 2)


def test_a_save_killed_at_20_random_moments_leaves_a_complete_checkpoint(tmp_path):
    chance, last, middles = random.Random(0), 0, 0
    for _ in range(20):
        receiving, sending = PROCESSES.Pipe(duplex=False)
        process = PROCESSES.Process(target=save_until_killed, args=(tmp_path, last + 1, sending), daemon=True)
        process.start()
        sending.close()
        assert receiving.poll(60)
        last = receiving.recv()
        time.sleep(chance.uniform(0, 0.3))
        process.kill()
        process.join(60)
        while receiving.poll():
            try:
                last = receiving.recv()
            except EOFError:
                break
        receiving.close()
        middles += any(name.startswith(".") for name in names_in(tmp_path))
        with RunLock(tmp_path) as lock:
            sweep_leftovers(lock)
        found = newest(tmp_path)  # a warning would be an error
        assert found.step in (last, last + 1)
        assert_holds(found, found.step, rows=20_011)
        assert len(steps(tmp_path)) == len(names_in(tmp_path)) <= 3
        last = found.step
    assert middles >= 5  # else the kills have missed the saves


def test_all_is_on_disk_before_the_rename_and_the_rename_before_the_end(tmp_path, monkeypatch):
    events, sync, rename = [], os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda number: (events.append(os.fstat(number).st_ino), sync(number)))
    monkeypatch.setattr(os, "rename", lambda old, new: (events.append("rename"), rename(old, new)))
    folder = save_seeded(tmp_path, 1)
    place = events.index("rename")
    assert set(events[:place]) == {path.stat().st_ino for path in (folder, *folder.iterdir())}
    assert events[place - 1] == folder.stat().st_ino
    assert events[place + 1 :] == [folder.parent.stat().st_ino]


def test_an_interrupted_save_leaves_nothing(tmp_path):
    save_seeded(tmp_path, 1, seed=1)

    def interrupt(stage):
        if stage == "old one set aside":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_seeded(tmp_path, 1, seed=2, at_stage=interrupt)
    assert names_in(tmp_path) == ["step-00000001"]
    assert_holds(newest(tmp_path), 1)


# -- the folder of a run


def hold_the_lock(run, held):
    with RunLock(run):
        held.send(os.getpid())
        time.sleep(60)


def test_a_second_process_is_refused_and_a_sigkill_frees_the_run(tmp_path):
    receiving, sending = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=hold_the_lock, args=(tmp_path, sending), daemon=True)
    process.start()
    assert receiving.poll(60)
    pid = receiving.recv()
    prepare_run(tmp_path)
    leftover = tmp_path / "checkpoints" / ".step-00000001.1-a.part"
    leftover.mkdir()
    with pytest.raises(ValueError, match=f"in use by process {pid} "), RunLock(tmp_path) as lock:
        sweep_leftovers(lock)
    assert leftover.exists()
    process.kill()
    process.join(60)
    with RunLock(tmp_path) as lock:
        sweep_leftovers(lock)
    assert not leftover.exists()
    for end in (receiving, sending):
        end.close()


def test_a_lock_is_free_after_its_block(tmp_path):
    for _ in range(2):
        with RunLock(tmp_path), pytest.raises(ValueError, match=f"in use by process {os.getpid()} "):
            RunLock(tmp_path).__enter__()


def test_sweeping_needs_the_lock_and_leaves_what_is_not_ours(tmp_path):
    with pytest.raises(ValueError, match="hold the lock"):
        sweep_leftovers(RunLock(tmp_path))
    prepare_run(tmp_path)
    for name in (".DS_Store", "notes.part", ".step-1.part"):
        (tmp_path / "checkpoints" / name).write_text("")
    with RunLock(tmp_path) as lock:
        sweep_leftovers(lock)
    assert names_in(tmp_path) == [".DS_Store", ".step-1.part", "notes.part"]


def test_a_run_that_is_a_file_fails_at_once(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ValueError, match="run: cannot be written: Not a directory"):
        prepare_run(tmp_path / "run")
    with pytest.raises(ValueError, match=r"\.lock: cannot be opened: Not a directory"):
        RunLock(tmp_path / "run").__enter__()


def test_a_run_where_nothing_can_be_written_fails_at_once():
    with pytest.raises(ValueError, match=r"^/proc/run: cannot be written: "):
        prepare_run("/proc/run")


# -- a full disk, a read-only one

ON_A_SMALL_DISK = """
import json, pathlib, resource, subprocess, sys
import torch
from modepth.checkpoint import newest, save, whole
from modepth.run_folder import prepare_run

run, mounted = pathlib.Path(sys.argv[1]), sys.argv[2] == "mounted"
said = {}

def attempt(at_stage):
    try:
        save(run, 2, {"model": whole({"w": torch.ones(100_000)})}, {}, at_stage=at_stage)
    except OSError as error:
        said["full"] = str(error)
    found = newest(run)
    assert (found.step, found.load("model")["w"].numel()) == (1, 20_000)
    left = [path.name for path in (run / "checkpoints").iterdir()]
    assert left == ["step-00000001"], left

def fill(stage):
    if stage == "folder made":
        try:
            (run / "ballast").write_bytes(b"x" * 2**20)
        except OSError:
            pass

save(run, 1, {"model": whole({"w": torch.ones(20_000)})}, {})
if mounted:
    attempt(fill)
    subprocess.run(["mount", "-o", "remount,ro", str(run)], check=True)
    try:
        prepare_run(run)
    except ValueError as error:
        said["read_only"] = str(error)
else:
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    attempt(lambda stage: None)
print(json.dumps(said))
"""


def small_disk(run):
    """A command's beginning that gives it a disk of 1 MiB of its own, gone when it ends; [] where that is forbidden."""
    mount = [
        "unshare",
        "--mount",
        "--map-root-user",
        "sh",
        "-c",
        'mount -t tmpfs -o size=1m none "$0" && "$@"',
        str(run),
    ]
    usable = (
        shutil.which("unshare") and subprocess.run([*mount, "true"], capture_output=True, check=False).returncode == 0
    )
    return mount if usable else []


@pytest.mark.parametrize("kind", ["mounted", "limited"])
def test_a_disk_that_fills_up_during_a_save_costs_nothing_but_that_save(tmp_path, kind):
    beginning = small_disk(tmp_path) if kind == "mounted" else []
    kind = kind if beginning else "limited"
    run = [*beginning, sys.executable, "-c", ON_A_SMALL_DISK, str(tmp_path), kind]
    result = subprocess.run(run, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    reason = "No space left on device" if kind == "mounted" else "File too large"
    assert f"{step_folder(tmp_path, 2)}: no room ({reason}): 400,000 bytes needed" in said["full"]
    assert " free (make room" in said["full"]
    if kind == "mounted":
        assert said["read_only"].startswith(f"{tmp_path}: cannot be written: Read-only file system")


def test_a_checkpoint_larger_than_the_free_space_is_refused_before_it_is_written(tmp_path):
    save_seeded(tmp_path, 1)
    stages = []
    with pytest.raises(
        OSError, match=r"step-00000002: no room .* 4,503,599,627,370,496 bytes needed .* [\d,]+ free"
    ) as e:
        save(tmp_path, 2, {"model": whole({"w": torch.ones(1).expand(2**50)})}, {}, at_stage=stages.append)
    assert e.value.errno == errno.ENOSPC
    assert (stages, names_in(tmp_path)) == ([], ["step-00000001"])
