"""The project itself: import directions, public names, the README's code, the wheel."""

import ast
import inspect
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import modepth
from modepth.config import read_model_config

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "modepth"

# Imports run one way: cli -> features -> model -> losses, routing -> config.
MAY_IMPORT = {
    "validation": set(),
    "files": set(),
    "run_folder": {"validation"},
    "manifest": {"files", "validation"},
    "checkpoint": {"files", "manifest", "run_folder", "validation"},
    "config": {"validation"},
    "routing": {"config", "validation"},
    "losses": {"config", "routing"},
    "flops": {"config", "routing", "validation"},
    "layer": {"config", "routing", "validation"},
    "model": {"config", "losses", "routing"},
    "data": {"validation"},
    "tokenizer": {"validation"},
    "corpus": {"validation"},
    "preparation": {"corpus", "data", "tokenizer"},
    "progress": set(),
    "interruption": set(),
    "runlog": set(),
    "rendezvous": set(),
    "world": {"rendezvous"},
    "schedule": {"config", "flops"},
    "parallel": {"config", "model", "routing", "world"},
    "restore": {"checkpoint"},
    "agreement": {"checkpoint", "config", "data", "world"},
    "train": {"config", "data", "model", "parallel", "routing", "world"},
    "run": {
        "agreement",
        "checkpoint",
        "config",
        "data",
        "interruption",
        "model",
        "parallel",
        "restore",
        "run_folder",
        "runlog",
        "schedule",
        "train",
        "world",
    },
    "cli": {"config", "corpus", "data", "flops", "preparation", "progress", "tokenizer", "validation"},
    "__init__": {"config", "flops", "layer", "losses", "model", "routing"},
}

PUBLIC_NAMES = [
    "LossWeights",
    "MixtureOfDepths",
    "ModelConfig",
    "Output",
    "Router",
    "Routing",
    "RoutingConfig",
    "Transformer",
    "apply_routed",
    "check_tokens",
    "flops",
    "losses",
    "num_routed",
]


def imported_modules(path):
    """The modules of the package that a file imports, by name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("modepth.")}
        elif isinstance(node, ast.ImportFrom) and node.module == "modepth":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("modepth.")):
            assert not node.level, f"{path.name}: relative imports hide directions"
            found.add(node.module.split(".")[1])
    return found


def test_imports_run_one_way():
    paths = {path.stem: path for path in PACKAGE.rglob("*.py")}
    assert set(paths) == set(MAY_IMPORT), "list every module in MAY_IMPORT"
    for name, path in paths.items():
        assert imported_modules(path) <= MAY_IMPORT[name], name


def test_import_modepth_loads_neither_transformers_nor_matplotlib():
    script = "import modepth, sys; print(sorted({'transformers', 'matplotlib', 'torch'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "['torch']"


def test_public_names_are_those_listed_and_documented():
    assert sorted(modepth.__all__) == sorted(PUBLIC_NAMES)
    for name in PUBLIC_NAMES:
        assert inspect.getdoc(getattr(modepth, name)), name


# -- the README


def readme_blocks():
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


def test_the_readme_shows_the_core_function_as_it_is():
    assert inspect.getsource(modepth.apply_routed) in readme_blocks()


def snippets():
    """The README's blocks that run by themselves."""
    found = [block for block in readme_blocks() if block.startswith("import torch")]
    assert len(found) == 2
    return found


def test_the_readmes_snippets_run_and_print_what_they_say(capsys):
    layer, decoder = snippets()
    exec(layer, {})
    assert capsys.readouterr().out == "tensor([32, 13])\n"
    exec(decoder, {})
    assert "\n[1, 3]\ntensor(" in capsys.readouterr().out


def test_the_readmes_config_is_one():
    assert read_model_config(ROOT / "examples" / "decoder.yaml").routed_layers == (1, 3, 5, 7, 9)


def test_links_of_the_documents_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_pre_commit_runs_the_checks_of_make_lint():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    makefile = (ROOT / "Makefile").read_text()
    for hook in hooks:
        assert hook["entry"].replace(".venv/bin/", "$(BIN)/").removesuffix(" --fix") in makefile


# -- the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    ours = {name for name in names if not name.startswith(f"modepth-{version()}.dist-info/")}
    assert ours == {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*") if path.suffix in (".py", ".typed")}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def version():
    return re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)[1]


def test_the_wheel_installs_into_an_empty_environment_and_runs_the_readmes_snippets(wheel, tmp_path):
    python = tmp_path / "empty" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "empty")], check=True)
    for target in ("torch", str(wheel)):
        install = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), target]
        subprocess.run(install, check=True, cwd=tmp_path)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for snippet in snippets():
        run = [str(python), "-c", snippet]
        assert subprocess.run(run, cwd=tmp_path, env=clean, capture_output=True, check=True).stdout
    command = [str(python.parent / "modepth"), "flops", str(ROOT / "examples" / "decoder.yaml")]
    result = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1].startswith('{"length": 1024')
