"""Causal attention that leaves out what is masked, on a CPU too.

torch's CPU kernel takes keys in blocks of 512, so of rows no longer than that it computes every score and throws half
of them away. Here queries go in pieces: each looks at the keys before its piece without a mask, and at those of its own
piece with one. The two results are means over different keys; the logarithms of their summed weights say how to merge
them. The kernel's gradient needs only the merged result and logarithm, so it is asked for piece by piece too.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PIECE = 128
LENGTHS = range(2 * PIECE + 1, 1025)  # shorter: not worth the calls; longer: torch's blocks are fine enough

attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def causal_attention(q_BHTE: Tensor, k_BGTE: Tensor, v_BGTE: Tensor, dropout: float = 0.0) -> Tensor:
    """Each token's mean of the values up to its own, weighed by softmax(q k / sqrt(E)). G divides H.

    >>> q, k, v = torch.randn(3, 1, 2, 300, 16)
    >>> whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(causal_attention(q, k, v), whole, atol=1e-5)
    True
    """
    H, T, G = q_BHTE.shape[1], q_BHTE.shape[2], k_BGTE.shape[1]
    in_pieces = q_BHTE.device.type == "cpu" and T in LENGTHS and not dropout
    if not in_pieces or torch.is_autocast_enabled("cpu"):
        return F.scaled_dot_product_attention(
            q_BHTE, k_BGTE, v_BGTE, dropout_p=dropout, is_causal=True, enable_gqa=G < H
        )
    if G < H:
        k_BGTE, v_BGTE = (each.repeat_interleave(H // G, dim=1) for each in (k_BGTE, v_BGTE))
    out: Tensor = InPieces.apply(q_BHTE, k_BGTE, v_BGTE)
    return out


class InPieces(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor) -> Tensor:
        out_BHTE = torch.empty_like(q_BHTE)
        log_BHT = torch.empty(q_BHTE.shape[:3], dtype=torch.promote_types(q_BHTE.dtype, torch.float32))
        for before, own in pieces(q_BHTE.shape[2]):
            q_BHPE = q_BHTE[:, :, own]
            out_BHPE, log_BHP = attend(q_BHPE, k_BHTE[:, :, own], v_BHTE[:, :, own], is_causal=True)
            if own.start:
                of_before_BHPE, log_before_BHP = attend(q_BHPE, k_BHTE[:, :, before], v_BHTE[:, :, before])
                share_BHP = torch.sigmoid(log_before_BHP - log_BHP).to(out_BHPE.dtype)
                out_BHPE = torch.lerp(out_BHPE, of_before_BHPE, share_BHP.unsqueeze(-1))
                log_BHP = torch.logaddexp(log_BHP, log_before_BHP)
            out_BHTE[:, :, own], log_BHT[:, :, own] = out_BHPE, log_BHP
        context.save_for_backward(q_BHTE, k_BHTE, v_BHTE, out_BHTE, log_BHT)
        return out_BHTE

    @staticmethod
    def backward(context: Any, *of_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_BHTE, k_BHTE, v_BHTE, out_BHTE, log_BHT = context.saved_tensors
        of_q_BHTE, of_k_BHTE, of_v_BHTE = (torch.zeros_like(each) for each in (q_BHTE, k_BHTE, v_BHTE))
        for before, own in pieces(q_BHTE.shape[2]):
            of_out_BHPE, q_BHPE, out_BHPE = (each[:, :, own] for each in (of_out[0], q_BHTE, out_BHTE))
            for keys in (before, own) if own.start else (own,):
                of_q_BHPE, of_k_BHSE, of_v_BHSE = attend_backward(
                    of_out_BHPE,
                    q_BHPE,
                    k_BHTE[:, :, keys],
                    v_BHTE[:, :, keys],
                    out_BHPE,
                    log_BHT[:, :, own],
                    dropout_p=0.0,
                    is_causal=keys is own,
                )
                of_q_BHTE[:, :, own] += of_q_BHPE
                of_k_BHTE[:, :, keys] += of_k_BHSE
                of_v_BHTE[:, :, keys] += of_v_BHSE
        return of_q_BHTE, of_k_BHTE, of_v_BHTE


def pieces(length: int) -> Iterator[tuple[slice, slice]]:
    """Of each piece, the tokens before it and its own.

    >>> list(pieces(200))
    [(slice(0, 0, None), slice(0, 128, None)), (slice(0, 128, None), slice(128, 200, None))]
    """
    for start in range(0, length, PIECE):
        yield slice(0, start), slice(start, min(start + PIECE, length))
