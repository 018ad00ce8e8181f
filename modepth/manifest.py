"""What a checkpoint's folder holds: the manifest, and the tensors in the files that it lists.

The manifest names every file with its size and sha256, and for every tensor its shape, dtype and pieces.
It is read as if a stranger had written it: plain names in one folder, sizes that the files bear out.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from modepth.files import DTYPES, file_hash, plain_size, read_json, to_json, write_file
from modepth.validation import check_count

FORMAT = 1  # a manifest with a higher number is refused, not half understood
FILE = re.compile(r"\w+-\d{5,}-of-\d{5,}\.safetensors", re.ASCII)


class Entry(NamedTuple):
    """One tensor: its shape, safetensors' word for its dtype, and pieces of (file, first row, number of rows)."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[tuple[str, int, int], ...]


Entries = dict[str, dict[str, Entry]]  # by group, then by the tensor's name
Files = dict[str, dict[str, Any]]  # the size and sha256 of each


def every(entries: Entries) -> Iterator[tuple[str, str, Entry]]:
    return ((group, name, entry) for group, tensors in entries.items() for name, entry in tensors.items())


def num_rows(shape: tuple[int, ...]) -> int:
    """How many rows there are to share out; a tensor without dimensions is one."""
    return shape[0] if shape else 1


# -- the manifest


def write_manifest(folder: Path, step: int, world_size: int, files: Files, entries: Entries) -> None:
    groups = {group: {name: entry._asdict() for name, entry in tensors.items()} for group, tensors in entries.items()}
    manifest = {"format": FORMAT, "step": step, "world_size": world_size, "files": files, "groups": groups}
    write_file(folder / "manifest.json", [to_json("the manifest", {"sha256": seal(manifest), **manifest})])


def read_manifest(folder: Path, step: int) -> tuple[int, Files, Entries]:
    """The world size, files and tensors of a checkpoint, once the manifest is seen to be sound."""
    path = folder / "manifest.json"
    manifest = read_json(path)
    try:
        check_seal(manifest, step)
        check_count("world_size", manifest["world_size"], low=1)
        entries: Entries = {group: {} for group in manifest["groups"]}
        for group, tensors in manifest["groups"].items():
            for name, facts in tensors.items():
                pieces = tuple((file, offset, rows) for file, offset, rows in facts["pieces"])
                entries[group][name] = Entry(tuple(facts["shape"]), facts["dtype"], pieces)
                check_entry(f"{group} {name}", entries[group][name])
        files = {name: {"size": facts["size"], "sha256": facts["sha256"]} for name, facts in manifest["files"].items()}
        return manifest["world_size"], files, entries
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except (AttributeError, KeyError, RecursionError, TypeError) as error:
        raise ValueError(f"{path}: not a manifest of modepth: {error!r}") from error


def seal(manifest: dict[str, Any]) -> str:
    """A hash of what the manifest says, whatever the order and spacing of its text."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def check_seal(manifest: dict[str, Any], step: int) -> None:
    if manifest["format"] > FORMAT:
        raise ValueError(f"format {manifest['format']} is newer than this modepth reads ({FORMAT}): upgrade modepth")
    if manifest["sha256"] != seal({key: value for key, value in manifest.items() if key != "sha256"}):
        raise ValueError("does not match its own sha256")
    if manifest["step"] != step:
        raise ValueError(f"is of step {manifest['step']}")


def check_entry(what: str, entry: Entry) -> None:
    for size in entry.shape:
        check_count(f"{what}: shape", size, low=0)
    if entry.dtype not in DTYPES:
        raise ValueError(f"{what}: dtype must be one of {', '.join(DTYPES)}, got {entry.dtype!r}")
    for file, offset, rows in entry.pieces:
        if not FILE.fullmatch(file):
            raise ValueError(f"{what}: must be in a plainly named safetensors file, got {file!r}")
        check_count(f"{what}: offset", offset, low=0)
        check_count(f"{what}: rows", rows, low=1)
    check_tiled(what, entry)


def check_tiled(what: str, entry: Entry) -> None:
    """The pieces hold every row once."""
    end = 0
    for _, offset, rows in sorted(entry.pieces, key=lambda piece: piece[1]):
        if offset != end:
            raise ValueError(f"{what}: a piece begins at row {offset}, expected row {end}")
        end += rows
    if end != num_rows(entry.shape):
        raise ValueError(f"{what}: the pieces hold {end} rows of {num_rows(entry.shape)}")


# -- the files


def check_files(folder: Path, files: Files, entries: Entries, *, hashes: bool) -> None:
    """The folder holds the files that the manifest lists and the tensors need, unharmed, and no others."""
    wanted = {"state.json", *(file for _, _, entry in every(entries) for file, _, _ in entry.pieces)}
    present = {path.name for path in folder.iterdir()} - {"manifest.json"}
    for name in sorted(present | wanted | files.keys()):
        path = folder / name
        if name not in wanted or name not in files:
            raise ValueError(f"{path}: not a file of this checkpoint (remove it, or mend the checkpoint)")
        size = plain_size(path)
        if size != files[name]["size"]:
            raise ValueError(f"{path}: {size} bytes instead of {files[name]['size']}")
        if hashes and file_hash(path) != files[name]["sha256"]:
            raise ValueError(f"{path}: contents changed since they were saved: another sha256")


def check_headers(folder: Path, entries: Entries) -> None:
    """The files hold the pieces that the manifest says, each once, so loading takes no more memory than disk."""
    pieces: dict[str, dict[str, tuple[list[int], str]]] = {}
    for _, name, entry in every(entries):
        for file, _, rows in entry.pieces:
            if name in pieces.setdefault(file, {}):
                raise ValueError(f"{folder / file}: {name} is used twice")
            pieces[file][name] = ([rows, *entry.shape[1:]] if entry.shape else [], entry.dtype)
    with opened(folder) as stored:
        for file, expected in pieces.items():
            slices = {name: stored(file).get_slice(name) for name in stored(file).keys()}  # noqa: SIM118
            found = {name: (each.get_shape(), each.get_dtype()) for name, each in slices.items()}
            wrong = sorted(name for name in found | expected if found.get(name) != expected.get(name))
            if wrong:
                raise ValueError(f"{folder / file}: differs from the manifest in {', '.join(wrong)}")


@contextmanager
def opened(folder: Path) -> Iterator[Callable[[str], Any]]:
    """A function from the name of a safetensors file to the file, opened once."""
    with ExitStack() as stack:

        @cache
        def stored(file: str) -> Any:
            try:
                return stack.enter_context(safe_open(folder / file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{folder / file}: cannot be read: {error}") from error

        yield stored


def read_tensor(stored: Callable[[str], Any], name: str, entry: Entry, rows: tuple[int, int] | None = None) -> Tensor:
    """All of a tensor, or the rows from one to before another, in memory of its own."""
    if not entry.shape:
        return stored(entry.pieces[0][0]).get_tensor(name).clone()
    start, stop = rows or (0, entry.shape[0])
    out = torch.empty((stop - start, *entry.shape[1:]), dtype=DTYPES[entry.dtype])
    for file, offset, length in entry.pieces:
        low, high = max(start, offset), min(stop, offset + length)
        if low < high and out.numel():
            out[low - start : high - start] = stored(file).get_slice(name)[low - offset : high - offset]
    return out
