"""What is saved is loaded, at any number of ranks; what does not fit is refused, and old ones go."""

import errno
import json
import struct
import tempfile
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from modepth.checkpoint import Piece, keep_newest, load_into, newest, open_step, save, whole
from modepth.files import DTYPES, MAX_JSON, remove
from modepth.run_folder import prepare_run, step_folder, steps
from tests.checkpoints import (
    MODEL,
    OPTIMIZER,
    assert_holds,
    assert_same,
    flip,
    names_in,
    save_seeded,
    tensors_of,
    truncate,
)

# -- what is saved is loaded


def test_what_is_saved_is_loaded(tmp_path):
    folder = save_seeded(tmp_path, 100)
    assert folder == tmp_path / "checkpoints" / "step-00000100"
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", MODEL, OPTIMIZER, "state.json"]
    assert_holds(newest(tmp_path), 100)
    assert_holds(open_step(tmp_path, 100), 100)


def test_the_files_are_those_of_safetensors(tmp_path):
    assert_same(load_file(save_seeded(tmp_path, 1) / MODEL), {k: t for k, t in tensors_of(1).items() if k != "no_rows"})


def test_every_tensor_in_a_file_begins_at_a_multiple_of_its_item(tmp_path):
    contents = (save_seeded(tmp_path, 1) / MODEL).read_bytes()
    (length,) = struct.unpack("<Q", contents[:8])
    for facts in json.loads(contents[8 : 8 + length]).values():
        assert (8 + length + facts["data_offsets"][0]) % DTYPES[facts["dtype"]].itemsize == 0


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


def test_a_harmed_checkpoint_never_costs_a_good_one(tmp_path):
    for step in (1, 2, 9):
        save_seeded(tmp_path, step)
    truncate(step_folder(tmp_path, 2) / MODEL)
    flip(step_folder(tmp_path, 9) / MODEL, place=-1)
    save_seeded(tmp_path, 3)
    keep_newest(tmp_path, 3, 2)
    assert steps(tmp_path) == [1, 2, 3, 9]
    keep_newest(tmp_path, 3, 1)
    assert steps(tmp_path) == [2, 3, 9]
    with pytest.warns(UserWarning, match="passing over step 9"):
        assert_holds(newest(tmp_path), 3)
