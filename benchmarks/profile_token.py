"""Where the time of a generated token goes, dense and routed, as py-spy sees it.

    pip install py-spy
    python benchmarks/profile_token.py [--dims 256 512] [--rows 1] [--seconds 12] [--threads 2] [--out FILE]

py-spy looks 400 times a second at what Python is calling while `generate` runs in a process of its own. A look counts
for the innermost function that stands in PARTS. Last line: JSON.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from modepth.bench.contest import LAYERS, Shape
from modepth.bench.contestants.native import build

CAPACITY, LENGTH = 0.125, 512
PARTS = {
    "OpOverload.__call__": "products",  # by oneDNN, the only operator that is called by its name
    "PackedLinear.forward": "around products",
    "LayerCache.attend": "attention",
    "NewTokens.attend": "around attention, cache",
    "RMSNorm.forward": "norms",
    "rotate": "rotation, gate",
    "swiglu": "rotation, gate",
    "Router.forward": "scoring, selecting",
    "Routing.gather": "moving tokens",
    "apply_routed": "moving tokens",
    "Layer.forward": "rest of the layers",
    "generate": "outside the layers",
}


def generate_for(seconds: float, dim: int, rows: int, threads: int, routed: bool) -> None:
    """What py-spy looks at."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    order = Shape("decode", dim, LENGTH, rows, CAPACITY).order(routed, threads)
    entry = build({**order, "routed_layers": []})  # none is to be timed by clocks of its own
    entry.model.eval()
    prompts = torch.randint(order["vocab_size"], (rows, 1))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        entry.generate(prompts, LENGTH - 1)


def shares(dim: int, rows: int, threads: int, routed: bool, seconds: float) -> dict[str, float]:
    """Each part's percentage of the looks that found `generate` at work."""
    loop = f"from profile_token import generate_for; generate_for({seconds + 5}, {dim}, {rows}, {threads}, {routed})"
    with tempfile.TemporaryDirectory() as folder:
        stacks = Path(folder) / "stacks"
        spy = ["py-spy", "record", "--duration", str(seconds), "--rate", "400", "--format", "raw", "--output", stacks]
        subprocess.run(
            [*spy, "--", sys.executable, "-c", loop], check=True, stdout=subprocess.DEVNULL, cwd=Path(__file__).parent
        )
        looks: Counter[str] = Counter()
        for line in stacks.read_text().splitlines():
            stack, _, count = line.rpartition(" ")
            part = part_of([frame.split(" (")[0] for frame in stack.split(";")])
            if part is not None:
                looks[part] += int(count)
    if not looks:
        raise SystemExit(f"in {seconds} seconds the model was built and nothing was generated yet: raise --seconds")
    return {part: round(100 * looks[part] / looks.total(), 1) for part in dict.fromkeys(PARTS.values())}


def part_of(functions: list[str]) -> str | None:
    """Of a stack, outermost function first; None where nothing is being generated."""
    if "generate" not in functions:
        return None
    return next(PARTS[function] for function in reversed(functions) if function in PARTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=[256, 512], choices=LAYERS)
    parser.add_argument("--rows", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--seconds", type=int, default=12, help="of each look (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="also write the rows here, as JSON lines")
    options = parser.parse_args()
    if shutil.which("py-spy") is None:
        parser.error("this needs py-spy: pip install py-spy")
    rows: list[dict[str, Any]] = []
    for dim in options.dims:
        dense, routed = (
            shares(dim, options.rows, options.threads, is_routed, options.seconds) for is_routed in (False, True)
        )
        rows.append({"dim": dim, "rows": options.rows, "capacity": CAPACITY, "dense": dense, "routed": routed})
        print(f"\nwidth {dim}, rows {options.rows}\n{'':24}{'dense, %':>10}{'routed, %':>11}")
        for part in dense:
            print(f"{part:24}{dense[part]:10.1f}{routed[part]:11.1f}", flush=True)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(json.dumps({"rows": rows, "torch": torch.__version__, "threads": options.threads}))


if __name__ == "__main__":
    main()
