"""A run and its folder: harmed checkpoints, other models, full disks, and what is refused before the first step."""

import math
import os
from dataclasses import replace

import pytest
import torch

from modepth import checkpoint
from modepth.checkpoint import save, whole
from modepth.config import TrainConfig
from modepth.data import TokenWriter, open_tokens
from modepth.loading import load
from modepth.parallel import spread
from modepth.run import ALONE, Stopped, check_possible, train
from modepth.run_folder import step_folder
from modepth.runlog import RunLog
from modepth.schedule import routing_at
from modepth.textfile import replace_text
from modepth.world import World
from tests.checkpoints import MODEL, flip, names_in
from tests.oracles import tiny_model, tiny_tokens
from tests.training import CONFIG, assert_same_end, contents, make_data, new_model, rows_of, stop_after


@pytest.fixture
def data(tmp_path):
    return make_data(tmp_path)


def stopped_run(data, run, step, config=CONFIG):
    with pytest.raises(Stopped):
        train(new_model(), config, data, run, on_row=stop_after(step))


# -- checkpoints


@pytest.mark.parametrize("harm", [flip, os.unlink])
def test_a_harmed_newest_checkpoint_costs_a_warning_and_the_steps_since_the_one_before(data, tmp_path, harm):
    train(new_model(), CONFIG, data, tmp_path / "whole")
    stopped_run(data, tmp_path / "run", 7)
    assert names_in(tmp_path / "run") == ["step-00000004", "step-00000008"]
    harm(step_folder(tmp_path / "run", 8) / MODEL)
    with pytest.warns(UserWarning, match="passing over step 8"):
        train(new_model(), CONFIG, data, tmp_path / "run")
    assert_same_end(tmp_path / "run", tmp_path / "whole")


def test_a_run_of_which_no_checkpoint_is_good_is_refused_and_left_as_it_was(data, tmp_path):
    train(new_model(), CONFIG, data, tmp_path / "run")
    for step in (8, 12):
        flip(step_folder(tmp_path / "run", step) / MODEL)
    before = contents(tmp_path / "run")
    with (
        pytest.warns(UserWarning, match="passing over step"),
        pytest.raises(ValueError, match=r"run: none of its checkpoints can be used: put a good one back, or"),
    ):
        train(new_model(), CONFIG, data, tmp_path / "run")
    assert contents(tmp_path / "run") == before


def test_a_run_sweeps_what_a_killed_save_left_and_goes_on_from_the_newest_complete_checkpoint(data, tmp_path):
    train(new_model(), CONFIG, data, tmp_path / "whole")
    stopped_run(data, tmp_path / "run", 5)
    leftover = tmp_path / "run" / "checkpoints" / ".step-00000008.1-a.part"
    leftover.mkdir()
    (leftover / MODEL).write_bytes(b"half")
    train(new_model(), CONFIG, data, tmp_path / "run")
    assert_same_end(tmp_path / "run", tmp_path / "whole")


def rewrite(run, change_tensors=lambda model, optimizer: None, change_state=lambda state: None):
    """A run's newest checkpoint as another program might have written it."""
    found = checkpoint.newest(run)
    model, optimizer, state = found.load("model"), found.load("optimizer"), found.state
    change_tensors(model, optimizer)
    state = change_state(state) or state
    save(run, found.step, {"model": whole(model), "optimizer": whole(optimizer)}, state)


def assert_refused(data, run, *messages, loads=False):
    """Neither resumed nor, unless it `loads`, loaded; each message is in the error, and the run is as it was."""
    before = contents(run)
    attempts = [lambda: train(new_model(), CONFIG, data, run)]
    for attempt in attempts if loads else [*attempts, lambda: load(run)]:
        with pytest.raises(ValueError, match=r"run/checkpoints/step-00000012") as caught:
            attempt()
        for message in messages:
            assert message in str(caught.value)
    assert contents(run) == before


def test_tensors_of_a_run_that_are_missing_unexpected_or_misshapen_are_all_listed(data, tmp_path):
    train(new_model(), CONFIG, data, tmp_path / "run")

    def change(model, optimizer):
        del model["norm.weight"]
        model["more"] = torch.ones(2)
        model["layers.0.mlp.up_proj.weight"] = torch.ones(41, 7)
        model["layers.2.input_layernorm.weight"] = torch.ones(60).double()

    rewrite(tmp_path / "run", change)
    assert_refused(
        data,
        tmp_path / "run",
        "missing norm.weight",
        "unexpected more",
        "layers.0.mlp.up_proj.weight is torch.float32 (41, 7), expected torch.float32 (41, 60)",
        "layers.2.input_layernorm.weight is torch.float64 (60,), expected torch.float32 (60,)",
    )


def test_an_optimizer_that_is_not_that_of_the_model_is_refused_listing_its_tensors(data, tmp_path):
    train(new_model(), CONFIG, data, tmp_path / "run")

    def change(model, optimizer):
        del optimizer["norm.weight.exp_avg"]
        optimizer["more.step"] = torch.tensor(1.0)
        optimizer["layers.0.mlp.up_proj.weight.exp_avg_sq"] = torch.ones(41, 7)

    rewrite(tmp_path / "run", change)
    assert_refused(
        data,
        tmp_path / "run",
        "missing norm.weight.exp_avg",
        "unexpected more.step",
        "layers.0.mlp.up_proj.weight.exp_avg_sq is torch.float32 (41, 7), expected torch.float32 (41, 60)",
        loads=True,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state["model"].update(format=2), "model: format 2 is newer than this modepth reads (1)"),
        (lambda state: state["model"]["routing"].update(depth=1), "model: unknown field routing.depth"),
        (lambda state: state["model"].update(num_layers=-3), "model: num_layers must be a whole number >= 1, got -3"),
        (lambda state: state.clear(), "has no model, so it is not of a run of modepth"),
        (lambda state: state.update(setting=3), "has no setting, so it is not of a run of modepth"),
        (lambda state: [1, 2], "has no model, so it is not of a run of modepth"),
    ],
)
def test_a_state_that_no_run_wrote_is_refused_naming_the_file_and_the_field(data, tmp_path, change, message):
    train(new_model(), CONFIG, data, tmp_path / "run")
    rewrite(tmp_path / "run", change_state=change)
    assert_refused(data, tmp_path / "run", f"state.json: {message}")


# -- going on with another config or setting


def test_other_threads_or_another_torch_go_on_with_a_warning(data, tmp_path, monkeypatch):
    stopped_run(data, tmp_path / "run", 5)
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    changes = f"threads was {threads}, is {threads + 1}; torch was .*, is 9.9.0"
    with pytest.warns(UserWarning, match=f"going on at step 6, but not bit-exact: {changes}"):
        train(new_model(), CONFIG, data, tmp_path / "run")
    assert checkpoint.newest(tmp_path / "run").step == 12


def test_other_data_go_on_with_a_warning(data, tmp_path):
    stopped_run(data, tmp_path / "run", 5)
    (tmp_path / "other").mkdir()
    other = make_data(tmp_path / "other", seed=1)
    with pytest.warns(UserWarning, match=f"data was {data.train.sha256}, is {other.train.sha256}"):
        train(new_model(), CONFIG, other, tmp_path / "run")


def test_fewer_steps_than_were_done_are_refused_and_the_run_left_as_it_was(data, tmp_path):
    train(new_model(), CONFIG, data, tmp_path / "run")
    before = contents(tmp_path / "run")
    with pytest.raises(
        ValueError, match=r"run: is at step 12 already, got 7 steps: ask for more, or choose another run"
    ):
        train(new_model(), replace(CONFIG, steps=7), data, tmp_path / "run")
    assert contents(tmp_path / "run") == before


def test_a_finished_run_started_again_is_left_as_it_was(data, tmp_path):
    last = train(new_model(), CONFIG, data, tmp_path / "run")
    before = contents(tmp_path / "run")
    assert train(new_model(), CONFIG, data, tmp_path / "run") == last
    assert contents(tmp_path / "run") == before


# -- before the first step


@pytest.mark.parametrize("split", ["train", "validation"])
def test_tokens_for_less_than_one_window_are_refused_before_the_first_step(data, tmp_path, split):
    writer = TokenWriter(tmp_path / "short.tokens", vocab_size=97)
    writer.add(range(16), num_bytes=16)
    writer.finish()
    short = open_tokens(tmp_path / "short.tokens")
    with pytest.raises(ValueError, match=r"short\.tokens: 16 tokens are fewer than one window of 16"):
        train(new_model(), CONFIG, data._replace(**{split: short}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_batch_that_the_processes_cannot_share_is_refused_before_the_first_step(data):
    world = World(rank=0, size=3, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="a batch of 4 rows cannot be shared by 3 processes: use a multiple"):
        check_possible(new_model().config, CONFIG, data, world)


# -- a full disk


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_log_on_a_full_disk_is_named(tmp_path):
    (tmp_path / "log.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"log\.jsonl: cannot be written: No space left on device"):
        RunLog(tmp_path).add({"step": 1})


def test_a_text_that_cannot_be_written_is_named_and_the_one_before_stays(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    replace_text(path, "before")

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"config\.json: cannot be written: No space left on device"):
        replace_text(path, "after")
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"config.json": "before"}


# -- the schedule of the capacity

FALLING = replace(CONFIG, capacity_warmup=0.75, capacity_stages=3, save_every=100)


def test_the_shares_that_a_run_logs_fall_as_scheduled(data, tmp_path):
    train(new_model(), FALLING, data, tmp_path / "run")
    shares = [row["layers"]["1"]["share"] for row in rows_of(tmp_path / "run") if "loss" in row]
    stages = [1.0, 1 - 0.7 / 3, 1 - 2 * 0.7 / 3, 0.3]
    assert shares == [math.ceil(16 * stages[step // 3]) / 16 for step in range(12)]
    assert len(set(shares)) == 4


def test_a_run_stopped_while_its_capacity_falls_goes_on_to_the_same_bytes(data, tmp_path):
    train(new_model(), FALLING, data, tmp_path / "whole")
    stopped_run(data, tmp_path / "run", 4, FALLING)
    train(new_model(), FALLING, data, tmp_path / "run")
    step_folder(tmp_path / "run", 5).rename(tmp_path / "aside")
    assert_same_end(tmp_path / "run", tmp_path / "whole")


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_run_compiles_every_stage_of_its_capacity(monkeypatch):
    graphs = []
    compile_model = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda model: compile_model(model, backend=lambda g, _: graphs.append(g) or g)
    )
    model, tokens = tiny_model(num_layers=3), tiny_tokens()
    config = TrainConfig(steps=4, capacity_warmup=0.5, capacity_stages=2, compile=True)
    with torch._dynamo.config.patch(recompile_limit=1):  # not by monkeypatch, which would take it away for good
        forward = spread(model, config, ALONE)
        for step in range(4):
            forward(tokens, mode="topk", routing=routing_at(step, 4, config, model.config.routing))
    assert len(graphs) == 3


# -- activation checkpointing


def end_of(run):
    return {path.name: path.read_bytes() for path in checkpoint.newest(run).folder.glob("*.safetensors")}


def test_a_run_that_keeps_fewer_activations_ends_in_the_same_bytes(data, tmp_path):
    runs = {}
    for saving in (False, True):
        model, calls = new_model(), []
        model.layers[0].mlp.register_forward_hook(lambda *_, calls=calls, model=model: calls.append(model.training))
        train(model, replace(CONFIG, checkpoint_activations=saving), data, tmp_path / str(saving))
        runs[saving] = sum(calls)
    assert runs[True] == 2 * runs[False]  # every layer is computed again in the backward
    assert end_of(tmp_path / "True") == end_of(tmp_path / "False")
