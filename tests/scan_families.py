"""Converts a tiny model of every decoder family of transformers, and prints what came of it.

    python -m tests.scan_families [FAMILY...] [--write]

Passes: capacity 1 is the dense model bit for bit, top-k equals the slow computation, generation with a cache equals
generation without, saving and loading is exact. `--write` puts the table into docs/converting.md. Last line: JSON.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

from tests.family_checks import check_family
from tests.tiny_models import families, tiny_model

PAGE = Path(__file__).parents[1] / "docs" / "converting.md"


def outcome(family: str) -> tuple[str, str]:
    """passes, refused (and why), not built (and why), or WRONG."""
    try:
        model = tiny_model(family)
        model(input_ids=model.dummy_inputs["input_ids"].clamp(3, 90))
    except Exception as error:
        return "not built", reason(error)
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            check_family(model, Path(folder))
    except AssertionError as error:
        return "WRONG", reason(error)
    except Exception as error:
        return "refused", reason(error)
    return "passes", ""


def be_quiet() -> None:
    """In each process: one thread is enough for models as small as these."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def reason(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 150 else f"{text[:147]}..."


def table(rows: dict[str, tuple[str, str]]) -> str:
    by_outcome = {
        kind: [name for name, row in rows.items() if row[0] == kind]
        for kind in ("passes", "refused", "not built", "WRONG")
    }
    lines = ["| outcome | families |", "|---|---|"]
    lines += [f"| {kind} | {len(names)} |" for kind, names in by_outcome.items()]
    lines += ["", f"Passes: {', '.join(by_outcome['passes'])}.", "", "| family | outcome | reason |", "|---|---|---|"]
    lines += [f"| {name} | {kind} | {why} |" for name, (kind, why) in rows.items() if kind != "passes"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="default: all")
    parser.add_argument("--write", action="store_true", help="put the table into docs/converting.md")
    options = parser.parse_args()
    start = time.perf_counter()
    names = options.families or families()
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn"), be_quiet) as pool:
        rows = dict(zip(names, tqdm(pool.map(outcome, names), total=len(names), unit="family"), strict=True))
    print(table(rows))
    if options.write:
        text = PAGE.read_text()
        marks = re.compile(r"(<!-- families -->\n).*(<!-- end -->)", re.DOTALL)
        PAGE.write_text(marks.sub(lambda found: f"{found[1]}{table(rows)}\n{found[2]}", text))
    counts = {
        kind: sum(row[0] == kind for row in rows.values()) for kind in ("passes", "refused", "not built", "WRONG")
    }
    print(
        json.dumps({**counts, "transformers": transformers.__version__, "seconds": round(time.perf_counter() - start)})
    )
    sys.exit(1 if counts["WRONG"] else 0)


if __name__ == "__main__":
    main()
