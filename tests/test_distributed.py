"""More than one process, for real, by gloo: equal to one, resumed to the bit, alike in trouble."""

import contextlib
import json
import os
import signal
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from modepth import ExpertsConfig, LossWeights, checkpoint
from modepth.config import model_config_to_dict
from modepth.loading import load
from modepth.parallel import spread
from modepth.rendezvous import fresh_store
from modepth.restore import load_model, load_optimizer, model_tensors, optimizer_tensors
from modepth.run import ALONE, Stopped, train
from modepth.run_folder import RunLock
from modepth.train import evaluate, make_optimizer, train_step
from tests.documents import blocks, text_of
from tests.oracles import tiny_config, tiny_model
from tests.processes import run_ranks
from tests.training import CONFIG, make_data, new_model, ragged_batch, read_data, rows_of

LOSSES = LossWeights(predictor=0.7, router=0.1, z=0.1)
PARALLEL = ("ddp", "fsdp")
EXPERTS = ExpertsConfig(num_experts=3, num_noops=1, balance=0.0)  # a balancing loss depends on how a batch is cut


def whole(tensors):
    """Tensors as arrays, those that are shared out put together; all ranks call this."""
    together = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    return {name: tensor.detach().clone().numpy() for name, tensor in together.items()}


def assert_close(got, expected, tolerance=1e-9):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert abs(got[name] - value).max(initial=0.0) <= tolerance, name


def assert_equal(got, expected):
    assert_close(got, expected, tolerance=0.0)


def test_what_parallel_may_be():
    with pytest.raises(ValueError, match="parallel must be one of ddp, fsdp, got 'tensor'"):
        replace(CONFIG, parallel="tensor")
    with pytest.raises(ValueError, match="compile does not go with parallel 'fsdp' yet: drop compile"):
        replace(CONFIG, parallel="fsdp", compile=True)


# -- meeting


def meet(store, size, late=None):
    """The keys that `size` threads agree on, one of them a little late."""

    def join(rank):
        if rank == late:
            time.sleep(0.2)
        mine = fresh_store(store, rank, size, timeout_seconds=10)
        mine.set(f"seen by {rank}", "")
        return mine

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(join, range(size)))


@pytest.mark.parametrize("late", [0, 2])
def test_processes_that_torchrun_restarts_meet_apart_from_those_before_them(late):
    store = dist.HashStore()
    for _ in range(3):
        stores = meet(store, 3, late)
        for each in stores:
            assert each.check([f"seen by {rank}" for rank in range(3)])
            assert not each.check(["address"])
        stores[0].set("address", "of a process that will be gone")


def test_a_process_that_never_comes_is_not_waited_for_in_vain():
    store = dist.HashStore()
    meet(store, 2)
    with pytest.raises(TimeoutError, match=r"rank 0: not all of 2 processes came within 0.3 s; see their logs"):
        fresh_store(store, 0, 2, timeout_seconds=0.3)


# -- equal to one process


def take_steps(world, config, model_changes, empty_rank=False):
    """Five updates on this rank's rows of a ragged batch: the weights, the optimiser's state, what each step said."""
    torch.set_default_dtype(torch.float64)
    model = tiny_model(seed=world.rank, num_layers=3, **model_changes)  # all begin with the first rank's weights
    model.checkpoint_activations = config.checkpoint_activations
    forward = spread(model, config, world)
    optimizer = make_optimizer(model, config)
    batch = ragged_batch()
    if empty_rank:
        batch.lengths_B[4:] = 0
    share = len(batch.lengths_B) // world.size
    batch = batch.rows(slice(share * world.rank, share * (world.rank + 1)))
    results = [train_step(forward, optimizer, batch, config, world) for _ in range(5)]
    said = [(result.loss, *result.router_losses.values(), result.gradient_norm) for result in results]
    return whole(model_tensors(model)), whole(optimizer_tensors(model, optimizer)), said


@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize(
    ("train_changes", "model_changes", "empty_rank"),
    [
        pytest.param({}, {"predictor": 5, "losses": LOSSES}, False, id="ragged"),
        pytest.param({"micro_batch": 1, "checkpoint_activations": True}, {"predictor": 5}, False, id="accumulated"),
        pytest.param({}, {"predictor": 5, "losses": LOSSES}, True, id="a rank of padding alone"),
        pytest.param({}, {"gate": "one", "tie_embeddings": False}, False, id="routers without gradient"),
        pytest.param({}, {"gate": "one", "flow": "exit", "experts": EXPERTS}, False, id="exits and experts"),
        pytest.param(
            {"micro_batch": 3}, {"predictor": 5, "losses": LossWeights(predictor=0)}, False, id="idle predictors"
        ),
    ],
)
def test_two_processes_equal_one(parallel, train_changes, model_changes, empty_rank):
    config = replace(CONFIG, parallel=parallel, **train_changes)
    weights, moments, said = take_steps(ALONE, config, model_changes, empty_rank)
    assert said[0][-1] > config.clip  # so that a wrong norm would show
    for rank_weights, rank_moments, rank_said in run_ranks(take_steps, 2, config, model_changes, empty_rank):
        assert_close(rank_weights, weights)
        assert_close(rank_moments, moments)
        for one, other in zip(said, rank_said, strict=True):
            assert other == pytest.approx(one, abs=1e-9)


def whole_run(world, config, folder, run, **model_changes):
    torch.set_default_dtype(torch.float64)
    train(new_model(dropout=0.0, losses=LOSSES, **model_changes), config, read_data(folder), run, world=world)


@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_whole_run_on_two_processes_equals_one(parallel, tmp_path):
    # Of five validation windows, two a rank at a time, the second rank gets none in the end.
    config = replace(CONFIG, steps=5, eval_every=2, eval_windows=5, parallel=parallel, capacity_warmup=0.5)
    make_data(tmp_path)
    whole_run(ALONE, config, tmp_path, tmp_path / "one")
    run_ranks(whole_run, 2, config, tmp_path, tmp_path / "two")
    assert_close(whole(load(tmp_path / "two").state_dict()), whole(load(tmp_path / "one").state_dict()))
    for one, two in zip(rows_of(tmp_path / "one"), rows_of(tmp_path / "two"), strict=True):
        for name in {"loss", "router_losses", "gradient_norm", "validation"} & one.keys():
            assert two[name] == pytest.approx(one[name], abs=1e-9), name


def compiled_run(world, config, folder, run):
    whole_run(world, config, folder, run)
    return torch._dynamo.utils.counters["frames"]["ok"]


@pytest.mark.long
@pytest.mark.usefixtures("fp64")
def test_a_compiled_run_on_two_processes_equals_one_that_is_not(tmp_path):
    config = replace(CONFIG, steps=4)
    make_data(tmp_path)
    assert run_ranks(compiled_run, 2, config, tmp_path, tmp_path / "eager") == [0, 0]
    compiled = replace(config, compile=True)
    assert min(run_ranks(compiled_run, 2, compiled, tmp_path, tmp_path / "compiled", patience=10)) > 0
    assert_close(whole(load(tmp_path / "compiled").state_dict()), whole(load(tmp_path / "eager").state_dict()), 1e-5)


def parameters_after_evaluation(world, folder):
    model = new_model()
    spread(model, replace(CONFIG, parallel="fsdp"), world)
    before = list(model.parameters())
    options = {"length": 16, "num_windows": 3, "batch_size": 2, "mode": "topk"}
    evaluate(model, read_data(folder).validation, world=world, **options)
    return all(one is other for one, other in zip(before, model.parameters(), strict=True))


def test_evaluation_leaves_a_shared_out_model_the_parameters_that_the_optimizer_has(tmp_path):
    make_data(tmp_path)
    assert run_ranks(parameters_after_evaluation, 2, tmp_path) == [True, True]


def run_script(world, script, *arguments):
    world.close()  # the script joins by itself
    sys.argv = ["train.py", *map(str, arguments)]
    exec(script, {})


def test_the_script_of_the_documents_runs_on_two_processes(tmp_path):
    (script,) = blocks(text_of("distributed.md"), "python")
    make_data(tmp_path)
    (tmp_path / "model.json").write_text(json.dumps(model_config_to_dict(tiny_config())))
    run_ranks(run_script, 2, script, tmp_path / "model.json", tmp_path, tmp_path / "run")
    assert checkpoint.newest(tmp_path / "run").step == 20


# -- resuming


def stopped_run(world, config, folder, run, signal_at=None):
    """A run; where `signal_at` is given, the first rank alone gets a SIGTERM in that step."""

    def on_row(row):
        if row["step"] == signal_at and "loss" in row:
            os.kill(os.getpid(), signal.SIGTERM)

    model = new_model(seed=world.rank)
    with contextlib.suppress(Stopped):
        train(model, config, read_data(folder), run, world=world, on_row=on_row)
    return whole(model_tensors(model))


# Two numbers have one sum; from three on the order of adding matters.
@pytest.mark.parametrize(("parallel", "size"), [("ddp", 2), ("ddp", 3), ("fsdp", 2)])
def test_a_run_of_several_processes_goes_on_to_the_same_bits(parallel, size, tmp_path):
    config = replace(CONFIG, batch_size=6, micro_batch=1, parallel=parallel, save_every=100)
    make_data(tmp_path)
    through = run_ranks(stopped_run, size, config, tmp_path, tmp_path / "through")
    run_ranks(stopped_run, size, config, tmp_path, tmp_path / "parts", 5)
    assert checkpoint.newest(tmp_path / "parts").step == 6
    resumed = run_ranks(stopped_run, size, config, tmp_path, tmp_path / "parts")
    for one, other in zip(through, resumed, strict=True):
        assert_equal(other, one)
    final = [checkpoint.newest(tmp_path / name) for name in ("through", "parts")]
    assert_equal(whole(final[1].load("optimizer")), whole(final[0].load("optimizer")))


def restored(world, config, run):
    """What a new set of processes finds in a checkpoint."""
    model = new_model(seed=world.rank)
    spread(model, config, world)
    optimizer = make_optimizer(model, config)
    found = checkpoint.newest(run)
    load_model(model, found)
    load_optimizer(model, optimizer, found)
    rows = model.layers[0].mlp.gate_proj.weight
    shared = rows.to_local().shape[0] if isinstance(rows, DTensor) else rows.shape[0]
    return whole(model_tensors(model)), whole(optimizer_tensors(model, optimizer)), shared


def test_what_two_ranks_save_one_and_four_load(tmp_path):
    config = replace(CONFIG, steps=3, parallel="fsdp")
    make_data(tmp_path)
    (saved, _) = run_ranks(stopped_run, 2, config, tmp_path, tmp_path / "run")
    found = checkpoint.newest(tmp_path / "run")
    names = {path.name for path in found.folder.glob("*.safetensors")}
    assert names == {f"{group}-{rank:05d}-of-00002.safetensors" for group in ("model", "optimizer") for rank in (0, 1)}
    moments = whole(found.load("optimizer"))
    assert_equal(whole(model_tensors(load(tmp_path / "run"))), saved)
    assert_equal(restored(ALONE, config, tmp_path / "run")[0], saved)
    for number, (weights, state, rows) in enumerate(run_ranks(restored, 4, config, tmp_path / "run")):
        assert_equal(weights, saved)
        assert_equal(state, moments)
        assert rows == (11, 11, 11, 8)[number]  # 41 rows on four ranks
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stopped_run(ALONE, replace(config, steps=4), tmp_path, tmp_path / "run")
    warned = next(str(warning.message) for warning in caught if "not bit-exact" in str(warning.message))
    assert "parallel was fsdp, is None" in warned  # the number of threads may differ too
    assert "world_size was 2, is 1" in warned
    assert checkpoint.newest(tmp_path / "run").step == 4


def one_step_in_bfloat16(world):
    model = new_model(dropout=0.0).bfloat16()
    config = replace(CONFIG, parallel="fsdp")
    forward = spread(model, config, world)
    batch = ragged_batch().rows(slice(4 * world.rank, 4 * world.rank + 4))
    problem = train_step(forward, make_optimizer(model, config), batch, config, world).problem
    return problem, {name: str(parameter.dtype) for name, parameter in model.named_parameters()}


def test_routers_stay_float32_where_a_shared_out_model_is_bfloat16():
    for problem, dtypes in run_ranks(one_step_in_bfloat16, 2):
        assert problem is None
        for name, dtype in dtypes.items():
            assert dtype == ("torch.float32" if ".router." in name else "torch.bfloat16"), name


# -- trouble on one rank


def start_differently(world, folder, run, difference):
    config, model, data = CONFIG, new_model(), read_data(folder)
    if world.rank == 1:
        config = replace(CONFIG, learning_rate=0.5) if difference == "config" else config
        model = new_model(num_layers=5) if difference == "model" else model
        data = read_data(folder / "other") if difference == "data" else data
    try:
        train(model, config, data, run, world=world)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("difference", "named"),
    [
        ("config", "train.learning_rate is 0.01 on rank 0, 0.5 on rank 1"),
        ("model", "model.num_layers is 3 on rank 0, 5 on rank 1"),
        ("data", "data.train.sha256 is "),
    ],
)
def test_ranks_that_were_started_differently_all_say_so_before_the_first_step(difference, named, tmp_path):
    make_data(tmp_path)
    (tmp_path / "other").mkdir()
    make_data(tmp_path / "other", seed=1)
    first, second = run_ranks(start_differently, 2, tmp_path, tmp_path / "run", difference)
    assert first == second
    assert first.startswith("the processes were started differently: ")
    assert named in first
    assert not (tmp_path / "run").exists()


def test_a_folder_that_another_run_holds_is_refused_on_every_rank(tmp_path):
    make_data(tmp_path)
    (tmp_path / "run").mkdir()
    with RunLock(tmp_path / "run"):
        first, second = run_ranks(start_differently, 2, tmp_path, tmp_path / "run", None)
    assert f"in use by process {os.getpid()}" in first
    assert second == f"rank 0: {first}"


def step_with_poison(world, parallel, place):
    """A good step, then one that is NaN on the second rank alone."""
    config = replace(CONFIG, parallel=parallel)
    model = tiny_model(num_layers=3, predictor=5)
    forward = spread(model, config, world)
    optimizer = make_optimizer(model, config)
    batch = ragged_batch().rows(slice(4 * world.rank, 4 * world.rank + 4))
    train_step(forward, optimizer, batch, config, world)
    before = whole(model_tensors(model))
    if world.rank == 1 and place == "gradient":
        model.norm.register_full_backward_hook(lambda module, into, out: (into[0] * float("inf"),))
    elif world.rank == 1:
        where = model.norm if place == "loss" else model.layers[1].router.score
        where.register_forward_hook(lambda module, arguments, out: out * float("nan"))
    result = train_step(forward, optimizer, batch, config, world)
    return result.problem, before, whole(model_tensors(model))


@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize(
    ("place", "named"), [("loss", "the loss"), ("gradient", "the gradient"), ("router", "a router score of layer 1")]
)
def test_what_is_not_finite_on_one_rank_is_not_applied_on_any(parallel, place, named):
    for problem, before, after in run_ranks(step_with_poison, 2, parallel, place):
        assert problem == named
        assert_equal(after, before)


def evaluation_with_poison(world, folder):
    model = new_model()
    if world.rank == 1:
        model.layers[1].router.score.register_forward_hook(lambda module, arguments, out: out * float("nan"))
    options = {"length": 16, "num_windows": 4, "batch_size": 1, "mode": "topk"}
    try:
        evaluate(model, read_data(folder).validation, world=world, **options)
    except FloatingPointError as error:
        return str(error)


def test_an_evaluation_that_is_not_finite_on_one_rank_raises_on_all_naming_the_layer(tmp_path):
    make_data(tmp_path)
    first, second = run_ranks(evaluation_with_poison, 2, tmp_path)
    assert first == second
    assert "validation.tokens: layer 1: the router score of row 0, token 0 is nan" in first
