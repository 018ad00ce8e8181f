"""Norm, rotation and gate with their gradients written by hand: autograd would keep more, and pass over memory more.

Shapes: B batch, T tokens, D width, F width of the feed-forward, H heads, E width of a head.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class RMSNorm(nn.RMSNorm):
    """Divides each token's state by its root mean square, in float32 or wider, and weighs it.

    >>> x_BTD = torch.randn(2, 5, 16)
    >>> torch.allclose(RMSNorm(16, eps=1e-5)(x_BTD), nn.RMSNorm(16, eps=1e-5)(x_BTD), atol=1e-6)
    True
    """

    def forward(self, x_BTD: Tensor) -> Tensor:
        if not torch.is_grad_enabled():  # for a few tokens at a time, one call is cheaper than eight
            return super().forward(x_BTD)
        return Normed.apply(x_BTD, self.weight, self.eps)


class Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        wide_BTD = x_BTD.to(torch.promote_types(x_BTD.dtype, torch.float32))
        length_BT1 = torch.linalg.vector_norm(wide_BTD, dim=-1, keepdim=True)
        rate_BT1 = length_BT1.square_().div_(x_BTD.shape[-1]).add_(eps).rsqrt_()
        normed_BTD = (wide_BTD * rate_BT1).to(x_BTD.dtype)
        ctx.save_for_backward(normed_BTD, weight_D, rate_BT1)
        return normed_BTD * weight_D

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_BTD: Tensor) -> tuple[Tensor, Tensor, None]:
        normed_BTD, weight_D, rate_BT1 = ctx.saved_tensors
        of_weight_D = (slope_BTD * normed_BTD).flatten(0, -2).sum(0).to(weight_D.dtype)
        of_normed_BTD = slope_BTD * weight_D
        # Along the state itself nothing changes: its length is divided out.
        along_BT1 = torch.linalg.vecdot(of_normed_BTD, normed_BTD).unsqueeze(-1) / normed_BTD.shape[-1]
        of_x_BTD = of_normed_BTD.addcmul_(normed_BTD, along_BT1, value=-1).mul_(rate_BT1)
        return of_x_BTD.to(normed_BTD.dtype), of_weight_D, None


def rotate(x_BTHE: Tensor, rope_BTE: Tensor) -> Tensor:
    """Turn the pairs (i, i + E/2) of every head by their position's angle, given as cosines, then sines.

    >>> x, quarter = torch.tensor([1.0, 2.0]).view(1, 1, 1, 2), torch.tensor([0.0, 1.0]).view(1, 1, 2)
    >>> rotate(x, quarter).flatten()
    tensor([-2.,  1.])
    """
    if not torch.is_grad_enabled():
        return turned(x_BTHE, rope_BTE, 1)
    out_BTHE: Tensor = Rotated.apply(x_BTHE, rope_BTE)
    return out_BTHE


class Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTHE: Tensor, rope_BTE: Tensor) -> Tensor:
        ctx.save_for_backward(rope_BTE)
        return turned(x_BTHE, rope_BTE, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_BTHE: Tensor) -> tuple[Tensor, None]:
        return turned(slope_BTHE, ctx.saved_tensors[0], -1), None


def turned(x_BTHE: Tensor, rope_BTE: Tensor, direction: int) -> Tensor:
    cos, sin = rope_BTE.unsqueeze(2).chunk(2, dim=-1)
    left, right = x_BTHE.chunk(2, dim=-1)
    out_BTHE = x_BTHE * torch.cat((cos, cos), dim=-1)
    out_left, out_right = out_BTHE.chunk(2, dim=-1)
    out_left.addcmul_(right, sin, value=-direction)
    out_right.addcmul_(left, sin, value=direction)
    return out_BTHE


def swiglu(gate_BTF: Tensor, up_BTF: Tensor) -> Tensor:
    """silu(gate) * up.

    >>> gate, up = torch.randn(2, 2, 5, 16)
    >>> torch.equal(swiglu(gate, up), F.silu(gate) * up)
    True
    """
    if not torch.is_grad_enabled():
        return F.silu(gate_BTF).mul_(up_BTF)
    out_BTF: Tensor = Gated.apply(gate_BTF, up_BTF)
    return out_BTF


class Gated(torch.autograd.Function):
    """Keeps its two inputs, where autograd would also keep silu(gate)."""

    @staticmethod
    def forward(ctx: Any, gate_BTF: Tensor, up_BTF: Tensor) -> Tensor:
        ctx.save_for_backward(gate_BTF, up_BTF)
        return F.silu(gate_BTF).mul_(up_BTF)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_BTF: Tensor) -> tuple[Tensor, Tensor]:
        gate_BTF, up_BTF = ctx.saved_tensors
        of_up_BTF = F.silu(gate_BTF).mul_(slope_BTF)
        of_gate_BTF = slope_BTF * up_BTF
        torch.ops.aten.silu_backward.grad_input(of_gate_BTF, gate_BTF, grad_input=of_gate_BTF)
        return of_gate_BTF, of_up_BTF
