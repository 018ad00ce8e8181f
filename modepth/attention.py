"""Causal attention that leaves out what is masked, on a CPU too.

torch's CPU kernel takes keys in blocks of 512, so of rows no longer than that it computes every score and throws half
of them away. Here queries go in pieces, and each piece looks at the keys up to its end: two products and a softmax, for
so many heads at a time that their scores stay in the cache. Scores are not kept: the gradient makes them again.

Shapes: B batch, H heads, G heads of keys and values, T tokens, E width of a head; N = B * H, of which M are done at a
time, P queries of a piece, S keys up to its end.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from modepth.operators import opaque

PIECE = 64
LENGTHS = range(256, 768)  # shorter: not worth the calls; longer: torch takes more queries at a time
LENGTHS_ALONE = range(256, 1025)  # on one thread, which has no other to wait for after each product
SCORES_A_THREAD = 2**19  # at a time


def causal_attention(q_BHTE: Tensor, k_BGTE: Tensor, v_BGTE: Tensor, dropout: float = 0.0) -> Tensor:
    """Each token's mean of the values up to its own, weighed by softmax(q k / sqrt(E)). G divides H.

    >>> q, k, v = torch.randn(3, 1, 2, 300, 16)
    >>> whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(causal_attention(q, k, v), whole, atol=1e-5)
    True
    """
    H, G = q_BHTE.shape[1], k_BGTE.shape[1]
    if dropout or not in_pieces(q_BHTE):
        return F.scaled_dot_product_attention(
            q_BHTE, k_BGTE, v_BGTE, dropout_p=dropout, is_causal=True, enable_gqa=G < H
        )
    if G < H:
        k_BGTE, v_BGTE = (each.repeat_interleave(H // G, dim=1) for each in (k_BGTE, v_BGTE))
    out: Tensor = InPieces.apply(q_BHTE, k_BGTE, v_BGTE)
    return out


def in_pieces(q_BHTE: Tensor) -> bool:
    """Whether pieces are faster, and as exact: narrower scores would be rounded, which torch's kernel keeps wide."""
    # A compiler does not know how many threads there are.
    alone = not torch.compiler.is_compiling() and torch.get_num_threads() == 1
    return (
        q_BHTE.shape[2] in (LENGTHS_ALONE if alone else LENGTHS)
        and q_BHTE.device.type == "cpu"
        and q_BHTE.dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled("cpu")
    )


class InPieces(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor) -> Tensor:
        # Contiguous: a row's heads and then the next row's, so that both are one axis.
        q_BHTE, k_BHTE, v_BHTE = (each.contiguous() for each in (q_BHTE, k_BHTE, v_BHTE))
        context.save_for_backward(q_BHTE, k_BHTE, v_BHTE)
        out: Tensor = attend(q_BHTE, k_BHTE, v_BHTE)
        return out

    @staticmethod
    @once_differentiable
    def backward(context: Any, of_out_BHTE: Tensor) -> tuple[Tensor, ...]:
        return tuple(attend_backward(of_out_BHTE.contiguous(), *context.saved_tensors))


def forward_in_pieces(q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor) -> Tensor:
    q_NTE, k_NTE, v_NTE = (each.flatten(0, 1) for each in (q_BHTE, k_BHTE, v_BHTE))
    out_NTE, room, later_PP = torch.empty_like(q_NTE), room_for_scores(q_NTE), later_keys(q_NTE)
    for heads, own, up_to in pieces(*q_NTE.shape[:2]):
        weight_MPS = weights(q_NTE[heads, own], k_NTE[heads, up_to], later_PP, room)
        out_NTE[heads, own] = weight_MPS @ v_NTE[heads, up_to]
    return out_NTE.view(q_BHTE.shape)


def backward_in_pieces(of_out_BHTE: Tensor, *qkv_BHTE: Tensor) -> list[Tensor]:
    of_out_NTE, q_NTE, k_NTE, v_NTE = (each.flatten(0, 1) for each in (of_out_BHTE, *qkv_BHTE))
    of_q_NTE, of_k_NTE, of_v_NTE = torch.empty_like(q_NTE), torch.zeros_like(k_NTE), torch.zeros_like(v_NTE)
    room, more_room, later_PP = room_for_scores(q_NTE), room_for_scores(q_NTE), later_keys(q_NTE)
    scale = q_NTE.shape[2] ** -0.5
    for heads, own, up_to in pieces(*q_NTE.shape[:2]):
        q_MPE, k_MSE, of_out_MPE = q_NTE[heads, own], k_NTE[heads, up_to], of_out_NTE[heads, own]
        weight_MPS = weights(q_MPE, k_MSE, later_PP, room)
        of_v_NTE[heads, up_to] += weight_MPS.mT @ of_out_MPE
        of_weight_MPS = multiply(of_out_MPE, v_NTE[heads, up_to].mT, more_room)
        of_score_MPS = torch._softmax_backward_data(
            of_weight_MPS, weight_MPS, -1, q_NTE.dtype, grad_input=of_weight_MPS
        )
        torch.mul(of_score_MPS @ k_MSE, scale, out=of_q_NTE[heads, own])
        of_k_NTE[heads, up_to].add_(of_score_MPS.mT @ q_MPE, alpha=scale)
    return [each.view(of_out_BHTE.shape) for each in (of_q_NTE, of_k_NTE, of_v_NTE)]


def pieces(N: int, T: int) -> Iterator[tuple[slice, slice, slice]]:
    """Some heads, a piece of their tokens, and the tokens up to its end.

    >>> for heads, own, up_to in pieces(N=1, T=100):
    ...     print(own, up_to)
    slice(0, 64, None) slice(0, 64, None)
    slice(64, 100, None) slice(0, 100, None)
    """
    M = heads_at_a_time(N, T)
    for first in range(0, N, M):
        for start in range(0, T, PIECE):
            end = min(start + PIECE, T)
            yield slice(first, first + M), slice(start, end), slice(0, end)


def heads_at_a_time(N: int, T: int) -> int:
    return max(1, min(N, SCORES_A_THREAD * torch.get_num_threads() // (PIECE * T)))


def room_for_scores(q_NTE: Tensor) -> Tensor:
    N, T = q_NTE.shape[:2]
    return q_NTE.new_empty(heads_at_a_time(N, T) * PIECE * T)


def later_keys(q_NTE: Tensor) -> Tensor:
    """What is added to the scores of a piece's own keys: -inf to those after each query."""
    return q_NTE.new_full((PIECE, PIECE), float("-inf")).triu_(1)


def weights(q_MPE: Tensor, k_MSE: Tensor, later_PP: Tensor, room: Tensor) -> Tensor:
    """What each query weighs the keys with, of which the last P are its piece's own."""
    P, E = q_MPE.shape[1:]
    score_MPS = multiply(q_MPE, k_MSE.mT, room, scale=E**-0.5)
    score_MPS[:, :, -P:] += later_PP[:P, :P]
    return torch.softmax(score_MPS, dim=-1, out=score_MPS)


def multiply(left_MPE: Tensor, right_MES: Tensor, room: Tensor, scale: float = 1.0) -> Tensor:
    M, P, S = *left_MPE.shape[:2], right_MES.shape[2]
    out_MPS = room[: M * P * S].view(M, P, S)
    return torch.baddbmm(out_MPS, left_MPE, right_MES, beta=0, alpha=scale, out=out_MPS)


attend = opaque(
    "attend(Tensor q, Tensor k, Tensor v) -> Tensor",
    forward_in_pieces,
    lambda q, k, v: torch.empty_like(q),
)
attend_backward = opaque(
    "attend_backward(Tensor of_out, Tensor q, Tensor k, Tensor v) -> Tensor[]",
    backward_in_pieces,
    lambda of_out, *qkv: [torch.empty_like(each) for each in qkv],
)
