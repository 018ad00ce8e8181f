"""Losses of router and predictor, against sums over single tokens."""

import math
from dataclasses import replace

import pytest
import torch

from modepth import LossWeights
from modepth.losses import balance_loss, predictor_loss, router_loss, z_loss
from tests.oracles import tiny_model, tiny_tokens


def routings_of(**changes):
    model = tiny_model(every=1, predictor=5, **changes)
    return model(tiny_tokens(), lengths=torch.tensor([23, 9, 0]), mode="topk").routings


def mean_slowly(routings, term):
    """The mean over layers of the mean of term(routing, row, token) over real tokens."""
    means = []
    for routing in routings:
        real = routing.real_BT.nonzero().tolist()
        means.append(sum(term(routing, row, token) for row, token in real) / len(real))
    return sum(means) / len(means)


def cross_entropy(logit, target):
    return math.log1p(math.exp(-logit if target else logit))


@pytest.mark.law
@pytest.mark.parametrize(("loss", "field"), [(predictor_loss, "predicted_BT"), (router_loss, "logit_BT")])
def test_membership_losses_are_the_mean_cross_entropy_of_being_in_the_top_k(loss, field):
    routings = routings_of()
    assert len(routings) == 3

    def term(routing, row, token):
        member = token in routing.index_BK[row][routing.valid_BK[row]].tolist()
        return cross_entropy(getattr(routing, field)[row, token].item(), member)

    assert loss(routings).item() == pytest.approx(mean_slowly(routings, term), rel=1e-5)


def test_targets_are_per_row():
    routings = routings_of()
    assert [routing.chosen_BT.sum(1).tolist() for routing in routings] == [[7, 3, 0]] * 3


@pytest.mark.law
def test_z_loss_is_the_mean_squared_logit():
    routings = routings_of()
    expected = mean_slowly(routings, lambda routing, row, token: routing.logit_BT[row, token].item() ** 2)
    assert z_loss(routings).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.law
def test_balance_loss_is_the_squared_distance_of_the_willing_share_and_its_gradient_closes_it():
    routings = routings_of(selection="token_choice")
    logits = [routing.logit_BT.detach().requires_grad_() for routing in routings]
    routings = [replace(routing, logit_BT=logit_BT) for routing, logit_BT in zip(routings, logits, strict=True)]
    shares = [mean_slowly([r], lambda r, row, token: float(r.logit_BT[row, token] >= 0)) for r in routings]
    for capacity in (0.01, 0.99):
        loss = balance_loss(routings, capacity)
        assert loss.item() == pytest.approx(sum((share - capacity) ** 2 for share in shares) / 3, rel=1e-5)
        for gradient_BT in torch.autograd.grad(loss, logits):
            toward_BT = gradient_BT if capacity < 0.5 else -gradient_BT
            assert (toward_BT >= 0).all()
            assert toward_BT[0].sum() > 0


@pytest.mark.law
@pytest.mark.parametrize("loss", [router_loss, z_loss])
def test_losses_of_the_router_reach_router_and_stream(loss):
    model = tiny_model()
    loss(model(tiny_tokens(), mode="topk").routings).backward()
    for weight in (model.layers[1].router.score.weight, model.layers[0].mlp.down_proj.weight):
        assert weight.grad.abs().sum() > 0


def test_a_loss_of_no_routing_is_refused():
    with pytest.raises(ValueError, match="there is no routing to take a loss of"):
        z_loss([])


def test_only_the_losses_asked_for_are_there_and_their_weighted_sum_is_added():
    tokens = tiny_tokens()
    weights = LossWeights(predictor=0.5, router=0.25, balance=3.0, z=0.125)
    expected = {
        "topk": {"predictor": 0.5, "router": 0.25, "z": 0.125},
        "token_choice": {"predictor": 0.5, "router": 0.25, "balance": 3.0, "z": 0.125},
    }
    for selection, names in expected.items():
        out = tiny_model(selection=selection, predictor=5, losses=weights)(tokens, targets=tokens, mode="topk")
        assert set(out.router_losses) == set(names)
        total = sum(weight * out.router_losses[name].item() for name, weight in names.items())
        assert out.router_loss.item() == pytest.approx(total, rel=1e-5)
    plain = tiny_model()(tokens, targets=tokens, mode="topk")
    assert plain.router_losses == {}
    assert plain.router_loss.item() == 0


def test_a_predictor_loss_without_a_predictor_is_refused():
    routings = tiny_model()(tiny_tokens(), mode="topk").routings
    with pytest.raises(ValueError, match="layer 1 has no predictor: set predictor in its RoutingConfig"):
        predictor_loss(routings)


def test_the_balance_loss_brings_the_share_to_the_capacity():
    model, tokens = tiny_model(selection="token_choice", capacity=0.3), tiny_tokens()
    optimizer = torch.optim.Adam([layer.router.score.weight for layer in model.layers if layer.router], lr=0.05)

    def shares():
        return [(routing.logit_BT >= 0).float().mean().item() for routing in model(tokens, mode="topk").routings]

    with torch.no_grad():
        for number in model.config.routed_layers:
            model.layers[number].router.score.weight.mul_(0.1)
    before = shares()
    for _ in range(60):
        optimizer.zero_grad()
        balance_loss(model(tokens, mode="topk").routings, 0.3).backward()
        optimizer.step()
    assert max(abs(share - 0.3) for share in shares()) < 0.05 < max(abs(share - 0.3) for share in before)
