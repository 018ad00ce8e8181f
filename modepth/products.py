"""Products of states and weights by oneDNN: in float32, on a CPU, faster than those that torch calls by itself.

Forward and the gradient of the states go this way; the gradient of the weights is as fast by torch's own. Compiled too:
torch's compiler knows oneDNN's operator, but only for weights that never change.

Shapes: I width of the input, O of the output.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.flop_counter import flop_registry, register_flop_formula

from modepth.operators import opaque

AVAILABLE = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def takes(x: Tensor, weight_OI: Tensor) -> bool:
    """Whether oneDNN is the one to multiply these. Subclasses and autocast know torch's own operators."""
    return (
        AVAILABLE
        and type(x) is Tensor
        and type(weight_OI) in (Tensor, nn.Parameter)
        and x.dtype == weight_OI.dtype == torch.float32
        and x.device.type == weight_OI.device.type == "cpu"
        and x.numel() > 0
        and not torch.is_autocast_enabled("cpu")
    )


def product(x: Tensor, weight_OI: Tensor) -> Tensor:
    """x @ weight.T, which autograd does not see.

    >>> x, weight = torch.randn(5, 16), torch.randn(8, 16)
    >>> torch.allclose(product(x, weight), x @ weight.T, atol=1e-5)
    True
    """
    out: Tensor = by_onednn(x, weight_OI) if takes(x, weight_OI) else F.linear(x, weight_OI)
    return out


by_onednn = opaque(
    "product(Tensor x, Tensor weight_OI) -> Tensor",
    lambda x, weight_OI: torch.ops.mkldnn._linear_pointwise.default(x, weight_OI, None, "none", (), ""),
    lambda x, weight_OI: x.new_empty((*x.shape[:-1], weight_OI.shape[0])),
)


class Linear(nn.Linear):
    """`nn.Linear` without bias."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if takes(x, self.weight):
            multiply = Mapped.apply if torch.is_grad_enabled() else by_onednn
            out: Tensor = multiply(x, self.weight)
            return out
        return F.linear(x, self.weight)


class Mapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        out: Tensor = by_onednn(x, weight_OI)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight_OI = ctx.saved_tensors
        slope = slope.contiguous()
        of_x = product(slope, weight_OI.T) if ctx.needs_input_grad[0] else None
        of_weight_OI = slope.flatten(0, -2).T @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return of_x, of_weight_OI


if AVAILABLE and torch.ops.mkldnn._linear_pointwise not in flop_registry:

    @register_flop_formula(torch.ops.mkldnn._linear_pointwise)
    def count_flops(x: torch.Size, weight_OI: torch.Size, *rest: object, **of_out: object) -> int:
        """So that torch's counter knows it."""
        return 2 * x.numel() * weight_OI[0]
