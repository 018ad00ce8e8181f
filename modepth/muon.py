"""Muon (Jordan et al., 2024): a matrix moves by its momentum with all singular values brought near 1, so that it learns
in directions of small gradients too. All other parameters have AdamW.

torch's own works in bfloat16 and matrix by matrix; here those of one shape are taken together, in float32 or wider.

Shapes: M matrices of one shape, R rows, C columns.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

MOMENTUM = 0.95
ROUNDS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the polynomial that brings singular values from (0, 1] near 1
RMS_OF_ADAM = 0.2  # of what AdamW's update is in units of the learning rate: one rate then serves both


class Muon(torch.optim.AdamW):
    """AdamW whose first group, the matrices, is moved by Muon.

    >>> matrix, vector = torch.nn.Parameter(torch.zeros(3, 5)), torch.nn.Parameter(torch.zeros(5))
    >>> optimizer = Muon([matrix], [{"params": [vector]}], lr=0.1)
    >>> (matrix @ vector.add(1)).sum().backward()
    >>> optimizer.step()
    >>> [sorted(optimizer.state[each]) for each in (matrix, vector)]
    [['momentum'], ['exp_avg', 'exp_avg_sq', 'step']]
    """

    def __init__(self, matrices: Sequence[Tensor], others: Iterable[dict[str, Any]], **options: Any) -> None:
        super().__init__([{"params": list(matrices)}, *others], **options)

    @property
    def matrices(self) -> list[Tensor]:
        matrices: list[Tensor] = self.param_groups[0]["params"]
        return matrices

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move all parameters. The matrices' gradients are used up, so that AdamW passes them over."""
        group = self.param_groups[0]
        alike: dict[torch.Size, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        for matrix in self.matrices:
            if matrix.grad is not None:
                matrices, slopes = alike[matrix.shape]
                matrices.append(matrix)
                slopes.append(matrix.grad)
                matrix.grad = None
        for matrices, slopes in alike.values():
            self.move(matrices, slopes, group["lr"], group["weight_decay"])
        super().step()

    def move(self, matrices: list[Tensor], slopes: list[Tensor], rate: float, weight_decay: float) -> None:
        """One update of matrices of one shape by their gradients."""
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["momentum"] = torch.zeros_like(matrix)
        momenta = [self.state[matrix]["momentum"] for matrix in matrices]
        torch._foreach_lerp_(momenta, slopes, 1 - MOMENTUM)
        # Nesterov's: a step ahead of the momentum.
        ahead_MRC = torch.stack(torch._foreach_lerp(slopes, momenta, MOMENTUM))
        size = RMS_OF_ADAM * math.sqrt(max(ahead_MRC.shape[1:]))
        torch._foreach_mul_(matrices, 1 - rate * weight_decay)
        torch._foreach_add_(matrices, orthogonal(ahead_MRC).to(ahead_MRC.dtype).unbind(), alpha=-rate * size)


def orthogonal(x_MRC: Tensor) -> Tensor:
    """Each matrix with its singular values brought near 1, its singular vectors kept (Newton and Schulz).

    >>> torch.linalg.svdvals(orthogonal(torch.randn(2, 8, 16))).sub(1).abs().max() < 0.4
    tensor(True)
    """
    if x_MRC.shape[1] > x_MRC.shape[2]:  # the smaller of the two products
        return orthogonal(x_MRC.transpose(1, 2)).transpose(1, 2)
    a, b, c = COEFFICIENTS
    x_MRC = x_MRC.to(torch.promote_types(x_MRC.dtype, torch.float32))
    x_MRC = x_MRC / torch.linalg.matrix_norm(x_MRC, keepdim=True).clamp(min=1e-7)
    for _ in range(ROUNDS):
        square_MRR = x_MRC @ x_MRC.transpose(1, 2)
        mixed_MRR = torch.baddbmm(square_MRR, square_MRR, square_MRR, beta=b, alpha=c)
        x_MRC = torch.baddbmm(x_MRC, mixed_MRR, x_MRC, beta=a)
    return x_MRC
