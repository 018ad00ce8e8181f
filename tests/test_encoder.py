"""Laws of the sequence encoder: equal to a loop over steps, blind to padding, dense at gate 1; and what it is worth."""

import copy
import json
import math
import runpy
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from modepth import build, check_lengths, num_routed, output_size, recommended_defaults, record
from modepth.model import rotary
from modepth.selection import noise
from tests.documents import run_snippets, text_of
from tests.oracles import top_slowly

ROOT = Path(__file__).parent.parent
ROUTINGS = ("topk", "soft", "random")


def tiny(seed=0, **options):
    """A small encoder whose routers give widely different scores."""
    torch.manual_seed(seed)
    sizes = {"embed_dim": 5, "hidden_size": 12, "num_heads": 3, "num_layers": 3, "dropout": 0.0, "window_size": 13}
    encoder = build(**{**sizes, **options})
    with torch.no_grad():
        for layer in encoder.layers:
            layer.router.score.weight.normal_()
    return encoder


def steps(B=4, T=13, seed=1):
    return torch.randn(B, T, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.get_default_dtype())


# -- the slow encoder: one row without padding, one step at a time


def encode_slowly(encoder, x_TC, routing, capacity, causal):
    states = [encoder.project(x) for x in x_TC]
    for number, layer in enumerate(encoder.layers):
        logits = [float(layer.router.score.weight[0] @ state) for state in states]
        gates = [1 / (1 + math.exp(-logit)) for logit in logits]
        scores = noise(0, number, torch.arange(len(states))).tolist() if routing == "random" else logits
        everyone, k = list(range(len(states))), num_routed(len(states), capacity)
        if routing == "soft":
            chosen, present = top_slowly(scores, everyone, k), dict.fromkeys(everyone, 1.0)
        else:
            gates[-1] = 1.0
            chosen = [*top_slowly(scores, everyone[:-1], k - 1), everyone[-1]]
            present = {step: gates[step] for step in chosen}
        new = {step: block_slowly(layer.block, states, step, present, causal) for step in chosen}
        states = [
            gates[step] * new[step] + (1 - gates[step]) * state if step in new else state
            for step, state in enumerate(states)
        ]
    return normed(states[-1], encoder.norm)


def block_slowly(block, states, step, present, causal):
    """What a block makes of one step, when those present, each with its weight, are there to look at."""
    taken, seen = [], [other for other in present if other <= step or not causal]
    qkv = {other: block.qkv(normed(states[other], block.attention_norm)).chunk(3) for other in seen}
    for start in range(0, block.dim, block.head_dim):
        head = slice(start, start + block.head_dim)
        query = turned(qkv[step][0][head], step)
        scores = [query @ turned(qkv[other][1][head], other) / math.sqrt(block.head_dim) for other in seen]
        parts = [present[other] * math.exp(score) for other, score in zip(seen, scores, strict=True)]
        taken.append(sum(part * qkv[other][2][head] for part, other in zip(parts, seen, strict=True)) / sum(parts))
    x = states[step] + block.out(torch.cat(taken))
    return x + block.mlp(normed(x, block.mlp_norm))


def normed(x, norm):
    return x / (x.square().mean() + norm.eps).sqrt() * norm.weight


def turned(vector, position):
    """Rotary positions as a complex factor; their angles are float32 in any model."""
    half = len(vector) // 2
    angle = position / 10_000.0 ** (torch.arange(half).float() / half)
    pairs = torch.complex(vector[:half], vector[half:]) * torch.complex(angle.cos(), angle.sin()).to(torch.complex128)
    return torch.cat((pairs.real, pairs.imag))


@pytest.mark.law
@pytest.mark.usefixtures("fp64")
@given(
    lengths=st.lists(st.integers(1, 13), min_size=1, max_size=3),
    padding=st.integers(0, 3),
    capacity=st.sampled_from([0.01, 0.25, 1 / 3, 0.5, 0.8, 1.0]),
    routing=st.sampled_from(ROUTINGS),
    causal=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_the_encoder_equals_a_loop_over_rows_and_steps(lengths, padding, capacity, routing, causal, seed):
    encoder = tiny(seed, capacity_ratio=capacity, routing=routing, causal=causal)
    T = min(13, max(lengths) + padding)
    x_BTC = steps(len(lengths), T, seed)
    with torch.no_grad():
        out_BD = encoder(x_BTC, lengths=torch.tensor(lengths))
        for row, length in enumerate(lengths):
            slow_D = encode_slowly(encoder, x_BTC[row, :length], routing, capacity, causal)
            torch.testing.assert_close(out_BD[row], slow_D, rtol=0, atol=1e-12)


# -- padding


@pytest.mark.law
@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_each_row_of_a_ragged_batch_equals_the_same_row_alone_gradients_included(routing, causal):
    encoder, lengths = tiny(routing=routing, causal=causal), [13, 7, 2, 1]
    x_BTC = steps().requires_grad_()
    together_BD = encoder(x_BTC, lengths=torch.tensor(lengths))
    together_BD.square().sum().backward()
    for row, length in enumerate(lengths):
        alone_1TC = x_BTC[row : row + 1, :length].detach().requires_grad_()
        alone_1D = encoder(alone_1TC)
        alone_1D.square().sum().backward()
        torch.testing.assert_close(together_BD[row], alone_1D[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(x_BTC.grad[row, :length], alone_1TC.grad[0], rtol=0, atol=1e-12)
        assert not x_BTC.grad[row, length:].any()


@pytest.mark.law
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_padding_may_hold_anything(routing, causal):
    lengths, results = torch.tensor([13, 7, 1, 0]), []
    for filler in (0.0, math.nan, math.inf, 1e30):
        encoder = tiny(routing=routing, causal=causal)
        x_BTC = steps().masked_fill(torch.arange(13)[:, None] >= lengths[:, None, None], filler)
        out_BD = encoder(x_BTC, lengths=lengths)
        out_BD.sum().backward()
        results.append([out_BD, *(parameter.grad for parameter in encoder.parameters() if parameter.grad is not None)])
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


@pytest.mark.law
@given(
    lengths=st.lists(st.integers(1, 13), min_size=1, max_size=5),
    capacity=st.sampled_from([0.01, 0.25, 1 / 3, 0.5, 0.8, 1.0]),
    routing=st.sampled_from(ROUTINGS),
    seed=st.integers(0, 10**6),
)
def test_k_follows_the_true_length_and_the_last_real_step_is_always_among_them(lengths, capacity, routing, seed):
    encoder = tiny(seed, capacity_ratio=capacity, routing=routing)
    with record(encoder) as trace:
        encoder(steps(len(lengths), 13, seed), lengths=torch.tensor(lengths))
    assert trace.routed_layers == (0, 1, 2)
    for layer in trace.last:
        for chosen_T, length in zip(layer.chosen_BT, lengths, strict=True):
            assert chosen_T.sum() == chosen_T[:length].sum() == num_routed(length, capacity)
            assert chosen_T[length - 1] or routing == "soft"


def test_soft_does_not_favour_the_last_step():
    encoder = tiny(routing="soft", capacity_ratio=0.25)
    with record(encoder) as trace:
        encoder(steps(50))
    assert 0.1 < trace.last[0].chosen_BT[:, -1].mean() < 0.4


@pytest.mark.law
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_row_without_steps_gives_zeros_and_gradients_of_zero(routing, causal):
    encoder = tiny(routing=routing, causal=causal)
    x_BTC = steps(2).requires_grad_()
    out_BD = encoder(x_BTC, lengths=torch.tensor([0, 0]))
    assert not out_BD.any()
    out_BD.sum().backward()
    gradients = [parameter.grad for parameter in encoder.parameters() if parameter.grad is not None]
    assert all(not gradient.any() for gradient in (x_BTC.grad, *gradients))


@pytest.mark.law
def test_a_row_of_impossible_length_is_nan_and_harms_no_other():
    encoder = tiny()
    out_BD = encoder(steps(3), lengths=torch.tensor([14, -1, 7]))
    assert out_BD[:2].isnan().all()
    assert torch.equal(out_BD[2], encoder(steps(3), lengths=torch.tensor([13, 1, 7]))[2])


# -- dense


def encode_densely(encoder, x_BTC):
    """The blocks one after the other, no router asked."""
    B, T, _ = x_BTC.shape
    rope_BTE = rotary(torch.arange(T).expand(B, T), encoder.head_dim, 10_000.0)
    x_BTD = encoder.project(x_BTC)
    for layer in encoder.layers:
        x_BTD = layer.block(x_BTD, rope_BTE, torch.ones(B, T, dtype=torch.bool), torch.ones(B, T))
    return encoder.norm(x_BTD[:, -1])


@pytest.mark.law
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_capacity_1_with_gate_1_is_the_dense_encoder_bit_for_bit(routing, causal):
    encoder = tiny(routing=routing, causal=causal, capacity_ratio=1.0, gate="one", dropout=0.1)
    results = []
    for encode in (encoder, lambda x: encode_densely(encoder, x)):
        encoder.zero_grad()
        torch.manual_seed(7)  # of dropout
        out_BD = encode(steps())
        out_BD.square().sum().backward()
        results.append(
            [out_BD, *(layer.block.qkv.weight.grad for layer in encoder.layers), encoder.project.weight.grad]
        )
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@pytest.mark.parametrize("options", [{"capacity_ratio": 0.5, "gate": "one"}, {"capacity_ratio": 1.0}])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_other_capacities_and_gates_are_not_the_dense_encoder(routing, options):
    encoder = tiny(routing=routing, **options)
    assert (encoder(steps()) - encode_densely(encoder, steps())).abs().amax() > 0.01


# -- gradients


def logit_gradients(encoder, x_BTC):
    """The gradient that every router logit gets, layer by layer, and which steps were chosen."""
    routings = []
    for layer in encoder.layers:
        layer.router.register_forward_hook(lambda router, inputs, routing: routings.append(routing))
    out_BD = encoder(x_BTC)
    found = torch.autograd.grad(out_BD.square().sum(), [routing.logit_BT for routing in routings])
    return [(gradient_BT, routing.chosen_BT) for gradient_BT, routing in zip(found, routings, strict=True)]


@pytest.mark.law
@pytest.mark.parametrize("causal", [False, True])
def test_every_step_that_was_chosen_by_score_teaches_its_router_even_in_the_last_layer(causal):
    for gradient_BT, chosen_BT in logit_gradients(tiny(causal=causal), steps()):
        assert torch.equal((gradient_BT != 0)[:, :-1], chosen_BT[:, :-1])
        assert not gradient_BT[:, -1].any()  # always chosen: its gate is 1


@pytest.mark.law
@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("routing", ["topk", "soft"])
def test_gradients_reach_routers_blocks_and_input_and_are_right(routing):
    encoder = tiny(routing=routing, num_layers=2, capacity_ratio=0.6)
    names = ["layers.0.router.score.weight", "layers.1.router.score.weight", "layers.0.block.mlp.0.weight"]
    weights = [encoder.get_parameter(name).detach().requires_grad_() for name in names]
    x_BTC, lengths = steps(2, 5).requires_grad_(), torch.tensor([5, 3])

    def run(x, *values):
        return torch.func.functional_call(encoder, dict(zip(names, values, strict=True)), (x, lengths))

    assert torch.autograd.gradcheck(run, (x_BTC, *weights))
    for gradient in torch.autograd.grad(run(x_BTC, *weights).square().sum(), (x_BTC, *weights)):
        assert gradient.abs().sum() > 0


# -- causal attention: what it promises, and what it does not


def states_before(encoder, x_BTC, step):
    """The states of the steps before `step`, after each layer."""
    seen = []
    hooks = [layer.register_forward_hook(lambda _, inputs, out: seen.append(out[:, :step])) for layer in encoder.layers]
    with torch.no_grad():
        encoder(x_BTC)
    for hook in hooks:
        hook.remove()
    return seen


def changed_from(x_BTC, step):
    return torch.cat((x_BTC[:, :step], torch.randn_like(x_BTC[:, step:])), dim=1)


def same(one, two):
    return all((a - b).abs().amax() <= 1e-12 for a, b in zip(one, two, strict=True))


@pytest.mark.law
@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("capacity", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("routing", ["topk", "random"])
def test_with_causal_attention_the_newest_step_changes_no_state_before_it(routing, capacity):
    x_BTC = steps()
    for causal in (True, False):
        encoder = tiny(causal=causal, routing=routing, capacity_ratio=capacity)
        before = states_before(encoder, x_BTC, 12)
        assert same(before, states_before(encoder, changed_from(x_BTC, 12), 12)) == causal


@pytest.mark.law
@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize(("routing", "capacity"), [("topk", 1.0), ("soft", 1.0), ("random", 0.5)])
def test_with_causal_attention_no_later_steps_change_a_state_where_scores_do_not_select(routing, capacity):
    encoder, x_BTC = tiny(causal=True, routing=routing, capacity_ratio=capacity), steps()
    for step in range(1, 13):
        assert same(states_before(encoder, x_BTC, step), states_before(encoder, changed_from(x_BTC, step), step))


@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("routing", ["topk", "soft"])
def test_selection_by_score_looks_ahead_even_with_causal_attention(routing):
    encoder, x_BTC = tiny(causal=True, routing=routing), steps()
    assert not same(states_before(encoder, x_BTC, 6), states_before(encoder, changed_from(x_BTC, 6), 6))


# -- one static graph


@pytest.mark.law
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("routing", "causal"), [("topk", False), ("topk", True), ("soft", False), ("random", False)])
def test_training_compiles_to_one_graph_whatever_the_lengths(routing, causal):
    encoder = tiny(routing=routing, causal=causal, num_layers=2)
    twin, counter = copy.deepcopy(encoder), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(twin, fullgraph=True, backend=counter)
    for lengths in (torch.tensor([13, 7, 1, 0]), torch.tensor([2, 2, 13, 14])):
        eager_BD, fast_BD = encoder(steps(), lengths=lengths), compiled(steps(), lengths=lengths)
        torch.testing.assert_close(fast_BD, eager_BD, equal_nan=True, rtol=1e-5, atol=1e-5)
        for out_BD in (eager_BD, fast_BD):
            out_BD.sum().backward()
    assert counter.frame_count == 1
    for eager, fast in zip(encoder.layers, twin.layers, strict=True):
        torch.testing.assert_close(fast.router.score.weight.grad, eager.router.score.weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.law
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_training_forward_and_backward_never_branch_on_data(routing, causal):
    with FakeTensorMode():
        encoder = build(5, 12, 3, routing=routing, causal=causal)
        out_BD = encoder(torch.randn(4, 13, 5), lengths=torch.tensor([13, 7, 1, 0]))
        out_BD.sum().backward()
    assert out_BD.shape == (4, 12)


def test_in_bfloat16_the_routers_stay_float32():
    encoder = tiny().bfloat16()
    assert encoder(steps().bfloat16()).dtype == torch.bfloat16
    assert encoder.layers[0].router.score.weight.dtype == torch.float32


# -- the documented surface


def test_only_embed_dim_is_required_and_the_defaults_are_those_documented():
    documented = {
        "hidden_size": 256,
        "num_heads": 4,
        "capacity_ratio": 0.5,
        "num_layers": 4,
        "dropout": 0.1,
        "window_size": 60,
        "routing": "topk",
        "gate": "sigmoid",
        "causal": False,
    }
    assert recommended_defaults() == documented
    torch.manual_seed(3)
    bare = build(embed_dim=287)
    torch.manual_seed(3)
    full = build(embed_dim=287, **documented)
    x_BTC = torch.randn(2, 60, 287)
    for encoder in (bare, full):
        torch.manual_seed(4)  # of dropout
        encoder.output = encoder(x_BTC)
    assert torch.equal(bare.output, full.output)


@pytest.mark.parametrize("options", [{}, {"hidden_size": 12, "num_heads": 3}, {"embed_dim": 7, "hidden_size": 24}])
def test_output_size_is_the_width_of_what_comes_out(options):
    encoder = build(**{"embed_dim": 5, **options})
    out_BD = encoder(torch.randn(2, 3, options.get("embed_dim", 5)))
    assert out_BD.shape == (2, output_size(**options))


# -- what it is worth


@pytest.fixture(scope="module")
def example():
    """The names of examples/encoder.py, not yet run."""
    return runpy.run_path(str(ROOT / "examples" / "encoder.py"))


def test_on_marked_recall_a_quarter_of_the_steps_does_what_all_do_and_random_steps_do_not(example, capsys):
    example["main"]([])
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert [line.split()[0] for line in table] == ["encoder", *result["accuracy"]]
    assert result["accuracy"]["dense"] > 0.98
    assert result["accuracy"]["topk"] > 0.98
    assert result["accuracy"]["random"] < 0.7  # a marked step is seen by two layers in 44 of 100 cases


def test_the_snippets_of_the_page_run_and_print_what_they_say():
    run_snippets(text_of("encoder.md"))


# -- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embed_dim": 0}, "embed_dim must be a whole number >= 1, got 0"),
        ({"hidden_size": 2.0}, r"hidden_size must be a whole number >= 1, got 2\.0"),
        ({"num_heads": True}, "num_heads must be a whole number >= 1, got True"),
        ({"num_heads": 5}, "hidden_size must be an even multiple of num_heads .* got hidden_size 12 and num_heads 5"),
        ({"num_layers": -1}, "num_layers must be a whole number >= 1, got -1"),
        ({"window_size": "60"}, "window_size must be a whole number >= 1, got '60'"),
        ({"dropout": 1.0}, r"dropout must be a number in \[0\.0, 1\.0\), got 1\.0"),
        ({"dropout": math.nan}, r"dropout must be a number in \[0\.0, 1\.0\), got nan"),
        ({"routing": "hard"}, "routing must be one of topk, soft, random, got 'hard'"),
        ({"gate": "relu"}, "gate must be one of sigmoid, one, got 'relu'"),
        ({"causal": 1}, "causal must be true or false, got 1"),
        *(
            ({"capacity_ratio": value}, r"capacity_ratio must be a number in \(0, 1\], got .* dense encoder: ")
            for value in (0, -0.5, 1.5, math.nan, True, "0.5", None)
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tiny(**options)


def test_an_unknown_or_missing_option_is_a_type_error_that_names_it():
    with pytest.raises(TypeError, match="hiden_size"):
        build(embed_dim=5, hiden_size=12)
    with pytest.raises(TypeError, match="embed_dim"):
        build()
    with pytest.raises(TypeError, match="hiden_size"):
        output_size(hiden_size=12)
    with pytest.raises(ValueError, match="hidden_size must be a whole number >= 1, got 0"):
        output_size(hidden_size=0)


@pytest.mark.parametrize(
    ("x", "lengths", "message"),
    [
        (torch.zeros(2, 14, 5), None, "1 to 13 steps, got 14: pass its last 13, or build with a larger window_size"),
        (torch.zeros(2, 0, 5), None, "1 to 13 steps, got 0"),
        (torch.zeros(2, 13, 7), None, r"x must be a tensor of shape \(any, any, 5\), got .* \(2, 13, 7\)"),
        (torch.zeros(13, 5), None, r"x must be a tensor of shape \(any, any, 5\), got .* \(13, 5\)"),
        ([[1.0]], None, "x must be a tensor .* got list"),
        (torch.zeros(2, 13, 5).long(), None, r"x must hold floating-point numbers, got torch.int64: .* x\.float\(\)"),
        (torch.zeros(2, 13, 5), torch.tensor([13]), r"lengths must be an .* tensor of shape \(2\), got .* \(1,\)"),
        (
            torch.zeros(2, 13, 5),
            torch.tensor([13.0, 2.0]),
            "lengths must be an int64 or int32 tensor .* got torch.float32",
        ),
        (torch.zeros(2, 13, 5), [13, 2], "lengths must be an .* tensor .* got list"),
    ],
)
def test_input_that_does_not_fit_is_refused(x, lengths, message):
    with pytest.raises(ValueError, match=message):
        tiny()(x, lengths=lengths)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([13, 0], r"lengths must be in 1\.\.13, got 0 at row 1: .* leave an empty row out"),
        ([14, 13], r"lengths must be in 1\.\.13, got 14 at row 0: cut the row"),
        ([5, 5, -2], r"lengths must be in 1\.\.13, got -2 at row 2"),
    ],
)
def test_lengths_are_checked_where_they_enter(lengths, message):
    with pytest.raises(ValueError, match=message):
        check_lengths(torch.tensor(lengths), 13)
    check_lengths(torch.tensor([13, 1, 7]), 13)
