"""Gradients written by hand against autograd's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from modepth.fused import RMSNorm, rotate, swiglu


def outputs(kind, x, weight, eps, slope):
    """What a norm makes of x, and its gradients."""
    norm = kind(x.shape[-1], eps=eps, dtype=x.dtype)
    norm.weight.data.copy_(weight)
    x = x.clone().requires_grad_()
    out = norm(x)
    return out, *torch.autograd.grad(out, (x, norm.weight), slope)


@pytest.mark.law
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(0, 5), st.integers(1, 11)),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    eps=st.sampled_from([1e-5, 0.1]),
    seed=st.integers(0, 99),
)
def test_the_norm_is_torchs_gradients_included(shape, scale, eps, seed):
    generator = torch.Generator().manual_seed(seed)
    x, slope = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    weight = torch.randn(shape[-1], generator=generator, dtype=torch.float64)
    ours, expected = (outputs(kind, scale * x, weight, eps, slope) for kind in (RMSNorm, nn.RMSNorm))
    for value, other in zip(ours, expected, strict=True):
        assert_close(value, other, rtol=1e-10, atol=1e-10)


def test_without_gradients_the_norm_is_torchs_to_the_bit():
    x = torch.randn(2, 5, 7)
    with torch.no_grad():
        assert torch.equal(RMSNorm(7, eps=1e-5)(x), nn.RMSNorm(7, eps=1e-5)(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_keeps_dtypes_and_is_no_less_exact_than_torchs(dtype):
    torch.manual_seed(0)
    x, slope, weight = torch.randn(2, 50, 64), torch.randn(2, 50, 64), torch.randn(64)
    exact = outputs(nn.RMSNorm, x.double(), weight.double(), 1e-5, slope.double())
    ours, theirs = (
        outputs(kind, x.to(dtype), weight.to(dtype), 1e-5, slope.to(dtype)) for kind in (RMSNorm, nn.RMSNorm)
    )
    for mine, other, reference in zip(ours, theirs, exact, strict=True):
        assert mine.dtype == dtype
        error, of_theirs = ((each.double() - reference).norm() for each in (mine, other))
        assert error <= 1.5 * of_theirs + 1e-6 * reference.norm()


@pytest.mark.law
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(0, 5), st.integers(1, 4), st.sampled_from([2, 4, 6])),
    seed=st.integers(0, 99),
)
def test_a_rotation_turns_pairs_and_its_gradient_turns_them_back(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    batch, tokens, _, width = shape
    x, slope = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    angle = torch.randn(batch, tokens, width // 2, generator=generator, dtype=torch.float64)
    rope = torch.cat((angle.cos(), angle.sin()), dim=-1)
    as_number = torch.complex(*x.chunk(2, dim=-1)).requires_grad_()
    turned = as_number * torch.polar(torch.ones_like(angle), angle).unsqueeze(2)
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    x.requires_grad_()
    assert_close(rotate(x, rope), expected)
    with torch.no_grad():
        assert_close(rotate(x, rope), expected)
    (of_x,) = torch.autograd.grad(rotate(x, rope), x, slope)
    (of_number,) = torch.autograd.grad(expected, as_number, slope)
    assert_close(of_x, torch.cat((of_number.real, of_number.imag), dim=-1))


@pytest.mark.law
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(0, 5), st.integers(1, 9)),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_a_gate_is_silu_times_up_gradients_included(shape, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    gate, up, slope = (scale * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    gate.requires_grad_(), up.requires_grad_()
    expected = F.silu(gate) * up
    assert torch.equal(swiglu(gate, up), expected)
    with torch.no_grad():
        assert torch.equal(swiglu(gate, up), expected)
    assert_close(*(torch.autograd.grad(out, (gate, up), slope) for out in (swiglu(gate, up), expected)))


def test_a_gate_keeps_its_inputs_and_nothing_else():
    gate, up = torch.randn(2, 3, 8).requires_grad_(), torch.randn(2, 3, 8).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.data_ptr()), lambda none: none):
        swiglu(gate, up)
    assert sorted(kept) == sorted([gate.data_ptr(), up.data_ptr()])
