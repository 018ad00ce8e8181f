"""The laws of experts: a gated sum that a loop over tokens gives too, padding and the future kept out of it."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modepth import ModelConfig, Transformer, flops, record
from modepth.config import ExpertsConfig, model_config_from_dict, model_config_to_dict
from modepth.cutoffs import lowest_taken, mean_cutoffs, move_cutoffs
from modepth.experts import Experts
from modepth.generation import generate
from modepth.loading import load
from modepth.losses import expert_balance_loss
from modepth.parallel import LossesOnly
from modepth.plots.routing import FIRST_EXPERT, IS_DENSE, SKIPS, map_cells, token_map
from modepth.run import ALONE, train
from tests.family import EXPERTS, FAMILY, experts_slowly, family_model
from tests.oracles import tiny_config, tiny_model, tiny_tokens
from tests.test_cache import WAYS, assert_same, full, read_all, rows_of
from tests.test_flops import counted
from tests.test_generate import PROMPTS, SOME, naive
from tests.training import CONFIG, assert_same_end, make_data, stop_after
from tests.training import rows_of as log_rows

ROOT = Path(__file__).parent.parent
MODES = ("topk", "causal")


def experts_module(config, dim=10, seed=0):
    torch.manual_seed(seed)
    model = ModelConfig(
        vocab_size=97, num_layers=1, dim=dim, num_heads=1, mlp_dim=7, experts=replace(config, layers=None)
    )
    module = Experts(model, layer=0)
    with torch.no_grad():
        module.router.score.weight.normal_()
        module.router.cutoff_E.fill_(0.35)
    return module


def real_mask(lengths, T):
    return torch.arange(T) < torch.tensor(lengths)[:, None]


# -- one layer


@pytest.mark.law
@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_equal_a_loop_over_tokens_gradients_included(name, mode):
    module = experts_module(EXPERTS[name])
    x_BTD, real_BT = torch.randn(3, 13, 10, requires_grad=True), real_mask([13, 6, 0], 13)
    out_BTD, decided = module(x_BTD, real_BT, mode)
    slow_BTD, taken_BTE = experts_slowly(module, x_BTD, real_BT, mode)
    assert torch.equal(decided.chosen_BTE, taken_BTE)
    torch.testing.assert_close(out_BTD, slow_BTD, rtol=0, atol=1e-12)
    inputs = (x_BTD, *module.parameters())
    gradients = [torch.autograd.grad((y * y.cos()).sum(), inputs) for y in (out_BTD, slow_BTD)]
    for fast, slow in zip(*gradients, strict=True):
        torch.testing.assert_close(fast, slow, rtol=0, atol=1e-12)
        assert fast.abs().sum() > 0
    # the law can fail: other experts, and no experts, are something else
    assert not torch.equal(out_BTD, module.experts[0](x_BTD))


@pytest.mark.law
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("choice", ["token", "expert"])
def test_one_expert_is_the_dense_feed_forward_to_the_bit(choice, mode):
    torch.manual_seed(0)
    dense = Transformer(tiny_config(routing=None))
    single = Transformer(replace(dense.config, experts=ExpertsConfig(num_experts=1, choice=choice, balance=0.0)))
    weights = {name.replace("mlp.", "mlp.experts.0."): weight for name, weight in dense.state_dict().items()}
    assert single.load_state_dict(weights, strict=False).unexpected_keys == []
    tokens = tiny_tokens()
    outs = [model(tokens, targets=tokens, mode=mode) for model in (dense, single)]
    assert torch.equal(outs[0].loss, outs[1].loss)
    assert torch.equal(*(model(tokens, mode=mode).logits_BTV for model in (dense, single)))
    for out in outs:
        out.loss.backward()
    gradients = dict(single.named_parameters())
    for name, weight in dense.named_parameters():
        assert torch.equal(weight.grad, gradients[name.replace("mlp.", "mlp.experts.0.")].grad), name


@pytest.mark.law
@given(
    T=st.integers(1, 40),
    length=st.integers(0, 40),
    E=st.integers(1, 5),
    factor=st.sampled_from([0.3, 1.0, 1.25, 9.0]),
    choice=st.sampled_from(["token", "expert"]),
    levels=st.sampled_from([1, 2, 1000]),
)
def test_an_expert_takes_no_more_than_its_room_and_of_equals_the_first(T, length, E, factor, choice, levels):
    module = experts_module(ExpertsConfig(num_experts=E, choice=choice, capacity_factor=factor))
    x_BTD = torch.randint(levels, (1, T, 10)).float()
    length = min(length, T)
    real_BT = real_mask([length], T)
    out_BTD, decided = module(x_BTD, real_BT, "topk")
    room = math.ceil(min(1.0, factor / E) * length - 1e-9)
    counts = decided.chosen_BTE.sum((0, 1))
    assert (counts <= room).all()
    assert choice == "token" or (counts == room).all()
    assert not decided.chosen_BTE[0, length:].any()
    assert torch.equal(out_BTD[0, length:], torch.zeros(T - length, 10))
    if levels == 1:  # all tokens alike: the first are taken
        for expert, count in enumerate(counts.tolist()):
            assert decided.chosen_BTE[0, :, expert].nonzero().flatten().tolist() == list(range(count))
    assert torch.isfinite(out_BTD).all()


@pytest.mark.law
def test_a_token_that_no_expert_computes_keeps_its_residual():
    for name in ("integrated", "reduced capacity"):
        layer = family_model(name).layers[1]
        x_BTD, real_BT = torch.randn(2, 23, 60), real_mask([23, 9], 23)
        for mode in MODES:
            out_BTD, decided = layer.feed(x_BTD, real_BT, mode)
            kept_BT = (out_BTD == x_BTD).all(-1)
            assert torch.equal(kept_BT, ~decided.chosen_BTE.any(-1))
            assert 0 < kept_BT.sum() < kept_BT.numel()


@pytest.mark.law
def test_an_infinite_update_of_an_invalid_slot_harms_no_one():
    module = experts_module(EXPERTS["token-choice"])
    x_BTD, real_BT = torch.randn(2, 13, 10), real_mask([13, 3], 13)
    expected, _ = module(x_BTD, real_BT, "topk")
    x_BTD[1, 3:] = math.inf
    assert torch.equal(module(x_BTD, real_BT, "topk")[0], expected)


# -- in a decoder


@pytest.mark.law
@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAMILY)
def test_a_row_of_a_padded_batch_equals_the_row_alone(name, mode):
    model, tokens = family_model(name), tiny_tokens()
    lengths = torch.tensor([23, 11, 1])
    with torch.no_grad():
        together = model(tokens, lengths=lengths, mode=mode).logits_BTV
        for row, length in enumerate(lengths.tolist()):
            alone = model(tokens[row : row + 1, :length], mode=mode).logits_BTV
            torch.testing.assert_close(together[row, :length], alone[0], rtol=0, atol=1e-12)


@pytest.mark.law
@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("name", FAMILY)
def test_the_future_changes_nothing_in_causal_mode_and_something_in_topk(name):
    model, tokens = family_model(name), tiny_tokens()
    changed = tokens.clone()
    changed[:, 15:] = (changed[:, 15:] + 1) % 97
    with torch.no_grad():
        far = {mode: model(tokens, mode=mode).logits_BTV - model(changed, mode=mode).logits_BTV for mode in MODES}
    assert far["causal"][:, :15].abs().max() < 1e-12
    assert far["topk"][:, :15].abs().max() > 1e-6


@pytest.mark.law
@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("way", ["in chunks of 5", "prefill, then one at a time"])
@pytest.mark.parametrize("name", FAMILY)
def test_every_way_of_reading_the_family_equals_one_full_forward(name, way):
    model, rows = family_model(name), rows_of((23, 11, 17, 1))
    got, _ = read_all(model, rows, WAYS[way])
    assert_same(got, full(model, rows))


@pytest.mark.law
@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("name", ["integrated", "staged", "staged, expert-choice", "exit", "filter"])
def test_the_family_generates_the_tokens_of_full_forwards_in_any_company(name):
    model = family_model(name)
    together = generate(model, PROMPTS, SOME)
    assert [each.tokens for each in together] == [naive(model, prompt, 12) for prompt in PROMPTS]
    assert [generate(model, [prompt], SOME)[0] for prompt in PROMPTS[::3]] == together[::3]


@pytest.mark.law
@pytest.mark.parametrize("name", FAMILY)
def test_flops_and_parameters_of_the_family_equal_independent_counts(name):
    config = tiny_config(**FAMILY[name], max_length=128)
    assert flops.num_parameters(config) == sum(parameter.numel() for parameter in Transformer(config).parameters())
    forward, training = counted(config, 101)
    assert flops.forward_flops(config, 101) == pytest.approx(forward, rel=0.01)
    assert flops.training_flops(config, 101) == pytest.approx(training, rel=0.01)


def test_static_shapes_make_one_graph():
    model, tokens = tiny_model(capacity=0.5, experts=EXPERTS["integrated"]), tiny_tokens()

    def step(model):
        out = model(tokens, targets=tokens, lengths=torch.tensor([23, 9, 0]), mode="topk")
        return out.loss + out.router_loss

    torch.testing.assert_close(step(torch.compile(model, backend="eager", fullgraph=True)), step(model))


@pytest.mark.law
@pytest.mark.parametrize("name", ["staged", "integrated", "exit"])
def test_checkpointed_activations_change_no_gradient_of_the_family(name):
    model, tokens = family_model(name), tiny_tokens()
    gradients = []
    for keep in (False, True):
        model.checkpoint_activations = keep
        model.zero_grad()
        out = model(tokens, targets=tokens, mode="topk")
        (out.loss + out.router_loss).backward()
        gradients.append([weight.grad for weight in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_expert_routers_stay_in_float32_and_are_not_moved_by_autocast():
    model = tiny_model(routing=None, experts=EXPERTS["integrated"]).to(torch.bfloat16)
    router = model.layers[0].mlp.router
    assert (router.score.weight.dtype, router.cutoff_E.dtype) == (torch.float32, torch.float32)
    assert model.layers[0].mlp.experts[0].up_proj.weight.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(tiny_tokens()).experts[0].logit_BTA.dtype == torch.float32


# -- losses and cutoffs


@pytest.mark.law
@pytest.mark.usefixtures("fp64")
def test_the_balancing_loss_is_that_of_a_loop_and_1_when_picks_are_even():
    model, tokens = family_model("integrated, top-2"), tiny_tokens()
    lengths = torch.tensor([23, 11, 0])
    out = model(tokens, lengths=lengths, mode="topk")
    losses = []
    for decided in out.experts:
        gates = [logit.softmax(0) for logit in decided.logit_BTA[decided.real_BT]]
        picks = torch.zeros(5)
        for gate in gates:
            for alternative in gate.argsort(descending=True)[:2]:
                picks[alternative] += 1 / (2 * len(gates))
        losses.append(5 * sum(picks[a] * sum(gate[a] for gate in gates) / len(gates) for a in range(5)))
    expected = sum(losses) / 3
    torch.testing.assert_close(out.router_losses["experts"], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(out.router_loss, 0.01 * expected, rtol=0, atol=1e-12)
    even = replace(
        out.experts[0],
        logit_BTA=torch.zeros(3, 23, 5),
        wanted_BTA=torch.eye(5).bool()[torch.arange(69) % 5].view(3, 23, 5),
        real_BT=torch.ones(3, 23).bool(),
    )
    assert expert_balance_loss([even]).item() == pytest.approx(1.0)


@pytest.mark.law
def test_the_balancing_loss_evens_out_picks():
    torch.manual_seed(0)
    module, x_BTD, real_BT = (
        experts_module(ExpertsConfig(num_experts=4, num_noops=1)),
        torch.randn(4, 50, 10),
        real_mask([50] * 4, 50),
    )
    optimizer = torch.optim.Adam(module.router.parameters(), lr=0.05)
    losses = []
    for _ in range(60):
        loss = expert_balance_loss([module(x_BTD + 1, real_BT, "topk")[1]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 1.2
    assert losses[-1] < 1.05


def test_a_batch_of_padding_alone_has_no_expert_loss_and_expert_choice_has_none():
    model, tokens = family_model("integrated"), tiny_tokens()
    out = model(tokens, targets=tokens, lengths=torch.tensor([0, 0, 0]), mode="topk")
    assert (out.loss + out.router_loss).item() == 0
    (out.loss + out.router_loss).backward()
    assert all(weight.grad is not None for weight in model.parameters())
    assert family_model("expert-choice")(tokens, mode="topk").router_losses == {}
    with pytest.raises(ValueError, match="none of the layers has experts"):
        expert_balance_loss([])


@pytest.mark.law
@pytest.mark.usefixtures("fp64")
def test_an_experts_cutoff_follows_the_lowest_gate_that_it_took_and_is_0_where_it_had_room():
    for name in ("expert-choice", "token-choice"):
        module = experts_module(EXPERTS[name])
        x_BTD, real_BT = torch.randn(3, 13, 10), real_mask([13, 6, 0], 13)
        _, decided = module(x_BTD, real_BT, "topk")
        gates, room = decided.logit_BTA.softmax(-1), module.config.capacity
        expected = []
        for expert in range(3):
            rows = []
            for row, length in ((0, 13), (1, 6)):
                taken = [gates[row, t, expert].item() for t in range(length) if decided.chosen_BTE[row, t, expert]]
                rows.append(min(taken) if len(taken) == math.ceil(room * length - 1e-9) else 0.0)
            expected.append(sum(rows) / 2)
        assert (lowest_taken(decided)[:, 0] / 2).tolist() == pytest.approx(expected)
        cutoffs = mean_cutoffs([{(0, e): low for e, low in enumerate(lowest_taken(decided))}], ALONE)
        move_cutoffs(module, cutoffs, 1.0)
        assert module.router.cutoff_E.tolist() == pytest.approx(expected)


def test_the_losses_alone_keep_a_graph_where_processes_wait_for_gradients():
    out = LossesOnly(family_model("staged"))(tiny_tokens(), targets=tiny_tokens(), mode="topk")
    assert out.router_loss.requires_grad
    assert not any(each.logit_BTA.requires_grad for each in out.experts)


# -- training


@pytest.mark.parametrize("name", ["staged", "integrated", "exit", "expert-choice"])
def test_the_family_trains_saves_and_resumes_to_the_bit(name, tmp_path):
    data = make_data(tmp_path)
    choices = {**FAMILY[name], "num_layers": 3, "layers": (1,)} if name == "exit" else {**FAMILY[name], "num_layers": 3}
    changes = {key: value for key, value in choices.items() if key != "experts" or value.layers is None}

    def new():
        torch.manual_seed(3)
        return Transformer(tiny_config(**changes))

    with pytest.raises(Exception, match="stopped by signal"):
        train(new(), CONFIG, data, tmp_path / "cut", on_row=stop_after(6))
    train(new(), CONFIG, data, tmp_path / "cut")
    last = train(new(), CONFIG, data, tmp_path / "whole")
    assert_same_end(tmp_path / "cut", tmp_path / "whole")
    assert {"loss", "topk_loss"} <= set(last["validation"])
    rows = [row for row in log_rows(tmp_path / "whole") if "loss" in row]
    assert rows[-1]["loss"] < rows[0]["loss"]
    model = load(tmp_path / "whole")
    assert model.config == tiny_config(**changes)
    if model.config.experts is not None:
        shares = rows[-1]["experts"]["0"]
        assert set(shares) == {*(f"share_{e}" for e in range(model.config.experts.num_experts)), "none", "dropped"}
        moved = model.layers[0].mlp.router.cutoff_E
        assert not torch.equal(moved, Transformer(model.config).layers[0].mlp.router.cutoff_E)


def test_a_score_that_is_not_finite_is_raised_with_layer_and_expert():
    model = family_model("integrated")
    with torch.no_grad():
        model.layers[2].mlp.router.score.weight[3, 0] = math.nan
    with pytest.raises(FloatingPointError, match="layer 2: the score of expert 3 for row 0, token 0 is nan"):
        generate(model, PROMPTS, SOME)


# -- pictures


@pytest.mark.law
def test_a_trace_tells_which_expert_computed_each_token_or_none():
    model, tokens = family_model("staged", experts=EXPERTS["integrated, top-2"]), tiny_tokens()
    with torch.no_grad(), record(model) as trace:
        out = model(tokens)
    experts = trace.expert_map(row=1)
    assert (experts[[0, 3]] == -2).all()
    for decided in out.experts:
        for place, found in enumerate(experts[decided.layer].tolist()):
            taken = decided.chosen_BTE[1, place].nonzero().flatten().tolist()
            best = max(taken, key=lambda expert: decided.logit_BTA[1, place, expert], default=-1)
            assert found == best
            computed = decided.layer not in trace.routed_layers or trace.chosen_map(1)[decided.layer, place]
            assert computed or found == -1
    words = [str(token) for token in tokens[1].tolist()]
    cells = map_cells(words, trace.chosen_map(1), trace.routed_layers, experts)
    assert (cells[0] == IS_DENSE).all()
    assert ((cells[1] == SKIPS) == (experts[1] == -1)).all()
    assert set(cells[2][cells[2] != SKIPS].tolist()) <= {FIRST_EXPERT + expert for expert in range(3)}
    figure = token_map(words, trace.chosen_map(1), trace.routed_layers, experts)
    shown = {text.get_text() for legend in figure.legends for text in legend.get_texts()}
    assert {"skipped", "expert 0"} <= shown


def test_a_model_of_experts_alone_can_be_recorded():
    model = family_model("integrated")
    with torch.no_grad(), record(model) as trace:
        model(tiny_tokens())
    assert trace.routed_layers == ()
    assert trace.chosen_map().all()
    assert {-1, 0, 1} == set(trace.expert_map().flatten().tolist())
    with record(family_model("exit")) as plain:
        model(tiny_tokens())
    with pytest.raises(ValueError, match="met no experts"):
        plain.expert_map()


# -- what a user sets


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": 0}, "num_experts must be a whole number >= 1, got 0"),
        ({"num_experts": True}, "num_experts must be a whole number >= 1, got True"),
        ({"per_token": 3}, "per_token must be 1 or 2 and at most num_experts 4, got 3"),
        ({"num_experts": 1, "per_token": 2}, "per_token must be 1 or 2 and at most num_experts 1, got 2"),
        ({"num_noops": -1}, "num_noops must be a whole number >= 0, got -1"),
        ({"choice": "both"}, "choice must be one of token, expert, got 'both'"),
        ({"choice": "expert", "num_noops": 2}, "num_noops must be 0 with choice 'expert', got 2: there a token"),
        ({"capacity_factor": 0}, "capacity_factor must be a number > 0, got 0"),
        ({"capacity_factor": math.nan}, "capacity_factor must be a finite number >= 0.0, got nan"),
        ({"capacity_factor": "1"}, "capacity_factor must be a finite number"),
        ({"balance": -1.0}, "balance must be a finite number >= 0.0, got -1.0"),
        ({"every": 0}, "every must be a whole number >= 1, got 0"),
        ({"layers": [1]}, "layers must be a tuple"),
    ],
)
def test_a_bad_field_of_experts_is_named_with_value_and_range(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ExpertsConfig(**fields)


def test_a_bad_place_for_experts_is_refused():
    for experts, message in (
        (ExpertsConfig(layers=(9,)), "layers must be in 0..4 for 5 layers, got [9]"),
        (ExpertsConfig(every=6), "experts with every=6 are in none of 5 layers: lower every"),
        ({"num_experts": 2}, "experts must be a ExpertsConfig"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            tiny_config(experts=experts)
    with pytest.raises(ValueError, match=r"unknown field experts.num_expert; did you mean 'num_experts'?"):
        model_config_from_dict({**model_config_to_dict(tiny_config()), "experts": {"num_expert": 3}})


def test_the_config_of_experts_survives_being_saved():
    config = tiny_config(experts=EXPERTS["integrated, top-2"], flow="filter", capacity=0.5)
    assert model_config_from_dict(model_config_to_dict(config)) == config
    assert config.expert_layers == (1, 2, 4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_the_python_of_the_page_on_experts_runs_and_prints_what_it_says(capsys):
    page = (ROOT / "docs" / "experts.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, {})
        printed = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("routed layers")]
        said = re.findall(r"print\(.*\)  # (.*)", block)
        assert printed == said if said else all(f"`{line}`" in page for line in printed), printed
        assert printed
