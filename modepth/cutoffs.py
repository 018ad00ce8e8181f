"""The cutoff: by which a model that was trained with top-k decides without looking ahead.

Each router keeps a running mean of the lowest score that top-k took, moved by the training loop once a step.
"""

import math

import torch
from torch import Tensor, nn

from modepth.routing import Router, Routing
from modepth.world import World


def lowest_routed(routing: Routing) -> Tensor:
    """The lowest chosen logit of each row, their sum; and the number of rows that chose any: (2,)."""
    lowest_B = routing.logit_BT.detach().double().masked_fill(~routing.chosen_BT, math.inf).amin(1)
    any_B = routing.chosen_BT.any(1)
    return torch.stack([torch.where(any_B, lowest_B, 0.0).sum(), any_B.sum()])


def cutoff_score(routing: Routing) -> Tensor:
    """The lowest chosen logit of a row, the mean over the rows that chose any."""
    total, count = lowest_routed(routing)
    return total / count.clamp(min=1)


def mean_cutoffs(layers: list[int], lowest: list[list[Tensor]], world: World) -> dict[int, float]:
    """By layer, the mean of `lowest_routed` over the micro-batches and ranks; `lowest` has a list a micro-batch."""
    if not layers:
        return {}
    sums_L2 = world.sum(torch.stack([torch.stack(part) for part in lowest]).sum(0))
    return {layer: total / count for layer, (total, count) in zip(layers, sums_L2.tolist(), strict=True) if count > 0}


def move_cutoffs(model: nn.Module, cutoffs: dict[int, float], weight: float) -> None:
    """Move each router's cutoff towards what top-k asked for in a step, by the share `weight`.

    Only where top-k chose: a threshold that followed its own lowest score would rise without end.
    """
    for router in (module for module in model.modules() if isinstance(module, Router)):
        if router.layer in cutoffs and router.config.selection in ("topk", "soft"):
            router.cutoff.lerp_(torch.as_tensor(cutoffs[router.layer]).to(router.cutoff), weight)


def cutoff_weight_at(step: int) -> float:
    """The weight of a step's cutoff in the running mean: the plain mean of the first steps, then of about fifty."""
    return max(1 / (step + 1), 0.02)
