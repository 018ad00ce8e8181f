"""A converted mixture of experts: staged MoDE, and the loss that balances its experts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from modepth import RoutingConfig
from modepth.config import ExpertsConfig
from modepth.hf import as_dense, convert, routing_mode, set_routing, verify
from modepth.hf.export import export
from modepth.hf.model import routed_layers
from tests.family_checks import converted, generated, ragged_prompts
from tests.oracles import tiny_config
from tests.tiny_models import tiny_model

PARTS = ("block", "attention", "mlp")


def staged(**options: Any) -> Any:
    return converted(tiny_model("mixtral", router_aux_loss_coef=0.3, output_router_logits=True), **options)


def loss_slowly(model: Any, seen: dict[int, torch.Tensor], mask: torch.Tensor) -> float:
    """The balancing loss, one token at a time: of a routed layer only the tokens that it computed."""
    picks, sums, count = [0.0] * 4, [0.0] * 4, 0
    for number, logits in seen.items():
        layer = routed_layers(model).get(number)
        counted = mask.flatten() if layer is None else layer.routing.valid_BK.flatten()
        for logit, counts in zip(logits, counted.tolist(), strict=True):
            if counts:
                probability = logit.softmax(0).tolist()
                for expert in sorted(range(4), key=lambda expert: -probability[expert])[:2]:
                    picks[expert] += 1
                sums = [total + each for total, each in zip(sums, probability, strict=True)]
                count += 1
    return 4 * sum(pick / count * total / count for pick, total in zip(picks, sums, strict=True))


@pytest.mark.parametrize("mode", ["topk", "causal"])
def test_the_balancing_loss_counts_the_tokens_that_reached_the_experts(mode: Any) -> None:
    model, (tokens, mask) = staged(), ragged_prompts()
    seen: dict[int, torch.Tensor] = {}
    for number, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_hook(lambda _, inputs, out, number=number: seen.update({number: out[0]}))
    with routing_mode(model, mode):
        out = model(input_ids=tokens, attention_mask=mask, labels=tokens)
        plain = model(input_ids=tokens, attention_mask=mask, labels=tokens, output_router_logits=False)
    assert out.aux_loss.item() == pytest.approx(loss_slowly(model, seen, mask), rel=1e-5)
    assert (out.loss - plain.loss).item() == pytest.approx(0.3 * out.aux_loss.item(), rel=1e-4)
    assert [len(each) for each in out.router_logits] == [len(each) for each in seen.values()]
    # the library's own reading of these scores fails or means something else
    try:
        theirs = load_balancing_loss_func(out.router_logits, 4, 2, mask).item()
    except RuntimeError:
        theirs = None
    assert theirs != pytest.approx(out.aux_loss.item(), rel=1e-3)
    out.loss.backward()
    assert model.model.layers[1].mlp.gate.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("masked", [True, False])
def test_where_no_token_skips_the_loss_is_that_of_the_library(masked: bool) -> None:
    model, (tokens, mask) = staged(), ragged_prompts()
    set_routing(model, replace(model.routing_state.config, capacity=1.0, gate="one", thresholds=None))
    given = {"attention_mask": mask} if masked else {}
    tokens = tokens.clamp(min=3)  # the state of padding is 0, where all experts tie
    out = model(input_ids=tokens, labels=tokens, **given)
    with as_dense(model):
        dense = model(input_ids=tokens, labels=tokens, **given)
    for each in (out, dense):
        expected = load_balancing_loss_func(dense.router_logits, 4, 2, mask if masked else None)
        assert each.aux_loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("part", PARTS)
def test_staged_experts_are_exact_and_generate_with_the_cache(part: str) -> None:
    model, (tokens, mask) = staged(part=part), ragged_prompts()
    verify(model)
    with_cache = generated(model, tokens, mask, use_cache=True)
    assert torch.equal(with_cache, generated(model, tokens, mask, use_cache=False))
    assert model(input_ids=tokens, attention_mask=mask, labels=tokens).aux_loss.isfinite()


def test_what_cannot_be_balanced_converted_or_exported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (tokens, _) = staged(), ragged_prompts()
    with pytest.raises(ValueError, match="needs return_dict=True"):
        model(input_ids=tokens, return_dict=False)
    del model.config.router_aux_loss_coef
    monkeypatch.delattr(MixtralConfig, "router_aux_loss_coef")
    with pytest.raises(ValueError, match="pass output_router_logits=False"):
        model(input_ids=tokens)
    with pytest.raises(ValueError, match="flow must be rejoin in a converted model, got 'exit'"):
        convert(tiny_model("llama"), RoutingConfig(flow="exit"))
    with pytest.raises(ValueError, match="experts cannot be exported"):
        export(tiny_config(routing=None, experts=ExpertsConfig()), {"": torch.zeros(1)})
