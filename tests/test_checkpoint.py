"""Checkpoints: complete or absent whatever kills the save, refused when harmed, equal at any number of ranks."""

import ast
import errno
import hashlib
import json
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from modepth import checkpoint, files, manifest, run_folder
from modepth.checkpoint import Piece, keep_newest, load_into, newest, open_step, save, sweep_leftovers, whole
from modepth.files import DTYPES, MAX_JSON, remove
from modepth.manifest import seal
from modepth.run_folder import RunLock, prepare_run, step_folder, steps

MODEL, OPTIMIZER = "model-00000-of-00001.safetensors", "optimizer-00000-of-00001.safetensors"
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


def tensors_of(seed, rows=7):
    """A group of every dtype, with a scalar, and with shapes that have no elements."""
    generator = torch.Generator().manual_seed(seed)
    group = {f"layers.{code}": torch.randn(rows, 3, generator=generator).mul(50).to(t) for code, t in DTYPES.items()}
    group |= {"scalar": torch.tensor(float(seed)), "no_rows": torch.empty(0, 3), "no_columns": torch.empty(5, 0)}
    return group


def groups_of(seed, rows=7):
    return {"model": whole(tensors_of(seed, rows)), "optimizer": whole({"step": torch.tensor(seed)})}


def save_seeded(run, step, seed=None, rows=7, **options):
    seed = step if seed is None else seed
    return save(run, step, groups_of(seed, rows), {"seed": seed}, **options)


def assert_holds(found, seed, rows=7):
    assert found.state == {"seed": seed}
    assert_same(found.load("model"), tensors_of(seed, rows))
    assert_same(found.load("optimizer"), {"step": torch.tensor(seed)})


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def names_in(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def edit_manifest(folder, change):
    """Change a manifest as a stranger could, its own hash and those of the files made right again."""
    path = folder / "manifest.json"
    body = json.loads(path.read_text())
    del body["sha256"]
    for name, facts in body["files"].items():
        contents = (folder / name).read_bytes()
        facts.update(size=len(contents), sha256=hashlib.sha256(contents).hexdigest())
    change(body)
    path.write_text(json.dumps({"sha256": seal(body), **body}))


# -- what is saved is loaded


def test_what_is_saved_is_loaded(tmp_path):
    folder = save_seeded(tmp_path, 100)
    assert folder == tmp_path / "checkpoints" / "step-00000100"
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", MODEL, OPTIMIZER, "state.json"]
    assert_holds(newest(tmp_path), 100)
    assert_holds(open_step(tmp_path, 100), 100)


def test_the_files_are_those_of_safetensors(tmp_path):
    assert_same(load_file(save_seeded(tmp_path, 1) / MODEL), {k: t for k, t in tensors_of(1).items() if k != "no_rows"})


def test_tensors_out_of_order_in_memory_and_tied_ones_are_saved(tmp_path):
    turned = torch.arange(6.0).view(2, 3).t()
    save(tmp_path, 1, {"model": whole({"turned": turned, "tied": turned})}, {})
    assert_same(newest(tmp_path).load("model"), {"turned": turned, "tied": turned})


def test_loaded_tensors_outlive_the_checkpoint(tmp_path):
    folder = save_seeded(tmp_path, 1)
    loaded = open_step(tmp_path, 1).load("model")
    for path in folder.iterdir():
        path.write_bytes(b"")
    remove(folder)
    assert_same(loaded, tensors_of(1))


def test_no_checkpoint_is_none(tmp_path):
    assert newest(tmp_path) is None
    assert newest(prepare_run(tmp_path / "run")) is None


def test_newest_is_the_highest_step(tmp_path):
    for step in (100_000_000, 9, 10):
        save_seeded(tmp_path, step)
    assert steps(tmp_path) == [9, 10, 100_000_000]
    assert newest(tmp_path).step == 100_000_000


def test_saving_a_step_again_replaces_it(tmp_path):
    save_seeded(tmp_path, 5, seed=1)
    save_seeded(tmp_path, 5, seed=2)
    assert_holds(newest(tmp_path), 2)
    assert names_in(tmp_path) == ["step-00000005"]


@pytest.mark.parametrize(
    ("groups", "state", "message"),
    [
        ({"../model": {}}, {}, "name of a group"),
        ({"model": whole({"__metadata__": torch.ones(1)})}, {}, "__metadata__"),
        ({"model": whole({"w": torch.ones(1, dtype=torch.complex64)})}, {}, "model w: dtype must be one of"),
        ({"model": {"w": Piece(torch.ones(2, 3), (2, 5), 0)}}, {}, r"model w: \(2, 3\) are not rows of \(2, 5\)"),
        ({"model": {"w": Piece(torch.ones(2, 3), (5, 3), 0)}}, {}, "model w: the pieces hold 2 rows of 5"),
        ({"model": {"w": Piece(torch.ones(2), (3,), 1)}}, {}, "model w: a piece begins at row 1, expected row 0"),
        ({}, {"loss": float("nan")}, "state must be plain data"),
        ({}, {"rng": b"x"}, "state must be plain data"),
        ({}, {"text": "x" * MAX_JSON}, "state must be at most"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path, groups, state, message):
    with pytest.raises(ValueError, match=message):
        save(tmp_path, 1, groups, state)
    assert not (tmp_path / "checkpoints").exists()


# -- more than one rank


def as_ranks(world_size, work):
    """`work(rank, exchange)` in a thread a rank: what each returned or raised."""
    barrier, board, outcomes = threading.Barrier(world_size, timeout=20), [None] * world_size, [None] * world_size

    def run(rank):
        def exchange(message):
            board[rank] = json.dumps(message)  # messages are plain data, however ranks talk
            barrier.wait()
            gathered = [json.loads(text) for text in board]
            barrier.wait()
            return gathered

        try:
            outcomes[rank] = work(rank, exchange)
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def chunked(tensor, rank, world_size):
    """This rank's piece as FSDP2 shares rows out: equal ones first, then a short one, then none."""
    if tensor.dim() == 0:
        return Piece(tensor, (), 0)
    size = -(-tensor.shape[0] // world_size)
    offset = min(rank * size, tensor.shape[0])
    return Piece(tensor[offset : offset + size], tuple(tensor.shape), offset)


def save_sharded(run, tensors, world_size):
    def work(rank, exchange):
        shards = {name: chunked(tensor, rank, world_size) for name, tensor in tensors.items()}
        return save(run, 1, {"model": shards}, {"rank": rank}, rank=rank, exchange=exchange)

    assert as_ranks(world_size, work) == [step_folder(run, 1)] * world_size


@pytest.mark.parametrize("rows", [1, 5, 7])
@pytest.mark.parametrize("world_size", [2, 3])
def test_saved_by_several_ranks_loaded_by_1_and_4(tmp_path, world_size, rows):
    tensors = tensors_of(0, rows)
    save_sharded(tmp_path, tensors, world_size)
    found = newest(tmp_path)
    assert (found.state, found.world_size) == ({"rank": 0}, world_size)
    assert_same(found.load("model"), tensors)
    for rank in range(4):
        for name, tensor in tensors.items():
            if tensor.dim():
                part, _, offset = chunked(tensor, rank, 4)
                loaded = found.load_rows("model", name, offset, offset + len(part))
                assert_same({name: loaded}, {name: part})


def test_a_tensor_that_all_ranks_hold_is_written_once(tmp_path):
    tensors = tensors_of(0)
    work = lambda rank, exchange: save(tmp_path, 1, {"model": whole(tensors)}, {}, rank=rank, exchange=exchange)  # noqa: E731
    as_ranks(2, work)
    found = newest(tmp_path)
    assert [path.name for path in found.folder.glob("*.safetensors")] == ["model-00000-of-00002.safetensors"]
    assert_same(found.load("model"), tensors)


@st.composite
def layouts(draw):
    """A tensor, and for each rank of a few the bounds of its rows."""
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    shape = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    cuts = sorted(draw(st.lists(st.integers(0, shape[0]), max_size=3)))
    bounds = draw(st.permutations(list(zip([0, *cuts], [*cuts, shape[0]], strict=True))))
    rows = draw(st.lists(st.integers(0, shape[0]), min_size=2, max_size=2).map(sorted))
    return torch.randn(shape).mul(9).to(dtype), bounds, rows


@given(layouts())
@settings(max_examples=40)
def test_any_layout_of_pieces_loads_as_the_tensor_and_as_any_rows(layout):
    tensor, bounds, (start, stop) = layout
    with tempfile.TemporaryDirectory() as run:

        def work(rank, exchange):
            low, high = bounds[rank]
            piece = Piece(tensor[low:high], tuple(tensor.shape), low)
            return save(run, 1, {"model": {"w": piece}}, {}, rank=rank, exchange=exchange)

        assert as_ranks(len(bounds), work) == [step_folder(run, 1)] * len(bounds)
        found = newest(run)
        assert_same(found.load("model"), {"w": tensor})
        assert_same({"w": found.load_rows("model", "w", start, stop)}, {"w": tensor[start:stop]})


def test_rows_that_do_not_exist_are_refused(tmp_path):
    save_seeded(tmp_path, 1)
    found = newest(tmp_path)
    for name, start, stop in [("layers.F32", 0, 8), ("layers.F32", -1, 2), ("layers.F32", 3, 2), ("scalar", 0, 1)]:
        with pytest.raises(ValueError, match=rf"{name} of shape \(.*\) has no rows"):
            found.load_rows("model", name, start, stop)
    with pytest.raises(ValueError, match="no tensor 'w' in model"):
        found.load_rows("model", "w", 0, 1)
    with pytest.raises(ValueError, match="no group 'ema', only model, optimizer"):
        found.load("ema")


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([Piece(torch.ones(2), (5,), 0), Piece(torch.ones(2), (5,), 3)], "begins at row 3, expected row 2"),
        ([Piece(torch.ones(3), (5,), 0), Piece(torch.ones(3), (5,), 2)], "begins at row 2, expected row 3"),
        ([Piece(torch.ones(3), (5,), 0), Piece(torch.ones(2), (6,), 3)], r"rank 1 has F32 \(6,\)"),
        ([Piece(torch.ones(3), (5,), 0), Piece(torch.ones(2).int(), (5,), 3)], r"rank 1 has I32 \(5,\)"),
        ([Piece(torch.ones(3), (5,), 0), Piece(torch.ones(2, 2), (5,), 3)], "are not rows of"),
    ],
)
def test_pieces_that_do_not_fit_are_refused_on_all_ranks(tmp_path, shards, message):
    def work(rank, exchange):
        return save(tmp_path, 1, {"model": {"w": shards[rank]}}, {}, rank=rank, exchange=exchange)

    for outcome in as_ranks(2, work):
        with pytest.raises(ValueError, match=message):
            raise outcome


@pytest.mark.parametrize("failing", [0, 1])
def test_a_write_that_fails_on_one_rank_raises_on_all_and_leaves_nothing(tmp_path, failing):
    save_seeded(tmp_path, 1)

    def work(rank, exchange):
        def at_stage(stage):
            if rank == failing and stage == "model written":
                raise OSError(errno.ENOSPC, "No space left on device")

        shards = {"w": chunked(torch.ones(4, 3), rank, 2)}
        return save(tmp_path, 2, {"model": shards}, {}, rank=rank, exchange=exchange, at_stage=at_stage)

    for outcome in as_ranks(2, work):
        with pytest.raises(OSError, match=r"step-00000002: no room .* 48 bytes needed .* free"):
            raise outcome
    assert names_in(tmp_path) == ["step-00000001"]


def test_ranks_at_different_steps_are_refused(tmp_path):
    work = lambda rank, exchange: save(tmp_path, rank, {}, {}, rank=rank, exchange=exchange)  # noqa: E731
    for outcome in as_ranks(2, work):
        with pytest.raises(ValueError, match=r"different steps: \[0, 1\]"):
            raise outcome


# -- killed

PROCESSES = multiprocessing.get_context("forkserver")  # each is real, but torch is imported once
PROCESSES.set_forkserver_preload(["tests.test_checkpoint"])


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
    process = PROCESSES.Process(target=target, args=arguments)
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
        process = PROCESSES.Process(target=save_until_killed, args=(tmp_path, last + 1, sending))
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


def test_an_interrupted_save_leaves_nothing(tmp_path):
    save_seeded(tmp_path, 1, seed=1)

    def interrupt(stage):
        if stage == "old one set aside":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_seeded(tmp_path, 1, seed=2, at_stage=interrupt)
    assert names_in(tmp_path) == ["step-00000001"]
    assert_holds(newest(tmp_path), 1)


# -- harmed


def flip(path):
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def empty(path):
    os.truncate(path, 0)


def replace_by_folder(path):
    path.unlink()
    path.mkdir()


def add_beside(path):
    path.with_name(path.name + ".extra").write_bytes(b"")


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER, "state.json", "manifest.json"])
@pytest.mark.parametrize("harm", [flip, truncate, empty, Path.unlink, replace_by_folder, add_beside])
def test_a_harmed_checkpoint_is_passed_over_with_a_warning_and_refused_by_name(tmp_path, harm, name):
    for step in (1, 2):
        save_seeded(tmp_path, step)
    harm(step_folder(tmp_path, 2) / name)
    with pytest.warns(UserWarning, match=rf"step-00000002/{name}.*: .+; passing over step 2"):
        assert_holds(newest(tmp_path), 1)
    with pytest.raises(ValueError, match=rf"step-00000002/{name}.*: "):
        open_step(tmp_path, 2)


def test_no_flipped_bit_is_loaded(tmp_path):
    folder, chance = save_seeded(tmp_path, 1), random.Random(0)
    for path in folder.iterdir():
        contents = path.read_bytes()
        for _ in range(60):
            place = chance.randrange(len(contents))
            harmed = bytearray(contents)
            harmed[place] ^= 1 << chance.randrange(8)
            path.write_bytes(harmed)
            try:
                found = open_step(tmp_path, 1)
            except ValueError as error:
                assert str(path) in str(error)  # noqa: PT017
            else:  # spaces of the manifest say nothing
                assert path.name == "manifest.json"
                assert_holds(found, 1)
        path.write_bytes(contents)
    assert_holds(open_step(tmp_path, 1), 1)


def test_when_all_are_harmed_there_is_none(tmp_path):
    for step in (1, 2):
        truncate(save_seeded(tmp_path, step) / MODEL)
    with pytest.warns(UserWarning, match="passing over") as caught:
        assert newest(tmp_path) is None
    assert len(caught) == 2


def test_a_step_that_is_not_there_or_no_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="step-00000003: no such checkpoint"):
        open_step(tmp_path, 3)
    prepare_run(tmp_path)
    step_folder(tmp_path, 3).write_text("")
    with pytest.raises(ValueError, match="step-00000003: not a folder"):
        open_step(tmp_path, 3)


def set_entry(**facts):
    return lambda body: body["groups"]["model"]["layers.F32"].update(facts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.update(format=2), "format 2 is newer than this modepth reads"),
        (lambda body: body.update(format="1"), "not a manifest"),
        (lambda body: body.update(step=2), "is of step 2"),
        (lambda body: body.update(world_size=0), "world_size must be"),
        (lambda body: body.pop("groups"), "not a manifest of modepth: KeyError"),
        (lambda body: body.update(groups=[]), "not a manifest"),
        (lambda body: body.update(files={}), "not a file of this checkpoint"),
        (lambda body: body.update(files={MODEL: 7}), "not a manifest"),
        (lambda body: body["groups"].pop("optimizer"), "optimizer-.*: not a file of this checkpoint"),
        (set_entry(shape=[7]), "model-.*: differs from the manifest in layers.F32"),
        (set_entry(dtype="I32"), "model-.*: differs from the manifest in layers.F32"),
        (set_entry(dtype="F128"), "layers.F32: dtype must be one of"),
        (set_entry(dtype=[]), "not a manifest"),
        (set_entry(shape=[-7, -3]), "shape must be a whole number"),
        (set_entry(shape=[2**62, 3]), "the pieces hold 7 rows of"),
        (set_entry(pieces=[]), "the pieces hold 0 rows of 7"),
        (set_entry(pieces=[[MODEL, 0, 2**62]], shape=[2**62, 3]), "differs from the manifest"),
        (set_entry(pieces=[[MODEL, 7 * n, 7] for n in range(9)], shape=[63, 3]), "layers.F32 is used twice"),
        (set_entry(pieces=[[MODEL, 0, 7, 7]]), "not a manifest|too many values"),
        (set_entry(pieces=[[7, 0, 7]]), "not a manifest"),
        (lambda body: body["groups"]["model"].pop("layers.F32"), "differs from the manifest in layers.F32"),
    ],
)
def test_a_manifest_that_lies_is_refused(tmp_path, change, message):
    edit_manifest(save_seeded(tmp_path, 1), change)
    with pytest.raises(ValueError, match=f"step-00000001/.*{message}"):
        open_step(tmp_path, 1)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", "[" * 100_000, "\xff", '{"format": 1}'])
def test_a_manifest_that_is_none_is_refused(tmp_path, text):
    (save_seeded(tmp_path, 1) / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"manifest\.json: not "):
        open_step(tmp_path, 1)


# -- from a stranger


@pytest.mark.parametrize("name", ["../x.safetensors", "/tmp/x.safetensors", "a/../b.safetensors", "..", "", "x\0"])
@pytest.mark.parametrize("kind", ["piece", "file"])
def test_names_that_lead_out_of_the_folder_are_refused(tmp_path, name, kind):
    def change(body):
        if kind == "file":
            body["files"][name] = body["files"][MODEL]
        else:
            set_entry(pieces=[[name, 0, 7]])(body)

    edit_manifest(save_seeded(tmp_path, 1), change)
    with pytest.raises(ValueError, match=r"not a file of this checkpoint|must be in a plainly named"):
        open_step(tmp_path, 1)


@pytest.mark.parametrize("name", [MODEL, "state.json", "manifest.json"])
def test_links_are_refused_even_to_the_same_contents(tmp_path, name):
    path = save_seeded(tmp_path, 1) / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=rf"{name}: not a plain file"):
        open_step(tmp_path, 1)


def test_a_checkpoint_that_is_a_link_is_refused(tmp_path):
    folder = save_seeded(tmp_path, 1)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="step-00000001: not a folder"):
        open_step(tmp_path, 1)


class Bomb:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin", "model.pkl", MODEL])
def test_a_pickle_is_never_run(tmp_path, name):
    folder, marker = save_seeded(tmp_path, 1), tmp_path / "ran"
    (folder / name).write_bytes(pickle.dumps(Bomb(marker)))
    edit_manifest(folder, lambda body: body["files"].update({name: body["files"][MODEL]}))
    edit_manifest(folder, lambda body: None)  # with the pickle's own hash
    with pytest.raises(ValueError, match=rf"{name}: (not a file of this checkpoint|cannot be read)"):
        open_step(tmp_path, 1)
    assert not marker.exists()
    pickle.loads((folder / name).read_bytes())
    assert marker.exists()  # it would have


def test_nothing_here_can_unpickle():
    for module in (checkpoint, files, manifest, run_folder):
        tree = ast.parse(Path(module.__file__).read_text())
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not imported & {"pickle", "marshal", "shelve"}
        assert not called & {"torch.load", "torch.save", "eval", "exec"}


def peak_memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@pytest.mark.parametrize("length", [2**60, 2**63 + 1, 10**9, 200])
def test_a_header_bomb_is_an_error_in_bounded_memory(tmp_path, length):
    folder = save_seeded(tmp_path, 1)
    (folder / MODEL).write_bytes(struct.pack("<Q", length) + b'{"w": ')
    edit_manifest(folder, lambda body: None)
    before = peak_memory()
    with pytest.raises(ValueError, match=rf"{MODEL}: cannot be read: .*[hH]eader"):
        open_step(tmp_path, 1)
    assert peak_memory() - before < 32 * 2**20


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_a_json_bomb_is_refused_unread(tmp_path, name):
    folder = save_seeded(tmp_path, 1)
    os.truncate(folder / name, 2**33)  # no blocks on disk
    before = peak_memory()
    with pytest.raises(ValueError, match=f"{name}: "):
        open_step(tmp_path, 1)
    assert peak_memory() - before < 32 * 2**20


def test_the_largest_json_that_is_read_is_64_mib(tmp_path):
    path = tmp_path / "manifest.json"
    path.write_text("7" + " " * (MAX_JSON - 1))
    assert files.read_json(path) == 7
    with path.open("a") as file:
        file.write(" ")
    with pytest.raises(ValueError, match="67,108,865 bytes of JSON, more than the 67,108,864 that are read"):
        files.read_json(path)


# -- into a module


def test_loading_into_a_module_copies_all_tensors(tmp_path):
    module, other = (torch.nn.Linear(3, 5) for _ in range(2))
    save(tmp_path, 1, {"model": whole(module.state_dict())}, {})
    load_into(other.state_dict(), newest(tmp_path).load("model"))
    assert_same(other.state_dict(), module.state_dict())


def test_tensors_that_do_not_fit_are_all_listed_and_none_is_copied():
    expected = {name: torch.zeros(2) for name in "abcd"}
    loaded = {"b": torch.ones(3), "c": torch.ones(2).double(), "d": torch.ones(2), "e": torch.ones(1)}
    with pytest.raises(ValueError, match="do not fit") as caught:
        load_into(expected, loaded)
    assert str(caught.value).split(": ")[1].split("; ") == [
        "b is torch.float32 (3,), expected torch.float32 (2,)",
        "c is torch.float64 (2,), expected torch.float32 (2,)",
        "missing a",
        "unexpected e",
    ]
    assert not any(tensor.any() for tensor in expected.values())


# -- old ones


def test_only_the_newest_are_kept(tmp_path):
    for step in range(1, 6):
        save_seeded(tmp_path, step)
        keep_newest(tmp_path, step, 2)
        assert steps(tmp_path) == list(range(max(1, step - 1), step + 1))
    keep_newest(tmp_path, 5, 1)
    assert names_in(tmp_path) == ["step-00000005"]
    with pytest.raises(ValueError, match="count must be a whole number >= 1, got 0"):
        keep_newest(tmp_path, 5, 0)


def test_a_harmed_checkpoint_never_costs_the_last_good_one(tmp_path):
    for step in (1, 2, 9):
        save_seeded(tmp_path, step)
    flip(step_folder(tmp_path, 9) / MODEL)
    truncate(step_folder(tmp_path, 2) / MODEL)
    save_seeded(tmp_path, 3)
    keep_newest(tmp_path, 3, 1)
    assert steps(tmp_path) == [2, 3, 9]
    with pytest.warns(UserWarning, match="passing over step 9"):
        assert_holds(newest(tmp_path), 3)


# -- the folder of a run


def hold_the_lock(run, held):
    with RunLock(run):
        held.send(os.getpid())
        time.sleep(60)


def test_a_second_process_is_refused_and_a_sigkill_frees_the_run(tmp_path):
    receiving, sending = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=hold_the_lock, args=(tmp_path, sending))
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
