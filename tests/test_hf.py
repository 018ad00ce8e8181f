"""Converting transformers models: the laws, on a tiny Llama unless a family matters."""

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache

from modepth import LossWeights, RoutingConfig
from modepth.hf import calibrate, convert, restore, routing_mode, set_routing, summary, verify
from modepth.hf.cache import RoutedEntry
from modepth.hf.layer import RoutedLayer
from tests.documents import blocks, run_snippets, smaller, text_of
from tests.family_checks import assert_routes_some, converted, generated, ragged_prompts
from tests.tiny_models import tiny_model

PARTS = ("block", "attention", "mlp")


def llama(**overrides: object) -> PreTrainedModel:
    return tiny_model("llama", **overrides)


# -- converting and back


@pytest.mark.parametrize("part", PARTS)
def test_every_part_is_exact(part: str) -> None:
    model, (tokens, mask) = converted(llama(), part=part), ragged_prompts()
    verify(model)
    with_cache = generated(model, tokens, mask, use_cache=True)
    assert torch.equal(with_cache, generated(model, tokens, mask, use_cache=False))


@pytest.mark.parametrize("family", ["gemma2", "olmo2", "gpt_neox", "granite"])
@pytest.mark.parametrize("part", ["attention", "mlp"])
def test_a_part_that_is_not_added_unchanged_is_refused(family: str, part: str) -> None:
    model = tiny_model(family, **({"residual_multiplier": 0.5} if family == "granite" else {}))
    before = type(model)
    with pytest.raises(ValueError, match=f"part '{part}'"):
        convert(model, RoutingConfig(part=part))
    assert type(model) is before


def test_parameter_names_stay_and_only_routers_are_added() -> None:
    model = llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    convert(model, RoutingConfig(capacity=0.5, predictor=8))
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert {name.split(".mod_router.")[0] for name in after.keys() - before.keys()} == {
        "model.layers.1",
        "model.layers.3",
    }


def test_a_refused_model_is_left_as_it_was() -> None:
    model = tiny_model("moshi")
    before, names = type(model), set(model.state_dict())
    with pytest.raises(ValueError, match=r"decoding with a cache is off|returns a tuple"):  # the latter until 5.19
        convert(model, RoutingConfig())
    assert type(model) is before
    assert set(model.state_dict()) == names
    assert not any(isinstance(module, RoutedLayer) for module in model.modules())
    assert model.config.model_type == "moshi"
    assert not hasattr(model.config, "routing")


@pytest.mark.parametrize(
    ("family", "routing", "reason"),
    [
        ("llama", RoutingConfig(layers=(0, 1)), "layer 0 cannot be routed"),
        ("llama", RoutingConfig(layers=(9,)), r"layers must be in 0\.\.4"),
        ("jamba", RoutingConfig(layers=(2,)), "a state that every token must enter"),
        ("gpt_neo", RoutingConfig(), "masks by index"),
        ("mamba", RoutingConfig(), "no attention layers"),
    ],
)
def test_what_cannot_be_routed_is_refused_with_the_reason(family: str, routing: RoutingConfig, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        convert(tiny_model(family), routing)


def test_a_hybrid_routes_its_attention_layers_alone() -> None:
    assert summary(convert(tiny_model("jamba"), RoutingConfig(capacity=0.5))).routed == (1, 3)


def test_a_hybrid_whose_attention_lies_elsewhere_routes_some_of_it() -> None:
    model = tiny_model("jamba", attn_layer_period=2, attn_layer_offset=0)
    assert summary(convert(model, RoutingConfig(capacity=0.5))).routed == (2,)


def test_a_model_converted_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="converted already"):
        convert(convert(llama(), RoutingConfig()), RoutingConfig())


def test_a_dense_model_has_nothing_to_restore_verify_or_calibrate() -> None:
    for attempt in (restore, verify, lambda model: routing_mode(model, "topk")):
        with pytest.raises(ValueError, match=r"convert it first|not converted"):
            attempt(llama())


def test_the_summary_counts_what_was_converted(capsys: pytest.CaptureFixture[str]) -> None:
    model = convert(llama(), RoutingConfig(capacity=0.25, layers=(1, 3)))
    found = summary(model)
    weights = sum(w.numel() for n, w in model.model.layers[1].named_parameters() if w.ndim == 2 and "router" not in n)
    assert found.routed == (1, 3)
    assert found.num_added == 2 * 32
    assert found.flops_before == 5 * 2 * weights
    assert found.flops_after == 3 * 2 * weights + 2 * (2 * weights // 4) + 2 * 2 * 32
    assert "parameters added: 64" in capsys.readouterr().out


def test_verify_notices_a_layer_that_takes_the_wrong_tokens() -> None:
    model = converted(llama())
    router = model.model.layers[1].mod_router
    right = router.forward
    router.forward = lambda x, *args, **kwargs: right(-x, *args, **kwargs)
    with pytest.raises(ValueError, match="top-k routing is off"):
        verify(model)


# -- the mode


def test_converted_and_loaded_models_are_causal_and_generate_is_always(tmp_path: Path) -> None:
    model, (tokens, mask) = converted(llama()), ragged_prompts()
    assert model.routing_state.mode == "causal"
    expected = generated(model, tokens, mask)
    routing_mode(model, "topk")
    model.train()
    assert torch.equal(generated(model, tokens, mask), expected)
    assert torch.equal(generated(model, tokens, mask, use_cache=False), expected)
    assert model.routing_state.mode == "topk"
    model.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).routing_state.mode == "causal"


@torch.no_grad()
def test_the_mode_does_not_follow_training() -> None:
    model, (tokens, _) = converted(llama()), ragged_prompts()
    for mode in ("topk", "causal"):
        with routing_mode(model, mode):
            assert torch.equal(model.eval()(tokens).logits, model.train()(tokens).logits)
    assert model.routing_state.mode == "causal"


def test_topk_builds_no_cache_and_takes_none() -> None:
    model, (tokens, _) = converted(llama()), ragged_prompts()
    with routing_mode(model, "topk"):
        assert model(tokens, use_cache=True).past_key_values is None
        with pytest.raises(ValueError, match="takes no cache"):
            model(tokens, past_key_values=DynamicCache())
        with pytest.raises(ValueError, match="does not go with a cache"):
            model.model(tokens, past_key_values=DynamicCache(), use_cache=True)


def test_the_training_loss_has_the_router_losses_and_the_evaluation_loss_has_not() -> None:
    weights = LossWeights(predictor=0.5, router=0.25)
    model, (tokens, _) = converted(llama(), predictor=8, losses=weights), ragged_prompts()
    with routing_mode(model, "topk"):
        out = model(tokens, labels=tokens)
        plain = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        assert torch.allclose(out.loss, plain + model.router_loss())
        assert model.router_loss() > 0
        as_tuple = model(tokens, labels=tokens, return_dict=False)
        assert torch.equal(as_tuple[0], out.loss)
    out = model(tokens, labels=tokens)
    plain = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert torch.allclose(out.loss, plain)


def test_losses_of_micro_batches_add_up_to_that_of_the_batch() -> None:
    model, (tokens, _) = converted(llama(), predictor=8), ragged_prompts()
    count = tokens[:, 1:].numel()
    with routing_mode(model, "topk"):
        whole = model(tokens, labels=tokens, num_items_in_batch=count).loss
        parts = [model(row[None], labels=row[None], num_items_in_batch=count).loss for row in tokens]
    assert torch.allclose(whole, torch.stack(parts).sum())


# -- tokens


@torch.no_grad()
def test_padding_takes_no_capacity_and_k_follows_the_true_length() -> None:
    model, (tokens, mask) = converted(llama()), ragged_prompts()
    with routing_mode(model, "topk"):
        model(tokens, attention_mask=mask)
        for routing in model.routings:
            assert routing.chosen_BT.sum(1).tolist() == [7, 5, 3]  # of 13, 9 and 6
            assert not (routing.chosen_BT & ~mask.bool()).any()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_a_row_in_a_padded_batch_equals_the_row_alone(side: str, implementation: str) -> None:
    model = converted(llama(attn_implementation=implementation))
    # In float64 the library's own eager attention overflows where a row is padding alone.
    model, tolerance = (model.double(), 1e-12) if implementation == "sdpa" else (model, 1e-5)
    tokens, mask = ragged_prompts()
    if side == "right":
        tokens, mask = tokens.flip(1), mask.flip(1)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    for mode in ("topk", "causal"):
        with routing_mode(model, mode):
            together = model(tokens, attention_mask=mask, position_ids=position).logits
            for row in range(3):
                real = mask[row].bool()
                alone = model(tokens[row][real][None]).logits[0]
                assert torch.allclose(together[row][real], alone, atol=tolerance)


@torch.no_grad()
def test_changing_the_future_leaves_the_past_unchanged_when_causal_but_not_in_topk() -> None:
    model, (tokens, _) = converted(llama()).double(), ragged_prompts()
    other = tokens.clone()
    other[:, 9:] = 96 - other[:, 9:]
    assert torch.allclose(model(tokens).logits[:, :9], model(other).logits[:, :9], atol=1e-12)
    with routing_mode(model, "topk"):
        assert not torch.allclose(model(tokens).logits[:, :9], model(other).logits[:, :9], atol=1e-3)


def test_an_argument_that_nobody_knows_is_refused() -> None:
    model, (tokens, _) = converted(llama()), ragged_prompts()
    with pytest.raises(ValueError, match=r"argument weights_of_mine of shape \(3, 13\) is not known"):
        model(tokens, weights_of_mine=torch.ones(3, 13))


# -- the cache


@torch.no_grad()
def test_the_cache_holds_what_was_computed_and_nothing_else() -> None:
    model, (tokens, mask) = converted(llama()), ragged_prompts()
    out = model(tokens, attention_mask=mask, use_cache=True)
    chosen = {routing.layer: routing.chosen_BT.sum(1).tolist() for routing in model.routings}
    step = model(
        tokens[:, :1],
        attention_mask=torch.nn.functional.pad(mask, (0, 1), value=1),
        past_key_values=out.past_key_values,
    )
    for routing in model.routings:
        entry = step.past_key_values.layers[routing.layer]
        assert isinstance(entry, RoutedEntry)
        assert entry.get_seq_length() == 14
        new = routing.chosen_BT.flatten().int().tolist()
        assert [row.count for row in entry.rows] == [a + b for a, b in zip(chosen[routing.layer], new, strict=True)]


@torch.no_grad()
def test_a_step_computes_the_routed_rows_alone() -> None:
    model, (tokens, _) = converted(llama()), ragged_prompts()
    rows: dict[int, list[int]] = {1: [], 3: []}
    for number, seen in rows.items():
        attention = model.model.layers[number].self_attn
        attention.register_forward_pre_hook(
            lambda module, args, kwargs, seen=seen: seen.append(kwargs["hidden_states"].shape[0]), with_kwargs=True
        )
    cache = model(tokens, use_cache=True).past_key_values
    counts: dict[int, list[int]] = {1: [], 3: []}
    for column in range(13):
        for seen in rows.values():
            seen.clear()
        model(tokens[:, column : column + 1], past_key_values=cache)
        for routing in model.routings:
            routed = int(routing.chosen_BT.sum())
            counts[routing.layer].append(routed)
            assert rows[routing.layer] == ([routed] if routed else [])
    assert all(len(set(count)) > 1 for count in counts.values())


@torch.no_grad()
def test_a_cache_that_cannot_hold_rows_of_different_lengths_is_refused() -> None:
    model, (tokens, _) = converted(llama()), ragged_prompts()
    with pytest.raises(ValueError, match="only dynamic caches"):
        model(tokens, past_key_values=StaticCache(config=model.config, max_cache_len=32))
    dense = llama()(tokens, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="filled by another model"):
        model(tokens[:, :1], past_key_values=dense)


@torch.no_grad()
def test_a_cropped_cache_goes_on_as_if_the_tokens_had_not_been() -> None:
    model, (tokens, _) = converted(llama()).double(), ragged_prompts()
    cache = model(tokens, use_cache=True).past_key_values
    cache.crop(-5)
    again = model(tokens[:, 8:], past_key_values=cache).logits
    assert torch.allclose(again, model(tokens).logits[:, 8:], atol=1e-12)


# -- files


def test_a_saved_model_is_the_same_in_a_fresh_process_and_unknown_without_us(tmp_path: Path) -> None:
    model, (tokens, mask) = converted(llama()), ragged_prompts()
    model.save_pretrained(tmp_path / "model")
    save_file({"logits": model(tokens, attention_mask=mask).logits, "tokens": tokens, "mask": mask}, tmp_path / "out")
    script = (
        "import sys, torch\nfrom safetensors.torch import load_file\nfrom transformers import AutoModelForCausalLM\n"
        "if len(sys.argv) > 3: import modepth.hf\n"
        "model, out = AutoModelForCausalLM.from_pretrained(sys.argv[1]), load_file(sys.argv[2])\n"
        "found = model(out['tokens'], attention_mask=out['mask']).logits\n"
        "real = out['mask'].bool()\n"
        "assert torch.equal(found[real], out['logits'][real])\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "model"), str(tmp_path / "out")]
    assert subprocess.run([*command, "with"], capture_output=True, text=True, check=False).returncode == 0
    without = subprocess.run(command, capture_output=True, text=True, check=False)
    assert without.returncode != 0
    assert "mod_llama" in without.stderr


@pytest.mark.parametrize("harm", ["missing", "unexpected", "shape"])
def test_tensors_that_do_not_fit_are_refused_and_listed(harm: str, tmp_path: Path) -> None:
    converted(llama()).save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mod_router.score.weight"
    tensors = load_file(file)
    if harm == "missing":
        del tensors[name]
    elif harm == "unexpected":
        name = "model.layers.2.mod_router.score.weight"
        tensors[name] = torch.zeros(1, 32)
    else:
        tensors[name] = torch.zeros(1, 31)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises((ValueError, RuntimeError), match=name if harm != "shape" else "score.weight|mismatch"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_routing_that_nobody_knows_is_refused_by_name(tmp_path: Path) -> None:
    converted(llama()).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["routing"]["speed"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"routing\.speed"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_routers_stay_in_float32(tmp_path: Path) -> None:
    model = converted(llama()).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for each in (model, loaded):
        layer = each.model.layers[1]
        assert layer.mod_router.score.weight.dtype == torch.float32
        assert layer.mlp.up_proj.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@torch.no_grad()
def test_a_copy_is_routed_by_itself(copied: object) -> None:
    model, (tokens, mask) = converted(llama()), ragged_prompts()
    other = copied(model)
    assert torch.equal(other(tokens).logits, model(tokens).logits)
    routing_mode(other, "topk")
    assert model.routing_state.mode == "causal"
    assert_routes_some(model, tokens, mask)


# -- training


def gradients(model: PreTrainedModel, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    with routing_mode(model, "topk"):
        model(tokens, labels=tokens).loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def test_checkpointed_activations_change_no_gradient_and_reentrant_ones_are_refused() -> None:
    model, (tokens, _) = converted(llama(), losses=LossWeights(router=0.1)).train(), ragged_prompts()
    kept = gradients(model, tokens)
    model.gradient_checkpointing_enable()
    made_again = gradients(model, tokens)
    assert kept.keys() == made_again.keys()
    assert "model.layers.1.mod_router.score.weight" in kept
    assert all(torch.allclose(kept[name], made_again[name], atol=1e-6) for name in kept)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(ValueError, match="reentrant"):
        gradients(model, tokens)


def test_the_dial_changes_what_may_change_and_nothing_else() -> None:
    model, (tokens, mask) = converted(llama()), ragged_prompts()
    with pytest.raises(ValueError, match="may not change layers"):
        set_routing(model, RoutingConfig(layers=(2,)))
    for capacity in (0.25, 0.75):
        calibrate(model, tokens, capacity, attention_mask=mask)
        with torch.no_grad():
            model(tokens, attention_mask=mask)
        for routing in model.routings:
            assert int(routing.chosen_BT.sum()) == -(-28 * capacity // 1)


def test_the_python_of_the_page_on_converting_runs() -> None:
    assert run_snippets(text_of("converting.md"))["out"].shape == (4, 16)


def test_the_readmes_conversion_runs(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    (block,) = (each for each in blocks(text_of("README.md"), "python") if "from modepth.hf" in each)
    names: dict[str, Any] = {}
    exec(smaller(block, {"path/to/llama": str(tmp_path)}), names)
    assert type(names["model"].config).model_type == "mod_llama"
