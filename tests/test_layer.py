"""MixtureOfDepths around a user's own block."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from modepth import MixtureOfDepths, RoutingConfig
from tests.oracles import GATES, MixingBlock, apply_slowly

HALF = RoutingConfig(capacity=0.5)


class FullAttention(nn.Module):
    """Looks both ways, so it must be told which slots take part; takes a bias for every pair of tokens."""

    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x, present=None, bias=None, scale=1.0):
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        mask = torch.zeros(x.shape[0], 1, x.shape[1], x.shape[1]) if bias is None else bias
        if present is not None:
            mask = mask.masked_fill(~present[:, None, None], -torch.inf)
        return x + scale * F.scaled_dot_product_attention(q, k, v, attn_mask=mask).squeeze(1)


@pytest.mark.law
@pytest.mark.usefixtures("fp64")
def test_the_layer_equals_a_loop_over_tokens():
    layer = MixtureOfDepths(MixingBlock(7), dim=7, routing=HALF)
    x_BTD = torch.randn(3, 13, 7)
    with torch.no_grad():
        out_BTD = layer(x_BTD, lengths=torch.tensor([13, 5, 0]))
        slow_BTD = apply_slowly(x_BTD, layer.routing, layer.block, GATES["sigmoid"])
    assert layer.routing.chosen_BT.sum(1).tolist() == [7, 3, 0]
    torch.testing.assert_close(out_BTD, slow_BTD, rtol=0, atol=1e-12)


@pytest.mark.law
@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("rows", [1, 3])
def test_per_token_arguments_travel_with_their_tokens(rows):
    layer = MixtureOfDepths(MixingBlock(7), dim=7, routing=HALF, per_token=["positions"])
    x_BTD, positions = torch.randn(3, 13, 7), torch.randn(rows, 13)
    with torch.no_grad():
        out_BTD = layer(x_BTD, positions=positions)
        for row, chosen_T in enumerate(layer.routing.chosen_BT):
            own = positions.expand(3, 13)[row : row + 1, chosen_T]
            y_KD = layer.block(x_BTD[row : row + 1, chosen_T], positions=own)[0]
            gate_K1 = layer.routing.logit_BT[row, chosen_T].sigmoid().unsqueeze(-1)
            expected = x_BTD[row, chosen_T] + gate_K1 * (y_KD - x_BTD[row, chosen_T])
            torch.testing.assert_close(out_BTD[row, chosen_T], expected, rtol=0, atol=1e-12)


@pytest.mark.law
@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("shape", [(1, 1, 13, 13), (3, 1, 13, 13), (3, 1, 1, 13)])
def test_per_pair_arguments_are_gathered_by_query_and_key(shape):
    layer = MixtureOfDepths(
        FullAttention(7), dim=7, routing=HALF, per_pair=["bias"], shared=["scale"], valid_name="present"
    )
    x_BTD, bias = torch.randn(3, 13, 7), torch.randn(shape)
    real_BT = torch.rand(3, 13) < 0.7
    with torch.no_grad():
        out_BTD = layer(x_BTD, real=real_BT, bias=bias, scale=0.3)
        for row in range(3):
            members = layer.routing.chosen_BT[row].nonzero().flatten()
            own_bias = bias.expand(3, 1, 13, 13)[row : row + 1, :, members][..., members]
            y_KD = layer.block(x_BTD[row : row + 1, members], bias=own_bias, scale=0.3)[0]
            gate_K1 = layer.routing.logit_BT[row, members].sigmoid().unsqueeze(-1)
            expected = x_BTD[row, members] + gate_K1 * (y_KD - x_BTD[row, members])
            torch.testing.assert_close(out_BTD[row, members], expected, rtol=0, atol=1e-12)


class Recorder(nn.Module):
    def forward(self, x, pairs):
        self.pairs = pairs
        return x


@pytest.mark.parametrize("shape", [(3, 13, 13), (3, 2, 13, 13), (1, 2, 5, 13, 13)])
def test_per_pair_arguments_may_have_any_number_of_axes_between(shape):
    layer = MixtureOfDepths(Recorder(), dim=7, routing=HALF, per_pair=["pairs"])
    pairs = torch.randn(shape)
    layer(torch.randn(3, 13, 7), pairs=pairs)
    for row, members in enumerate(layer.routing.index_BK):
        expected = pairs.expand(3, *shape[1:])[row][..., members, :][..., members]
        assert torch.equal(layer.block.pairs[row], expected)


def test_the_number_of_a_layer_names_it_and_varies_random_selection():
    config, x_BTD = RoutingConfig(capacity=0.5, selection="random"), torch.randn(1, 40, 7)
    layers = [MixtureOfDepths(MixingBlock(7), dim=7, routing=config, layer=number) for number in (0, 5)]
    for layer in layers:
        layer(x_BTD)
    assert [layer.routing.layer for layer in layers] == [0, 5]
    assert not torch.equal(layers[0].routing.chosen_BT, layers[1].routing.chosen_BT)


def test_a_copy_of_a_compiled_layer_uses_its_own_weights():
    layer = MixtureOfDepths(MixingBlock(7), dim=7, routing=RoutingConfig(capacity=1.0, gate="one"))
    layer.compile(backend="eager")
    x_BTD = torch.randn(2, 13, 7)
    layer(x_BTD)
    twin = copy.deepcopy(layer)
    for parameter in twin.block.parameters():
        torch.nn.init.zeros_(parameter)
    assert torch.equal(twin(x_BTD), x_BTD)
    assert not torch.equal(layer(x_BTD), x_BTD)


def test_real_tokens_and_lengths_say_the_same():
    layer = MixtureOfDepths(MixingBlock(7), dim=7, routing=HALF)
    x_BTD, lengths = torch.randn(2, 13, 7), torch.tensor([13, 5])
    by_lengths = layer(x_BTD, lengths=lengths)
    assert torch.equal(layer(x_BTD, real=torch.arange(13) < lengths[:, None]), by_lengths)
    assert not torch.equal(layer(x_BTD), by_lengths)


def test_the_layer_selects_by_top_k_unless_told_otherwise():
    layer = MixtureOfDepths(MixingBlock(7), dim=7, routing=HALF)
    x_BTD = torch.randn(2, 13, 7)
    for training in (True, False):  # the mode is never tied to .training
        layer.train(training)(x_BTD)
        assert layer.routing.chosen_BT.sum(1).tolist() == [7, 7]
    layer(x_BTD, mode="causal")
    assert torch.equal(layer.routing.chosen_BT, layer.routing.logit_BT >= 0)


@pytest.mark.law
def test_copy_and_pickle_work_after_a_training_forward():
    layer = MixtureOfDepths(MixingBlock(7), dim=7, routing=HALF)
    x_BTD = torch.randn(2, 13, 7)
    out_BTD = layer(x_BTD)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin.routing is None
        assert torch.equal(twin(x_BTD), out_BTD)
    assert layer.routing is not None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"bias": torch.zeros(1)}, TypeError, "argument 'bias' is not declared: name it in per_token, per_pair"),
        ({"positions": torch.zeros(2, 12)}, ValueError, r"positions must have the shape \(B or 1, T, ...\)"),
        ({"positions": torch.zeros(13)}, ValueError, r"positions must have the shape .* got \(13,\)"),
        ({"pairs": torch.zeros(2, 1, 13, 7)}, ValueError, r"pairs must have the shape \(B or 1, ..., T or 1, T\)"),
        ({"positions": (torch.zeros(2, 13),)}, ValueError, "positions must be one tensor .* got tuple"),
        ({"lengths": torch.tensor([3])}, ValueError, r"lengths must be an .* tensor of shape \(2\)"),
        ({"lengths": torch.tensor([3, 4]), "real": torch.ones(2, 13).bool()}, ValueError, "lengths or real, not both"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, error, message):
    layer = MixtureOfDepths(MixingBlock(7), dim=7, routing=HALF, per_token=["positions"], per_pair=["pairs"])
    with pytest.raises(error, match=message):
        layer(torch.randn(2, 13, 7), **arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_token": "positions"}, r"per_token must be a list of names, got 'positions': write \['positions'\]"),
        ({"shared": ["mode"]}, "shared names 'mode', which MixtureOfDepths takes itself"),
        ({"routing": {"capacity": 0.5}}, "routing must be a RoutingConfig"),
        ({"dim": 0}, "dim must be a whole number >= 1, got 0"),
    ],
)
def test_declarations_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MixtureOfDepths(**{"block": MixingBlock(7), "dim": 7, **options})


def test_a_part_of_a_layer_is_refused():
    with pytest.raises(ValueError, match="part must be block here, got 'mlp': wrap the attention or the mlp itself"):
        MixtureOfDepths(MixingBlock(7), dim=7, routing=RoutingConfig(part="mlp"))


def test_the_layer_compiles_to_one_graph():
    layer = MixtureOfDepths(MixingBlock(7), dim=7, routing=HALF, per_token=["positions"])
    x_BTD, positions = torch.randn(2, 13, 7), torch.randn(1, 13)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x_BTD, positions=positions), layer(x_BTD, positions=positions))
