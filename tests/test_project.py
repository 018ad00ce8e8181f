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
from tests.documents import blocks, text_of

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "modepth"

# Imports run one way: cli -> features -> model -> losses, routing -> config.
MAY_IMPORT = {
    "validation": set(),
    "files": set(),
    "run_folder": {"validation"},
    "manifest": {"files", "validation"},
    "checkpoint": {"files", "manifest", "run_folder", "validation"},
    "train_config": {"validation"},
    "experts_config": {"validation"},
    "config": {"experts_config", "train_config", "validation"},
    "adopted": {"config", "validation"},
    "selection": {"config"},
    "routing": {"config", "selection", "validation"},
    "allocator": set(),
    "operators": set(),
    "products": {"operators"},
    "attention": {"operators"},
    "blocks": {"attention", "cache", "config", "fused", "products", "routing"},
    "experts": {"blocks", "config", "routing"},
    "fused": set(),
    "decoder_layer": {"blocks", "config", "experts", "fused", "routing"},
    "cross_entropy": {"products"},
    "losses": {"config", "experts", "routing"},
    "flops": {"adopted", "config", "muon", "routing", "validation"},
    "layer": {"config", "routing", "validation"},
    "cache": {"config", "flops", "routing", "validation"},
    "model": {
        "adopted",
        "blocks",
        "cache",
        "config",
        "cross_entropy",
        "decoder_layer",
        "experts",
        "fused",
        "losses",
        "products",
        "routing",
        "validation",
    },
    "ready": {"blocks", "fused", "model", "products"},
    "encoder": {"blocks", "config", "fused", "routing", "validation"},
    "data": {"validation"},
    "textfile": set(),
    "tokenizer": {"textfile", "validation"},
    "corpus": {"validation"},
    "preparation": {"corpus", "data", "tokenizer"},
    "progress": {"formats"},
    "interruption": set(),
    "runlog": {"textfile"},
    "rendezvous": set(),
    "world": {"rendezvous"},
    "schedule": {"adopted", "config", "flops"},
    "parallel": {"config", "experts", "model", "routing", "world"},
    "muon": set(),
    "restore": {"checkpoint", "muon"},
    "agreement": {"adopted", "checkpoint", "config", "data", "world"},
    "cutoffs": {"experts", "routing", "world"},
    "train": {
        "config",
        "cross_entropy",
        "cutoffs",
        "data",
        "experts",
        "model",
        "muon",
        "parallel",
        "routing",
        "validation",
        "world",
    },
    "run": {
        "adopted",
        "agreement",
        "checkpoint",
        "config",
        "cutoffs",
        "data",
        "interruption",
        "model",
        "parallel",
        "restore",
        "run_folder",
        "runlog",
        "schedule",
        "textfile",
        "train",
        "world",
    },
    "loading": {"adopted", "agreement", "checkpoint", "hf.adoption", "model", "restore"},
    "run_data": {"config", "data", "run", "textfile", "tokenizer"},
    "sampling": {"validation"},
    "text_stream": {"tokenizer"},
    "generation": {
        "cache",
        "config",
        "experts",
        "model",
        "routing",
        "sampling",
        "text_stream",
        "tokenizer",
        "validation",
    },
    "thresholds": {"config", "routing", "selection"},
    "depth": {"config", "flops", "generation", "model", "sampling", "selection", "text_stream", "tokenizer"},
    "calibration": {"config", "generation", "model", "thresholds"},
    "hf": {"hf.calibration", "hf.classes", "hf.convert", "hf.export", "hf.model", "hf.training", "hf.verify"},
    "hf.adoption": {
        "adopted",
        "config",
        "cross_entropy",
        "flops",
        "hf.classes",
        "hf.convert",
        "hf.model",
        "losses",
        "model",
        "routing",
        "tokenizer",
    },
    "hf.families": set(),
    "hf.cache": {"cache"},
    "hf.layer": {"config", "hf.cache", "hf.families", "routing"},
    "hf.balance": {"hf.layer", "routing"},
    "hf.model": {"config", "hf.balance", "hf.families", "hf.layer", "losses", "routing", "validation"},
    "hf.classes": {"hf.model"},
    "hf.calibration": {"config", "hf.model", "thresholds"},
    "hf.verify": {"hf.calibration", "hf.families", "hf.layer", "hf.model", "routing"},
    "hf.export": {"config", "hf.classes", "hf.model"},
    "hf.folder": {"hf.model"},
    "hf.native": {"config", "hf.model"},
    "hf.training": {"cutoffs", "hf.model", "schedule", "validation", "world"},
    "hf.convert": {"config", "hf.classes", "hf.families", "hf.model", "hf.verify"},
    "bench": set(),
    "bench.worker": set(),
    "bench.peers": set(),
    "bench.contest": {"bench.peers", "config", "flops"},
    "bench.table": set(),
    "bench.contestants": set(),
    "bench.contestants.llama": set(),
    "bench.contestants.soup": set(),
    "bench.contestants.mixture_of_depth": set(),
    "bench.contestants.converted": {"config", "hf", "hf.convert"},
    "bench.contestants.native": {
        "allocator",
        "calibration",
        "config",
        "cross_entropy",
        "flops",
        "generation",
        "model",
        "ready",
        "sampling",
    },
    "tracking": {"runlog"},
    "flags": {"config"},
    "commands": set(),
    "formats": set(),
    "commands.table": {"formats"},
    "commands.bench": {
        "bench.contest",
        "bench.peers",
        "bench.table",
        "commands.table",
        "plots.growth",
        "plots.style",
        "run_folder",
        "textfile",
        "validation",
    },
    "commands.flops": {"commands.table", "config", "flops", "validation"},
    "commands.data": {"commands.table", "corpus", "data", "preparation", "progress", "tokenizer"},
    "commands.convert": {
        "config",
        "flags",
        "hf.adoption",
        "hf.convert",
        "hf.export",
        "hf.folder",
        "loading",
        "model",
        "run_data",
        "tokenizer",
    },
    "commands.demo": {
        "commands.table",
        "comparison",
        "config",
        "corpus",
        "loading",
        "model",
        "preparation",
        "progress",
        "run",
        "run_data",
        "schedule",
        "tokenizer",
    },
    "commands.generate": {
        "calibration",
        "commands.table",
        "config",
        "flops",
        "generation",
        "loading",
        "model",
        "ready",
        "run_data",
        "sampling",
        "text_stream",
        "tokenizer",
    },
    "commands.serve": {"serve.http", "serve.limits", "serve.listen", "serve.served", "validation"},
    "commands.report": {
        "commands.table",
        "comparison",
        "loading",
        "run",
        "run_data",
        "sweep.fit",
        "sweep.page",
        "sweep.plan",
        "sweep.results",
        "sweep.run",
        "tokenizer",
    },
    "commands.sweep": {
        "commands.table",
        "formats",
        "progress",
        "sweep.config",
        "sweep.executors",
        "sweep.fit",
        "sweep.page",
        "sweep.plan",
        "sweep.rate",
        "sweep.results",
        "sweep.run",
        "validation",
    },
    "commands.train": {
        "allocator",
        "commands.table",
        "config",
        "flags",
        "flops",
        "hf.adoption",
        "hf.folder",
        "hf.training",
        "loading",
        "model",
        "progress",
        "run",
        "run_data",
        "schedule",
        "tracking",
        "train",
        "validation",
        "world",
    },
    "commands.inspect": {
        "adopted",
        "checkpoint",
        "commands.table",
        "config",
        "files",
        "flops",
        "run_folder",
        "runlog",
        "schedule",
    },
    "cli": {
        "commands.bench",
        "commands.convert",
        "commands.data",
        "commands.demo",
        "commands.flops",
        "commands.generate",
        "commands.inspect",
        "commands.report",
        "commands.serve",
        "commands.sweep",
        "commands.table",
        "commands.train",
        "run",
    },
    "__main__": {"cli"},
    "trace": {"config", "experts", "routing"},
    "comparison": {
        "data",
        "depth",
        "flops",
        "formats",
        "generation",
        "model",
        "plots",
        "report",
        "routing",
        "sampling",
        "text_stream",
        "tokenizer",
        "trace",
    },
    # Figures and reports take arrays and rows: none of these may reach torch.
    "plots": {"plots.curves", "plots.routing", "plots.style"},
    "plots.style": {"textfile"},
    "plots.growth": {"plots.style"},
    "plots.curves": {"formats", "plots.style"},
    "plots.routing": {"formats", "plots.style"},
    "plots.isoflop": {"formats", "plots.style", "sweep.arms", "sweep.fit", "sweep.results"},
    "page": set(),
    "report": {"formats", "page", "plots", "runlog", "textfile"},
    "sweep.results": {"textfile"},
    "sweep.intervals": set(),
    "sweep.arms": {"sweep.intervals", "sweep.results"},
    "sweep.fit": {"sweep.arms", "sweep.intervals", "sweep.results"},
    "sweep.page": {
        "formats",
        "plots",
        "plots.isoflop",
        "plots.style",
        "report",
        "sweep.arms",
        "sweep.fit",
        "sweep.intervals",
        "sweep.results",
    },
    # What plans and runs a sweep may: it is handed no model, it makes them.
    "sweep": set(),
    "sweep.config": {"config", "validation"},
    "sweep.plan": {"config", "data", "flags", "flops", "schedule", "sweep.config", "sweep.results", "validation"},
    "sweep.trial": {
        "allocator",
        "config",
        "files",
        "model",
        "run",
        "run_data",
        "runlog",
        "schedule",
        "textfile",
        "train",
        "world",
    },
    "sweep.executors": {"sweep.trial"},
    "sweep.run": {
        "files",
        "interruption",
        "run",
        "run_folder",
        "sweep.config",
        "sweep.executors",
        "sweep.plan",
        "sweep.results",
        "sweep.trial",
        "textfile",
    },
    "sweep.rate": {"model", "schedule", "sweep.plan", "sweep.results", "train", "world"},
    # The engine knows nothing of HTTP.
    "serve": set(),
    "serve.limits": {"validation"},
    "serve.engine": {
        "cache",
        "config",
        "generation",
        "model",
        "sampling",
        "serve.limits",
        "text_stream",
        "tokenizer",
    },
    "serve.pace": {"cache", "generation", "model", "serve.limits"},
    "serve.watch": {"generation", "model"},
    "serve.metrics": {"serve.engine"},
    "serve.worker": {"serve.engine", "serve.metrics"},
    "serve.chat": {"tokenizer"},
    "serve.served": {
        "calibration",
        "config",
        "hf.folder",
        "hf.native",
        "loading",
        "model",
        "ready",
        "run_data",
        "runlog",
        "serve.chat",
        "textfile",
        "tokenizer",
        "validation",
    },
    "serve.ship": {"checkpoint", "loading", "serve.served"},
    "serve.protocol": {"depth"},
    "serve.answers": {
        "config",
        "depth",
        "sampling",
        "serve.engine",
        "serve.protocol",
        "serve.served",
        "serve.watch",
        "text_stream",
        "tokenizer",
    },
    "serve.depth": {
        "depth",
        "sampling",
        "serve.answers",
        "serve.engine",
        "serve.protocol",
        "serve.served",
        "text_stream",
    },
    "serve.rows": {"page", "runlog", "serve.protocol"},
    "serve.guards": {"serve.answers", "serve.engine", "serve.protocol", "validation"},
    "serve.calls": {
        "serve.answers",
        "serve.engine",
        "serve.guards",
        "serve.protocol",
        "serve.served",
        "serve.worker",
    },
    "serve.http": {
        "flops",
        "page",
        "serve.answers",
        "serve.calls",
        "serve.depth",
        "serve.engine",
        "serve.guards",
        "serve.limits",
        "serve.metrics",
        "serve.pace",
        "serve.protocol",
        "serve.rows",
        "serve.served",
        "serve.worker",
    },
    "serve.listen": {"serve.http", "serve.served"},
    "__init__": {
        "calibration",
        "config",
        "encoder",
        "flops",
        "generation",
        "layer",
        "loading",
        "losses",
        "model",
        "ready",
        "routing",
        "sampling",
        "trace",
    },
}

PUBLIC_NAMES = [
    "ExpertsConfig",
    "LossWeights",
    "MixtureOfDepths",
    "ModelConfig",
    "Output",
    "Router",
    "Routing",
    "RoutingConfig",
    "Sampling",
    "Transformer",
    "apply_routed",
    "build",
    "calibrate",
    "check_lengths",
    "check_tokens",
    "flops",
    "generate",
    "load",
    "losses",
    "num_routed",
    "output_size",
    "ready_to_generate",
    "recommended_defaults",
    "record",
    "stream",
]


def module_name(path):
    """A file's dotted name inside the package; a sub-package is called by its folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


PATHS = {module_name(path): path for path in PACKAGE.rglob("*.py")}


def imported_modules(path):
    """The modules of the package that a file imports, by dotted name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}: relative imports hide directions"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule.removeprefix("modepth.") in PATHS else node.module)
    ours = {name for name in found if name.split(".")[0] == "modepth"}
    return {"__init__" if name == "modepth" else name.removeprefix("modepth.") for name in ours}


def test_imports_run_one_way():
    assert set(PATHS) == set(MAY_IMPORT), "list every module in MAY_IMPORT"
    for name, path in PATHS.items():
        assert imported_modules(path) <= MAY_IMPORT[name], name


def loaded(statement):
    """Which of the heavy packages a fresh interpreter has loaded after `statement`."""
    heavy = "{'transformers', 'matplotlib', 'matplotlib.pyplot', 'torch'}"
    script = f"{statement}\nimport sys; print(*sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return result.stdout.split()


def test_import_modepth_loads_neither_transformers_nor_matplotlib():
    assert loaded("import modepth") == []
    assert loaded("import modepth\nfor name in modepth.__all__: getattr(modepth, name)") == ["torch"]


def test_public_names_are_those_listed_and_documented():
    assert sorted(modepth.__all__) == sorted(PUBLIC_NAMES)
    for name in PUBLIC_NAMES:
        assert inspect.getdoc(getattr(modepth, name)), name


# -- the README


def readme_blocks():
    return blocks(text_of("README.md"), "python")


def test_the_readme_shows_the_core_function_as_it_is():
    assert inspect.getsource(modepth.apply_routed) in readme_blocks()


def snippets():
    """The README's blocks that run by themselves."""
    found = [block for block in readme_blocks() if block.startswith(("import torch", "from modepth"))]
    assert len(found) == 3
    return found


def test_the_readmes_snippets_run_and_print_what_they_say(capsys):
    layer, decoder, generation = snippets()
    exec(layer, {})
    assert capsys.readouterr().out == "tensor([32, 13])\n"
    exec(decoder, {})
    assert "\n[1, 3]\ntensor(" in capsys.readouterr().out
    exec(generation, {})
    assert len(re.findall(r"length \[(?:\d, )*\d\]\n", capsys.readouterr().out)) == 2


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
    carried = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".typed", ".js", ".css", ".html")]
    carried += [path for path in (PACKAGE / "serve" / "shipped").rglob("*") if path.is_file()]
    assert ours == {str(path.relative_to(ROOT)) for path in carried}
    assert sum(path.stat().st_size for path in carried if "shipped" in path.parts) <= 12_000_000
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
