"""Token files and batches: what is written is read, damage is named with its place, the order is a pure function."""

import hashlib
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modepth import data
from modepth.data import (
    TokenWriter,
    check_ids,
    evaluation_windows,
    global_batch_rows,
    open_tokens,
    rank_rows,
    read_windows,
    spread_windows,
    verify_hash,
)


def write_tokens(path, ids, *, vocab_size=257, num_bytes=0):
    writer = TokenWriter(path, vocab_size)
    writer.add(ids, num_bytes)
    writer.finish()
    return open_tokens(path)


@pytest.fixture
def tokens(tmp_path):
    """101 tokens: 14 windows of 7, and two tokens over."""
    return write_tokens(tmp_path / "train.tokens", list(range(101)), num_bytes=202)


# -- files


@given(
    vocab_size=st.sampled_from([2, 257, 2**16, 2**16 + 1, 2**31]),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    draw=st.data(),
)
def test_what_is_written_is_read(tmp_path_factory, vocab_size, lengths, draw):
    path = tmp_path_factory.mktemp("tokens") / "x.tokens"
    pieces = [draw.draw(st.lists(st.integers(0, vocab_size - 1), min_size=n, max_size=n)) for n in lengths]
    writer = TokenWriter(path, vocab_size)
    for piece in pieces:
        writer.add(piece, 3)
    writer.finish()
    tokens = open_tokens(path)
    assert tokens.ids.tolist() == [one for piece in pieces for one in piece]
    assert (tokens.vocab_size, tokens.count, tokens.num_bytes) == (vocab_size, sum(lengths), 3 * len(pieces))
    check_ids(tokens)
    verify_hash(tokens)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_the_format_is_the_one_documented(tmp_path, vocab_size, dtype):
    path = tmp_path / "x.tokens"
    write_tokens(path, [1, 2, 258, vocab_size - 1], vocab_size=vocab_size, num_bytes=5)
    magic, header, payload = path.read_bytes().split(b"\n", maxsplit=2)
    assert magic == b"modepth tokens 1"
    assert (len(magic) + len(header) + 2) % 64 == 0
    assert header.rstrip(b" ").endswith(b"}")
    size = {"uint16": 2, "uint32": 4}[dtype]
    assert payload == b"".join(i.to_bytes(size, "little") for i in (1, 2, 258, vocab_size - 1))
    fields = json.loads(header)
    assert fields.pop("sha256") == hashlib.sha256(payload).hexdigest()
    assert fields == {"vocab_size": vocab_size, "dtype": dtype, "count": 4, "num_bytes": 5}


def test_a_token_file_is_mapped_not_loaded(tokens):
    assert isinstance(tokens.ids.base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        tokens.ids[0] = 1


def test_a_file_that_was_not_finished_is_no_token_file(tmp_path):
    writer = TokenWriter(tmp_path / "x.tokens", 257)
    writer.add([1, 2, 3], 3)
    writer.close()
    with pytest.raises(ValueError, match=r"x.tokens: not a token file: byte 0"):
        open_tokens(tmp_path / "x.tokens")


@pytest.mark.parametrize(
    ("ids", "shown", "place"),
    [
        ([1, 2, 257], "257", 5),
        ([1, -1], "-1", 4),
        ([2.0], "2.0", 3),
        ([1, 2, 2.5], "2.5", 5),
        ([True], "True", 3),
        ([1, 2**70], str(2**70), 4),
        (["7"], "'7'", 3),
        (np.array([3, 65_537]), "65537", 4),
    ],
)
def test_an_id_that_is_not_in_the_vocabulary_is_not_written(tmp_path, ids, shown, place):
    writer = TokenWriter(tmp_path / "x.tokens", 257)
    writer.add([0, 1, 256], 3)
    writer.add([], 0)
    with pytest.raises(
        ValueError,
        match=rf"x\.tokens: ids must be whole numbers in 0\.\.256, got (np.int64\()?{shown}\)? at token {place}$",
    ):
        writer.add(ids, 3)
    writer.finish()
    assert open_tokens(tmp_path / "x.tokens").ids.tolist() == [0, 1, 256]


# -- damage


def header_with(**changes):
    fields = {"vocab_size": 257, "dtype": "uint16", "count": 101, "num_bytes": 202, "sha256": "0" * 64}
    fields |= changes
    text = json.dumps({name: value for name, value in fields.items() if value != "absent"})
    return lambda raw: b"modepth tokens 1\n" + text.encode().ljust(512 - 18) + b"\n" + raw[512:]


DAMAGE = {
    "empty": (lambda raw: b"", "not a token file: byte 0"),
    "text": (lambda raw: b"once upon a time\n" + raw, "not a token file: byte 0 .*once upon"),
    "version 0": (lambda raw: raw.replace(b"tokens 1", b"tokens 0", 1), "not a token file: byte 0"),
    "newer": (lambda raw: raw.replace(b"tokens 1", b"tokens 2", 1), "version 2 at byte 15 is newer .* upgrade modepth"),
    "not JSON": (lambda raw: raw.replace(b"{", b"(", 1), "damaged header at byte 17: Expecting value"),
    "a list": (
        lambda raw: raw[:17] + b"[1]".ljust(494) + raw[511:],
        "damaged header at byte 17: expected a JSON object",
    ),
    "deep": (lambda raw: raw[:17] + b"[" * 3000 + b" " * 54 + b"\n", "damaged header at byte 17"),
    "endless": (lambda raw: raw[:17] + b" " * 10**6, "damaged header at byte 17: no line of JSON .* within 4096"),
    "unaligned": (lambda raw: raw.replace(b" \n", b"\n", 1), "damaged header at byte 17: no line of JSON"),
    "no count": (header_with(count="absent"), "damaged header at byte 17: expected a JSON object of vocab_size"),
    "unknown field": (header_with(more=1), "damaged header at byte 17: expected a JSON object"),
    "no tokens": (header_with(count=0), "damaged header at byte 17: count must be a whole number >= 1, got 0"),
    "huge": (header_with(count=10**18), "from byte 512 on there should be 1000000000000000000 ids"),
    "dtype": (header_with(dtype="float16"), "damaged header at byte 17: dtype must be one of uint16, uint32"),
    "hash": (header_with(sha256=None), "damaged header at byte 17: sha256 must be"),
    "odd size": (lambda raw: raw[:-1], "from byte 512 on there should be 101 ids of 2 bytes, 202 .* there are 201"),
    "cut": (lambda raw: raw[:600], "from byte 512 on there should be 101 ids of 2 bytes, 202 .* there are 88"),
    "longer": (lambda raw: raw + b"\0\0", "from byte 512 .* there are 204; prepare the data again"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_an_error_that_names_file_and_byte(tokens, name):
    damage, message = DAMAGE[name]
    tokens.path.write_bytes(damage(tokens.path.read_bytes()))
    with pytest.raises(ValueError, match=f"train.tokens: {message}"):
        open_tokens(tokens.path)


@given(place=st.integers(0, 713), value=st.integers(0, 255), keep=st.integers(0, 714))
def test_any_changed_byte_or_cut_is_noticed_or_leaves_the_ids_as_they_were(tmp_path_factory, place, value, keep):
    path = tmp_path_factory.mktemp("tokens") / "x.tokens"
    ids = write_tokens(path, list(range(101)), num_bytes=202).ids.tolist()
    raw = bytearray(path.read_bytes())
    assert len(raw) == 714
    raw[place] = value
    path.write_bytes(raw[:keep])
    try:
        tokens = open_tokens(path)
        verify_hash(tokens)
        check_ids(tokens)
    except ValueError:
        return
    assert tokens.ids.tolist() == ids


def test_a_missing_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ValueError, match=r"none.tokens: cannot be read: No such file"):
        open_tokens(tmp_path / "none.tokens")


@pytest.mark.parametrize("place", [0, 5, 100])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_an_id_outside_the_vocabulary_is_found_at_its_byte(tokens, monkeypatch, place, chunk):
    monkeypatch.setattr(data, "CHUNK", chunk)
    check_ids(tokens)
    raw = bytearray(tokens.path.read_bytes())
    raw[512 + 2 * place : 514 + 2 * place] = (257).to_bytes(2, "little")
    tokens.path.write_bytes(raw)
    with pytest.raises(ValueError, match=rf"train.tokens: id 257 at byte {512 + 2 * place} .* not in 0..256"):
        check_ids(open_tokens(tokens.path))


def test_a_changed_id_changes_the_hash(tokens):
    verify_hash(tokens)
    raw = bytearray(tokens.path.read_bytes())
    raw[-2] ^= 1
    tokens.path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"train.tokens: from byte 512 on the sha256 is"):
        verify_hash(open_tokens(tokens.path))


# -- batches


def samples(tokens, *, steps, batch_size, seed=0, length=7):
    return [
        row
        for step in range(steps)
        for row in global_batch_rows(tokens, seed=seed, step=step, batch_size=batch_size, length=length).tolist()
    ]


@pytest.mark.parametrize("batch_size", [1, 3, 14, 40])
def test_every_epoch_visits_every_window_once_without_a_gap(tokens, batch_size):
    visited = samples(tokens, steps=-(-4 * 14 // batch_size), batch_size=batch_size)
    epochs = [visited[start : start + 14] for start in range(0, 4 * 14, 14)]
    assert all(sorted(epoch) == list(range(14)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4  # and each in an order of its own


@given(seed=st.integers(0, 2**64), batch_size=st.integers(1, 20), start=st.integers(0, 9))
def test_the_order_does_not_depend_on_batch_size_or_where_one_starts(tmp_path_factory, seed, batch_size, start):
    tokens = write_tokens(tmp_path_factory.mktemp("tokens") / "x.tokens", list(range(101)))
    one_by_one = samples(tokens, seed=seed, steps=200, batch_size=1)
    rows = global_batch_rows(tokens, seed=seed, step=start, batch_size=batch_size, length=7).tolist()
    assert rows == one_by_one[start * batch_size : (start + 1) * batch_size]


def test_seeds_differ(tokens):
    assert samples(tokens, seed=1, steps=1, batch_size=14) != samples(tokens, seed=2, steps=1, batch_size=14)


def test_the_order_is_the_one_of_earlier_versions(tokens):
    """A resumed run must go on where it was, whatever was upgraded meanwhile."""
    first, second = [8, 4, 9, 13, 12, 7, 10, 1, 2, 0, 3, 5, 6, 11], [5, 6, 12, 11, 9, 7, 3, 8, 0, 4, 1, 2, 10, 13]
    assert samples(tokens, seed=5, steps=2, batch_size=14) == first + second


@pytest.mark.parametrize("step", [0, 1, 7])
def test_the_slices_of_any_world_size_are_the_same_batch(tokens, step):
    rows = global_batch_rows(tokens, seed=3, step=step, batch_size=8, length=7)
    for world_size in (1, 2, 4, 8):
        slices = [rank_rows(rows, rank=rank, world_size=world_size) for rank in range(world_size)]
        assert {len(part) for part in slices} == {8 // world_size}
        assert np.concatenate(slices).tolist() == rows.tolist()


def test_windows_hold_the_tokens_that_a_loop_would_read(tokens):
    windows = [13, 0, 5]
    expected = [[tokens.ids[window * 7 + place] for place in range(8)] for window in windows]
    found = read_windows(tokens, windows, 7)
    assert found.dtype == torch.int64
    assert found.tolist() == expected


@given(count=st.integers(2, 60), length=st.integers(1, 70))
def test_evaluation_predicts_every_token_once_but_the_first_and_an_incomplete_rest(tmp_path_factory, count, length):
    tokens = write_tokens(tmp_path_factory.mktemp("tokens") / "x.tokens", list(range(count)))
    if count <= length:
        with pytest.raises(ValueError, match=f"x.tokens: {count} tokens are fewer than one window of {length}"):
            evaluation_windows(tokens, length)
        return
    targets = read_windows(tokens, evaluation_windows(tokens, length), length)[:, 1:].flatten().tolist()
    assert targets == list(range(1, 1 + (count - 1) // length * length))


def test_impossible_batches_are_errors_with_the_range(tokens):
    with pytest.raises(ValueError, match=r"train.tokens: 101 tokens are fewer than one window of 101"):
        global_batch_rows(tokens, seed=0, step=0, batch_size=1, length=101)
    with pytest.raises(ValueError, match=r"step must be a whole number >= 0, got -1"):
        global_batch_rows(tokens, seed=0, step=-1, batch_size=1, length=7)
    with pytest.raises(ValueError, match=r"window must be in 0..13, got 14"):
        read_windows(tokens, [14], 7)
    with pytest.raises(ValueError, match=r"window must be in 0..13, got -1"):
        read_windows(tokens, [-1], 7)
    rows = global_batch_rows(tokens, seed=0, step=0, batch_size=6, length=7)
    with pytest.raises(ValueError, match=r"6 rows cannot be shared by 4 processes"):
        rank_rows(rows, rank=0, world_size=4)
    with pytest.raises(ValueError, match=r"rank must be in 0..1, got 2"):
        rank_rows(rows, rank=2, world_size=2)


@pytest.mark.parametrize(
    ("count", "expected"), [(1, [0]), (3, [0, 4, 9]), (10, list(range(10))), (99, list(range(10)))]
)
def test_spread_windows_reach_from_the_first_to_the_last(tmp_path, count, expected):
    assert spread_windows(write_tokens(tmp_path / "some.tokens", [1] * 51), 5, count).tolist() == expected
