"""Token files, memory-mapped, and the batches that training and evaluation read from them.

A token file is a line `modepth tokens 1`, one line of JSON (vocab_size, dtype, count, num_bytes, sha256),
padded with spaces so that what follows starts at a multiple of 64 bytes, then `count` little-endian ids.

Batches are a pure function of (seed, step): nothing is saved, nothing is skipped on resume, and the order
is the same at any number of processes, of which each takes its rows. Text becomes token files in corpus.py.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from modepth.validation import check_choice, check_count

Dtype = Literal["uint16", "uint32"]
SPLITS = ("train", "validation", "test")
MAGIC = b"modepth tokens "
VERSION = 1
ALIGNMENT = 64
HEADER_BYTES = 512  # written; the ids start here
MAX_HEADER_BYTES = 4096  # read: a damaged file costs no more than this
CHUNK = 2**20  # ids at a time where a whole file is read


# -- writing


class TokenWriter:
    """Writes a token file as its documents come; the header's place is kept and filled at the end."""

    def __init__(self, path: str | Path, vocab_size: int):
        check_count("vocab_size", vocab_size, low=1)
        self.vocab_size = vocab_size
        self.dtype: Dtype = "uint16" if vocab_size <= 2**16 else "uint32"
        self.count = self.num_bytes = 0
        self.hash = hashlib.sha256()
        self.file = open(path, "wb")  # noqa: SIM115
        self.file.write(bytes(HEADER_BYTES))  # no magic yet: an unfinished file is not a token file

    def add(self, ids: Sequence[int], num_bytes: int) -> None:
        """Append `ids`, which stand for `num_bytes` bytes of text."""
        self.check(ids)
        payload = np.asarray(ids, dtype=little_endian(self.dtype)).tobytes()
        self.file.write(payload)
        self.hash.update(payload)
        self.count += len(ids)
        self.num_bytes += num_bytes

    def check(self, ids: Sequence[int]) -> None:
        """Raise at the first that is not a whole number in the vocabulary: a cast would wrap or cut it."""
        values = np.asarray(ids)
        whole = not len(ids) or values.dtype.kind in "iu"
        outside = (values < 0) | (values >= self.vocab_size) if whole else [not is_whole(one) for one in ids]
        if np.any(outside):
            place = int(np.argmax(outside))
            raise ValueError(
                f"{self.file.name}: ids must be whole numbers in 0..{self.vocab_size - 1}, got {ids[place]!r} "
                f"at token {self.count + place}"
            )

    def finish(self) -> None:
        """Write the header: only now is it a token file."""
        header = {
            "vocab_size": self.vocab_size,
            "dtype": self.dtype,
            "count": self.count,
            "num_bytes": self.num_bytes,
            "sha256": self.hash.hexdigest(),
        }
        line = MAGIC + f"{VERSION}\n{json.dumps(header)}".encode()
        assert len(line) < HEADER_BYTES
        self.file.seek(0)
        self.file.write(line.ljust(HEADER_BYTES - 1) + b"\n")
        self.close()

    def close(self) -> None:
        self.file.close()


def is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and abs(int(value)) < 2**63


def little_endian(dtype: Dtype) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    return np.dtype("<u2") if dtype == "uint16" else np.dtype("<u4")


# -- reading


@dataclass(frozen=True)
class TokenFile:
    """An open token file: its header, and its ids as a read-only memory map."""

    path: Path
    vocab_size: int
    dtype: Dtype
    count: int
    num_bytes: int
    sha256: str
    payload_offset: int
    ids: NDArray[np.uint16 | np.uint32] = field(repr=False, compare=False)


def open_tokens(path: str | Path) -> TokenFile:
    """Map a token file, checking all but its ids and hash: see `check_ids` and `verify_hash`."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            start = file.read(MAX_HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    magic, _, rest = start.partition(b"\n")
    check_magic(path, magic)
    line, newline, _ = rest.partition(b"\n")
    line_offset = len(magic) + 1
    offset = line_offset + len(line) + 1
    if not newline or offset % ALIGNMENT:
        raise ValueError(
            f"{path}: damaged header at byte {line_offset}: no line of JSON that ends at a multiple "
            f"of {ALIGNMENT} bytes, within {MAX_HEADER_BYTES}; prepare the data again"
        )
    try:
        header = read_header(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: damaged header at byte {line_offset}: {error}; prepare the data again") from error
    dtype, count = little_endian(header["dtype"]), header["count"]
    if size - offset != count * dtype.itemsize:
        raise ValueError(
            f"{path}: from byte {offset} on there should be {count} ids of {dtype.itemsize} bytes, "
            f"{count * dtype.itemsize} bytes in all, but there are {size - offset}; prepare the data again"
        )
    ids = np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,)).view(np.ndarray)  # slices faster
    return TokenFile(path, **header, payload_offset=offset, ids=ids)


def check_magic(path: Path, magic: bytes) -> None:
    version = magic.removeprefix(MAGIC)
    if not magic.startswith(MAGIC) or not version.isdigit() or int(version[:9]) < 1:
        raise ValueError(
            f"{path}: not a token file: byte 0 should begin {(MAGIC + b'1').decode()!r}, found {magic[:20]!r}"
        )
    if int(version[:9]) > VERSION:
        raise ValueError(
            f"{path}: version {int(version[:9])} at byte {len(MAGIC)} is newer than this modepth reads "
            f"({VERSION}): upgrade modepth"
        )


def read_header(line: bytes) -> dict:  # type: ignore[type-arg]
    header = json.loads(line)
    wanted = ["vocab_size", "dtype", "count", "num_bytes", "sha256"]
    if not isinstance(header, dict) or sorted(header) != sorted(wanted):
        raise ValueError(f"expected a JSON object of {', '.join(wanted)}")
    check_count("vocab_size", header["vocab_size"], low=1)
    check_choice("dtype", header["dtype"], Dtype)
    check_count("count", header["count"], low=1)
    check_count("num_bytes", header["num_bytes"], low=0)
    if not isinstance(header["sha256"], str) or len(header["sha256"]) != 64:
        raise ValueError(f"sha256 must be 64 hexadecimal digits, got {header['sha256']!r}")
    return header


def check_ids(token_file: TokenFile) -> None:
    """Raise at the first id that the vocabulary does not have."""
    for start, ids in chunks(token_file):
        if int(ids.max()) >= token_file.vocab_size:
            index = start + int(np.argmax(ids >= token_file.vocab_size))
            byte = token_file.payload_offset + index * ids.itemsize
            raise ValueError(
                f"{token_file.path}: id {token_file.ids[index]} at byte {byte} (token {index}) is not in "
                f"0..{token_file.vocab_size - 1}; prepare the data again"
            )


def verify_hash(token_file: TokenFile) -> None:
    """Raise if the ids are not those that were written."""
    found = hashlib.sha256()
    for _, ids in chunks(token_file):
        found.update(ids.tobytes())
    if found.hexdigest() != token_file.sha256:
        raise ValueError(
            f"{token_file.path}: from byte {token_file.payload_offset} on the sha256 is {found.hexdigest()}, "
            f"the header says {token_file.sha256}; prepare the data again"
        )


def chunks(token_file: TokenFile) -> Iterator[tuple[int, NDArray[np.uint16 | np.uint32]]]:
    for start in range(0, token_file.count, CHUNK):
        yield start, token_file.ids[start : start + CHUNK]


# -- batches


def num_windows(token_file: TokenFile, length: int) -> int:
    """How many windows of `length` tokens, each followed by one more to predict, do not overlap in their inputs."""
    check_count("length", length, low=1)
    number = (token_file.count - 1) // length
    if number < 1:
        raise ValueError(
            f"{token_file.path}: {token_file.count} tokens are fewer than one window of {length} and the token "
            "after it; prepare more text or train on shorter windows"
        )
    return number


def evaluation_windows(token_file: TokenFile, length: int) -> NDArray[np.int64]:
    """All windows, in order."""
    return np.arange(num_windows(token_file, length))


def spread_windows(token_file: TokenFile, length: int, count: int) -> NDArray[np.int64]:
    """At most `count` windows, evenly spread, so that they come from many documents."""
    number = num_windows(token_file, length)
    return np.unique(np.linspace(0, number - 1, min(count, number)).round().astype(np.int64))


def global_batch_rows(
    token_file: TokenFile, *, seed: int, step: int, batch_size: int, length: int
) -> NDArray[np.int64]:
    """The windows of the batch of `step`, of all processes together: every window once an epoch, without gaps."""
    for name, value, low in (("seed", seed, 0), ("step", step, 0), ("batch_size", batch_size, 1)):
        check_count(name, value, low=low)
    number = num_windows(token_file, length)
    epochs, places = np.divmod(np.arange(step * batch_size, (step + 1) * batch_size), number)
    rows = np.empty(batch_size, dtype=np.int64)
    for epoch in np.unique(epochs):
        rows[epochs == epoch] = window_order(seed, int(epoch), number)[places[epochs == epoch]]
    return rows


@lru_cache(maxsize=2)  # a batch may reach from one epoch into the next
def window_order(seed: int, epoch: int, number: int) -> NDArray[np.int64]:
    """A permutation of the windows drawn from (seed, epoch)."""
    # Raw bits, sorted: numpy keeps those of a bit generator for ever, but not what `permutation` makes of them.
    bits = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(epoch,))).random_raw(number)
    order = np.argsort(bits, kind="stable")
    order.setflags(write=False)
    return order


def rank_rows(rows: NDArray[np.int64], *, rank: int, world_size: int) -> NDArray[np.int64]:
    """The part of a global batch that process `rank` of `world_size` computes."""
    check_count("world_size", world_size, low=1)
    if rank not in range(world_size):
        raise ValueError(f"rank must be in 0..{world_size - 1}, got {rank!r}")
    if len(rows) % world_size:
        raise ValueError(f"a batch of {len(rows)} rows cannot be shared by {world_size} processes: use a multiple")
    share = len(rows) // world_size
    return rows[rank * share : (rank + 1) * share]


def read_windows(token_file: TokenFile, windows: Sequence[int] | NDArray[np.int64], length: int) -> torch.Tensor:
    """Tokens (rows, length + 1) of the windows: inputs are all but the last column, targets all but the first."""
    number = num_windows(token_file, length)
    tokens = np.empty((len(windows), length + 1), dtype=np.int64)
    for row, window in enumerate(windows):
        if not 0 <= window < number:
            raise ValueError(f"{token_file.path}: window must be in 0..{number - 1}, got {window}")
        start = int(window) * length
        tokens[row] = token_file.ids[start : start + length + 1]
    return torch.from_numpy(tokens)
