"""Recording what was routed."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from modepth import MixtureOfDepths, ModelConfig, RoutingConfig, Transformer, record
from tests.oracles import MixingBlock

ROUTING = RoutingConfig(capacity=0.4, every=2)
LENGTHS = torch.tensor([17, 5])


def decoder(routing=ROUTING, **options):
    return Transformer(
        ModelConfig(vocab_size=31, num_layers=7, dim=16, num_heads=2, max_length=32, routing=routing), **options
    )


def tokens():
    return torch.randint(31, (2, 17))


def num_hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("mode", ["topk", "causal"])
@pytest.mark.parametrize("selection", ["topk", "soft", "token_choice"])
def test_the_trace_is_what_the_forward_decided(mode, selection):
    model, tokens_BT = decoder(RoutingConfig(capacity=0.4, selection=selection)), tokens()
    with record(model) as trace:
        out = model(tokens_BT, lengths=LENGTHS, mode=mode)
    assert trace.routed_layers == (1, 3, 5)
    for layer, routing in zip(trace.last, out.routings, strict=True):
        assert np.array_equal(layer.chosen_BT, routing.chosen_BT.numpy())
        assert np.array_equal(layer.real_BT, routing.real_BT.numpy())
        assert np.array_equal(layer.logit_BT, routing.logit_BT.detach().numpy())
        gate_BT = torch.where(routing.chosen_BT, routing.logit_BT.sigmoid(), 0.0)
        assert np.array_equal(layer.gate_BT, gate_BT.detach().numpy())
    assert sum(layer.chosen_BT.sum() for layer in trace.last) > 0


def test_recording_changes_no_bit_of_the_output():
    model, tokens_BT = decoder(), tokens()
    before = model(tokens_BT, targets=tokens_BT, mode="topk")
    with record(model):
        during = model(tokens_BT, targets=tokens_BT, mode="topk")
        recorded = model(tokens_BT, mode="topk")
    assert torch.equal(before.loss, during.loss)
    assert torch.equal(model(tokens_BT, mode="topk").logits_BTV, recorded.logits_BTV)
    gradients = [torch.autograd.grad(out.loss, list(model.parameters()), allow_unused=True) for out in (before, during)]
    for one, other in zip(*gradients, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def test_every_forward_is_kept_in_order_and_nothing_after_the_block():
    model = decoder()
    with record(model) as trace:
        for length in (17, 3, 11):
            model(tokens()[:, :length])
    model(tokens())
    assert [forward[0].chosen_BT.shape for forward in trace.forwards] == [(2, 17), (2, 3), (2, 11)]


def test_hooks_go_even_after_an_exception():
    model = decoder()
    with record(model):
        assert num_hooks(model) == 2 + 3
    with pytest.raises(ZeroDivisionError), record(model):
        1 / 0  # noqa: B018
    assert num_hooks(model) == 0


def test_a_forward_that_fails_is_not_kept():
    model = decoder()
    with record(model) as trace:
        handle = model.norm.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(tokens())
        handle.remove()
        model(tokens()[:, :3])
    assert [forward[0].chosen_BT.shape for forward in trace.forwards] == [(2, 3)]


def test_what_a_backward_computes_again_is_not_recorded():
    model = decoder(checkpoint_activations=True)
    with record(model) as trace:
        model(tokens(), targets=tokens(), mode="topk").loss.backward()
    assert [len(forward) for forward in trace.forwards] == [3]


def test_nothing_of_the_graph_stays_alive():
    model = decoder()
    with record(model) as trace:
        out = model(tokens(), mode="topk")
    alive = [weakref.ref(tensor) for routing in out.routings for tensor in (routing.logit_BT, routing.gate_BK)]
    del out
    gc.collect()
    assert [ref() for ref in alive] == [None] * 6
    for value in trace.last[0][1:]:
        assert isinstance(value, np.ndarray)
        assert value.flags.owndata


def test_depth_counts_the_routed_layers_of_each_token():
    model = decoder()
    with record(model) as trace:
        out = model(tokens(), lengths=LENGTHS, mode="topk")
    assert np.array_equal(trace.depth(), sum(routing.chosen_BT.long() for routing in out.routings).numpy())
    assert trace.depth().sum(1).tolist() == [3 * 7, 3 * 2]


def test_the_map_of_a_row_has_all_layers_and_dense_ones_compute_everything():
    model = decoder()
    with record(model) as trace:
        out = model(tokens(), mode="topk")
    chosen = trace.chosen_map(1)
    assert chosen.shape == (7, 17)
    assert chosen.dtype == bool
    assert chosen[[0, 2, 4, 6]].all()
    for routing in out.routings:
        assert np.array_equal(chosen[routing.layer], routing.chosen_BT[1].numpy())


def test_scores_are_those_of_real_tokens_over_all_forwards():
    model = decoder()
    with record(model) as trace:
        outs = [model(tokens(), lengths=lengths, mode="topk") for lengths in (LENGTHS, LENGTHS.flip(0) - 1)]
    logits, chosen = trace.scores()
    assert list(logits) == list(chosen) == [1, 3, 5]
    for number, layer in enumerate(logits):
        real = [out.routings[number].logit_BT[out.routings[number].real_BT] for out in outs]
        assert np.array_equal(logits[layer], torch.cat(real).detach().numpy())
        assert logits[layer].shape == chosen[layer].shape == (22 + 20,)
        assert chosen[layer].sum() == 7 + 2 + 2 + 7


def test_layers_around_blocks_of_ones_own_are_recorded():
    stack = nn.Sequential(
        MixtureOfDepths(MixingBlock(7), dim=7, routing=ROUTING, layer=1),
        nn.Linear(7, 7),
        MixtureOfDepths(MixingBlock(7), dim=7, routing=ROUTING, layer=3),
    )
    with record(stack) as trace:
        stack(torch.randn(3, 13, 7))
    assert trace.routed_layers == (1, 3)
    assert trace.chosen_map(2).sum(1).tolist() == [13, 6, 13, 6]


def test_a_layer_alone_and_its_router_alone_are_recorded():
    layer = MixtureOfDepths(MixingBlock(7), dim=7, routing=ROUTING)
    for module in (layer, layer.router):
        with record(module) as trace:
            module(torch.randn(3, 13, 7))
        assert trace.depth().sum(1).tolist() == [6, 6, 6]


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="this Transformer has no router"), record(decoder(routing=None)):
        pass
    with pytest.raises(ValueError, match=r"the model that torch\.compile was given"), record(torch.compile(decoder())):
        pass
    model = decoder()
    with record(model) as trace, pytest.raises(ValueError, match="inside `with record"):
        trace.depth()
    model.compile()
    with pytest.raises(ValueError, match=r"the model that torch\.compile was given"), record(model):
        pass
    with record(decoder()) as trace, pytest.raises(ValueError, match="no forward was recorded"):
        trace.chosen_map(0)
    model = decoder()
    with record(model) as trace:
        model(tokens())
    with pytest.raises(ValueError, match=r"row must be in 0..1, got 2"):
        trace.chosen_map(2)
    stack = nn.Sequential(*(MixtureOfDepths(MixingBlock(7), dim=7, routing=ROUTING) for _ in range(2)))
    with record(stack) as trace:
        stack(torch.randn(3, 13, 7))
    with pytest.raises(ValueError, match=r"distinct numbers, got \(0, 0\)"):
        trace.chosen_map(0)


def test_a_forward_that_runs_no_router_says_so():
    model = nn.ModuleDict({"unused": MixtureOfDepths(MixingBlock(7), dim=7, routing=ROUTING)})
    model.forward = lambda x: x
    with record(model) as trace:
        model(torch.randn(3, 13, 7))
    with pytest.raises(ValueError, match="ran no router"):
        trace.depth()
