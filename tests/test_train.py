"""The training loop: accumulation, finite numbers, logs, resuming."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from modepth import Transformer
from modepth.cutoffs import cutoff_score
from modepth.loading import load
from modepth.run import ALONE, DivergedError, Stopped, train
from modepth.train import evaluate, make_optimizer, routing_row, train_step, windows_to_batch
from tests.oracles import tiny_config, tiny_model, tiny_tokens
from tests.training import CONFIG, TIMING, make_data, new_model, ragged_batch, rows_of, stop_after


@pytest.fixture
def data(tmp_path):
    return make_data(tmp_path)


# -- a step


@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_accumulation_equals_one_batch_with_ragged_rows(rows):
    losses, weights = [], []
    for micro_batch in (None, rows):
        model = tiny_model(predictor=5, losses=replace(tiny_config().routing.losses, router=0.1, z=0.1))
        config = replace(CONFIG, micro_batch=micro_batch)
        result = train_step(model, make_optimizer(model, config), ragged_batch(), config, ALONE)
        losses.append((result.loss, *result.router_losses.values()))
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-9)


def test_a_batch_without_targets_counts_nothing():
    model = tiny_model(predictor=5)
    batch = ragged_batch()
    batch = batch._replace(
        targets_BT=torch.full_like(batch.targets_BT, -100), lengths_B=torch.zeros(8, dtype=torch.int64)
    )
    before = copy.deepcopy(model.state_dict())
    result = train_step(model, make_optimizer(model, replace(CONFIG, weight_decay=0.0)), batch, CONFIG, ALONE)
    assert (result.loss, result.problem) == (0.0, None)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("place", "named"),
    [("loss", "the loss"), ("gradient", "the gradient"), ("router", "a router score of layer 1")],
)
def test_an_update_that_is_not_finite_is_not_applied_and_named(place, named, bad):
    model = tiny_model(predictor=5, tie_embeddings=False)
    if place == "gradient":
        model.layers[0].mlp.down_proj.weight.register_hook(
            lambda gradient: gradient.index_fill(0, torch.tensor(3), bad)
        )
    else:
        with torch.no_grad():
            (model.lm_head if place == "loss" else model.layers[1].router.score).weight[0, 0] = bad
    before = copy.deepcopy(model.state_dict())
    result = train_step(model, make_optimizer(model, CONFIG), windows_to_batch(tiny_tokens()), CONFIG, ALONE)
    assert result.problem == named
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)


def test_weight_decay_is_on_matrices_only():
    optimizer = make_optimizer(tiny_model(), CONFIG)
    decayed, others = optimizer.param_groups
    assert {parameter.dim() for parameter in decayed["params"]} == {2}
    assert {parameter.dim() for parameter in others["params"]} == {1}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)


def test_what_a_layers_row_says():
    routing = tiny_model(predictor=5)(tiny_tokens(), lengths=torch.tensor([23, 11, 0]), mode="topk").routings[0]
    row = routing_row(routing)
    lowest = [min(routing.logit_BT[b, t].item() for t in range(23) if routing.chosen_BT[b, t]) for b in range(2)]
    assert cutoff_score(routing).item() == row["cutoff"] == pytest.approx(sum(lowest) / 2)
    assert row["share"] == pytest.approx((7 + 4) / 34)
    said = {(b, t) for b, t in (routing.real_BT & (routing.predicted_BT >= 0)).nonzero().tolist()}
    chosen = {(b, t) for b, t in routing.chosen_BT.nonzero().tolist()}
    assert row["precision"] == pytest.approx(len(said & chosen) / max(1, len(said)))
    assert row["recall"] == pytest.approx(len(said & chosen) / len(chosen))
    gates = [routing.logit_BT[b, t].sigmoid().item() for b, t in chosen]
    assert row["gate"] == pytest.approx(sum(gates) / len(gates))


@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("micro_batch", [None, 3])
def test_a_steps_cutoffs_are_the_mean_of_the_lowest_routed_scores_of_its_rows(micro_batch):
    model, batch = tiny_model(), ragged_batch()
    lowest = {}
    for routing in model(batch.tokens_BT, lengths=batch.lengths_B, mode="topk").routings:
        rows = zip(routing.logit_BT.tolist(), routing.chosen_BT.tolist(), strict=True)
        routed = [[logit for logit, chosen in zip(*row, strict=True) if chosen] for row in rows]
        lowest[routing.layer] = [min(logits) for logits in routed if logits]
    assert {len(values) for values in lowest.values()} == {7}  # one row is padding only
    config = replace(CONFIG, micro_batch=micro_batch)
    cutoffs = train_step(model, make_optimizer(model, config), batch, config, ALONE).cutoffs
    assert cutoffs == pytest.approx({layer: sum(values) / 7 for layer, values in lowest.items()}, abs=1e-12)


@pytest.mark.parametrize("selection", ["topk", "threshold"])
def test_after_a_run_of_top_k_the_cutoff_is_the_running_mean_of_its_cutoffs(selection, data, tmp_path):
    model = new_model(selection=selection)
    train(model, replace(CONFIG, steps=60), data, tmp_path / "run")
    mean = 0.0
    for step, row in enumerate(row for row in rows_of(tmp_path / "run") if "loss" in row):
        weight = 1 / (step + 1) if step < 50 else 1 / 50
        mean += weight * (row["layers"]["1"]["cutoff"] - mean)
    assert abs(mean) > 1e-3
    cutoff = load(tmp_path / "run").layers[1].router.cutoff.item()
    assert cutoff == pytest.approx(mean if selection == "topk" else 0.0, rel=1e-4)


def test_evaluation_is_the_mean_over_windows_and_leaves_the_model_as_it_was(data):
    model = new_model().train()
    options = {"length": 16, "num_windows": 7, "world": ALONE, "mode": "topk"}
    result = evaluate(model, data.validation, batch_size=3, **options)
    assert model.training
    losses = []
    for window in range(7):
        ids = torch.from_numpy(data.validation.ids[16 * window : 16 * window + 17].astype("int64")).unsqueeze(0)
        losses.append(model.eval()(ids[:, :-1], targets=ids[:, 1:], mode="topk").loss.item())
    assert result["loss"] == pytest.approx(sum(losses) / 7, rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert result["bits_per_byte"] == pytest.approx(result["loss"] / math.log(2) * 3000 / 6000)


# -- a run


def test_a_run_lowers_the_loss_logs_rows_and_can_be_loaded(data, tmp_path):
    model = new_model()
    last = train(model, replace(CONFIG, steps=40), data, tmp_path / "run")
    rows = rows_of(tmp_path / "run")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 40
    assert losses[-1] < losses[0] - 0.3
    assert set(rows[0]["layers"]) == {"1"}
    assert set(rows[0]["router_losses"]) == {"predictor"}
    assert rows[-1]["validation"] == last["validation"]
    loaded = load(tmp_path / "run")
    tokens = tiny_tokens()
    assert torch.equal(loaded(tokens).logits_BTV, model.eval()(tokens).logits_BTV)


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(data, tmp_path):
    whole = new_model()
    train(whole, CONFIG, data, tmp_path / "whole")

    with pytest.raises(Stopped, match="stopped by signal 15; the same command goes on from here"):
        train(new_model(), CONFIG, data, tmp_path / "parts", on_row=stop_after(6))
    resumed = new_model()
    train(resumed, CONFIG, data, tmp_path / "parts")
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    plain = [
        [{k: v for k, v in row.items() if k not in TIMING} for row in rows_of(tmp_path / n)] for n in ("whole", "parts")
    ]
    assert plain[0] == plain[1]


def test_another_model_in_the_same_run_is_refused_and_another_learning_rate_recorded(data, tmp_path):
    train(new_model(), CONFIG, data, tmp_path / "run")
    with pytest.raises(ValueError, match="holds another model: num_layers was 3, is 5"):
        train(Transformer(tiny_config(dropout=0.1, predictor=5)), CONFIG, data, tmp_path / "run")
    train(new_model(), replace(CONFIG, steps=14, learning_rate=2e-2), data, tmp_path / "run")
    (event,) = [row for row in rows_of(tmp_path / "run") if row.get("event") == "config changed"]
    assert event["reason"] == "learning_rate was 0.01, is 0.02; steps was 12, is 14"


def test_a_run_stops_after_so_many_bad_steps_and_keeps_its_last_good_weights(data, tmp_path):
    model, after = new_model(), {}
    config = replace(CONFIG, learning_rate=1e30, warmup=0.0, clip=1e30, max_bad_steps=3)
    with pytest.raises(
        DivergedError, match=r"3 updates in a row .* the last at step 3: a router score of layer 1 is not"
    ):
        train(
            model,
            config,
            data,
            tmp_path / "run",
            on_row=lambda row: after.update({row["step"]: copy.deepcopy(model.state_dict())}),
        )
    told = [(row["step"], row.get("event"), row.get("reason")) for row in rows_of(tmp_path / "run")]
    bad = "a router score of layer 1 is not finite"
    assert told == [(0, None, None), *((step, "update not applied", bad) for step in (1, 2, 3))]
    for name, value in model.state_dict().items():
        assert torch.equal(value, after[0][name]), name


def poison(model, steps):
    """The loss of these training steps becomes NaN."""
    seen = iter(range(1000))

    def hook(module, arguments, out):
        return out * math.nan if model.training and next(seen) in steps else out

    model.norm.register_forward_hook(hook)


def test_a_good_step_between_bad_ones_starts_their_count_anew(data, tmp_path):
    model = new_model()
    poison(model, {1, 2, 4, 5})
    train(model, replace(CONFIG, max_bad_steps=3), data, tmp_path / "run")
    rows = [row for row in rows_of(tmp_path / "run") if "validation" not in row]
    assert [row["step"] for row in rows] == list(range(12))
    assert [(row["step"], row["reason"]) for row in rows if "event" in row] == [
        (step, "the loss is not finite") for step in (1, 2, 4, 5)
    ]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("router", "layer 1: the router score of row 0, token 0 is nan"),
        ("loss", "the loss is nan: look for an overflow"),
    ],
)
def test_an_evaluation_that_is_not_finite_raises_and_leaves_the_model_as_it_was(data, place, message):
    model = new_model(tie_embeddings=False).train()
    where = model.layers[1].router.score if place == "router" else model.lm_head
    torch.nn.init.constant_(where.weight, math.nan)
    with pytest.raises(FloatingPointError, match=rf"validation\.tokens: {message}"):
        evaluate(model, data.validation, length=16, num_windows=2, batch_size=2, world=ALONE, mode="topk")
    assert model.training


@pytest.mark.parametrize("batch_size", [0, -1, 2.0])
def test_an_evaluation_of_no_windows_at_a_time_is_refused(data, batch_size):
    with pytest.raises(ValueError, match="batch_size must be a whole number >= 1, got "):
        evaluate(
            new_model(), data.validation, length=16, num_windows=2, batch_size=batch_size, world=ALONE, mode="topk"
        )
