"""Plans: sizes from one dial, arms at equal forward FLOPs, steps exactly from the budget, no token twice."""

from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from modepth import Transformer, flops
from modepth.config import ModelConfig, RoutingConfig
from modepth.sweep.config import Dial, read_sweep
from modepth.sweep.plan import expected_seconds, measuring_flops, plan_runs
from tests.sweeps import CONFIG, FACTS, changed, sweep
from tests.test_project import ROOT

DIALS = st.builds(
    Dial,
    width_per_layer=st.floats(1, 40),
    head_dim=st.sampled_from([2, 4, 6, 16]),
    learning_rate=st.floats(1e-5, 1e-1),
    at_width=st.integers(1, 500),
    power=st.floats(0, 2),
    at_budget=st.floats(1e10, 1e20),
    budget_power=st.floats(0, 1),
)
ROUTINGS = st.one_of(
    st.none(),
    st.builds(
        dict,
        capacity=st.sampled_from([0.125, 0.25, 0.5, 1.0]),
        every=st.integers(1, 4),
        part=st.sampled_from(["block", "attention", "mlp"]),
        predictor=st.sampled_from([None, 3]),
    ),
    st.builds(dict, layers=st.sampled_from([[0], [1, 4]])),
)


def plan(**changes):
    return plan_runs(sweep(**changes), FACTS)


@given(DIALS, st.integers(1, 40))
def test_the_dial_sets_width_heads_and_learning_rate_by_its_rule(dial, depth):
    width = dial.width(depth)
    assert width % dial.head_dim == 0
    assert width >= dial.head_dim
    assert abs(width - depth * dial.width_per_layer) <= max(dial.head_dim / 2, dial.head_dim - depth)
    assert dial.heads(depth) * dial.head_dim == width
    rate = dial.learning_rate * (dial.at_width / width) ** dial.power
    assert dial.rate(depth, dial.at_budget) == pytest.approx(rate)
    assert dial.rate(depth, 8 * dial.at_budget) == pytest.approx(rate / 8**dial.budget_power)


@given(DIALS, st.integers(1, 4), st.integers(1, 40))
def test_a_dial_with_a_number_of_heads_keeps_it_and_widens_them(dial, num_heads, depth):
    dial = replace(dial, num_heads=num_heads)
    width = dial.width(depth)
    assert dial.heads(depth) == num_heads
    assert width % (2 * num_heads) == 0
    assert abs(width - depth * dial.width_per_layer) <= max(num_heads, 2 * num_heads - depth)


@given(ROUTINGS, st.integers(1, 9), st.floats(1e8, 1e9), st.sampled_from([None, 9]), st.sampled_from(["adamw", "muon"]))
def test_steps_follow_exactly_from_the_budget(routing, depth, budget, length, optimizer):
    grids = [{"budgets": [budget], "depths": [depth], "arms": ["mod"]}]
    train = {"train__length": length, "train__optimizer": optimizer}
    (run,) = plan(arms__mod__model__routing=routing, grids=grids, repeats="flag", **train)
    update = flops.update_flops(run.model, optimizer)
    assert (update > 0) == (optimizer == "muon")
    step = 2 * flops.training_flops(run.model, length or 16, half_causal=True) + update
    facts = run.facts()
    assert facts["steps"] == budget // step
    assert facts["training_flops"] == step * facts["steps"] <= budget
    full = 2 * flops.training_flops(run.model, length or 16) + update
    assert facts["training_flops_full"] == facts["steps"] * full
    assert facts["tokens"] == facts["steps"] * 2 * (length or 16)
    assert facts["flops_per_token"] * (length or 16) == flops.forward_flops(run.model, length or 16, half_causal=True)
    assert facts["flops_per_token_full"] * (length or 16) == flops.forward_flops(run.model, length or 16)
    assert facts["params"] == sum(parameter.numel() for parameter in Transformer(run.model).parameters())


@given(ROUTINGS, st.integers(1, 9))
def test_no_other_number_of_whole_periods_is_nearer_to_the_dense_models_forward_flops(routing, depth):
    grids = [{"budgets": [1e9], "depths": [depth], "arms": ["mod"]}]
    (run,) = plan(arms__mod__model__routing=routing, grids=grids)
    dense = ModelConfig(vocab_size=257, num_layers=depth, dim=4 * depth, num_heads=depth, max_length=16)
    target = flops.forward_flops(dense, 16, half_causal=True)

    def distance(model):
        return abs(flops.forward_flops(model, 16, half_causal=True) - target)

    assert (run.model.dim, run.model.num_heads) == (dense.dim, dense.num_heads)
    period = 1 if routing is None or "layers" in routing else routing["every"]
    assert (run.model.num_layers - 1) % period == 0
    for layers in range(1, 9 * depth + 9, period):
        try:
            other = replace(run.model, num_layers=layers)
        except ValueError:  # routes none
            continue
        assert (distance(run.model), run.model.num_layers) <= (distance(other), layers)


def test_a_depth_between_whole_ones_has_the_layers_of_the_nearest_and_a_width_of_its_own():
    grids = [{"budgets": [1e9], "depths": [2.5, 3, 3.4]}]
    runs = plan(grids=grids, dial__width_per_layer=20, arms__mod__size="depth")
    assert [(run.model.num_layers, run.model.dim) for run in runs if run.arm == "dense"] == [(3, 52), (3, 60), (3, 68)]
    assert [run.model.num_layers for run in runs if run.arm == "mod"] == [3, 3, 3]
    assert [run.id.split("-")[2] for run in runs if run.arm == "dense"] == ["d2.5", "d3", "d3.4"]
    assert len({run.train.learning_rate for run in runs}) == 3


def test_a_routed_arm_is_deeper_than_the_dense_one_unless_sized_by_depth():
    dense, mod = plan(grids=[{"budgets": [1e9], "depths": [9]}])
    assert mod.model.num_layers > dense.model.num_layers == 9
    assert (mod.model.dim, mod.train.learning_rate) == (dense.model.dim, dense.train.learning_rate)
    dense, mod = plan(grids=[{"budgets": [1e9], "depths": [9]}], arms__mod__size="depth")
    assert mod.model.num_layers == 9
    assert mod.steps > dense.steps


def test_an_arm_overrides_model_and_training():
    arm = {
        "model": {"routing": {"capacity": 0.5, "layers": [1]}, "dropout": 0.1},
        "train": {"clip": 0.5},
        "learning_rate_factor": 0.5,
    }
    dense, mod = plan(arms__mod=arm, grids=[{"budgets": [1e9], "depths": [4], "seeds": [3]}])
    assert dense.model.routing is None
    assert mod.model.routing == RoutingConfig(capacity=0.5, layers=(1,))
    assert (mod.model.dropout, mod.train.clip, mod.train.seed) == (0.1, 0.5, 3)
    assert mod.train.learning_rate == 0.5 * dense.train.learning_rate
    assert dense.train.clip != 0.5


def test_grids_are_products_and_a_run_is_planned_once():
    grids = [
        {"budgets": [1e8, 3e8], "depths": [2, 3, 4], "seeds": [0]},
        {"budgets": [1e8], "depths": [3], "seeds": [0, 1, 2], "arms": ["mod"]},
    ]
    cells = [(run.arm, run.budget, run.depth, run.seed) for run in plan(grids=grids)]
    wanted = {(arm, b, d, 0) for arm in ("dense", "mod") for b in (1e8, 3e8) for d in (2, 3, 4)}
    assert set(cells) == wanted | {("mod", 1e8, 3, 1), ("mod", 1e8, 3, 2)}
    assert len(cells) == len(set(cells))


def test_an_id_changes_with_what_changes_the_result_and_with_nothing_else():
    before = {run.id for run in plan()}
    assert len(before) == 4
    more = {run.id for run in plan(grids=[*CONFIG["grids"], {"budgets": [1e8], "depths": [2]}])}
    assert before < more
    for same in ({"train__log_every": 7}, {"train__save_every": 9}, {"threads": 2}, {"out": "elsewhere"}):
        assert {run.id for run in plan(**same)} == before, same
    for other in ({"dial__learning_rate": 1e-3}, {"model__dropout": 0.1}, {"train__clip": 0.5}):
        assert not {run.id for run in plan(**other)} & before, other
    assert not {run.id for run in plan_runs(sweep(), FACTS._replace(hash="other"))} & before


@given(st.integers(17, 1500))
def test_a_token_seen_twice_is_refused_or_flagged(count):
    data = FACTS._replace(tokens=FACTS.tokens | {"train": count})
    runs = plan_runs(sweep(repeats="flag"), data)
    for run in runs:
        assert run.epochs == run.steps * 2 / ((count - 1) // 16)
    if any(run.steps * 2 > (count - 1) // 16 for run in runs):
        with pytest.raises(ValueError, match=r"runs would see a token twice; .* prepare more text, or set repeats"):
            plan_runs(sweep(), data)
    else:
        assert plan_runs(sweep(), data) == runs


def test_the_refusal_of_repeats_says_what_is_needed():
    data = FACTS._replace(tokens=FACTS.tokens | {"train": 100})
    worst = max(plan_runs(sweep(repeats="flag"), data), key=lambda run: run.epochs)
    with pytest.raises(ValueError, match=f"4 of 4 runs .* needs {worst.tokens:,} tokens of the 96 in whole windows"):
        plan_runs(sweep(), data)


def test_the_expected_time_counts_steps_measurements_and_starts():
    config = sweep()
    runs = plan_runs(config, FACTS)
    dense, mod = runs[:2]
    times = -(-dense.steps // 4)
    assert measuring_flops(dense, FACTS, 3) == (3 * times + 3) * flops.forward_flops(dense.model, 16, half_causal=True)
    times = -(-mod.steps // 4)
    twice = 2 * flops.forward_flops(mod.model, 16, half_causal=True)
    assert measuring_flops(mod, FACTS, None) == (3 * times + 19_999 // 16) * twice
    total = sum(run.training_flops + measuring_flops(run, FACTS, 3) for run in runs)
    assert expected_seconds(runs, FACTS, config, flops_per_second=1e6, jobs=1) == pytest.approx(total / 1e6 + 4 * 5)
    assert expected_seconds(runs, FACTS, config, flops_per_second=1e6, jobs=2) == pytest.approx(total / 2e6 + 2 * 5)
    assert expected_seconds([], FACTS, config, flops_per_second=1e6, jobs=2) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": {}}, "arms must be a mapping of one or more"),
        ({"grids": []}, "grids must be a list of one or more"),
        ({"arms": {"a/b": {}}}, "arms: a name must be of letters, digits, '_', '.' and '-', got 'a/b'"),
        ({"arms__mod": {"modle": {}}}, "unknown field arms.mod.modle; did you mean 'model'"),
        ({"arms__mod": {"model": {"dim": 8}}}, "arms.mod.model.dim is set by the dial: leave it out"),
        ({"arms__mod__size": "width"}, "arms.mod.size must be one of flops, depth, got 'width'"),
        ({"train__steps": 8}, "train.steps is set by the budgets: leave it out"),
        ({"baseline": "sparse"}, "there is no arm 'sparse': name one of dense, mod"),
        ({"grids": [{"budgets": [1e8], "depths": [2], "arms": ["x"]}]}, "there is no arm 'x'"),
        ({"grids": [{"budgets": [1e8]}]}, r"missing field grids\[0\].depths"),
        ({"grids": [{"budgets": [1e8], "depths": [0]}]}, r"grids\[0\].depths must be a finite number >= 1.0, got 0"),
        ({"grids": [{"budgets": [0], "depths": [2]}]}, r"grids\[0\].budgets must be a finite number >= 1.0, got 0"),
        ({"grids": [{"budgets": 1e8, "depths": [2]}]}, r"grids\[0\].budgets must be a list of one or more"),
        (
            {"grids": [{"budgets": [1e8], "depths": [2], "seeds": [2**64]}]},
            r"seeds must be a whole number from 0 to 2\^64",
        ),
        ({"grids": [{"budgets": [1e12], "depths": [1001]}]}, "depths must be at most 1000, got 1001"),
        (
            {"grids": [{"budgets": [1e15], "depths": [999], "arms": ["mod"]}], "dial__width_per_layer": 0.01},
            "1000 layers do not reach the dense model's FLOPs: lower the depth",
        ),
        ({"dial__num_heads": 0}, "dial.num_heads must be a whole number >= 1, got 0"),
        ({"dial__head_dim": 1}, "dial.head_dim must be a whole number >= 2, got 1"),
        ({"dial": None}, "dial must be a Dial, got None"),
        ({"repeats": "maybe"}, "repeats must be one of refuse, flag, got 'maybe'"),
        ({"threads": 0}, "threads must be a whole number >= 1, got 0"),
        ({"model": None}, "model must be a mapping of fields, got None"),
        # what shows when the runs are made
        ({"arms__mod__model__routing__capacity": 2}, "arm mod at depth 2 and budget 2e.07: model.routing.capacity"),
        ({"train__clip": -1}, "arm dense at depth 2 and budget 2e.07: train.clip must be"),
        (
            {"grids": [{"budgets": [100], "depths": [2]}]},
            r"target_flops is less than one step of 2 windows of 16 tokens needs, \d{3},\d{3}; got 100\.0: raise it",
        ),
        ({"model__vocab_size": "many"}, "model.vocab_size must be a whole number >= 1, got 'many'"),
        ({"dial__power": 1e5, "dial__at_width": 99}, "arm dense at depth 2 .* beyond any float"),
        ({"dial__width_per_layer": 1e300}, "width or learning rate is beyond any float: lower width_per_layer"),
        ({"model__vocab_size": 100}, "model.vocab_size must be at least the data's 257, got 100"),
        ({"train__length": 32}, "train.length must be at most model.max_length 16, got 32"),
        ({"model__max_length": 30_000}, "the validation split has 20,000 tokens, less than a window of 30000"),
        ({"arms__mod__train__capacity_warmup": 0.5}, "capacity_warmup changes the FLOPs of a step"),
    ],
)
def test_a_mistake_names_the_field_and_the_fix(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(**changes)


def test_a_file_with_a_mistake_is_named(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(changed(threads=-3)))
    with pytest.raises(ValueError, match=r"^.*sweep\.yaml: threads must be a whole number >= 1, got -3$"):
        read_sweep(path)
    with pytest.raises(ValueError, match=r"none\.yaml: cannot be read"):
        read_sweep(tmp_path / "none.yaml")


def test_the_example_is_a_sweep():
    config = read_sweep(ROOT / "examples" / "sweep_tiny.yaml")
    runs = plan_runs(config, FACTS._replace(vocab_size=2048, tokens=FACTS.tokens | {"train": 3_000_000}))
    assert {run.arm for run in runs} == set(config.arms)


@pytest.mark.parametrize("flow", ["exit", "filter"])
def test_an_arm_whose_tokens_leave_for_good_is_not_grown_for_ever(flow):
    grids = [{"budgets": [1e9], "depths": [9], "arms": ["mod"]}]
    routing = {"capacity": 0.5, "every": 1, "flow": flow}
    with pytest.raises(ValueError, match=r"layers beyond \d+ cost nearly nothing, since tokens leave on the way"):
        plan(arms__mod__model__routing=routing, grids=grids, repeats="flag")
    (run,) = plan(arms__mod__model__routing={**routing, "capacity": 0.9}, grids=grids, repeats="flag")
    assert run.model.num_layers > 9
