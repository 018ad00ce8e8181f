"""Does a converted model compute what it should? Three checks on random tokens, each against something obvious.

Capacity 1 must be the dense model, bit for bit. Top-k must be what one gets by computing every token and hiding the
keys of those that were not chosen, with the choice made by sorting. Reading token by token into a cache must give
what one forward gives. Routers are random for the time of the check, so that they choose.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from modepth.hf.calibration import calibrate
from modepth.hf.families import CACHES, MASKS
from modepth.hf.layer import RoutedLayer
from modepth.hf.model import RoutedModel, as_dense, part_refused, routed_layers, routing_mode, set_routing
from modepth.routing import GATES, num_routed

ROWS, TOKENS, PADDING = 2, 12, 3


def verify(model: PreTrainedModel) -> None:
    """Raise a ValueError that says what is wrong, if this model's routed layers do not compute what they should."""
    if not isinstance(model, RoutedModel):
        raise ValueError(f"{type(model).__name__} has no routed layers: convert it first")
    with as_evaluated(model):
        tokens_BT, mask_BT = probe(model)
        check_capacity_one(model, tokens_BT)
        with random_routers(model):
            check_top_k(model, tokens_BT, mask_BT)
            check_cache(model, tokens_BT, mask_BT)


def probe(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Random tokens, the second row with padding on its left."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    tokens_BT = torch.randint(vocabulary, (ROWS, TOKENS), generator=generator).to(model.device)
    mask_BT = torch.ones_like(tokens_BT)
    mask_BT[1, :PADDING] = 0
    return tokens_BT, mask_BT


@contextmanager
def as_evaluated(model: RoutedModel) -> Iterator[None]:
    """No gradients, no dropout, causal; the model and its routing are left as they were."""
    before, training = model.routing_state.config, model.training
    model.eval()
    try:
        with torch.no_grad(), routing_mode(model, "causal"):
            yield
    finally:
        model.train(training)
        set_routing(model, before)
        for layer in routed_layers(model).values():
            layer.routing = None


@contextmanager
def random_routers(model: RoutedModel) -> Iterator[None]:
    """Routers that choose half of the tokens, for a while."""
    layers = routed_layers(model).values()
    weights = [layer.mod_router.score.weight.detach().clone() for layer in layers]
    generator = torch.Generator().manual_seed(1)
    try:
        for layer in layers:
            weight = layer.mod_router.score.weight
            weight.copy_(torch.randn(weight.shape, generator=generator))
        set_routing(model, replace(model.routing_state.config, capacity=0.5, selection="topk", thresholds=None))
        yield
    finally:
        for layer, weight in zip(layers, weights, strict=True):
            layer.mod_router.score.weight.copy_(weight)


def check_capacity_one(model: RoutedModel, tokens_BT: Tensor) -> None:
    own = model.routing_state.config
    set_routing(model, replace(own, capacity=1.0, gate="one", weigh_bypass=False))
    routed = model(input_ids=tokens_BT, use_cache=False).logits
    set_routing(model, own)
    with as_dense(model):
        dense = model(input_ids=tokens_BT, use_cache=False).logits
    if not torch.equal(routed, dense):
        if own.part != "block":
            raise ValueError(part_refused(model, own.part))
        distance = (routed - dense).abs().max().item()
        raise ValueError(f"{type(model).__name__}: at capacity 1 it differs from the dense model by {distance:.2e}")


def check_top_k(model: RoutedModel, tokens_BT: Tensor, mask_BT: Tensor) -> None:
    """Every routed layer against one that computes all tokens and hides the keys of those not chosen."""
    seen: list[tuple[RoutedLayer, tuple[Any, ...], dict[str, Any], Tensor]] = []

    def note(layer: RoutedLayer, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        seen.append((layer, args, kwargs, out[0] if isinstance(out, tuple) else out))

    hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in routed_layers(model).values()]
    try:
        with routing_mode(model, "topk"):
            model(input_ids=tokens_BT, attention_mask=mask_BT)
    finally:
        for hook in hooks:
            hook.remove()
    if len(seen) != len(routed_layers(model)):
        raise ValueError(f"{type(model).__name__}: only {len(seen)} of its routed layers were called")
    for layer, (x_BTD, *args), kwargs, out_BTD in seen:
        arguments = {**dict(zip(layer.argument_names, args, strict=False)), **kwargs}
        expected_BTD = slow_layer(layer, x_BTD, arguments, mask_BT.bool())
        check_close(layer, out_BTD[mask_BT.bool()], expected_BTD[mask_BT.bool()], "top-k routing")


def slow_layer(layer: RoutedLayer, x_BTD: Tensor, arguments: dict[str, Any], real_BT: Tensor) -> Tensor:
    """What a routed layer should return, by computing every token."""
    part, config = layer.mod_router.config.part, layer.routing_state.config
    read_BTD = layer.attend(x_BTD, arguments) if part == "mlp" else x_BTD
    score_BT = layer.mod_router.score(read_BTD.to(layer.mod_router.score.weight.dtype)).squeeze(-1)
    chosen_BT = torch.zeros_like(real_BT)
    for row, score_T in enumerate(score_BT.tolist()):
        real = [token for token in range(len(score_T)) if real_BT[row, token]]
        best = sorted(real, key=lambda token: (-score_T[token], token))
        chosen_BT[row, best[: num_routed(len(real), config.capacity)]] = True
    gate_BT1 = GATES[config.gate](score_BT).to(x_BTD.dtype).unsqueeze(-1)

    def blend(y_BTD: Tensor) -> Tensor:
        return torch.where(chosen_BT.unsqueeze(-1), read_BTD + gate_BT1 * (y_BTD - read_BTD), read_BTD)

    if part == "mlp":
        return blend(layer.feed(read_BTD))
    hidden = hide_keys(layer, x_BTD, arguments, chosen_BT)
    if part == "attention":
        return layer.feed(blend(layer.attend(x_BTD, hidden)))
    return blend(layer.base_call(x_BTD, hidden))


def hide_keys(layer: RoutedLayer, x_BTD: Tensor, arguments: dict[str, Any], chosen_BT: Tensor) -> dict[str, Any]:
    """A layer's arguments with a mask that hides all keys but the chosen."""
    name = next((name for name in MASKS if name in layer.argument_names), None)
    if name is None:
        raise ValueError(f"{type(layer).__name__} takes no attention mask, so it cannot be told what to leave out")
    B, T, _ = x_BTD.shape
    mask = arguments.get(name)
    if mask is None:
        mask = torch.ones(T, T, dtype=torch.bool, device=x_BTD.device).tril().expand(B, 1, T, T)
    key_B11T = chosen_BT[:, None, None]
    if mask.dtype == torch.bool:
        hidden = mask & key_B11T
        hidden = hidden | ~hidden.any(-1, keepdim=True)  # tokens not chosen may see nothing; they are not looked at
    else:
        hidden = mask.masked_fill(~key_B11T, torch.finfo(mask.dtype).min)
    return {key: value for key, value in arguments.items() if key not in CACHES} | {name: hidden}


def check_cache(model: RoutedModel, tokens_BT: Tensor, mask_BT: Tensor) -> None:
    """Token by token into a cache against one forward, in causal mode."""
    calibrate(model, tokens_BT, 0.5, attention_mask=mask_BT)
    position_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
    whole = model(input_ids=tokens_BT, attention_mask=mask_BT, position_ids=position_BT, use_cache=False).logits
    first = TOKENS // 2
    pieces = [slice(0, first), *(slice(end, end + 1) for end in range(first, TOKENS))]
    cache, parts = None, []
    for piece in pieces:
        out = model(
            input_ids=tokens_BT[:, piece],
            attention_mask=mask_BT[:, : piece.stop],
            position_ids=position_BT[:, piece],
            past_key_values=cache,
            use_cache=True,
        )
        cache = out.past_key_values
        parts.append(out.logits)
    check_close(model, torch.cat(parts, dim=1)[mask_BT.bool()], whole[mask_BT.bool()], "decoding with a cache")


def check_close(module: torch.nn.Module, found: Tensor, expected: Tensor, what: str) -> None:
    """Equal but for rounding."""
    scale = expected.abs().max().clamp(min=1e-3).item()
    tolerance = scale * 2000 * torch.finfo(found.dtype).eps
    distance = (found - expected).abs().max().item()
    if not distance <= tolerance:
        raise ValueError(
            f"{type(module).__name__}: {what} is off by {distance:.2e} (rounding would be below {tolerance:.2e}): "
            "this family is not supported"
        )
