"""The first command that a newcomer types, and the pages that runs are compared on."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

from modepth import flops
from modepth.cli import main
from modepth.commands.demo import DENSE, MODELS
from modepth.loading import load
from tests.test_report import read
from tests.training import rows_of

BUDGET = 1e11
COMMAND = ["--target-flops", str(BUDGET)]


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The demo with a budget of a few steps: its folder and what it printed."""
    out = tmp_path_factory.mktemp("demo") / "out"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["demo", str(out), *COMMAND]) == 0
    return out, printed.getvalue().splitlines()


def test_the_demo_trains_both_models_with_the_same_flops(shown):
    out, lines = shown
    result = json.loads(lines[-1])
    for name, config in MODELS.items():
        step = 8 * flops.training_flops(config, 256, half_causal=True)
        facts = result["runs"][name]
        assert facts["training FLOPs"] == step * facts["steps"]
        assert BUDGET - step < facts["training FLOPs"] <= BUDGET
        assert facts["parameters"] == sum(parameter.numel() for parameter in load(out / name).parameters())
        assert facts["FLOPs a token"] == flops.forward_flops(config, 256, half_causal=True) // 256
        assert facts["cache bytes of 256 tokens"] == flops.cache_bytes(config, 256)
        measured = rows_of(out / name)[-1]["validation"]
        assert facts["validation loss"] == measured["loss"]
        assert facts["bits per byte"] == measured["bits_per_byte"]
        assert facts["validation loss, top-k"] == measured.get("topk_loss")
        assert facts["decode tokens/s"] > 0
    written = "cache bytes written by 127 tokens"
    assert result["runs"]["dense"][written] == flops.cache_bytes(DENSE, 127)
    assert result["runs"]["MoD"][written] < result["runs"]["dense"][written]
    assert result["runs"]["MoD"]["steps"] > result["runs"]["dense"]["steps"]
    assert flops.dense(MODELS["MoD"]) == DENSE


def test_the_demo_prints_a_table_and_the_paths_of_what_it_wrote(shown):
    out, lines = shown
    table = {re.split("  +", line)[0]: re.split("  +", line)[1:] for line in lines if "  " in line}
    assert table["parameters"] == [f"{flops.num_parameters(config):,}" for config in MODELS.values()]
    assert {"FLOPs a token", "validation loss", "bits per byte", "training tokens/s", "training FLOPs"} < set(table)
    names = ["report.html", "loss_against_flops.png", "token_map_MoD.png", "router_scores_MoD.png"]
    written = [Path(line.strip()) for line in lines if line.startswith("  ") and Path(line.strip()).suffix]
    assert written == [out / name for name in names]
    for picture in written[1:]:
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.with_suffix(".svg").exists()


def test_the_demos_page_holds_the_table_and_the_three_pictures(shown):
    page = read(shown[0] / "report.html")
    assert len(page.of("img")) == 3
    assert [each.get("id") for each in page.of("script")] == ["view-0", "view-1", None]
    assert {"dense", "MoD", "parameters", "FLOPs a token", "validation loss", "bits per byte"} < set(page.text("th"))
    assert page.text("h2") == ["Depth of MoD", "Training", "A sample of dense", "A sample of MoD", "Routing of MoD"]
    assert page.text("figcaption")[0] == (
        "Which layers of MoD compute each token of a validation snippet, decided token by token."
    )


def test_the_demo_again_trains_nothing_anew(shown, capsys):
    out, _ = shown
    before = {name: rows_of(out / name) for name in MODELS}
    assert main(["demo", str(out), *COMMAND]) == 0
    assert {name: rows_of(out / name) for name in MODELS} == before


def test_a_report_of_runs_is_a_page_with_pictures(shown, tmp_path, capsys):
    runs = [str(shown[0] / name) for name in MODELS]
    assert main(["report", *runs, "--out", str(tmp_path / "page")]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(result["runs"]) == ["dense", "MoD"]
    assert [Path(path).exists() for path in result["written"]] == [True] * 4
    assert main(["report", runs[0], "--out", str(tmp_path / "dense")]) == 0
    assert len(read(tmp_path / "dense" / "report.html").of("img")) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "FOLDER", "--target-flops", "5"], "target_flops is less than one step"),
        (["demo", "FOLDER", "--target-flops", "nan"], "target_flops must be"),
        (["report", "FOLDER"], "there is no such folder: name that of a run or of a sweep"),
        (["report", "FOLDER/x", "FOLDER/y/x"], "folders of the same name"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, tmp_path, capsys):
    arguments = [argument.replace("FOLDER", str(tmp_path / "none")) for argument in arguments]
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "none").exists()
