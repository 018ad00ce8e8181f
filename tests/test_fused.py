"""The hand-written gradient against autograd's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from modepth.fused import RMSNorm


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
