"""Files written to last and read with care: synced, hashed, bounded, never pickle.

Every new file is synced before its hash is returned. Only plain files are read, no links, and JSON up to
64 MiB. Every error in reading is a ValueError that names the file.
"""

import hashlib
import json
import os
import shutil
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAX_JSON = 64 * 2**20  # bytes; a larger file is refused unread
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


# -- writing


def write_file(path: Path, chunks: Iterable[Any]) -> dict[str, Any]:
    """Write and sync a new file; its size and sha256."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += memoryview(chunk).nbytes
        file.flush()
        os.fsync(file.fileno())
    return {"size": size, "sha256": digest.hexdigest()}


def safetensors_bytes(tensors: Mapping[str, Tensor]) -> Iterator[Any]:
    """A safetensors file. Not by `save_file`: hashed while it is written, and a full disk stays an OSError."""
    # Wide types first, so that every tensor begins at a multiple of its item.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header, end = {}, 0
    for name, tensor in ordered:
        offsets = [end, end := end + tensor.nbytes]
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text))
    yield text
    for _, tensor in ordered:
        yield tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def to_json(what: str, data: Any) -> bytes:
    try:
        text = json.dumps(data, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what} must be plain data that JSON can hold: {error}") from error
    if len(text) > MAX_JSON:
        raise ValueError(f"{what} must be at most {MAX_JSON:,} bytes of JSON, got {len(text):,} (store tensors)")
    return text


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def remove(path: Path) -> None:
    """Remove a folder, a file or a link, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# -- reading


def plain_size(path: Path) -> int:
    """The size of a plain file; links and devices are refused unopened."""
    try:
        facts = path.lstat()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(facts.st_mode):
        raise ValueError(f"{path}: not a plain file")
    return facts.st_size


def file_hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error


def read_json(path: Path) -> Any:
    size = plain_size(path)
    if size > MAX_JSON:
        raise ValueError(f"{path}: {size:,} bytes of JSON, more than the {MAX_JSON:,} that are read")
    try:
        with path.open("rb") as file:
            return json.loads(file.read(MAX_JSON))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
