"""Losses of routers and predictors: pure functions of decisions, means over real tokens and over layers.

They are kept apart from the language-model loss, which they must never be plotted as. The targets
are the decisions themselves, `chosen_BT`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from modepth.config import ExpertsConfig, LossWeights, RoutingConfig
from modepth.experts import ExpertRouting
from modepth.routing import Routing


def predictor_loss(routings: Sequence[Routing]) -> Tensor:
    """Cross-entropy of the predictor. Its input is detached, so it trains the predictor alone."""

    def layer_loss(routing: Routing) -> Tensor:
        if routing.predicted_BT is None:
            raise ValueError(f"layer {routing.layer} has no predictor: set predictor in its RoutingConfig")
        return membership_loss(routing.predicted_BT, routing)

    return mean_over_layers(layer_loss, routings)


def router_loss(routings: Sequence[Routing]) -> Tensor:
    """Cross-entropy of the router's own logits: centres sigmoid(logit) at the boundary of being chosen."""
    return mean_over_layers(lambda routing: membership_loss(routing.logit_BT, routing), routings)


def balance_loss(routings: Sequence[Routing], capacity: float) -> Tensor:
    """Squared distance of the share of willing tokens from `capacity`, for token-choice.

    The share is a count and has no gradient; that of the mean sigmoid stands in for it.
    """

    def layer_loss(routing: Routing) -> Tensor:
        share = mean_over_real((routing.logit_BT >= 0).to(routing.logit_BT.dtype), routing)
        soft_share = mean_over_real(routing.logit_BT.sigmoid(), routing)
        return (share + soft_share - soft_share.detach() - capacity).square()

    return mean_over_layers(layer_loss, routings)


def z_loss(routings: Sequence[Routing]) -> Tensor:
    """Mean squared logit: keeps scores small, where sigmoid still has a slope."""
    return mean_over_layers(lambda routing: mean_over_real(routing.logit_BT.square(), routing), routings)


def expert_balance_loss(decisions: Sequence[ExpertRouting]) -> Tensor:
    """How unevenly tokens pick among the alternatives, no-ops included: 1 if evenly, up to their number if all agree.

    The share of picks times the mean softmax, summed and scaled, as in the Switch Transformer, equations 4 to 6. The
    share of picks is a count and has no gradient.
    """

    def layer_loss(decided: ExpertRouting) -> Tensor:
        gate_BTA = decided.logit_BTA.softmax(-1)
        real_BT1 = decided.real_BT.unsqueeze(-1)
        picks_A = decided.wanted_BTA.sum((0, 1))
        gates_A = torch.where(real_BT1, gate_BTA, 0.0).sum((0, 1))
        # A batch of padding alone has the loss 0.
        return len(picks_A) * (picks_A * gates_A).sum() / (picks_A.sum() * real_BT1.sum()).clamp(min=1)

    if not decisions:
        raise ValueError("there is no choice of experts to take a loss of: none of the layers has experts")
    return torch.stack([layer_loss(each) for each in decisions]).mean()


def all_losses(
    routings: Sequence[Routing],
    routing: RoutingConfig | None,
    experts: Sequence[ExpertRouting],
    experts_config: ExpertsConfig | None,
) -> tuple[dict[str, Tensor], Tensor]:
    """The losses that the two configs ask for, by name and not yet weighted; and what is added to the language loss."""
    losses: dict[str, Tensor] = {}
    total = torch.zeros(())
    if routing is not None:
        losses = router_losses(routings, routing)
        total = weighted_sum(losses, routing.losses)
    if experts_config is not None and experts_config.choice == "token" and experts_config.balance:
        losses["experts"] = expert_balance_loss(experts)
        total = total + experts_config.balance * losses["experts"]
    return losses, total


def router_losses(routings: Sequence[Routing], config: RoutingConfig) -> dict[str, Tensor]:
    """The losses that the config asks for, each by its name in LossWeights, not yet weighted."""
    weights = config.losses
    losses: dict[str, Tensor] = {}
    if weights.predictor and config.predictor is not None:
        losses["predictor"] = predictor_loss(routings)
    if weights.router:
        losses["router"] = router_loss(routings)
    if weights.balance and config.selection == "token_choice":
        losses["balance"] = balance_loss(routings, config.capacity)
    if weights.z:
        losses["z"] = z_loss(routings)
    return losses


def weighted_sum(losses: dict[str, Tensor], weights: LossWeights) -> Tensor:
    """What is added to the language-model loss; 0 if there is nothing to add."""
    return sum((getattr(weights, name) * loss for name, loss in losses.items()), start=torch.zeros(()))


# -- means


def membership_loss(logit_BT: Tensor, routing: Routing) -> Tensor:
    target_BT = routing.chosen_BT.to(logit_BT.dtype)
    return mean_over_real(F.binary_cross_entropy_with_logits(logit_BT, target_BT, reduction="none"), routing)


def mean_over_real(value_BT: Tensor, routing: Routing) -> Tensor:
    # A batch of padding alone has the mean 0.
    return torch.where(routing.real_BT, value_BT, 0.0).sum() / routing.real_BT.sum().clamp(min=1)


def mean_over_layers(layer_loss: Callable[[Routing], Tensor], routings: Sequence[Routing]) -> Tensor:
    if not routings:
        raise ValueError("there is no routing to take a loss of: none of the layers is routed")
    return torch.stack([layer_loss(routing) for routing in routings]).mean()
