"""The oldest transformers that the package claims to work with: its laws, in that one."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def lowest() -> str:
    (requirement,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["hf"]
    return requirement.partition(">=")[2]


@pytest.mark.long
@pytest.mark.parametrize("file", ["test_hf.py", "test_hf_families.py", "test_hf_export.py", "test_hf_adoption.py"])
def test_converting_works_with_the_oldest_transformers(file: str, oldest: Path) -> None:
    here = os.environ | {"PYTHONPATH": os.pathsep.join([str(oldest), str(ROOT)])}
    seen = subprocess.run(
        [sys.executable, "-c", "import transformers; print(transformers.__version__)"],
        env=here,
        capture_output=True,
        text=True,
        check=True,
    )
    assert seen.stdout.strip() == lowest()
    laws = [sys.executable, "-m", "pytest", "-q", "-m", "not long", "-p", "no:cacheprovider", f"tests/{file}"]
    run = subprocess.run(laws, cwd=ROOT, env=here, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:]


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("oldest")
    install = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), f"transformers=={lowest()}"]
    subprocess.run(install, check=True, capture_output=True)
    return folder
