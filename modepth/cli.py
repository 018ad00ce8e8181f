"""The command `modepth`: reads arguments, calls the library, prints tables for people and JSON for programs."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from modepth import flops
from modepth.config import ModelConfig, read_model_config
from modepth.corpus import Corpus
from modepth.data import SPLITS, open_tokens
from modepth.preparation import Summary, check_prepared, prepare
from modepth.progress import ByteProgress
from modepth.tokenizer import load_tokenizer
from modepth.validation import check_count

FLOPS_EXAMPLES = """\
examples:
  modepth flops model.yaml
  modepth flops model.yaml --length 2048 --value-bytes 2

where model.yaml holds the fields of ModelConfig:
  vocab_size: 2048
  num_layers: 12
  dim: 256
  num_heads: 4
  routing: {capacity: 0.125, every: 2}
"""

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake is one line on stderr and exit code 2."""
    options = make_parser().parse_args(arguments)
    try:
        options.run(options)
    except ValueError as error:
        print(f"modepth {options.command}: {error}", file=sys.stderr)
        return 2
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="modepth", description="Mixture-of-Depths for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    count = commands.add_parser(
        "flops",
        help="count FLOPs, parameters and cache bytes of a model",
        description="FLOPs per layer of a model, beside those of the dense model of the same shape; "
        "parameters; cache bytes. The last line is JSON.",
        epilog=FLOPS_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    count.add_argument("config", metavar="CONFIG", help="a YAML or JSON file with the fields of ModelConfig")
    count.add_argument("--length", type=int, help="tokens of a sequence (default: the config's max_length)")
    count.add_argument("--value-bytes", type=int, default=4, help="bytes of a cached number (default: %(default)s)")
    count.set_defaults(run=run_flops)
    add_data_commands(commands)
    return parser


# -- flops


def run_flops(options: argparse.Namespace) -> None:
    config = read_model_config(options.config)
    length = config.max_length if options.length is None else options.length
    check_count("--length", length, low=1)
    check_count("--value-bytes", options.value_bytes, low=1)
    print(f"One sequence of {length} tokens. FLOPs of a forward, causal attention counted in full.\n")
    print_table(layer_rows(config, length))
    print()
    totals = count_totals(config, length, options.value_bytes)
    beside = count_totals(flops.dense(config), length, options.value_bytes)
    rows = [["", "this model", "dense", "ratio"]]
    rows += [[name, f"{totals[name]:,}", f"{beside[name]:,}", ratio(totals[name], beside[name])] for name in totals]
    print_table(rows)
    print()
    print(json.dumps({"length": length, "model": keyed(totals), "dense": keyed(beside)}))


def keyed(totals: dict[str, int]) -> dict[str, int]:
    """The names of a table as keys for programs."""
    return {name.replace(",", "").replace(" ", "_"): number for name, number in totals.items()}


def layer_rows(config: ModelConfig, length: int) -> list[list[str]]:
    rows = [["layer", "attends", "feeds", "attention", "mlp", "router", "predictor", "total", "dense", "ratio"]]
    dense_layers = flops.layer_flops(flops.dense(config), length)
    for layer, dense in zip(flops.layer_flops(config, length), dense_layers, strict=True):
        parts = (layer.attention, layer.mlp, layer.router, layer.predictor, layer.total, dense.total)
        rows.append(
            [f"{layer.layer}{' routed' if layer.routed else ''}", str(layer.num_attended), str(layer.num_fed)]
            + [millions(part) for part in parts]
            + [ratio(layer.total, dense.total)]
        )
    logits = millions(flops.logits_flops(config, length))
    return [*rows, ["logits", "", "", "", "", "", "", logits, logits, ratio(1, 1)]]


def count_totals(config: ModelConfig, length: int, value_bytes: int) -> dict[str, int]:
    totals = {}
    for title, count in (("forward", flops.forward_flops), ("training step", flops.training_flops)):
        for logits in (True, False):
            for half_causal in (False, True):
                name = f"{title}, {'with' if logits else 'without'} logits, causal {'half' if half_causal else 'full'}"
                totals[name] = count(config, length, logits=logits, half_causal=half_causal)
    totals["parameters"] = flops.num_parameters(config)
    totals["cache bytes"] = flops.cache_bytes(config, length, value_bytes=value_bytes)
    return totals


# -- data


def add_data_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
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
    print(f"hashes and ids verified\n\nvalidation begins:\n{printable(sample_text(Path(options.folder)))}\n")
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


def printable(text: str) -> str:
    """Text without what could steer a terminal, or what stdout cannot encode."""
    text = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


# -- tables


def print_table(rows: list[list[str]]) -> None:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [first.ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        print("  ".join(cells).rstrip())


def millions(number: int) -> str:
    return f"{number / 1e6:,.2f}M" if number else "-"


def ratio(number: int, base: int) -> str:
    return f"{number / base:.3f}"
