"""Early exit and the filter: who is out stays out, chosen among those that are left, as a slow forward does it."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modepth import MixtureOfDepths, RoutingConfig, calibrate, num_routed, record
from modepth.cache import Cache
from modepth.flops import num_computed
from modepth.generation import generate
from tests.family import family_model, flow_slowly
from tests.oracles import tiny_config, tiny_model, tiny_tokens
from tests.test_cache import WAYS, read_all, rows_of
from tests.test_generate import PROMPTS, SOME

FLOWS = ("exit", "filter")


@pytest.mark.law
@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("mode", ["topk", "causal"])
@pytest.mark.parametrize("flow", FLOWS)
def test_a_flow_equals_a_forward_that_computes_all_and_hides_those_that_are_out(flow, mode):
    model, tokens, lengths = family_model(flow), tiny_tokens(), torch.tensor([23, 14, 3])
    with torch.no_grad():
        out = model(tokens, lengths=lengths, mode=mode)
        expected = flow_slowly(model, tokens, mode, lengths)
        for row, length in enumerate(lengths.tolist()):
            torch.testing.assert_close(out.logits_BTV[row, :length], expected[row, :length], rtol=0, atol=1e-12)
    others = [other for other in (*FLOWS, "rejoin") if other != flow]
    for other in others:  # each flow is something of its own
        changed = replace(model.config, routing=replace(model.config.routing, flow=other))
        strange = tiny_model(routing=changed.routing).eval()
        strange.load_state_dict(model.state_dict())
        assert not torch.allclose(strange(tokens, mode=mode).logits_BTV, out.logits_BTV)


@pytest.mark.law
@given(T=st.integers(1, 64), length=st.integers(0, 64), capacity=st.sampled_from([0.125, 0.3, 0.5, 0.9, 1.0]))
def test_every_routed_layer_takes_its_share_of_what_the_last_one_left(T, length, capacity):
    for flow in FLOWS:
        model = tiny_model(flow=flow, capacity=capacity, layers=(0, 1, 3), num_layers=4)
        length = min(length, T)
        out = model(tiny_tokens(B=1, T=T), lengths=torch.tensor([length]), mode="topk")
        left_BT, k, slots = torch.arange(T).unsqueeze(0) < length, length, T
        for routing in out.routings:
            k, slots = num_routed(k, capacity), num_routed(slots, capacity)
            assert routing.chosen_BT.sum() == k
            assert routing.index_BK.shape[1] == slots
            assert not (routing.chosen_BT & ~left_BT).any()
            left_BT = routing.chosen_BT
        assert [num_computed(model.config, layer, T)[0] for layer in (0, 1, 3)] == [
            each.index_BK.shape[1] for each in out.routings
        ]


@pytest.mark.law
def test_a_token_that_stopped_passes_all_later_layers_unchanged():
    model, tokens, seen = family_model("exit"), tiny_tokens(), []
    for layer in model.layers:
        layer.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0].x_BTD, output[0].x_BTD)))
    for mode in ("topk", "causal"):
        seen.clear()
        out = model(tokens, mode=mode)
        first, second = (routing.chosen_BT for routing in out.routings)
        computed = [torch.ones_like(first), first, first, second, second]
        for (before, after), chosen_BT in zip(seen, computed, strict=True):
            assert torch.equal((before != after).any(-1), chosen_BT)


@pytest.mark.law
@pytest.mark.parametrize("flow", FLOWS)
def test_a_flow_at_capacity_1_with_gate_1_is_the_dense_model_to_the_bit(flow):
    model = tiny_model(flow=flow, capacity=1.0, gate="one")
    dense = tiny_model(routing=None)
    dense.load_state_dict({name: value for name, value in model.state_dict().items() if ".router." not in name})
    for mode in ("topk", "causal"):
        assert torch.equal(model(tiny_tokens(), mode=mode).logits_BTV, dense(tiny_tokens()).logits_BTV)


@pytest.mark.law
def test_the_cache_of_an_exit_holds_what_is_left_in_layers_without_a_router_too():
    model, rows = family_model("exit"), rows_of((23, 11, 17, 1))
    _, caches = read_all(model, rows, WAYS["in chunks of 5"])
    for row, cache in zip(rows, caches, strict=True):
        first, second = (routing.chosen_BT[0] for routing in model(torch.tensor([row])).routings)
        counts = [len(row), *(int(chosen.sum()) for chosen in (first, first, second, second))]
        assert cache.num_entries == counts
    expected = [layer.expected for layer in Cache(model.config, expected=20).layers]
    assert expected == [20, 14, 14, 10, 10]


def test_generation_and_pictures_tell_which_layers_computed_a_token_that_stopped():
    model = family_model("exit")
    each = generate(model, PROMPTS[:1], SOME, layers=True)[0]
    read = torch.tensor([[*PROMPTS[0], *each.tokens[:-1]]])
    with torch.no_grad(), record(model) as trace:
        model(read)
    computed = trace.chosen_map()
    assert each.layers == [tuple(computed[:, place].nonzero()[0].tolist()) for place in range(read.shape[1])]
    assert set(each.layers) > {(0,)}
    assert all(layers == tuple(range(len(layers))) for layers in each.layers)


@pytest.mark.parametrize("flow", FLOWS)
def test_a_calibrated_flow_routes_the_share_of_what_is_left(flow):
    model, tokens = family_model(flow), tiny_tokens(B=40)
    routing = calibrate(model, tokens, 0.5)
    first, second = model(tokens, routing=routing).routings
    assert first.chosen_BT.sum() == 460
    assert second.chosen_BT.sum() == 230
    assert first.chosen_BT[second.chosen_BT].all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"flow": "leave"}, "flow must be one of rejoin, filter, exit, got 'leave'"),
        ({"flow": "exit", "part": "mlp"}, "part must be block with flow 'exit', got 'mlp'"),
        (
            {"flow": "filter", "selection": "soft"},
            "flow 'filter' does not go with selection .soft., which",
        ),
        (
            {"flow": "exit", "selection": "stride"},
            "flow 'exit' does not go with selection .stride., which",
        ),
    ],
)
def test_a_flow_that_means_nothing_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RoutingConfig(**fields)


def test_a_flow_needs_layers_to_flow_through():
    with pytest.raises(ValueError, match="flow must be rejoin here, got 'exit'"):
        MixtureOfDepths(torch.nn.Identity(), dim=4, routing=RoutingConfig(flow="exit"))
    model = tiny_model()
    with pytest.raises(ValueError, match="routing may not change flow of a model that stands"):
        model(tiny_tokens(), routing=replace(model.config.routing, flow="filter"))


def test_a_flow_of_random_choices_takes_its_share():
    model = tiny_model(flow="exit", selection="random", capacity=0.5)
    first, second = model(tiny_tokens(), mode="topk").routings
    assert [int(each.chosen_BT[0].sum()) for each in (first, second)] == [12, 6]
    causal = model(tiny_tokens(B=1, T=64)).routings
    assert not (causal[1].chosen_BT & ~causal[0].chosen_BT).any()
    assert math.isfinite(model(tiny_tokens(), targets=tiny_tokens(), mode="topk").loss.item())
    assert tiny_config(flow="exit").decided_by(2) == 1
