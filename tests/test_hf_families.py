"""The twelve most used families; `make families` scans all that transformers can build."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from modepth.hf import routing_mode
from tests.family_checks import check_family, converted, generated, ragged_prompts
from tests.tiny_models import tiny_model

MOST_USED = (
    "falcon",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
)
each_family = pytest.mark.parametrize("family", MOST_USED)


@functools.cache
def routed_once(family: str) -> PreTrainedModel:
    return converted(tiny_model(family))


def routed(family: str) -> PreTrainedModel:
    return copy.deepcopy(routed_once(family))


@each_family
def test_a_converted_family_is_exact(family: str, tmp_path: Path) -> None:
    check_family(tiny_model(family), tmp_path)


@each_family
def test_beam_search_with_a_cache_equals_beam_search_without(family: str) -> None:
    model, (tokens, mask) = routed(family), ragged_prompts()
    options = {"num_beams": 3, "num_return_sequences": 2}
    assert torch.equal(
        generated(model, tokens, mask, use_cache=True, **options),
        generated(model, tokens, mask, use_cache=False, **options),
    )


@each_family
def test_sampling_with_a_cache_equals_sampling_without(family: str) -> None:
    model, (tokens, mask) = routed(family), ragged_prompts()
    outs = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        options = {"do_sample": True, "temperature": 2.0, "num_return_sequences": 2}
        outs.append(generated(model, tokens, mask, use_cache=use_cache, **options))
    assert torch.equal(*outs)
    assert not torch.equal(outs[0][0], outs[0][1])


@each_family
def test_prompt_lookup_finds_what_greedy_search_finds(family: str) -> None:
    model, (tokens, _) = routed(family), ragged_prompts()
    prompt = tokens[:1].repeat(1, 2)
    real = torch.ones_like(prompt)
    greedy = generated(model, prompt, real)
    assert torch.equal(generated(model, prompt, real, prompt_lookup_num_tokens=3), greedy)


@each_family
def test_a_prompt_read_in_chunks_gives_what_it_gives_at_once(family: str) -> None:
    model, (tokens, mask) = routed(family), ragged_prompts()
    assert torch.equal(generated(model, tokens, mask, prefill_chunk_size=4), generated(model, tokens, mask))


@each_family
def test_a_second_turn_on_the_cache_of_the_first_equals_starting_anew(family: str) -> None:
    model, (tokens, _) = routed(family), ragged_prompts()
    prompt = tokens[:1]
    first = generated(model, prompt, torch.ones_like(prompt), return_dict_in_generate=True)
    longer = torch.cat((first.sequences, tokens[:1, :5]), dim=1)
    real = torch.ones_like(longer)
    again = generated(model, longer, real, past_key_values=first.past_key_values)
    assert torch.equal(again, generated(model, longer, real))


@pytest.mark.parametrize(
    "family", [family if family == "llama" else pytest.param(family, marks=pytest.mark.long) for family in MOST_USED]
)
def test_a_training_step_is_one_graph_where_the_dense_one_is(family: str) -> None:
    tokens, _ = ragged_prompts()
    if not compiles(tiny_model(family), tokens):
        assert family in NOT_COMPILED
        return
    assert family not in NOT_COMPILED
    assert_compiled_as_eager(routed(family), tokens, "aot_eager")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch, about its own lowering
def test_a_compiled_training_step_is_the_eager_one() -> None:
    assert_compiled_as_eager(routed("llama"), ragged_prompts()[0], "inductor")


def assert_compiled_as_eager(model: PreTrainedModel, tokens: torch.Tensor, backend: str) -> None:
    with routing_mode(model, "topk"):
        eager, expected = loss_and_gradients(model, model, tokens)
        torch._dynamo.reset()
        loss, gradients = loss_and_gradients(torch.compile(model, fullgraph=True, backend=backend), model, tokens)
    assert torch.allclose(loss, eager, atol=1e-5)
    assert any("mod_router.score" in name for name in expected)
    for name, gradient in expected.items():
        assert gradient.abs().sum() > 0 or "mod_router.score" not in name
        assert torch.allclose(gradients[name], gradient, atol=1e-4), name


def loss_and_gradients(
    forward: Callable[..., Any], model: PreTrainedModel, tokens: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = forward(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


NOT_COMPILED = ("gpt2", "mixtral")  # their dense base breaks the graph


def compiles(model: PreTrainedModel, tokens: torch.Tensor) -> bool:
    torch._dynamo.reset()
    compiled = torch.compile(model.train(), fullgraph=True, backend="aot_eager")
    try:
        compiled(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    except torch._dynamo.exc.TorchDynamoException:
        return False
    return True
