"""The norm with its gradient written by hand: autograd would make several more passes over memory.

Shapes: B batch, T tokens, D width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


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
