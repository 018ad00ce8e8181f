"""Text to token files: survey a corpus, train or read its tokenizer, encode every document, all or nothing.

The corpus is read twice, three times where a BPE is trained, and never held in memory. Nothing appears under
the output's name before it is complete; after a kill, a hidden folder `.OUT.*.partial` may stay beside it.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from modepth.corpus import Corpus, documents, list_files, name_fraction, read_documents, source_path
from modepth.data import SPLITS, TokenWriter, check_ids, open_tokens, verify_hash
from modepth.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    bpe_size,
    load_tokenizer,
    read_text,
    read_tokenizer,
    save_tokenizer,
    train_bpe,
)

FORMAT = 1  # of data.json
BPE_SAMPLE_BYTES = 2**24  # of training text: the trainer holds its distinct words, at up to 100 bytes a byte
OUTPUTS = {f"{split}.tokens" for split in SPLITS} | {"tokenizer.json", "tokenizer_config.json", "data.json"}

Report = Callable[[str, int, int | None], None]  # stage, bytes so far, bytes in all where known
Summary = dict[str, Any]


def prepare(
    corpus: Corpus,
    out: str | Path,
    *,
    tokenizer: str = "bpe:2048",
    end_of_text: str | None = None,
    overwrite: bool = False,
    report: Report = lambda stage, done, total: None,
) -> Summary:
    """Write the token files of a corpus, its tokenizer and data.json into the folder `out`, all or nothing.

    `tokenizer` is `bytes`, `bpe:N` or a tokenizer.json; `end_of_text` names that file's token for the end.
    """
    out = Path(out).resolve()
    check_out(out, corpus, overwrite)
    chosen = fixed_tokenizer(tokenizer, end_of_text)
    surveyed = survey(corpus, report)
    with written_whole(out, overwrite) as folder:
        if chosen is None:
            texts = training_texts(corpus, surveyed, report)
            chosen = train_bpe(texts, bpe_size(tokenizer) or 0)
        save_tokenizer(chosen, folder)
        summary: Summary = {
            "format": FORMAT,
            "sources": list(corpus.sources),
            "shares": {"validation": corpus.validation, "test": corpus.test},
            "document_bytes": corpus.document_bytes,
            "tokenizer": tokenizer,
            "vocab_size": chosen.vocab_size,
            "skipped_files": surveyed["skipped_files"],
            **write_splits(corpus, folder, chosen, surveyed["read"], report),
        }
        (folder / "data.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def fixed_tokenizer(name: str, end_of_text: str | None) -> Tokenizer | None:
    """A tokenizer that needs no training, None where a BPE is to be trained."""
    to_train = bpe_size(name) is not None
    if end_of_text is not None and (to_train or name == "bytes"):
        raise ValueError(f"end_of_text is for a tokenizer.json; {name} has its own, got {end_of_text!r}: leave it out")
    if to_train:
        return None
    if name == "bytes":
        return ByteTokenizer()
    if not Path(name).is_file():
        raise ValueError(f"tokenizer must be bytes, bpe:N (for example bpe:2048) or a tokenizer.json, got {name!r}")
    return read_tokenizer(name, end_of_text=end_of_text)


def survey(corpus: Corpus, report: Report) -> dict[str, int]:
    """Read everything once: bytes in all and for training, files that give no text; an empty split raises."""
    num_documents = dict.fromkeys(SPLITS, 0)
    total = {"read": 0, "train": 0, "skipped_files": 0}
    for file in list_files(corpus.sources):
        before = total["read"]
        for document in read_documents(file, corpus):
            num_documents[document.split] += 1
            total["read"] += document.num_read
            total["train"] += document.num_read if document.split == "train" else 0
            report("reading", total["read"], None)
        total["skipped_files"] += total["read"] == before
    found = sum(num_documents.values())
    if not found:
        raise ValueError(
            f"no text in {', '.join(corpus.sources)} (empty files, and hidden files, links and binary files "
            "of folders, are left out)"
        )
    for split, number in num_documents.items():
        if not number:
            shares = "a smaller" if split == "train" else "a larger"
            name = "validation or test share" if split == "train" else f"{split} share (--{split})"
            raise ValueError(
                f"the {split} split would be empty: none of {found} documents falls into it; give more files, "
                f"{shares} {name}, or cut files smaller (--document-bytes, now {corpus.document_bytes})"
            )
    return total


def training_texts(corpus: Corpus, surveyed: dict[str, int], report: Report) -> Iterator[str]:
    """Documents of the train split, or a sample of about BPE_SAMPLE_BYTES of them, chosen by name."""
    share, done = BPE_SAMPLE_BYTES / surveyed["train"], 0
    for document in documents(corpus):
        done += document.num_read
        report("training BPE", done, surveyed["read"])
        if document.split == "train" and name_fraction(document.name, salt=b"bpe:") < share:
            yield document.text


def write_splits(corpus: Corpus, folder: Path, tokenizer: Tokenizer, total: int, report: Report) -> dict[str, Any]:
    """Encode every document into the token file of its split; what there is of each."""
    corpus_hash, num_replaced, done = hashlib.sha256(), 0, 0
    num_documents = dict.fromkeys(SPLITS, 0)
    with ExitStack() as open_files:
        writers = {
            split: open_files.enter_context(closing(TokenWriter(folder / f"{split}.tokens", tokenizer.vocab_size)))
            for split in SPLITS
        }
        for document in documents(corpus):
            text = document.text.encode("utf-8")
            ids = tokenizer.encode(document.text)
            ids.append(tokenizer.end_of_text)
            writers[document.split].add(ids, len(text))
            corpus_hash.update(json.dumps([document.name, len(text)]).encode() + text)
            num_documents[document.split] += 1
            num_replaced += document.num_replaced
            done += document.num_read
            report("tokenizing", done, total)
        for writer in writers.values():
            writer.finish()
    return {
        "corpus_sha256": corpus_hash.hexdigest(),
        "replaced_characters": num_replaced,
        "splits": {
            split: {"documents": num_documents[split], "bytes": writer.num_bytes, "tokens": writer.count}
            for split, writer in writers.items()
        },
    }


# -- the output folder


def check_out(out: Path, corpus: Corpus, overwrite: bool) -> None:
    for source in corpus.sources:
        if source_path(source).resolve() in out.parents:
            raise ValueError(f"{out} lies in {source}, which is read: choose a folder outside of it")
    check_replaceable(out, overwrite)


def check_replaceable(out: Path, overwrite: bool) -> None:
    if not out.exists():
        return
    if not overwrite:
        raise ValueError(f"{out} exists already: choose another folder, or replace it with overwrite (--overwrite)")
    others = sorted(set(os.listdir(out)) - OUTPUTS) if out.is_dir() else ["a file"]
    if others:
        raise ValueError(
            f"{out} holds more than prepared data ({others[0]}), so it is not replaced: remove it yourself"
        )


@contextmanager
def written_whole(out: Path, overwrite: bool) -> Iterator[Path]:
    """A folder beside `out` that takes its place at the end, or vanishes."""
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    replaced = partial.with_suffix(".replaced")
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in (*partial.iterdir(), partial):
            sync(path)
        check_replaceable(out, overwrite)  # again: others may have written there meanwhile
        if out.exists():
            out.rename(replaced)
        partial.rename(out)
        sync(out.parent)
    except OSError as error:
        raise ValueError(f"{out}: cannot be written: {error}") from error
    finally:
        if replaced.exists() and not out.exists():
            replaced.rename(out)
        for left_over in (partial, replaced):
            shutil.rmtree(left_over, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until the disk has it: a rename must not become lasting before what it renames."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_prepared(folder: str | Path) -> Summary:
    """What data.json says of a prepared folder, once hashes, ids and counts of its token files agree with it."""
    folder = Path(folder)
    summary = read_summary(folder / "data.json")
    vocab_size = load_tokenizer(folder).vocab_size
    for split, counts in summary["splits"].items():
        tokens = open_tokens(folder / f"{split}.tokens")
        verify_hash(tokens)
        check_ids(tokens)
        said = {"tokens": counts["tokens"], "bytes": counts["bytes"], "ids": vocab_size}
        found = {"tokens": tokens.count, "bytes": tokens.num_bytes, "ids": tokens.vocab_size}
        if found != said:
            raise ValueError(
                f"{tokens.path}: data.json says (tokenizer.json for ids) {said}, its header says {found}: "
                "the files are not of one preparation; prepare the data again"
            )
    return summary


def read_summary(path: Path) -> Summary:
    """data.json, with what is printed of it present and whole numbers where it must be."""
    try:
        summary: Summary = json.loads(read_text(path))
        version = summary["format"]
        numbers = [summary[name] for name in ("vocab_size", "replaced_characters", "skipped_files")]
        for split in SPLITS:
            numbers += [summary["splits"][split][name] for name in ("documents", "bytes", "tokens")]
        known = isinstance(summary["tokenizer"], str) and sorted(summary["splits"]) == sorted(SPLITS)
    except (json.JSONDecodeError, RecursionError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not what `modepth data prepare` writes: {error!r}") from error
    if version != FORMAT:
        raise ValueError(f"{path}: format {version!r} is not the one that this modepth reads ({FORMAT})")
    if not known or not all(isinstance(number, int) for number in numbers):
        raise ValueError(f"{path}: not what `modepth data prepare` writes: names or numbers differ")
    return summary
