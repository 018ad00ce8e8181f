"""From scores to the thresholds that route a wanted share of tokens: what calibration does at one layer."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from modepth.config import RoutingConfig
from modepth.routing import Routing
from modepth.selection import num_routed, rule_score


def without_thresholds(routing: RoutingConfig, capacity: float) -> RoutingConfig:
    """Where calibration starts from."""
    if routing.selection not in ("topk", "soft"):
        raise ValueError(f"selection {routing.selection!r} follows no rule, so there is nothing to calibrate")
    return replace(routing, capacity=capacity, thresholds=())


def with_threshold(routing: RoutingConfig, decisions: Sequence[Routing | None]) -> RoutingConfig:
    """The routing with one layer's threshold added, which `capacity` of these tokens reach.

    It lies midway to the next score, so that rounding in another order of computing does not change the choice.
    """
    made = [decision for decision in decisions if decision is not None]
    for decision in made:
        decision.check()
    scores = torch.cat([rule_score(decision, routing.rule)[decision.real_BT] for decision in made])
    scores = scores.sort(descending=True).values
    k = num_routed(len(scores), routing.capacity)
    threshold = scores[k - 1 : k + 1].mean().item()
    return replace(routing, thresholds=(*(routing.thresholds or ()), (made[0].layer, threshold)))
