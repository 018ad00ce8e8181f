"""Make a run into the small model that the package carries: `python -m modepth.serve.ship RUN --data DIR`.

The optimiser's state stays behind; thresholds for the dial are found once, here.
"""

import argparse
import json
import shutil
from pathlib import Path

from modepth import checkpoint
from modepth.checkpoint import whole
from modepth.loading import load_native
from modepth.serve.served import SETTINGS, SHIPPED, make_dial, write_dial

LARGEST = 12_000_000  # bytes


def ship(run: Path, data: Path, out: Path) -> int:
    """Write the folder `out` anew; its bytes."""
    found, model = checkpoint.newest(run), load_native(run)
    assert found is not None  # or it could not have been loaded
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    checkpoint.save(out, found.step, {"model": whole(found.load("model"))}, found.state)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(run / name, out / name)
    write_dial(out, make_dial(run, model, SETTINGS, data))
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    if size > LARGEST:
        raise ValueError(f"{out}: {size} bytes are more than the {LARGEST} that a package may carry")
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="prepared data to calibrate on")
    parser.add_argument("--out", type=Path, default=SHIPPED)
    options = parser.parse_args()
    print(json.dumps({"out": str(options.out), "bytes": ship(options.run, options.data, options.out)}))


if __name__ == "__main__":
    main()
