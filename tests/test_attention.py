"""Causal attention in pieces, against one softmax over all scores, written out."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from modepth import attention
from modepth.attention import LENGTHS, PIECE, causal_attention


def slowly(q_BHTE, k_BGTE, v_BGTE):
    repeats = q_BHTE.shape[1] // k_BGTE.shape[1]
    k_BHTE, v_BHTE = (each.repeat_interleave(repeats, dim=1) for each in (k_BGTE, v_BGTE))
    score_BHTT = q_BHTE @ k_BHTE.transpose(-1, -2) / q_BHTE.shape[-1] ** 0.5
    later_TT = torch.ones(score_BHTT.shape[-2:]).triu(1) > 0
    return score_BHTT.masked_fill(later_TT, float("-inf")).softmax(-1) @ v_BHTE


def inputs(B, H, G, T, E, seed=0):
    """As the projections leave them: tokens before heads in memory."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(B, T, heads, E) for heads in (H, G, G)]
    return [3 * torch.randn(shape, generator=generator).transpose(1, 2).requires_grad_() for shape in shapes]


@pytest.mark.law
@pytest.mark.usefixtures("fp64")
@given(
    B=st.integers(1, 2),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2)]),
    T=st.integers(1, 3 * PIECE + 20),
    E=st.sampled_from([2, 16]),
)
def test_values_and_gradients_are_those_of_one_softmax(B, heads, T, E):
    given = inputs(B, *heads, T, E)
    of_out = torch.randn(B, heads[0], T, E)
    fast, slow = causal_attention(*given), slowly(*given)
    torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-10)
    of_fast, of_slow = (torch.autograd.grad(each, given, of_out) for each in (fast, slow))
    for one, other in zip(of_fast, of_slow, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_numbers_are_rounded_about_as_much_as_torch_rounds_them(dtype):
    given = [each.detach().to(dtype) for each in inputs(2, 4, 4, 3 * PIECE, 16)]
    exact = slowly(*(each.double() for each in given))
    ours, theirs = causal_attention(*given), F.scaled_dot_product_attention(*given, is_causal=True)
    assert ours.dtype == dtype
    assert (ours.double() - exact).square().mean() < 4 * (theirs.double() - exact).square().mean()


@pytest.mark.parametrize(("T", "dropout"), [(2 * PIECE, 0.0), (LENGTHS.stop, 0.0), (3 * PIECE, 0.5)])
def test_short_and_long_rows_and_dropout_are_left_to_torch(T, dropout, monkeypatch):
    monkeypatch.setattr(attention.InPieces, "apply", lambda *_: pytest.fail("in pieces"))
    assert causal_attention(*inputs(1, 1, 1, T, 4), dropout).shape == (1, 1, T, 4)


def test_under_autocast_dtypes_are_torchs_to_choose():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert causal_attention(*inputs(1, 1, 1, 3 * PIECE, 4)).dtype == torch.bfloat16
