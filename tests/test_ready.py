"""A model made ready to generate against the model as it was."""

import copy

import pytest
import torch
from torch.testing import assert_close

from modepth.config import ExpertsConfig
from modepth.generation import generate
from modepth.ready import ready_to_generate
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
@pytest.mark.parametrize(
    "changes",
    [{"tie_embeddings": False}, {"num_kv_heads": 1}, {"experts": ExpertsConfig(num_experts=3)}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_model_made_ready_computes_what_it_did(changes):
    model = tiny_model(**changes).eval().double()
    expected = model(tiny_tokens()).logits_BTV
    num_weights = sum(each.numel() for each in model.parameters())
    ready = ready_to_generate(model)
    assert ready is model
    assert_close(ready(tiny_tokens()).logits_BTV, expected)
    assert sum(each.numel() for each in ready.parameters()) == num_weights


def test_weights_lie_by_columns_but_for_those_that_tokens_read_rows_of():
    model = ready_to_generate(tiny_model())
    assert model.lm_head.weight is model.embed_tokens.weight
    assert model.embed_tokens.weight.is_contiguous()
    maps = [each for each in model.layers.modules() if isinstance(each, torch.nn.Linear)]
    assert all(each.weight.t().is_contiguous() for each in maps)
    assert len(maps) == 4 * len(model.layers) + len(model.config.routed_layers)  # joined, out, joined, down; routers
