"""Router and predictor losses: pure functions of Routings, means over real tokens and routed layers.

They are kept apart from the language-model loss, which they must never be plotted as. The targets
are the decisions themselves, `chosen_BT`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from modepth.config import LossWeights, RoutingConfig
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
