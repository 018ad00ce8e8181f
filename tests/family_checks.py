"""What every converted family must do: used on a few families by the tests, on all of them by `make families`."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from modepth import RoutingConfig
from modepth.hf import as_dense, calibrate, convert, restore, verify
from tests.tiny_models import VOCABULARY

NEW = 10


def ragged_prompts() -> tuple[Tensor, Tensor]:
    """Three prompts of different lengths, padded on the left."""
    tokens = torch.randint(3, VOCABULARY, (3, 13), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(tokens)
    mask[1, :4] = mask[2, :7] = 0
    return tokens.masked_fill(mask == 0, 0), mask


def converted(model: PreTrainedModel, **options: object) -> PreTrainedModel:
    """With random routers that route about half of the tokens, as is asserted."""
    convert(model, RoutingConfig(capacity=0.5, **options), router_init="normal")
    tokens, mask = ragged_prompts()
    calibrate(model, tokens, 0.5, attention_mask=mask)
    assert_routes_some(model, tokens, mask)
    return model


@torch.no_grad()
def assert_routes_some(model: PreTrainedModel, tokens: Tensor, mask: Tensor) -> None:
    routed = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    assert model.routings
    for routing in model.routings:
        real = routing.chosen_BT[mask.bool()]
        assert real.any(), routing.layer
        assert not real.all(), routing.layer
        assert not routing.chosen_BT[~mask.bool()].any(), routing.layer
    with as_dense(model):
        dense = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    assert (routed - dense)[mask.bool()].abs().max() > 1e-4


@torch.no_grad()
def check_capacity_one(model: PreTrainedModel) -> None:
    """Converting changes nothing at capacity 1, nor does restoring."""
    tokens, _ = ragged_prompts()
    dense = model(input_ids=tokens).logits
    convert(model, RoutingConfig(capacity=1.0))
    assert torch.equal(model(input_ids=tokens).logits, dense)
    restore(model)
    assert torch.equal(model(input_ids=tokens).logits, dense)


def generated(model: PreTrainedModel, tokens: Tensor, mask: Tensor, **options: object) -> Tensor:
    length = {"max_new_tokens": NEW, "min_new_tokens": NEW}
    return model.generate(tokens, attention_mask=mask, **{"do_sample": False, **length, **options})


def check_generation(model: PreTrainedModel) -> None:
    """With a cache as without one, padded or not."""
    tokens, mask = ragged_prompts()
    options = {"return_dict_in_generate": True, "output_logits": True}
    for prompt, real in ((tokens, mask), (tokens[:1], mask[:1]), (tokens.clamp(min=3), torch.ones_like(mask))):
        cached, plain = (generated(model, prompt, real, use_cache=use, **options) for use in (True, False))
        assert torch.equal(cached.sequences, plain.sequences)
        # Greedy tokens alone would hide small errors.
        assert torch.allclose(torch.stack(cached.logits), torch.stack(plain.logits), atol=1e-4)


@torch.no_grad()
def check_saving(model: PreTrainedModel, folder: Path) -> None:
    tokens, mask = ragged_prompts()
    model.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(loaded) is type(model)
    assert loaded.routing_state == model.routing_state
    assert_same_tensors(dict(model.state_dict()), dict(loaded.state_dict()))
    assert_same_tensors(dict(model.named_buffers()), dict(loaded.named_buffers()))  # those that are not saved, too
    ours, theirs = model(input_ids=tokens, attention_mask=mask), loaded(input_ids=tokens, attention_mask=mask)
    # Not to the bit: loaded tensors lie at other addresses, where some kernels, of dense models too, round otherwise.
    assert torch.allclose(ours.logits[mask.bool()], theirs.logits[mask.bool()], atol=1e-6)


def assert_same_tensors(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def check_family(model: PreTrainedModel, folder: Path) -> None:
    check_capacity_one(model)
    converted(model)
    verify(model)
    check_generation(model)
    check_saving(model, folder)
