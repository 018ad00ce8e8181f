"""`modepth inspect`: says what a run is and where it stands, harms nothing, runs nothing, fails in one line."""

import json
import os
import pickle
import shutil
from dataclasses import replace

import pytest

from modepth import checkpoint
from modepth.cli import main
from modepth.loading import load
from modepth.run import train
from tests.checkpoints import MODEL, flip, truncate
from tests.training import CONFIG, make_data, new_model, rows_of


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 8 steps that went on to 12, so that its log has an event; checkpoints of 8 and 12."""
    folder = tmp_path_factory.mktemp("finished")
    data = make_data(folder)
    for steps in (8, 12):
        train(new_model(), replace(CONFIG, steps=steps), data, folder / "run")
    return folder / "run"


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def inspect(capsys, run, *options):
    """What is printed for people, and the JSON."""
    assert main(["inspect", str(run), *map(str, options)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    *text, last = captured.out.splitlines()
    return text, json.loads(last)


def cells_of(text, *path):
    """The words of the line that begins with `path`'s last, under the title that is its first."""
    title, name = path
    start = next(number for number, line in enumerate(text) if line.startswith(title))
    return next(line for line in text[start + 1 :] if line.startswith(name)).removeprefix(name).split()


def refused(capsys, *arguments):
    """The one line of an error."""
    assert main(["inspect", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("modepth inspect: ")
    return line


def state_of(folder):
    """Bytes and times of everything in a folder."""
    paths = [folder, *sorted(folder.rglob("*"))]
    return {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in paths}


# -- what it says


def test_it_says_what_the_run_is(capsys, run):
    text, summary = inspect(capsys, run)
    model = load(run)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert summary["parameters"] == count
    assert summary["model"] == json.loads((run / "config.json").read_text())["model"]
    assert summary["train"] == json.loads((run / "config.json").read_text())["train"]
    assert summary["routed_layers"] == [1]
    for name, value in {
        "layers": "3",
        "width": "60",
        "heads ": "6",
        "heads of keys and values": "3",
        "vocabulary": "97",
        "parameters": f"{count:,}",
        "routed layers": "1",
        "capacity": "0.3",
        "selection in training": "topk",
        "rule in causal mode": "cutoff",
        "predictor width": "5",
    }.items():
        assert cells_of(text, "Model", name) == [value], name


def test_of_the_training_config_it_says_what_differs_from_the_defaults(capsys, run):
    text, _ = inspect(capsys, run)
    start, end = text.index("Training"), text.index("Where it stands")
    table = {line.split()[0]: line.split()[1:] for line in text[start + 2 : end - 4]}
    assert table == {
        "steps": ["12", "-"],
        "length": ["16", "-"],
        "batch_size": ["4", "16"],
        "learning_rate": ["0.01", "0.003"],
        "eval_every": ["5", "100"],
        "eval_windows": ["3", "64"],
        "save_every": ["4", "100"],
        "log_every": ["1", "10"],
    }
    assert cells_of(text, "Training", "tokens in all") == [str(12 * 4 * 16)]


def test_it_says_where_the_run_stands(capsys, run):
    text, summary = inspect(capsys, run)
    rows = rows_of(run)
    trained = [row for row in rows if "loss" in row][-1]
    measured = [row for row in rows if "validation" in row][-1]
    assert (summary["steps_done"], summary["steps"], summary["newest_unharmed"]) == (12, 12, 12)
    assert (summary["loss"], summary["loss_step"]) == (trained["loss"], 11)
    assert (summary["validation"], summary["validation_step"]) == (measured["validation"], 12)
    assert (summary["layers"], summary["layers_step"]) == (trained["layers"], 11)
    assert summary["events"] == [{"step": 8, "event": "config changed", "reason": "steps was 8, is 12"}]
    assert cells_of(text, "Where it stands", "steps done") == ["12", "of", "12"]
    assert cells_of(text, "Where it stands", "training loss") == [f"{trained['loss']:.4g}", "11"]
    assert cells_of(text, "Where it stands", "validation loss") == [f"{measured['validation']['loss']:.4g}", "12"]
    assert cells_of(text, "Where it stands", "bits a byte")[0] == f"{measured['validation']['bits_per_byte']:.4g}"
    assert cells_of(text, "Routed layers at step 11", "1")[:3] == [
        f"{trained['layers']['1'][name]:.4g}" for name in ("share", "gate", "cutoff")
    ]
    assert "config changed  steps was 8, is 12" in text[text.index("Events, the last 1 of 1") + 2]


def test_it_counts_the_bytes_of_checkpoints_and_verifies_them(capsys, run):
    text, summary = inspect(capsys, run)
    for found, step in zip(summary["checkpoints"], (8, 12), strict=True):
        folder = run / "checkpoints" / f"step-{step:08d}"
        num_bytes = sum(path.stat().st_size for path in folder.iterdir())
        assert found == {"step": step, "num_bytes": num_bytes, "harm": None}
        assert cells_of(text, "Checkpoints", str(step)) == [f"{num_bytes:,}", "complete,", "hashes", "right"]


def test_with_a_step_it_is_the_run_as_it_stood_there(capsys, run):
    text, summary = inspect(capsys, run, "--step", 8)
    assert summary["train"]["steps"] == 8
    assert (summary["steps_done"], summary["steps"], summary["loss_step"], summary["layers_step"]) == (8, 8, 7, 7)
    assert summary["validation_step"] == 8
    assert [each["step"] for each in summary["checkpoints"]] == [8]
    assert not any(line.startswith("Events") for line in text)


def test_a_dense_model_and_a_run_that_was_killed_at_once(capsys, run):
    shutil.rmtree(run / "checkpoints")
    (run / "log.jsonl").unlink()
    config = json.loads((run / "config.json").read_text())
    config["model"]["routing"] = None
    (run / "config.json").write_text(json.dumps(config))
    text, summary = inspect(capsys, run)
    assert cells_of(text, "Model", "routed layers") == ["none:", "a", "dense", "model"]
    assert (summary["steps_done"], summary["loss"], summary["checkpoints"], summary["layers"]) == (0, None, [], {})
    assert cells_of(text, "Where it stands", "newest unharmed checkpoint") == ["none", "-"]


def test_of_a_cut_log_it_says_what_it_did_not_read(capsys, run):
    lines = (run / "log.jsonl").read_text().splitlines(keepends=True)
    (run / "log.jsonl").write_text("".join([*lines[:3], lines[3][:20] + "\n", *lines[4:]]))
    text, summary = inspect(capsys, run)
    assert (summary["loss_step"], summary["num_unread_lines"]) == (2, len(lines) - 3)
    assert cells_of(text, "Where it stands", "log lines not read") == ["the", "last", str(len(lines) - 3)]


def test_of_many_events_the_last_ten_are_shown(capsys, run):
    with (run / "log.jsonl").open("a") as file:
        for step in range(12, 30):
            file.write(json.dumps({"step": step, "event": "update not applied", "reason": "\x1b[2J"}) + "\n")
    text, summary = inspect(capsys, run)
    assert (summary["num_events"], [each["step"] for each in summary["events"]]) == (19, list(range(20, 30)))
    assert "Events, the last 10 of 19" in text
    assert "\x1b" not in "".join(text)


# -- what it must not do


def test_it_changes_nothing(capsys, run):
    before = state_of(run)
    inspect(capsys, run)
    inspect(capsys, run, "--step", 8)
    assert state_of(run) == before


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


@pytest.mark.parametrize(
    "place",
    ["model.pt", "config.json", "log.jsonl", f"checkpoints/step-00000012/{MODEL}", "checkpoints/step-00000012/x.bin"]
    + [f"checkpoints/step-00000012/{name}.json" for name in ("state", "manifest")],
)
@pytest.mark.parametrize("protocol", [0, 5])
def test_a_pickle_is_never_executed(capsys, run, tmp_path, place, protocol):
    trap = pickle.dumps(Bomb(str(tmp_path / "exploded")), protocol)
    (run / place).write_bytes(trap)
    code = main(["inspect", str(run)])
    assert not (tmp_path / "exploded").exists()
    out = capsys.readouterr().out
    if "checkpoints" in place:
        assert "HARMED" in out
    assert code == (2 if place == "config.json" or (place == "log.jsonl" and protocol) else 0)
    pickle.loads(trap)
    assert (tmp_path / "exploded").exists()


# -- what is wrong


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda folder: flip(folder / MODEL), f"{MODEL}: contents changed since they were saved: another sha256"),
        (lambda folder: truncate(folder / MODEL), f"{MODEL}: "),
        (lambda folder: (folder / MODEL).unlink(), f"{MODEL}: No such file or directory"),
        (lambda folder: (folder / "more").touch(), "more: not a file of this checkpoint"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json: not valid JSON"),
        (lambda folder: (shutil.rmtree(folder), folder.touch()), "not a folder"),
        (lambda folder: (shutil.rmtree(folder), folder.symlink_to(folder.parent)), "not a folder"),
    ],
)
def test_a_harmed_checkpoint_is_shown_as_such(capsys, run, harm, reason):
    harm(run / "checkpoints" / "step-00000012")
    text, summary = inspect(capsys, run)
    first, last = summary["checkpoints"]
    assert first["harm"] is None
    assert last["harm"].startswith(reason)
    assert summary["newest_unharmed"] == 8
    (line,) = [line for line in text if "HARMED" in line]
    assert line.startswith("12 ")
    assert f"HARMED: {reason}" in line
    assert reason.split(": ")[-1] in refused(capsys, run, "--step", 12)


def test_a_checkpoint_that_is_removed_meanwhile_is_left_out(capsys, run, monkeypatch):
    def remove_first(folder, step):
        if step == 8:
            shutil.rmtree(run / "checkpoints" / "step-00000008")
        return checkpoint.open_step(folder, step)

    monkeypatch.setattr("modepth.commands.inspect.open_step", remove_first)
    assert [each["step"] for each in inspect(capsys, run)[1]["checkpoints"]] == [12]


def test_what_is_not_a_run_is_refused(capsys, tmp_path):
    assert "nowhere: no such folder" in refused(capsys, tmp_path / "nowhere")
    (tmp_path / "file").touch()
    assert "file: not a folder" in refused(capsys, tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "empty: not a run, it is empty" in refused(capsys, tmp_path / "empty")
    assert f"{tmp_path}: not a run, it has no config.json" in refused(capsys, tmp_path)


def test_a_step_without_a_checkpoint_is_refused(capsys, run):
    assert "run: no checkpoint of step 7: there are 8, 12" in refused(capsys, run, "--step", 7)
    assert "no checkpoint of step -1" in refused(capsys, run, "--step", -1)
    shutil.rmtree(run / "checkpoints")
    assert "no checkpoint of step 8: there is none yet" in refused(capsys, run, "--step", 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: "[]", "config.json: expected the fields of a model under `model`"),
        (lambda config: '{"model": 3}', "config.json: expected the fields of a model under `model`"),
        (lambda config: '{"model": {', "config.json: not valid JSON: "),
        (lambda config: "[" * 100_000, "config.json: not valid JSON: "),
        (lambda config: changed(config, "model", num_layers=-1), "num_layers must be a whole number >= 1, got -1"),
        (lambda config: changed(config, "model", format=9), "format 9 is newer than this modepth reads"),
        (lambda config: changed(config, "train", clip=float("nan")), "train.clip must be a finite number >= 0.0"),
        (lambda config: changed(config, "train", **{"a\nb\x1b[2J": 1}), "unknown field train.a\\nb\\x1b[2J"),
        (lambda config: changed(config, "train", steps=None, tokens=3), "tokens is less than one step"),
        (lambda config: json.dumps({"model": config["model"]}), "train must be a mapping of TrainConfig fields"),
    ],
)
def test_a_damaged_config_is_refused(capsys, run, change, message):
    path = run / "config.json"
    path.write_text(change(json.loads(path.read_text())))
    line = refused(capsys, run)
    assert f"{path}: " in line
    assert message in line


def changed(config, part, **fields):
    return json.dumps({**config, part: {**config[part], **fields}})


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (b"\xff\xfe\n", "log.jsonl: 'utf-8' codec can't decode"),
        (b"3\n", "log.jsonl: not the rows of a run: "),
        (b'{"loss": 3}\n', "log.jsonl: not the rows of a run: KeyError('step')"),
        (b'{"step": 3, "loss": "high"}\n', "log.jsonl: could not convert string to float: 'high'"),
        (b'{"step": 1e999}\n', "log.jsonl: cannot convert float infinity to integer"),
        (b'{"step": 3, "validation": 4}\n', "log.jsonl: not the rows of a run: "),
        (b'{"step": 3, "layers": {"1": {"share": null}}}\n', "log.jsonl: not the rows of a run: "),
        (b"[" * 100_000 + b"\n", "log.jsonl: not the rows of a run: RecursionError"),
    ],
)
def test_a_damaged_log_is_refused(capsys, run, rows, message):
    (run / "log.jsonl").write_bytes(rows)
    assert message in refused(capsys, run)


def test_a_log_that_never_ends_is_refused(capsys, run):
    (run / "log.jsonl").unlink()
    os.mkfifo(run / "log.jsonl")
    assert "log.jsonl: not a plain file" in refused(capsys, run)
