"""`modepth report`: runs side by side, or a sweep, as a page and pictures."""

import argparse
import json
from pathlib import Path

from modepth.commands.table import print_columns
from modepth.loading import load_native
from modepth.run import open_split
from modepth.run_data import data_of
from modepth.sweep.plan import cells
from modepth.sweep.results import Results, cell_name, check_unique
from modepth.sweep.run import config_of
from modepth.tokenizer import load_tokenizer

EXAMPLES = """\
examples:
  modepth report runs/tiny
  modepth report runs/dense runs/half --out compared
  modepth report sweeps/tiny                     the folder of a sweep, by itself
"""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "report",
        help="a page with pictures of one or more runs",
        description="Compare runs: a table, loss against FLOPs, and where each router spent the compute, as one "
        "self-contained page and as PNG and SVG. The last line is JSON.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="the folder of a run, or of one sweep")
    parser.add_argument("--data", metavar="DIR", help="prepared data for the pictures (default: that of the first run)")
    parser.add_argument("--out", metavar="DIR", default="report", help="where to write (default: %(default)s)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    sweeps = [folder for folder in options.runs if (Path(folder) / "results.jsonl").exists()]
    if not sweeps:
        report_runs(options)
    elif len(options.runs) == 1:
        report_sweep(Path(sweeps[0]), Path(options.out))
    else:
        raise ValueError(f"{sweeps[0]}: is a sweep, which has a page of its own: give it alone")


def report_sweep(folder: Path, out: Path) -> None:
    from modepth.sweep.fit import fit_rows  # noqa: PLC0415
    from modepth.sweep.page import write_sweep_page  # noqa: PLC0415

    rows = Results(folder / "results.jsonl").rows()
    check_unique(rows)
    config = config_of(folder)
    planned, baseline = ([], None) if config is None else (cells(config), config.baseline)
    order = {cell: number for number, cell in enumerate(planned)}
    rows.sort(key=lambda row: order.get(row.cell, len(order)))  # as planned: several at a time end in any order
    missing = [cell_name(cell) for cell in planned if cell not in {row.cell for row in rows}]
    written = write_sweep_page(rows, fit_rows(rows, baseline), out, missing=missing)
    print("written:", *written, sep="\n  ")
    print(json.dumps({"runs": len(rows), "written": [str(path) for path in written]}))


def report_runs(options: argparse.Namespace) -> None:
    # Here, because the other commands need no matplotlib.
    from modepth.comparison import Opened, compare  # noqa: PLC0415

    folders = {Path(folder).resolve().name: Path(folder) for folder in options.runs}
    if len(folders) < len(options.runs):
        raise ValueError("two of the runs have folders of the same name, by which they would be called: rename one")
    for folder in folders.values():
        if not folder.is_dir():
            raise ValueError(f"{folder}: there is no such folder: name that of a run or of a sweep")
        if (folder / "sweep.json").exists():
            raise ValueError(f"{folder}: a sweep of which no run has ended yet: see modepth sweep run")
    data = Path(options.data) if options.data is not None else data_of(Path(options.runs[0]))
    runs = {name: Opened(folder, load_native(folder)) for name, folder in folders.items()}
    validation, *_ = [open_split(data, "validation", run.model.config) for run in runs.values()]
    table, written = compare(
        runs,
        validation,
        load_tokenizer(data),
        Path(options.out),
        title="Training runs",
        intro="",
    )
    print_columns(table)
    print("\nwritten:", *written, sep="\n  ")
    print(json.dumps({"runs": table, "written": [str(path) for path in written]}))
