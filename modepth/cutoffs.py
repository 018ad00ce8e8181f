"""The cutoff: by which a model that was trained with top-k decides without looking ahead.

Each router keeps a running mean of the lowest score that top-k took, moved by the training loop once a step; an
expert's router one for each expert, of the lowest share that the expert took, or 0 where it had room left.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from modepth.experts import ExpertRouter, ExpertRouting
from modepth.routing import Router, Routing, num_routed
from modepth.world import World

Place = int | tuple[int, int]  # a routed layer; a layer and its expert


def lowest_routed(routing: Routing) -> Tensor:
    """The lowest chosen logit of each row, their sum; and the number of rows that chose any: (2,)."""
    lowest_B = routing.logit_BT.detach().double().masked_fill(~routing.chosen_BT, math.inf).amin(1)
    any_B = routing.chosen_BT.any(1)
    return torch.stack([torch.where(any_B, lowest_B, 0.0).sum(), any_B.sum()])


def lowest_taken(decided: ExpertRouting) -> Tensor:
    """For each expert, the lowest share that it took in a row, 0 if it had room left, summed; and the rows: (E, 2)."""
    share_BTE = decided.logit_BTA.detach().double().softmax(-1)[..., : decided.chosen_BTE.shape[-1]]
    lowest_BE = share_BTE.masked_fill(~decided.chosen_BTE, math.inf).amin(1)
    num_real_B = decided.real_BT.sum(1)
    full_BE = decided.chosen_BTE.sum(1) >= num_routed(num_real_B, decided.capacity).unsqueeze(1)
    total_E = torch.where(full_BE & (num_real_B > 0).unsqueeze(1), lowest_BE, 0.0).sum(0)
    return torch.stack([total_E, (num_real_B > 0).sum().expand_as(total_E)], dim=1)


def cutoff_score(routing: Routing) -> Tensor:
    """The lowest chosen logit of a row, the mean over the rows that chose any."""
    total, count = lowest_routed(routing)
    return total / count.clamp(min=1)


def lowest_by_place(routings: Sequence[Routing], experts: Sequence[ExpertRouting]) -> dict[Place, Tensor]:
    """The lowest that was taken, and the rows counted, wherever a forward decided: (2,) each."""
    found: dict[Place, Tensor] = {routing.layer: lowest_routed(routing) for routing in routings}
    for decided in experts:
        found |= {(decided.layer, expert): lowest for expert, lowest in enumerate(lowest_taken(decided))}
    return found


def mean_cutoffs(lowest: Sequence[Mapping[Place, Tensor]], world: World) -> dict[Place, float]:
    """By place, the mean over the micro-batches and ranks of what `lowest_by_place` found in each."""
    if not lowest or not lowest[0]:
        return {}
    sums_L2 = world.sum(torch.stack([torch.stack(list(part.values())) for part in lowest]).sum(0))
    sums = zip(lowest[0], sums_L2.tolist(), strict=True)
    return {place: total / count for place, (total, count) in sums if count > 0}


def move_cutoffs(model: nn.Module, cutoffs: Mapping[Place, float], weight: float) -> None:
    """Move each router's cutoff towards what top-k asked for in a step, by the share `weight`.

    Only where top-k chose: a threshold that followed its own lowest score would rise without end.
    """
    for router in (module for module in model.modules() if isinstance(module, Router)):
        if router.layer in cutoffs and router.config.selection in ("topk", "soft"):
            router.cutoff.lerp_(torch.as_tensor(cutoffs[router.layer]).to(router.cutoff), weight)
    for chooser in (module for module in model.modules() if isinstance(module, ExpertRouter)):
        for expert, cutoff in enumerate(chooser.cutoff_E):
            if (chooser.layer, expert) in cutoffs:
                cutoff.lerp_(torch.as_tensor(cutoffs[chooser.layer, expert]).to(cutoff), weight)


def cutoff_weight_at(step: int) -> float:
    """The weight of a step's cutoff in the running mean: the plain mean of the first steps, then of about fifty."""
    return max(1 / (step + 1), 0.02)
