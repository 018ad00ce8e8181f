"""Break the core in named ways, in a copy, and see which laws catch each: `make mutants`.

The breakages stand in mutants.txt; one that names a file of tests is shown to that file instead. One that no law
notices survives, and a law that none trips has never been seen to fail; both are errors. Words pick breakages:
`python -m tests.mutants gate k`.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

ROOT = Path(__file__).parent.parent
NOT_COMPILED = "not compiled_training and not one_graph"  # those take minutes: run where a breakage asks for them


class Mutant(NamedTuple):
    name: str
    file: str
    compiled: bool
    by: str | None  # a file of tests, None for the laws
    old: str
    new: str


def read_mutants() -> list[Mutant]:
    text = (ROOT / "tests" / "mutants.txt").read_text()
    found = []
    entries = re.findall(r"^\[(.+)\] (\S+)( compiled)?(?: by (\S+))?\n((?:[-+].*\n)+)", text, re.MULTILINE)
    for name, file, compiled, by, body in entries:
        lines = body.splitlines()
        old, new = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+")
        found.append(Mutant(name, file, bool(compiled), by or None, old, new))
    assert len(found) == len(re.findall(r"^\[", text, re.MULTILINE)), "an entry of mutants.txt is malformed"
    return found


def laws_that_fail(source: Path, mutant: Mutant | None) -> set[str]:
    """Run the laws on a copy with one breakage, or with none; the names of those that fail."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(source, copy, dirs_exist_ok=True)
        if mutant is not None:
            break_copy(copy, mutant)
        deselect = [] if mutant is None or mutant.compiled else ["-k", NOT_COMPILED]
        by = None if mutant is None else mutant.by
        run = [
            sys.executable,
            "-m",
            "pytest",
            *([] if by is None else [f"tests/{by}"]),
            "-m",
            "law and not long" if by is None else "not long",
            "--tb=no",
            "-q",
            "-p",
            "no:cacheprovider",
            *deselect,
        ]
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "HYPOTHESIS_PROFILE": "unshrunk"}
        result = subprocess.run(
            run, cwd=copy, env=environment, capture_output=True, text=True, timeout=900, check=False
        )
    if result.returncode not in (0, 1):
        raise RuntimeError(f"{mutant}: the laws did not run:\n{result.stdout[-3000:]}{result.stderr[-3000:]}")
    return set(re.findall(r"^FAILED \S+?::(\w+)", result.stdout, flags=re.MULTILINE))


def break_copy(copy: Path, mutant: Mutant) -> None:
    path = copy / "modepth" / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name!r} must match {mutant.file} once, matches {text.count(mutant.old)} times")
    path.write_text(text.replace(mutant.old, mutant.new))


def all_laws() -> set[str]:
    collect = [sys.executable, "-m", "pytest", "-m", "law", "--collect-only", "-q"]
    result = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(re.findall(r"::(test_\w+)", result.stdout))


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)  # as it is now: the tree may be edited meanwhile
        for name in ("modepth", "tests", "docs", "examples", "recipes", "benchmarks"):
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, source)
        return report(source, sys.argv[1:])


def report(source: Path, words: list[str]) -> int:
    """Print which laws catch each breakage; 1 if one survives or a law was never seen to fail."""
    mutants = [mutant for mutant in read_mutants() if not words or any(word in mutant.name for word in words)]
    if not words and (failing := laws_that_fail(source, None)):
        print(f"the laws fail on the unbroken core: {', '.join(sorted(failing))}")
        return 1
    caught = []
    with ThreadPoolExecutor(max_workers=2) as pool:
        results = pool.map(partial(laws_that_fail, source), mutants)
        for mutant, laws in zip(mutants, tqdm(results, total=len(mutants), unit="mutant"), strict=True):
            caught.append(laws)
            verdict = f"caught by {len(laws)}" if laws else "SURVIVES"
            tqdm.write("\n    ".join([f"{mutant.name} ({mutant.file}): {verdict}", *sorted(laws)]))
    survivors = sum(not laws for laws in caught)
    unseen = set() if words else all_laws() - set().union(*caught)
    for law in sorted(unseen):
        print(f"\nnever seen to fail: {law}")
    print(f"\n{len(mutants) - survivors} mutants caught, {survivors} survive; {len(unseen)} laws never seen to fail")
    return 1 if survivors or unseen else 0


if __name__ == "__main__":
    sys.exit(main())
