"""`modepth data prepare` and `modepth data inspect`: text as tokens."""

import argparse
import json
from pathlib import Path

from modepth.commands.table import LAYOUT, print_table, printable, ratio
from modepth.corpus import Corpus
from modepth.data import SPLITS, open_tokens
from modepth.preparation import Summary, check_prepared, prepare
from modepth.progress import ByteProgress
from modepth.tokenizer import load_tokenizer

PREPARE_EXAMPLES = """\
examples:
  modepth data prepare stdlib data/stdlib
  modepth data prepare books/ notes.txt data/mine --tokenizer bpe:8192
  modepth data prepare one.txt data/one --tokenizer bytes --document-bytes 16384
  modepth data prepare books/ data/books --tokenizer model/tokenizer.json

stdlib is Python's own standard library, on every machine (a folder of that name: ./stdlib). Which split
a document falls into depends on its name alone. OUT appears only when it is complete.
"""
INSPECT_EXAMPLES = """\
examples:
  modepth data inspect data/stdlib
"""
SAMPLE_CHARACTERS = 200


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    data = commands.add_parser("data", help="prepare text for training, and look at it", description="Text as tokens.")
    actions = data.add_subparsers(dest="action", required=True, metavar="ACTION")
    make = actions.add_parser(
        "prepare",
        help="turn text into token files and a tokenizer",
        description="Split text by document into train, validation and test, and write each as a file of tokens, "
        "with the tokenizer and data.json, into the folder OUT. The last line is JSON.",
        epilog=PREPARE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    make.add_argument("inputs", nargs="+", metavar="INPUT", help="a file, a folder, or the word stdlib")
    make.add_argument("out", metavar="OUT", help="the folder to write")
    make.add_argument("--tokenizer", default="bpe:2048", help="bytes, bpe:N or a tokenizer.json (default: %(default)s)")
    make.add_argument("--end-of-text", metavar="TOKEN", help="the token of a tokenizer.json that ends a text")
    for split in ("validation", "test"):
        help_text = f"share of documents for {split} (default: %(default)s)"
        make.add_argument(f"--{split}", type=float, default=getattr(Corpus, split), metavar="SHARE", help=help_text)
    make.add_argument(
        "--document-bytes",
        type=int,
        default=Corpus.document_bytes,
        metavar="N",
        help="cut longer files into documents of at most N bytes (default: %(default)s)",
    )
    make.add_argument("--overwrite", action="store_true", help="replace OUT if it holds prepared data")
    make.set_defaults(run=run_prepare, command="data prepare")
    look = actions.add_parser(
        "inspect",
        help="check prepared data and show what it holds",
        description="Verify hashes and ids of prepared data; print what it holds and the start of its validation text. "
        "The last line is JSON.",
        epilog=INSPECT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    look.add_argument("folder", metavar="DIR", help="what `modepth data prepare` wrote")
    look.set_defaults(run=run_inspect, command="data inspect")


def run_prepare(options: argparse.Namespace) -> None:
    corpus = Corpus(
        sources=tuple(options.inputs),
        validation=options.validation,
        test=options.test,
        document_bytes=options.document_bytes,
    )
    with ByteProgress() as progress:
        summary = prepare(
            corpus,
            options.out,
            tokenizer=options.tokenizer,
            end_of_text=options.end_of_text,
            overwrite=options.overwrite,
            report=progress,
        )
    print_summary(summary)
    print(json.dumps({"out": options.out, **summary}))


def run_inspect(options: argparse.Namespace) -> None:
    summary = check_prepared(options.folder)
    print_summary(summary)
    print(
        f"hashes and ids verified\n\nvalidation begins:\n{printable(sample_text(Path(options.folder)), keep=LAYOUT)}\n"
    )
    print(json.dumps({"folder": options.folder, "verified": True, **summary}))


def print_summary(summary: Summary) -> None:
    rows = [["split", "documents", "bytes", "tokens", "bytes/token"]]
    for split in SPLITS:
        counts = summary["splits"][split]
        cells = [f"{counts[name]:,}" for name in ("documents", "bytes", "tokens")]
        rows.append([split, *cells, ratio(counts["bytes"], counts["tokens"])])
    print_table(rows)
    print(
        f"\ntokenizer {summary['tokenizer']}, {summary['vocab_size']:,} ids; characters replaced as not UTF-8: "
        f"{summary['replaced_characters']:,}; files without text skipped: {summary['skipped_files']:,}\n"
    )


def sample_text(folder: Path) -> str:
    """The first characters of the validation split."""
    ids = open_tokens(folder / "validation.tokens").ids[: 4 * SAMPLE_CHARACTERS]  # a character is up to 4 bytes
    return load_tokenizer(folder).decode(ids.tolist())[:SAMPLE_CHARACTERS]
