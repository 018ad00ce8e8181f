"""Products by oneDNN against torch's own."""

import pytest
import torch
from functorch.compile import make_boxed_func
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from modepth.products import Linear, Mapped, product, takes

shapes = st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 40), st.integers(1, 40))


@pytest.mark.law
@given(shape=shapes, seed=st.integers(0, 99))
def test_a_map_is_torchs_gradients_included(shape, seed):
    batch, tokens, width, width_out = shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, tokens, width, generator=generator).requires_grad_()
    linear = Linear(width, width_out)
    assert takes(x, linear.weight)
    expected = F.linear(x, linear.weight)
    slope = torch.randn(expected.shape, generator=generator)
    with torch.no_grad():
        assert_close(linear(x), expected, rtol=1e-5, atol=1e-5)
        assert_close(product(x, linear.weight), expected, rtol=1e-5, atol=1e-5)
    out = linear(x)
    assert_close(out, expected, rtol=1e-5, atol=1e-5)
    grads, expected_grads = (torch.autograd.grad(each, (x, linear.weight), slope) for each in (out, expected))
    assert_close(grads, expected_grads, rtol=1e-5, atol=1e-4)


@pytest.mark.law
def test_a_gradient_that_is_spread_or_turned_counts_as_any_other():
    x, linear = torch.randn(2, 5, 7).requires_grad_(), Linear(7, 3)
    for make in (lambda out: out.sum(), lambda out: (out.transpose(1, 2) * torch.arange(5.0)).sum()):
        grads = torch.autograd.grad(make(linear(x)), (x, linear.weight))
        expected = torch.autograd.grad(make(F.linear(x, linear.weight)), (x, linear.weight))
        assert_close(grads, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_what_needs_no_gradient_costs_none(frozen):
    x, weight = torch.randn(5, 7, requires_grad=frozen != "x"), torch.randn(3, 7, requires_grad=frozen != "weight")
    out = Mapped.apply(x, weight).sum()
    with FlopCounterMode(display=False) as backward:
        out.backward()
    assert backward.get_total_flops() == 2 * 5 * 7 * 3


def test_what_onednn_does_not_take_is_torchs_to_the_bit():
    x, linear = torch.randn(4, 7), Linear(7, 3)
    assert linear(x[:0]).shape == (0, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x).dtype == torch.bfloat16
    wide = linear.double()
    assert torch.equal(wide(x.double()), F.linear(x.double(), wide.weight))


def test_torchs_counter_knows_the_product():
    x, linear = torch.randn(2, 5, 7, requires_grad=True), Linear(7, 3)
    with FlopCounterMode(display=False) as forward:
        out = linear(x)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert forward.get_total_flops() == 2 * 10 * 7 * 3
    assert backward.get_total_flops() == 2 * forward.get_total_flops()


@pytest.mark.law
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_it_is_the_same_product_to_the_bit():
    x, linear = torch.randn(2, 5, 7, requires_grad=True), Linear(7, 3)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph)

    compiled = torch.compile(linear, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    slope = torch.randn(2, 5, 3)
    one, other = ((out, *torch.autograd.grad(out, (x, linear.weight), slope)) for out in (linear(x), compiled(x)))
    assert all(map(torch.equal, one, other))
    for graph in graphs:  # the forward, and the gradient of the states
        assert [node.target for node in graph.graph.nodes].count(torch.ops.modepth.product.default) == 1
