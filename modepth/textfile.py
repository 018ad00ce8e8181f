"""Small files that are replaced whole: after a kill or on a full disk, the one before is still there."""

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, data: bytes) -> None:
    """Write `data` beside the file, then put it in its place; an error names the file and leaves it as it was."""
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        if part.is_file():
            part.unlink()
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> OSError:
    """The same error, with the file that it is about: a full disk names none."""
    return OSError(error.errno, f"{path}: cannot be written: {error.strerror}")
