"""Checkpoints: named groups of tensors and a JSON state, atomic, hashed, without pickle.

    RUN/checkpoints/step-00000100/
        model-00000-of-00002.safetensors   what rank 0 of 2 wrote of the group "model"
        state.json                         the caller's plain data
        manifest.json                      size and sha256 of every file, the pieces of every tensor

A tensor is stored whole, or as ranges of rows (dimension 0) by several ranks, and read at any number of
ranks. A save fills a hidden folder beside, syncs it and renames it, so a killed process leaves a complete
checkpoint or a leftover. Knows nothing of models or training, nor of how ranks talk: `exchange` is handed in.
"""

import errno
import math
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modepth.files import CODES, DTYPES, read_json, remove, safetensors_bytes, sync_folder, to_json, write_file
from modepth.manifest import (
    Entries,
    Entry,
    Files,
    check_files,
    check_headers,
    check_tiled,
    every,
    num_rows,
    opened,
    read_manifest,
    read_tensor,
    write_manifest,
)
from modepth.run_folder import RunLock, step_folder, step_name, steps
from modepth.validation import check_count

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
GROUP = re.compile(r"[A-Za-z0-9_]+")
LEFTOVER = re.compile(r"\.(step-\d{8,})\.[0-9a-f-]+\.(part|old)")

Exchange = Callable[[Any], list[Any]]  # plain data of this rank -> that of all ranks in order; also a barrier
Stage = Callable[[str], None]
Kinds = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # the dtype and shape of each tensor


class Piece(NamedTuple):
    """The rows of a tensor of `shape` that begin at `offset`; a tensor without dimensions is one row."""

    tensor: Tensor
    shape: tuple[int, ...]
    offset: int


Pieces = Mapping[str, Mapping[str, Piece]]  # by group, then by the tensor's name


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Piece]:
    """Tensors that this rank holds entirely; if other ranks do too, the first writes them."""
    return {name: Piece(tensor, tuple(tensor.shape), 0) for name, tensor in tensors.items()}


def alone(message: Any) -> list[Any]:
    """The exchange of a single process."""
    return [message]


# -- saving


def save(
    run: str | Path,
    step: int,
    groups: Pieces,
    state: Mapping[str, Any],
    *,
    rank: int = 0,
    exchange: Exchange = alone,
    at_stage: Stage = lambda stage: None,
) -> Path:
    """Write a checkpoint, or replace that of the same step; all ranks call this, and all return or all raise.

    state      plain data, of which rank 0's is written
    at_stage   told what has just been done

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as run:
    ...     _ = save(run, 7, {"model": whole({"weight": torch.ones(2)})}, {"seed": 5})
    ...     found = newest(run)
    ...     print(found.step, found.state, found.load("model"))
    7 {'seed': 5} {'weight': tensor([1., 1.])}
    """
    plans = in_step(exchange, lambda: plan(step, groups, state))
    entries = merge(plans)
    final = step_folder(run, step)
    part = final.with_name(f".{final.name}.{plans[0]['token']}.part")
    needed = sum(math.prod(entry.shape) * DTYPES[entry.dtype].itemsize for _, _, entry in every(entries))
    try:
        in_step(exchange, lambda: make_folder(part, needed) if rank == 0 else None)
        at_stage("folder made")
        written = in_step(exchange, lambda: write_groups(part, groups, entries, rank, len(plans), at_stage))
        if rank == 0:
            in_step(exchange, lambda: finish(part, step, state, written, entries, at_stage))
        else:
            in_step(exchange, lambda: None)
    except BaseException as error:
        if rank == 0:
            with suppress(OSError):  # what cannot be removed now is swept at the next start
                remove(part)
                settle(part.with_suffix(".old"), final)
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            free = shutil.disk_usage(final.parent).free
            raise OSError(
                error.errno,
                f"{final}: no room ({os.strerror(error.errno)}): {needed:,} bytes needed and a little more, "
                f"{free:,} free (make room, or keep fewer checkpoints); the checkpoints before it are intact",
            ) from error
        raise
    return final


def in_step(exchange: Exchange, work: Callable[[], Any]) -> list[Any]:
    """Every rank's result of its work; if one fails all raise, so that none waits for ever."""
    result, failure = None, None
    try:
        result = work()
    except Exception as error:
        failure = error
    outcomes = exchange((result, failure and (str(failure), getattr(failure, "errno", None))))
    if failure is not None:
        raise failure
    for rank, (_, problem) in enumerate(outcomes):
        if problem is not None:
            message, number = f"rank {rank}: {problem[0]}", problem[1]
            raise ValueError(message) if number is None else OSError(number, message)
    return [result for result, _ in outcomes]


def plan(step: int, groups: Pieces, state: Mapping[str, Any]) -> dict[str, Any]:
    """What this rank holds, as plain data, checked before anything is written."""
    check_count("step", step, low=0)
    to_json("state", state)
    held = []
    for group, pieces in groups.items():
        if not GROUP.fullmatch(group):
            raise ValueError(f"the name of a group must be letters, digits and _, got {group!r}")
        for name, (tensor, shape, offset) in pieces.items():
            if name == "__metadata__":
                raise ValueError(f"{group}: safetensors keeps the name __metadata__ for itself: rename the tensor")
            if tensor.dtype not in CODES:
                known = ", ".join(str(dtype) for dtype in CODES)
                raise ValueError(f"{group} {name}: dtype must be one of {known}, got {tensor.dtype}")
            if tensor.dim() != len(shape) or tensor.shape[1:] != tuple(shape[1:]):
                raise ValueError(f"{group} {name}: {tuple(tensor.shape)} are not rows of {tuple(shape)}")
            held.append((group, name, list(shape), CODES[tensor.dtype], offset, num_rows(tensor.shape)))
    return {"step": step, "groups": list(groups), "held": held, "token": f"{os.getpid():x}-{secrets.token_hex(4)}"}


def merge(plans: list[dict[str, Any]]) -> Entries:
    """Whose file holds what: each piece once, with the first rank that has it, and none of no rows."""
    if len({each["step"] for each in plans}) > 1:
        raise ValueError(f"the ranks save different steps: {[each['step'] for each in plans]}")
    entries: Entries = {group: {} for each in plans for group in each["groups"]}
    for rank, each in enumerate(plans):
        for group, name, sizes, dtype, offset, rows in each["held"]:
            shape = tuple(sizes)
            entry = entries[group].setdefault(name, Entry(shape, dtype, ()))
            if (entry.shape, entry.dtype) != (shape, dtype):
                raise ValueError(
                    f"{group} {name}: rank {rank} has {dtype} {shape}, one before it {entry.dtype} {entry.shape}"
                )
            if rows and all((offset, rows) != piece[1:] for piece in entry.pieces):
                piece = (file_name(group, rank, len(plans)), offset, rows)
                entries[group][name] = entry._replace(pieces=(*entry.pieces, piece))
    for group, name, entry in every(entries):
        check_tiled(f"{group} {name}", entry)
    return entries


def make_folder(part: Path, needed: int) -> None:
    part.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(part.parent).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    part.mkdir()


def write_groups(part: Path, groups: Pieces, entries: Entries, rank: int, world_size: int, at_stage: Stage) -> Files:
    """This rank's files, one a group of which it has something to write; their sizes and hashes."""
    files = {}
    for group, pieces in groups.items():
        file = file_name(group, rank, world_size)
        stored = {name for name, entry in entries[group].items() if any(file == piece[0] for piece in entry.pieces)}
        if stored:
            files[file] = write_file(part / file, safetensors_bytes({name: pieces[name].tensor for name in stored}))
            at_stage(f"{group} written")
    return files


def finish(
    part: Path, step: int, state: Mapping[str, Any], written: list[Files], entries: Entries, at_stage: Stage
) -> None:
    """Rank 0's last part: the state, the manifest, and the name that makes the folder a checkpoint."""
    files = {name: facts for each in written for name, facts in each.items()}
    files["state.json"] = write_file(part / "state.json", [to_json("state", state)])
    at_stage("state written")
    write_manifest(part, step, len(written), files, entries)
    at_stage("manifest written")
    sync_folder(part)
    at_stage("folder synced")
    old, final = part.with_suffix(".old"), part.with_name(step_name(step))
    if os.path.lexists(final):
        os.rename(final, old)
        at_stage("old one set aside")
    os.rename(part, final)
    at_stage("renamed")
    sync_folder(final.parent)
    settle(old, final)
    at_stage("done")


def settle(old: Path, final: Path) -> None:
    """End a replacement: the folder set aside goes, or comes back if nothing took its name."""
    if os.path.lexists(final):
        remove(old)
    elif os.path.lexists(old):
        os.rename(old, final)


# -- reading


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint found complete and unharmed; tensors are read when asked for.

    entries   by group and name: shape, dtype and pieces of every tensor
    """

    folder: Path
    step: int
    world_size: int
    state: dict[str, Any]
    entries: Entries

    def load(self, group: str, held: Mapping[str, Piece] = MappingProxyType({})) -> dict[str, Tensor]:
        """All tensors of a group, whole, but of those in `held` only the rows of the piece, read alone.

        Whether the shapes agree is for `check_fit` to say, first.
        """
        rows: dict[str, tuple[int, int]] = {}
        for name in held.keys() & self.group(group).keys():
            tensor, _, offset = held[name]
            rows[name] = (offset, offset + num_rows(tensor.shape))
        with opened(self.folder) as stored:
            return {name: read_tensor(stored, name, each, rows.get(name)) for name, each in self.group(group).items()}

    def kinds(self, group: str) -> Kinds:
        return {name: (DTYPES[entry.dtype], entry.shape) for name, entry in self.group(group).items()}

    def load_rows(self, group: str, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop-1 of one tensor, reading no others."""
        entry = self.group(group).get(name)
        if entry is None:
            raise ValueError(f"{self.folder}: no tensor {name!r} in {group}")
        if not entry.shape or not 0 <= start <= stop <= entry.shape[0]:
            raise ValueError(f"{self.folder}: {group} {name} of shape {entry.shape} has no rows {start}..{stop - 1}")
        with opened(self.folder) as stored:
            return read_tensor(stored, name, entry, (start, stop))

    def group(self, group: str) -> dict[str, Entry]:
        if group not in self.entries:
            raise ValueError(f"{self.folder}: no group {group!r}, only {', '.join(self.entries) or 'none'}")
        return self.entries[group]


def newest(run: str | Path) -> Checkpoint | None:
    """The newest unharmed checkpoint, None if there is none; warns about each that it passes over."""
    for step in reversed(steps(run)):
        try:
            return open_step(run, step)
        except ValueError as error:
            warnings.warn(f"{error}; passing over step {step}", stacklevel=2)
    return None


def open_step(run: str | Path, step: int, *, hashes: bool = True) -> Checkpoint:
    """The checkpoint of one step, refused if anything is wrong with it; without `hashes` contents go unread."""
    folder = step_folder(run, step)
    if folder.is_symlink() or not folder.is_dir():
        raise ValueError(f"{folder}: {'not a folder' if os.path.lexists(folder) else 'no such checkpoint'}")
    world_size, files, entries = read_manifest(folder, step)
    check_files(folder, files, entries, hashes=hashes)
    check_headers(folder, entries)
    return Checkpoint(folder, step, world_size, read_json(folder / "state.json"), entries)


def load_into(expected: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> None:
    """Copy loaded tensors into a module's, once all names, shapes and dtypes are seen to agree."""
    check_fit(*({name: (each.dtype, tuple(each.shape)) for name, each in side.items()} for side in (expected, loaded)))
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(loaded[name])


def check_fit(expected: Kinds, found: Kinds) -> None:
    """Refuse tensors that are missing, unexpected or of another kind, listing them all."""
    wrong = [f"missing {name}" for name in expected if name not in found]
    wrong += [f"unexpected {name}" for name in found if name not in expected]
    for name in expected.keys() & found.keys():
        if expected[name] != found[name]:
            (dtype, shape), (want_dtype, want_shape) = found[name], expected[name]
            wrong.append(f"{name} is {dtype} {shape}, expected {want_dtype} {want_shape}")
    if wrong:
        raise ValueError(f"the tensors do not fit: {'; '.join(sorted(wrong))}")


# -- the folder of checkpoints


def keep_newest(run: str | Path, step: int, count: int) -> None:
    """Remove all but the newest `count` complete checkpoints up to `step`, the one just saved.

    Later ones stay: after falling back behind a harmed checkpoint, its number is the higher one.
    """
    check_count("count", count, low=1)
    kept = 0
    for each in reversed([each for each in steps(run) if each <= step]):
        try:
            folder = open_step(run, each, hashes=False).folder
        except ValueError:
            continue
        kept += 1
        if kept > count:
            # Renamed first: a kill in between leaves a leftover, not a harmed checkpoint.
            part = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
            os.rename(folder, part)
            remove(part)


def sweep_leftovers(lock: RunLock) -> None:
    """Clear away what killed saves left; only who holds the run may, so a save under way is safe."""
    if lock.file is None:
        raise ValueError(f"{lock.run}: hold the lock while sweeping: with RunLock(run) as lock")
    folder = lock.run / "checkpoints"
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        found = LEFTOVER.fullmatch(path.name)
        if found and found[2] == "old":
            settle(path, folder / found[1])
        elif found:
            remove(path)


def file_name(group: str, rank: int, world_size: int) -> str:
    return f"{group}-{rank:05d}-of-{world_size:05d}.safetensors"
