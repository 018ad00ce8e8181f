"""The language-model loss, and the same without logits: taken piece by piece, they never stand in memory as a whole.

A piece is some of the tokens. Its logits are made, turned in place into their own gradient, and multiplied back at
once: the three products that autograd would make, over numbers that are still in the cache.

Shapes: B batch, T tokens, N tokens of all rows, D width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from modepth.products import product

IGNORED = -100  # a target that does not count
LEAST_ROWS = 256  # of a piece: fewer would be slow to multiply


def loss_of_logits(logits_BTV: Tensor, targets_BT: Tensor, real_BT: Tensor) -> Tensor:
    """Mean cross-entropy over the real targets, 0 if there are none."""
    targets_BT = counted(targets_BT, real_BT)
    wide = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
    total = F.cross_entropy(wide.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORED, reduction="sum")
    return mean_over_counted(total, targets_BT)


def loss_of_states(states_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, real_BT: Tensor) -> Tensor:
    """The loss of the logits `states @ weight.T`.

    >>> states, weight = torch.randn(2, 7, 16), torch.randn(101, 16)
    >>> targets, real = torch.randint(101, (2, 7)), torch.ones(2, 7, dtype=torch.bool)
    >>> whole = loss_of_logits(states @ weight.T, targets, real)
    >>> torch.allclose(loss_of_states(states, weight, targets, real), whole)
    True
    """
    targets_BT = counted(targets_BT, real_BT)
    total = PieceByPiece.apply(states_BTD.flatten(0, 1), weight_VD, targets_BT.flatten(), torch.is_grad_enabled())
    return mean_over_counted(total, targets_BT)


def counted(targets_BT: Tensor, real_BT: Tensor) -> Tensor:
    return targets_BT.long().masked_fill(~real_BT, IGNORED)


def mean_over_counted(total: Tensor, targets_BT: Tensor) -> Tensor:
    return total / (targets_BT != IGNORED).sum().clamp(min=1)


class PieceByPiece(torch.autograd.Function):
    """Summed cross-entropy; its gradients are ready when the forward is."""

    @staticmethod
    def forward(ctx: Any, states_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, with_gradients: bool) -> Tensor:
        wide = torch.promote_types(states_ND.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=states_ND.device)
        of_states = torch.zeros_like(states_ND) if with_gradients and ctx.needs_input_grad[0] else None
        of_weight = None
        if with_gradients and ctx.needs_input_grad[1]:
            of_weight = torch.zeros_like(weight_VD, dtype=wide)
        for rows in pieces(states_ND, weight_VD):
            logits_PV = product(states_ND[rows], weight_VD)
            loss, slope_PV = loss_and_slope(logits_PV.to(wide), targets_N[rows])
            total += loss
            slope_PV = slope_PV.to(logits_PV.dtype)
            if of_states is not None:
                of_states[rows] = product(slope_PV, weight_VD.T)
            if of_weight is not None:
                of_weight += slope_PV.T @ states_ND[rows]
        ctx.save_for_backward(of_states, of_weight)
        ctx.weight_dtype = weight_VD.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        of_states, of_weight = ctx.saved_tensors
        return (
            None if of_states is None else of_states * slope.to(of_states.dtype),
            None if of_weight is None else (of_weight * slope).to(ctx.weight_dtype),
            None,
            None,
        )


def pieces(states_ND: Tensor, weight_VD: Tensor) -> list[slice]:
    """The tokens in turn, as many at once that their logits take the room of all states."""
    rows = max(LEAST_ROWS, states_ND.numel() // weight_VD.shape[0])
    return [slice(start, start + rows) for start in range(0, len(states_ND), rows)]


def loss_and_slope(logits_PV: Tensor, targets_P: Tensor) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy, and its derivative by each logit, in the place of the logits."""
    counts_P1 = (targets_P != IGNORED).unsqueeze(1)
    target_P1 = torch.where(counts_P1, targets_P.unsqueeze(1), 0)
    highest_P1 = logits_PV.amax(1, keepdim=True)
    of_target_P1 = logits_PV.gather(1, target_P1) - highest_P1
    weight_PV = logits_PV.sub_(highest_P1).exp_()
    sum_P1 = weight_PV.sum(1, keepdim=True)
    loss = torch.where(counts_P1, sum_P1.log() - of_target_P1, 0.0).sum()
    slope_PV = weight_PV.mul_(torch.where(counts_P1, 1 / sum_P1, 0.0))
    return loss, slope_PV.scatter_add_(1, target_P1, -counts_P1.to(slope_PV.dtype))
