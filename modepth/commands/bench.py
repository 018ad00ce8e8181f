"""`modepth bench`: speed and memory beside transformers and other implementations."""

import argparse
import importlib.util
import json
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from modepth.commands.table import print_table
from modepth.run_folder import RunLock
from modepth.textfile import replace_text
from modepth.validation import check_capacity, check_choice, check_count

if TYPE_CHECKING:
    from modepth.bench.contest import Shape

ROWS = "rows.jsonl"
EXAMPLES = """\
examples:
  modepth bench results/bench --dims 256 --lengths 256 --capacities 0.125 --batches 1
  modepth bench results/bench --peers .peers
  modepth bench results/ours --tasks train --tokens 16384 --beside
  modepth bench results/compiled --tasks train --dims 256 --lengths 1024 --beside dense_compiled routed_compiled

A bench that was stopped goes on: cells whose rows are in OUT/rows.jsonl are not measured again.
"""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "bench",
        help="measure training, prefill and generation beside others",
        description="Our dense and routed decoder, transformers' Llama, ours converted, and the peers: at the same "
        "shapes, in turns, each in a process of its own. Ratios are to our dense decoder. The last line is JSON.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="folder of rows.jsonl, table.md and growth.png")
    parser.add_argument("--tasks", nargs="+", default=["train", "prefill", "decode"], metavar="TASK")
    parser.add_argument("--dims", nargs="+", type=int, default=[256, 512, 1024], metavar="D")
    parser.add_argument("--lengths", nargs="+", type=int, default=[256, 1024, 4096], metavar="T", help="not of decode")
    parser.add_argument("--capacities", nargs="+", type=float, default=[0.125, 0.25, 0.5], metavar="C")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32], metavar="B", help="rows of a decode")
    parser.add_argument("--tokens", type=int, metavar="N", help="of a training step and of a prefill")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: %(default)s")
    parser.add_argument("--threads", type=int, metavar="N", help="of each contestant (default: torch's)")
    parser.add_argument(
        "--beside",
        nargs="*",
        metavar="NAME",
        help="beside our dense and routed decoder: llama converted soup mixture_of_depth (the default), or of training "
        "dense_compiled routed_compiled llama_compiled soup_compiled; each choice in an OUT of its own",
    )
    parser.add_argument("--peers", type=Path, metavar="DIR", help="environments of the peers, installed if need be")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise ImportError("this needs transformers: pip install 'modepth[hf]'")
    from modepth.bench.peers import install  # noqa: PLC0415 - needs transformers

    wanted = shapes(options)
    options.beside = others(options.beside, options.peers)
    if options.threads is None:
        options.threads = torch.get_num_threads()
    check_count("--threads", options.threads, low=1)
    if options.peers is not None:
        install(options.peers)
    options.out.mkdir(parents=True, exist_ok=True)
    with RunLock(options.out):
        rows, num_measured = measure(wanted, options)
        write_table(rows, options.out)
    print(json.dumps({"rows": str(options.out / ROWS), "cells": len(wanted), "measured": num_measured}))


def measure(wanted: list["Shape"], options: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    """All rows there are when the cells that had none have theirs, and the number of those cells."""
    from modepth.bench.contest import run_cell  # noqa: PLC0415 - needs transformers

    path = options.out / ROWS
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    todo = [shape for shape in wanted if not any(asdict(shape).items() <= row.items() for row in rows)]
    for shape in tqdm(todo, unit="cell"):
        measured = run_cell(shape, options.rounds, options.threads, options.peers, options.beside)
        with path.open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in measured))
        rows += measured
    return rows, len(todo)


def write_table(rows: list[dict[str, Any]], out: Path) -> None:
    from modepth.bench.table import bench_table  # noqa: PLC0415

    table = bench_table(rows)
    print_table(table)
    lines = [table[0], ["---"] * len(table[0]), *table[1:]]
    replace_text(out / "table.md", "".join(f"| {' | '.join(line)} |\n" for line in lines))
    if importlib.util.find_spec("matplotlib") is not None:
        from modepth.plots.growth import cost_growth  # noqa: PLC0415 - an extra
        from modepth.plots.style import save_figure  # noqa: PLC0415

        figure = cost_growth(rows)
        if figure is not None:
            save_figure(figure, out / "growth.png")


def others(names: list[str] | None, peers: Path | None) -> list[str]:
    """Who takes part besides our own two, checked."""
    from modepth.bench.contest import CONTESTANTS, OTHERS, UNCOMPILED_OTHERS  # noqa: PLC0415
    from modepth.bench.peers import PEERS  # noqa: PLC0415

    for name in names or ():
        if name not in OTHERS:
            raise ValueError(f"--beside must be among {', '.join(OTHERS)}, got {name}")
        if CONTESTANTS[name].file in PEERS and peers is None:
            raise ValueError(f"--beside {name} needs the peers' environments: add --peers DIR, got none")
    return list(UNCOMPILED_OTHERS) if names is None else names


def shapes(options: argparse.Namespace) -> list["Shape"]:
    """The cells that were asked for, checked before anything is measured."""
    from modepth.bench.contest import LAYERS, NEW_TOKENS, PROMPT, TOKENS, Shape, Task  # noqa: PLC0415

    check_count("--rounds", options.rounds, low=1)
    tokens = TOKENS if options.tokens is None else options.tokens
    check_count("--tokens", tokens, low=1)
    for dim in options.dims:
        if dim not in LAYERS:
            raise ValueError(f"--dims must be among {', '.join(map(str, LAYERS))}, got {dim}")
    for count in (*options.lengths, *options.batches):
        check_count("--lengths and --batches", count, low=1)
    for capacity in options.capacities:
        check_capacity(capacity)
    found = []
    for task in options.tasks:
        check_choice("--tasks", task, Task)
        sizes = [(length, max(1, tokens // length)) for length in options.lengths]
        if task == "decode":
            sizes = [(PROMPT + NEW_TOKENS, batch) for batch in options.batches]
        for dim, (length, batch), capacity in product(options.dims, sizes, options.capacities):
            found.append(Shape(task, dim, length, batch, capacity))
    return found
