"""A model made ready to generate against the model as it was."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.testing import assert_close

from modepth.config import ExpertsConfig
from modepth.generation import generate
from modepth.ready import PackedLinear, ready_to_generate
from tests.oracles import PARTS, tiny_model, tiny_tokens
from tests.test_cache import RULES, model_of
from tests.test_generate import PROMPTS, SOME, naive


@pytest.mark.law
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("choice", RULES, ids=str)
def test_a_model_made_ready_generates_the_tokens_of_full_forwards_of_the_model_as_it_was(choice, part):
    model = model_of(part=part, **choice)
    ready = ready_to_generate(copy.deepcopy(model))
    assert [each.tokens for each in generate(ready, PROMPTS, SOME)] == [naive(model, each, 12) for each in PROMPTS]


@pytest.mark.law
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "changes",
    [{"tie_embeddings": False}, {"num_kv_heads": 1}, {"experts": ExpertsConfig(num_experts=3)}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_model_made_ready_computes_what_it_did(changes, dtype):
    model = tiny_model(**changes).eval().to(dtype)
    tokens = tiny_tokens()
    expected, loss = model(tokens).logits_BTV, model(tokens, targets=tokens).loss
    ready = ready_to_generate(model)
    assert ready is model
    assert any(isinstance(each, PackedLinear) for each in ready.modules()) == (dtype == torch.float32)
    assert_close(ready(tokens).logits_BTV, expected, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 1e-12)
    assert_close(ready(tokens, targets=tokens).loss, loss)


@pytest.mark.law
@given(
    batch=st.integers(1, 3),
    tokens=st.integers(1, 40),
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    seed=st.integers(0, 99),
)
def test_a_packed_map_is_the_map_for_any_number_of_tokens(batch, tokens, sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(sizes, generator=generator)
    x = torch.randn(batch, tokens, sizes[1], generator=generator)
    linear = PackedLinear(weight)
    assert_close(linear(x), F.linear(x, weight), rtol=1e-5, atol=1e-4)
    assert_close(linear(x[0]), F.linear(x[0], weight), rtol=1e-5, atol=1e-4)
    assert torch.equal(linear.weight, weight)


def test_a_model_made_ready_has_no_gradients():
    ready = ready_to_generate(tiny_model())
    assert not ready(tiny_tokens()).logits_BTV.requires_grad
