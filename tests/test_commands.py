"""`modepth train` and `modepth eval` as a user types them; flags made from the configs."""

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from modepth.cli import main, make_parser
from modepth.commands.table import LAYOUT, printable
from modepth.config import LossWeights, ModelConfig, RoutingConfig, TrainConfig
from modepth.flags import flags_given, laid_over

ROOT = Path(__file__).parent.parent
CONFIG = """\
model: {vocab_size: 257, num_layers: 3, dim: 16, num_heads: 2, max_length: 32, routing: {capacity: 0.25, predictor: 4}}
train: {steps: 6, batch_size: 2, eval_every: 3, eval_windows: 2, save_every: 3, log_every: 1}
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"document {number}: " + "to be or not to be, that is the question. " * 9)
    assert main(["data", "prepare", str(folder), str(folder.parent / "out"), "--tokenizer", "bytes"]) == 0
    return folder.parent / "out"


@pytest.fixture
def command(prepared, tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    return ["train", str(tmp_path / "run"), "--data", str(prepared), "--config", str(tmp_path / "config.yaml")]


def test_train_then_eval(command, capsys):
    assert main(command) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out.splitlines()[-1])
    assert result["step"] == 6
    assert "step 3: validation loss" in captured.err
    run = Path(command[1])
    assert {path.name for path in run.iterdir()} >= {"config.json", "log.jsonl", "checkpoints", "tokenizer.json"}
    for extra in ([], ["--split", "validation", "--mode", "topk"]):
        assert main(["eval", str(run), *extra]) == 0
        evaluated = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert evaluated["loss"] > 0
    assert evaluated["split"] == "validation"


def test_the_same_command_goes_on(command, capsys):
    assert main([*command, "--train.steps", "3"]) == 0
    assert main(command) == 0
    rows = [json.loads(line) for line in (Path(command[1]) / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(6))
    assert [row["step"] for row in rows if "event" in row] == [3]


def test_print_config_shows_what_would_run_and_runs_nothing(command, capsys):
    assert (
        main([*command, "--print_config", "--model.routing.losses.z", "1e-4", "--model.routing.layers", "[1, 2]"]) == 0
    )
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["routing"]["losses"]["z"] == 1e-4
    assert printed["model"]["routing"]["layers"] == [1, 2]
    assert printed["train"]["steps"] == 6
    assert not Path(command[1]).exists()


def test_tensorboard_gets_the_rows(command, capsys):
    assert main([*command, "--tensorboard"]) == 0
    run = Path(command[1])
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    for tag, values in (
        ("train/loss", {row["step"]: row["loss"] for row in rows if "loss" in row}),
        ("validation/loss", {row["step"]: row["validation"]["loss"] for row in rows if "validation" in row}),
    ):
        assert {each.step: each.value for each in events.Scalars(tag)} == pytest.approx(values)


def test_without_the_flag_there_is_no_tensorboard(command, capsys):
    assert main(command) == 0
    assert not (Path(command[1]) / "tensorboard").exists()


def test_a_missing_tensorboard_is_named_before_anything_is_done(command):
    script = "import sys; sys.modules['tensorboard'] = None; from modepth.cli import main; sys.exit(main(sys.argv[1:]))"
    result = subprocess.run(
        [sys.executable, "-c", script, *command, "--tensorboard"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert result.returncode == 2
    assert result.stderr == "modepth train: --tensorboard needs tensorboard: pip install 'modepth[track]'\n"
    assert result.stdout == ""
    assert not Path(command[1]).exists()


def test_a_file_in_place_of_the_tensorboard_folder_is_refused_before_the_first_step(command, capsys):
    assert main([*command, "--train.steps", "3"]) == 0
    run = Path(command[1])
    (run / "tensorboard").write_text("")
    capsys.readouterr()
    assert main([*command, "--tensorboard"]) == 2
    assert f"{run / 'tensorboard'}" in capsys.readouterr().err.splitlines()[-1]
    assert '"step": 4' not in (run / "log.jsonl").read_text()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--model.dim", "x"], "model.dim must be a whole number >= 1, got 'x'"),
        (["--model.routing.capacity", "1.5"], "model.routing.capacity must be a number in (0, 1], got 1.5"),
        (["--train.tokens", "100"], "train.set exactly one of steps, tokens and target_flops"),
        (["--model.vocab_size", "100"], "its vocabulary of 257 is more than the model's vocab_size 100"),
        (["--data", "nowhere"], "nowhere/train.tokens: cannot be read"),
        (["--config", "none.yaml"], "none.yaml: cannot be read: No such file or directory"),
        (["--train.batch_size", "3.5"], "train.batch_size must be a whole number"),
        (["--train.length", "100000"], "tokens are fewer than one window of 100000"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(command, capsys, extra, message):
    assert main([*command, *extra]) == 2
    captured = capsys.readouterr()
    assert message in captured.err.splitlines()[-1]
    assert captured.err.splitlines()[-1].startswith("modepth train: ")
    assert captured.out == ""


def test_an_unknown_flag_or_key_is_refused(command, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--model.dimm", "3"])
    assert stop.value.code == 2
    (tmp_path / "config.yaml").write_text(CONFIG.replace("batch_size", "bach_size"))
    assert main(command) == 2
    assert "unknown field train.bach_size; did you mean 'batch_size'?" in capsys.readouterr().err


def test_a_file_in_place_of_the_run_folder_is_refused_before_the_first_step(command, capsys, tmp_path):
    (tmp_path / "run").write_text("")
    assert main(command) == 2
    assert "run: cannot be written" in capsys.readouterr().err


def test_there_is_a_flag_for_every_field_of_every_config(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    for kind, prefix in (
        (ModelConfig, "model."),
        (TrainConfig, "train."),
        (RoutingConfig, "model.routing."),
        (LossWeights, "model.routing.losses."),
    ):
        for each in fields(kind):
            if each.name != "losses":
                assert f"--{prefix}{each.name} " in text


def test_flags_lie_over_the_file():
    options = make_parser().parse_args(
        ["train", "r", "--data", "d", "--model.routing.every", "3", "--train.clip", "null"]
    )
    tree = laid_over({"model": {"dim": 8, "routing": {"capacity": 0.5}}}, flags_given(options))
    assert tree == {"model": {"dim": 8, "routing": {"capacity": 0.5, "every": 3}}, "train": {"clip": None}}
    assert laid_over({"model": {"routing": None}}, {"model": {"routing": {"every": 3}}}) == {
        "model": {"routing": {"every": 3}}
    }


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    (folder / "config.yaml").write_text(CONFIG)
    assert main(["train", str(folder / "run"), "--data", str(prepared), "--config", str(folder / "config.yaml")]) == 0
    return str(folder / "run")


def test_generate_prints_the_text_then_json(trained, capsys):
    command = ["generate", trained, "-p", "to be", "--max-tokens", "9", "--temperature", "1", "--seed", "3"]
    assert main(command) == 0
    captured = capsys.readouterr()
    *text, last = captured.out.splitlines()
    (row,) = json.loads(last)["rows"]
    assert (row["prompt_tokens"], row["new_tokens"], row["reason"]) == (5, 9, "length")
    assert "\n".join(text) == printable("to be" + row["text"], keep=LAYOUT)
    assert 0 < row["cache_bytes"] < row["dense_cache_bytes"] == 3 * 13 * (2 * 16 * 4 + 4)
    assert "tokens/s; cache " in captured.err
    assert main([*command, "-p", "or not"]) == 0
    *text, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["rows"][0] == row
    assert text[0] == "--- prompt 1"


def test_show_depth_colours_every_token_that_was_read(trained, capsys):
    assert main(["generate", trained, "-p", "to be", "--max-tokens", "9", "--show-depth"]) == 0
    text, legend, last = capsys.readouterr().out.rsplit("\n", 3)[:3]
    assert text.count("\x1b[38;5;") == text.count("\x1b[0m") == 5 + 9 - 1
    assert legend == "layers: \x1b[38;5;27m2\x1b[0m \x1b[38;5;196m3\x1b[0m"
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert plain.startswith("to be")
    assert json.loads(last)["rows"][0]["new_tokens"] == 9


@pytest.mark.parametrize(
    "flags", [["--rule", "router"], ["--capacity", "0.9"], ["--capacity", "0.9", "--rule", "predictor"]]
)
def test_the_rule_and_the_dial_change_what_is_routed(flags, trained, capsys):
    used = []
    for extra in ([], flags):
        assert main(["generate", trained, "-p", "to be or not to be", "--max-tokens", "9", *extra]) == 0
        used.append(json.loads(capsys.readouterr().out.splitlines()[-1])["rows"][0]["cache_bytes"])
    assert used[0] != used[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "-1"], "temperature must be a finite number >= 0.0, got -1.0"),
        (["--max-tokens", "0"], "max_tokens must be a whole number >= 1, got 0"),
        (["--capacity", "2"], "capacity must be a number in (0, 1], got 2.0"),
        (["--chunk", "0"], "chunk must be a whole number >= 1, got 0"),
        (["-p", "x" * 40], "a prompt of 40 tokens is more than the model's max_length 32"),
    ],
)
def test_a_mistake_in_generate_is_one_line(flags, message, trained, capsys):
    assert main(["generate", trained, "-p", "to be", *flags]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"modepth generate: {message}" + (
        " (to keep a layer dense, leave it out of the routed layers)" if "--capacity" in flags else ""
    )


def test_null_leaves_an_optional_part_out(command, capsys):
    assert main([*command, "--print_config", "--model.routing", "null"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["routing"] is None
    assert main([*command, "--model.routing", "null", "--model.routing.every", "3"]) == 2
    assert capsys.readouterr().err == (
        "modepth train: --model.routing.every and --model.routing contradict each other: drop one\n"
    )


def test_recipes_are_configs(capsys):
    recipes = sorted((ROOT / "recipes").glob("*.yaml"))
    assert recipes
    for recipe in recipes:
        assert main(["train", "r", "--data", "d", "--config", str(recipe), "--print_config"]) == 0
        assert main(["flops", str(recipe)]) == 0
        assert capsys.readouterr().out


def test_a_reader_that_leaves_gets_no_complaint():
    command = [sys.executable, "-m", "modepth", "flops", str(ROOT / "examples" / "decoder.yaml")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141
