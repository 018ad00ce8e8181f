"""Causal attention in pieces, against one softmax over all scores, written out."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from modepth import attention
from modepth.attention import LENGTHS, LENGTHS_ALONE, PIECE, causal_attention

IN_PIECES = 300  # tokens


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
    return [(3 * torch.randn(shape, generator=generator)).transpose(1, 2).requires_grad_() for shape in shapes]


@pytest.mark.law
@pytest.mark.usefixtures("fp64")
@given(
    B=st.integers(0, 2),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2)]),
    T=st.integers(1, 3 * PIECE + 20),
    E=st.sampled_from([2, 16]),
    scores=st.integers(1, 8 * 3 * PIECE**2),
)
def test_values_and_gradients_are_those_of_one_softmax(B, heads, T, E, scores):
    given = inputs(B, *heads, T, E)
    of_out = torch.randn(B, heads[0], T, E)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "in_pieces", lambda q: True)
        patch.setattr(attention, "SCORES_A_THREAD", scores)
        fast, slow = causal_attention(*given), slowly(*given)
        of_fast, of_slow = (torch.autograd.grad(each, given, of_out) for each in (fast, slow))
    torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-10)
    for one, other in zip(of_fast, of_slow, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_no_more_scores_are_made_at_a_time_than_threads_have_caches_for():
    for N, T in ((1, 300), (64, 300), (1000, 767)):
        at_a_time = attention.heads_at_a_time(N, T) * PIECE * T
        assert at_a_time <= max(PIECE * T, attention.SCORES_A_THREAD * torch.get_num_threads())


@pytest.mark.parametrize(("T", "threads"), [(LENGTHS[0], 2), (LENGTHS[-1], 2), (LENGTHS_ALONE[-1], 1)])
def test_rows_of_some_hundreds_of_tokens_go_in_pieces(T, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    out = causal_attention(*inputs(1, 1, 1, T, 4))
    assert "InPieces" in out.grad_fn.name()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_numbers_are_rounded_about_as_much_as_torch_rounds_them(dtype):
    given = [each.detach().to(dtype) for each in inputs(2, 4, 4, IN_PIECES, 16)]
    exact = slowly(*(each.double() for each in given))
    ours, theirs = causal_attention(*given), F.scaled_dot_product_attention(*given, is_causal=True)
    assert ours.dtype == dtype
    assert (ours.double() - exact).square().mean() < 4 * (theirs.double() - exact).square().mean()


@pytest.mark.parametrize(
    ("T", "threads", "dropout"),
    [(LENGTHS[0] - 1, 2, 0.0), (LENGTHS[-1] + 1, 2, 0.0), (LENGTHS_ALONE[-1] + 1, 1, 0.0), (IN_PIECES, 2, 0.5)],
)
def test_short_and_long_rows_and_dropout_are_left_to_torch(T, threads, dropout, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    out = causal_attention(*inputs(1, 1, 1, T, 4), dropout)
    assert "InPieces" not in out.grad_fn.name()


def test_narrow_scores_are_torchs_which_keeps_them_wide():
    given = [each.detach().to(torch.bfloat16).requires_grad_() for each in inputs(1, 1, 1, IN_PIECES, 4)]
    assert "InPieces" not in causal_attention(*given).grad_fn.name()


def test_under_autocast_dtypes_are_torchs_to_choose():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert causal_attention(*inputs(1, 1, 1, IN_PIECES, 4)).dtype == torch.bfloat16


@pytest.mark.law
def test_compiled_it_is_the_same_to_the_bit():
    given = inputs(2, 2, 2, IN_PIECES, 4)
    of_out = torch.randn(2, 2, IN_PIECES, 4)
    outs = [attend(*given) for attend in (causal_attention, compiled(causal_attention))]
    one, other = ((out, *torch.autograd.grad(out, given, of_out)) for out in outs)
    assert all(map(torch.equal, one, other))


def test_compiled_it_goes_in_pieces_that_the_compiler_does_not_look_into(monkeypatch):
    asked = []
    monkeypatch.setattr(attention, "pieces", lambda *shape: asked.append(shape) or iter(()))
    compiled(causal_attention)(*inputs(2, 3, 3, IN_PIECES, 4))
    assert asked == [(6, IN_PIECES)]


def compiled(run):
    torch.compiler.reset()
    return torch.compile(run, backend="aot_eager", fullgraph=True)
