"""A corpus: its sources, the documents in them, and which split each document belongs to.

Documents stream: none is longer than `document_bytes`, and one is held at a time. The split of a document
depends on its name alone, so adding a file moves no other one, and the order of sources does not matter.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from modepth.validation import check_count, is_number

STDLIB = "stdlib"
# Tests and installed packages are not the library; config-* and _sysconfigdata* tell of one machine.
STDLIB_WITHOUT = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
STDLIB_WITHOUT_PREFIXES = ("config-", "_sysconfigdata")
LONGEST_CHARACTER = 4  # bytes of UTF-8


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Which text, how it is cut into documents, and what share of them is held back.

    sources         files, folders (all text files in them, but hidden ones and links), or the word `stdlib`
    validation      share of documents for tuning and calibration
    test            share of documents for published numbers
    document_bytes  a longer file is cut into documents of at most this size, after a line where possible
    """

    sources: tuple[str, ...]
    validation: float = 0.05
    test: float = 0.05
    document_bytes: int = 2**20

    def __post_init__(self) -> None:
        for name, share in (("validation", self.validation), ("test", self.test)):
            if not is_number(share) or not 0 < share < 1:
                raise ValueError(f"{name} must be a share of the documents in (0, 1), got {share!r}")
        if self.validation + self.test >= 1:
            raise ValueError(
                f"validation and test must leave documents to train on, got {self.validation} + {self.test}"
            )
        check_count("document_bytes", self.document_bytes, low=LONGEST_CHARACTER)
        if not self.sources:
            raise ValueError("sources must name at least one file, one folder or stdlib")
        check_no_overlap(self.sources)


class File(NamedTuple):
    name: str  # relative to its source
    path: Path
    named: bool  # by the user, rather than found in a folder


class Document(NamedTuple):
    name: str
    split: str
    text: str
    num_read: int  # bytes of the file
    num_replaced: int  # characters that stand for what was not UTF-8


# -- sources


def source_path(source: str) -> Path:
    return Path(sysconfig.get_path("stdlib") if source == STDLIB else source)


def check_no_overlap(sources: tuple[str, ...]) -> None:
    """Each source exists and none is part of another: one text under two names could be in two splits."""
    seen: dict[Path, str] = {}
    for source in sources:
        path = source_path(source)
        if not path.is_file() and not path.is_dir():
            problem = "is neither a file nor a folder" if path.exists() else "does not exist"
            raise ValueError(f"{source}: {problem}; give text files, folders of them, or the word {STDLIB}")
        path = path.resolve()
        for other, name in seen.items():
            if path == other or path in other.parents or other in path.parents:
                raise ValueError(f"{source} and {name} share text, which would be read twice: drop one")
        seen[path] = source


def list_files(sources: tuple[str, ...]) -> Iterator[File]:
    """Files in the order of the sources, those of a folder by name."""
    for source in sources:
        root = source_path(source)
        if root.is_dir():
            for path in walk(root, source == STDLIB):
                yield File(path.relative_to(root).as_posix(), path, named=False)
        else:
            yield File(root.name, root, named=True)


def walk(folder: Path, stdlib: bool) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise ValueError(f"{folder}: cannot be read: {error.strerror}") from error
    for entry in entries:
        if entry.name.startswith(".") or (stdlib and not_in_stdlib(entry.name)):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from walk(Path(entry.path), stdlib)
        elif entry.is_file(follow_symlinks=False) and (entry.name.endswith(".py") or not stdlib):
            yield Path(entry.path)


def not_in_stdlib(name: str) -> bool:
    return name in STDLIB_WITHOUT or name.startswith(STDLIB_WITHOUT_PREFIXES)


# -- documents


def documents(corpus: Corpus) -> Iterator[Document]:
    for file in list_files(corpus.sources):
        yield from read_documents(file, corpus)


def read_documents(file: File, corpus: Corpus) -> Iterator[Document]:
    """The documents of one file: none if it is empty, or found in a folder and not text."""
    try:
        with file.path.open("rb") as opened:
            if not file.named and looks_binary(opened):
                return
            for index, raw in enumerate(cut(opened, corpus.document_bytes)):
                name = f"{file.name}#{index}" if index else file.name
                text = raw.decode("utf-8", "replace")
                num_replaced = text.count("\ufffd") - raw.count("\ufffd".encode())
                yield Document(name, split_of(name, corpus), text, len(raw), num_replaced)
    except OSError as error:
        raise ValueError(f"{file.path}: cannot be read: {error.strerror}") from error


def looks_binary(file: BinaryIO) -> bool:
    """As git guesses: a NUL near the start."""
    start = file.read(8000)
    file.seek(0)
    return b"\0" in start


def cut(file: BinaryIO, limit: int) -> Iterator[bytes]:
    """A file in pieces of at most `limit` bytes, each ending after a line, else between two characters."""
    rest = file.read(limit + 1)
    while len(rest) > limit:
        end = rest.rfind(b"\n", 0, limit) + 1 or character_start(rest, limit)
        yield rest[:end]
        rest = rest[end:] + file.read(limit + 1 - len(rest) + end)
    if rest:
        yield rest


def character_start(raw: bytes, end: int) -> int:
    """The last start of a character at or shortly before `end`."""
    for start in range(end, end - LONGEST_CHARACTER, -1):
        if raw[start] & 0xC0 != 0x80:
            return start
    return end  # not UTF-8 here


def split_of(name: str, corpus: Corpus) -> str:
    """Test takes the low end of a hash and validation the high, so a change of one share leaves the other alone."""
    place = name_fraction(name)
    if place < corpus.test:
        return "test"
    return "validation" if place >= 1 - corpus.validation else "train"


def name_fraction(name: str, salt: bytes = b"") -> float:
    """A number in [0, 1) that depends on the name alone."""
    digest = hashlib.sha256(salt + name.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48
