"""`modepth train` and `modepth eval` as a user types them; flags made from the configs."""

import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from modepth import checkpoint
from modepth.checkpoint import save, whole
from modepth.cli import main, make_parser
from modepth.commands.table import LAYOUT, printable
from modepth.config import LossWeights, ModelConfig, RoutingConfig, TrainConfig
from modepth.flags import flags_given, laid_over
from modepth.progress import StepProgress
from modepth.run_folder import RunLock
from tests.checkpoints import names_in
from tests.documents import run_commands, run_snippets, smaller, text_of
from tests.processes import run_ranks, torchrun
from tests.test_kills import last_logged, last_saved, wait_until
from tests.training import contents

ROOT = Path(__file__).parent.parent
CONFIG = """\
model: {vocab_size: 257, num_layers: 3, dim: 16, num_heads: 2, max_length: 32, routing: {capacity: 0.25, predictor: 4}}
train: {steps: 6, batch_size: 2, eval_every: 3, eval_windows: 2, save_every: 3, log_every: 1}
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared") / "texts"  # its own: other modules use this fixture too
    folder.mkdir()
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
        (["--train.length", "33"], "length must be at most the model's max_length 32, got 33"),
        (["--model.max_length", "100000"], "train.tokens: 13320 tokens are fewer than one window of 100000"),
        (["--model.dim", "["], "--model.dim: not a YAML value: while parsing"),
        (["--train.clip", "{a: 1, a: 2}"], "--train.clip: not a YAML value: the key 'a' is given twice"),
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


def test_a_run_folder_that_cannot_be_written_is_refused_before_the_first_step(command, capsys):
    assert main([command[0], "/proc/run", *command[2:]]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("modepth train: /proc/run: cannot be written: ")


def test_a_run_that_another_process_holds_is_refused_and_left_as_it_was(command, capsys):
    assert main([*command, "--train.steps", "3"]) == 0
    with RunLock(command[1]):
        before = contents(Path(command[1]))
        assert main(command) == 2
        assert contents(Path(command[1])) == before
    assert f"modepth train: {command[1]}: in use by process {os.getpid()} (" in capsys.readouterr().err
    assert main(command) == 0


def test_the_config_that_a_run_keeps_is_a_config_and_one_of_a_newer_format_is_refused(command, capsys, tmp_path):
    assert main(command) == 0
    kept = Path(command[1]) / "config.json"
    again = ["train", str(tmp_path / "again"), *command[2:4], "--config", str(kept)]
    assert main([*again, "--train.steps", "1"]) == 0
    assert (
        json.loads((tmp_path / "again" / "config.json").read_text())["model"] == json.loads(kept.read_text())["model"]
    )
    kept.write_text(kept.read_text().replace('"format": 1', '"format": 2'))
    assert main(again) == 2
    assert "model.format 2 is newer than this modepth reads (1): upgrade modepth" in capsys.readouterr().err


def test_a_run_that_diverges_is_one_line_and_exit_code_2(command, capsys):
    flags = {"learning_rate": 1e30, "clip": 1e30, "warmup": 0, "max_bad_steps": 2}
    assert main([*command, *(word for name, value in flags.items() for word in (f"--train.{name}", str(value)))]) == 2
    error = capsys.readouterr().err.splitlines()
    assert error[-1].startswith("modepth train: 2 updates in a row could not be applied, the last at step 2: ")
    assert error[-2] == "step 2: update not applied: a router score of layer 1 is not finite"


# -- stopped


def test_a_signal_ends_the_command_with_its_code_and_one_line_and_the_same_command_goes_on(
    command, capsys, monkeypatch
):
    show = StepProgress.__call__

    def show_and_stop(self, row):
        show(self, row)
        if row["step"] == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(StepProgress, "__call__", show_and_stop)
        assert main(command) == 143
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1] == "modepth train: stopped by signal 15; the same command goes on from here"
    assert last_saved(command[1]) == 2
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 6


def run_main(world, arguments):
    world.close()  # the command joins by itself
    return main(arguments)


def test_sigterm_to_torchrun_saves_the_run_and_the_same_command_goes_on(command):
    run, endless = Path(command[1]), ["--train.steps", "100000", "--train.save_every", "100000"]
    with torchrun(2, "-m", "modepth", *command, *endless) as agent:
        wait_until(lambda: last_logged(run) >= 3, agent)
        agent.send_signal(signal.SIGTERM)
        output, _ = agent.communicate(timeout=60)
    assert agent.returncode == 1  # torchrun's own, whatever its processes end with
    assert output.count("modepth train: stopped by signal 15; the same command goes on from here") == 2
    assert re.search("SignalException: Process .* got signal: 15", output)
    stopped = last_saved(run)
    assert stopped == last_logged(run) + 1
    resumed = [*command, *endless, "--train.steps", str(stopped + 2)]
    assert run_ranks(run_main, 2, resumed) == [0, 0]
    assert last_saved(run) == stopped + 2


def refuse_on_second(world, arguments):
    if world.rank == 1:
        arguments = [*arguments, "--data", "nowhere"]
    world.close()
    return main(arguments)


def test_data_that_one_process_cannot_read_ends_all_of_them_before_the_first_step(command):
    assert run_ranks(refuse_on_second, 2, command) == [2, 2]
    assert not Path(command[1]).exists()


@contextmanager
def small_files(limit):
    """No file may grow beyond so many bytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_up_ends_the_command_and_with_room_the_same_command_goes_on(command, capsys):
    assert main([*command, "--train.steps", "3"]) == 0
    with small_files(30_000):
        assert main(command) == 2
    complaint = capsys.readouterr().err.splitlines()[-1]
    assert re.match(
        r"modepth train: .*/step-00000006: no room \(File too large\): [\d,]+ bytes needed .* [\d,]+ free", complaint
    )
    assert names_in(Path(command[1])) == ["step-00000003"]
    assert main(command) == 0
    assert names_in(Path(command[1])) == ["step-00000003", "step-00000006"]


# -- measured on what it was not made for


def with_other_tokenizer(run, prepared, folder):
    main(["data", "prepare", str(prepared.parent / "texts"), str(folder / "other"), "--tokenizer", "bpe:280"])
    return [
        "--data",
        str(folder / "other"),
    ], "test.tokens: its vocabulary of 280 is more than the model's vocab_size 257"


def with_an_id_outside(run, prepared, folder):
    shutil.copytree(prepared, folder / "other")
    path = folder / "other" / "test.tokens"
    path.write_bytes(path.read_bytes()[:-2] + (257).to_bytes(2, "little"))
    size = path.stat().st_size
    return ["--data", str(folder / "other")], f"test.tokens: id 257 at byte {size - 2} "


def with_nan_in_a_router(run, prepared, folder):
    found = checkpoint.newest(run)
    model = found.load("model")
    model["layers.1.router.score.weight"][0, 0] = math.nan
    save(run, found.step, {"model": whole(model), "optimizer": whole(found.load("optimizer"))}, found.state)
    return [], "test.tokens: layer 1: the router score of row 0, token 0 is nan"


def with_no_checkpoint(run, prepared, folder):
    shutil.rmtree(run / "checkpoints")
    return [], "run: no checkpoint to load"


def with_no_windows(run, prepared, folder):
    return ["--batch-size", "-1"], "batch_size must be a whole number >= 1, got -1"


MISTAKES = [with_other_tokenizer, with_an_id_outside, with_nan_in_a_router, with_no_checkpoint, with_no_windows]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_eval_refuses_in_one_line_what_it_cannot_measure(command, capsys, prepared, tmp_path, mistake):
    assert main([*command, "--train.steps", "1"]) == 0
    extra, message = mistake(Path(command[1]), prepared, tmp_path)
    capsys.readouterr()
    assert main(["eval", command[1], *extra]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("modepth eval: ")
    assert message in line


# -- the page


def test_the_commands_and_the_snippet_of_the_page_on_training_run(tmp_path, monkeypatch, capsys):
    small = {
        "prepare stdlib ": "prepare ./stdlib ",
        "tiny.yaml\n": "tiny.yaml --train.steps 3 --model.dim 16 --model.max_length 64\n",
        "steps=100": "steps=3",
    }
    text = smaller(text_of("training.md"), small)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "stdlib").mkdir()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]:
        (tmp_path / "stdlib" / path.name).write_bytes(path.read_bytes()[:3000])
    run_commands(text)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["run"] == "runs/tiny"
    names = run_snippets(text)
    assert names["model"].config == names["config"]
    written = {path.name for path in (tmp_path / "runs" / "tiny").iterdir()}
    assert written >= {name.split("/")[0] for name in re.findall(r"^\| `(.+?)` \|", text, flags=re.MULTILINE)}


def test_the_commands_and_the_snippet_of_the_page_on_generation_run(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "tiny").symlink_to(trained)

    def on_done(line):
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["run"] == "runs/tiny", line

    run_commands(text_of("generation.md"), on_done)
    run_snippets(text_of("generation.md"))


def test_an_exported_run_speaks_as_the_run_does(trained, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    assert main(["generate", str(trained), "-p", "def main(", "--max-tokens", "12"]) == 0
    text = capsys.readouterr().out
    assert main(["export", str(trained), str(tmp_path / "out")]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["model"] == "ModLlamaForCausalLM"
    model, tokenizer = (each.from_pretrained(tmp_path / "out") for each in (AutoModelForCausalLM, AutoTokenizer))
    prompt = tokenizer("def main(", return_tensors="pt")
    out = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(out[0], skip_special_tokens=True).strip() in text
    assert main(["export", str(trained), str(tmp_path / "out")]) == 2
    assert "exists already" in capsys.readouterr().err


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
    "flags", [["--rule", "predictor"], ["--capacity", "0.9"], ["--capacity", "0.9", "--rule", "router"]]
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
        (["-p", "x" * 40], "prompt 2: 40 tokens are more than the model's max_length 32"),
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


def test_ctrl_c_is_one_line_and_exit_code_130(monkeypatch, capsys):
    def interrupt(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("modepth.commands.flops.read_model_config", interrupt)
    assert main(["flops", "some.yaml"]) == 130
    assert capsys.readouterr().err == "modepth flops: interrupted\n"


def test_a_reader_that_leaves_gets_no_complaint():
    command = [sys.executable, "-m", "modepth", "flops", str(ROOT / "examples" / "decoder.yaml")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141
