"""Any Hugging Face decoder becomes a Mixture-of-Depths model, in place, and back again."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from modepth.config import Gate, Init, RoutingConfig
from modepth.hf.classes import base_of, model_class
from modepth.hf.families import REFUSED
from modepth.hf.model import PREFIX, ROUTER, RoutedModel, decoder_layers, install, plain, routed_layers, uninstall
from modepth.hf.verify import verify


class Summary(NamedTuple):
    """What a conversion did: parameters added, and FLOPs a token of the layers' weights (attention scores aside)."""

    routed: tuple[int, ...]
    num_layers: int
    num_added: int
    flops_before: int
    flops_after: int

    def __str__(self) -> str:
        saved = 1 - self.flops_after / self.flops_before
        return (
            f"routed layers: {', '.join(map(str, self.routed))} of {self.num_layers}; "
            f"parameters added: {self.num_added:,}; FLOPs a token in layers: "
            f"{self.flops_before:,} -> {self.flops_after:,} ({-100 * saved:+.1f} %)"
        )


def convert(model: Any, routing: RoutingConfig, *, gate: Gate = "tanh", router_init: Init = "zero") -> Any:
    """Route some layers of a causal language model, in place.

    Weights and their names stay, routers are added. `gate` and `router_init` take the place of the routing's own: with
    the ones given here a routed token leaves its layer exactly as before, until routers are trained. The model comes
    out in causal mode; for training, `routing_mode(model, "topk")`.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2)
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=97, **sizes))
    >>> model = convert(model, RoutingConfig(capacity=0.5))
    routed layers: 1 of 4; parameters added: 32; FLOPs a token in layers: 69,632 -> 60,992 (-12.4 %)
    >>> type(model).__name__
    'ModLlamaForCausalLM'
    """
    training = model.training
    install_routing(model, replace(routing, gate=gate, router_init=router_init))
    try:
        model.train(training)
        verify(model)
    except BaseException:
        restore(model)
        raise
    print(summary(model))
    return model


def would_convert(config: PreTrainedConfig, routing: RoutingConfig) -> Summary:
    """What converting a model of this config would come to; no weights are made."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        install_routing(model, routing)
    return summary(model)


def install_routing(model: Any, routing: RoutingConfig) -> None:
    """Swap the classes of a model and of the layers to route; if that fails, nothing has changed."""
    base, routing = check_family(model), replace(routing, layers=routable(model, routing))
    made, config_class = model_class(base), model.config.__class__
    model.__class__, model.config.__class__ = made, made.config_class
    model.config.routing = plain(routing)
    try:
        install(model, routing)
    except BaseException:
        uninstall(model)
        del model.config.routing
        model.__class__, model.config.__class__ = base, config_class
        raise


def restore(model: Any) -> Any:
    """The dense base of a converted model, in place: its weights as they are now, without routers."""
    if not isinstance(model, RoutedModel):
        raise ValueError(f"{type(model).__name__} was not converted, so there is nothing to restore")
    uninstall(model)
    base = base_of(model.config.model_type.removeprefix(PREFIX))
    del model.config.routing
    model.__class__, model.config.__class__ = base, base.config_class
    return model


def check_family(model: PreTrainedModel) -> Any:
    """The model's class, if it is a causal language model that can be routed."""
    if isinstance(model, RoutedModel):
        raise ValueError("the model is converted already: restore(model) first")
    family = model.config.model_type
    if family in REFUSED:
        raise ValueError(f"{family} cannot be routed: {REFUSED[family]}")
    try:
        base = base_of(family)
    except KeyError:
        raise ValueError(f"{family} is no causal language model of this transformers") from None
    if type(model) is not base:
        raise ValueError(f"a {base.__name__} can be converted, got {type(model).__name__}")
    return base


def routable(model: PreTrainedModel, routing: RoutingConfig) -> tuple[int, ...]:
    """The layers to route: never the first, and only such as keep keys and values of every token."""
    num_layers = len(decoder_layers(model))
    entries = DynamicCache(config=model.config).layers
    attending = [
        number
        for number in range(1, num_layers)
        if not entries or type(entries[number]) in (DynamicLayer, DynamicSlidingWindowLayer)
    ]
    wanted = routing.routed_layers(num_layers)
    if routing.layers is None:
        # In a hybrid the layers that attend may be others than those that `every` finds: then every so many of them.
        wanted = tuple(number for number in wanted if number in attending) or tuple(attending[:: routing.every])
    refused = [number for number in wanted if number not in attending]
    if 0 in refused:
        raise ValueError("layer 0 cannot be routed: there equal tokens have equal states, so they tie")
    if refused:
        kinds = ", ".join(f"{number} ({type(entries[number]).__name__})" for number in refused)
        raise ValueError(f"layers {kinds} keep a state that every token must enter: they cannot be routed")
    if not wanted:
        raise ValueError(f"none of the model's {num_layers} layers can be routed: name some by layers=(...)")
    return wanted


def summary(model: RoutedModel) -> Summary:
    layers, routed = decoder_layers(model), routed_layers(model)
    routing = model.routing_state.config
    before = after = added = 0
    for number, layer in enumerate(layers):
        router = sum(weight.numel() for name, weight in layer.named_parameters() if name.startswith(ROUTER))
        parts = layer_flops(layer, model.config)
        before += sum(parts.values())
        if number in routed:
            added += router
            skipped = {"block": ("attention", "mlp"), "attention": ("attention",), "mlp": ("mlp",)}[routing.part]
            after -= math.floor(sum(parts[name] for name in skipped) * (1 - routing.capacity))
            after += 2 * router
        after += sum(parts.values())
    return Summary(tuple(routed), len(layers), added, before, after)


def layer_flops(layer: nn.Module, config: PreTrainedConfig) -> dict[str, int]:
    """Forward FLOPs a token of a layer's weights; of experts, as many as a token uses."""
    names = getattr(layer, "names", None)
    totals = {"attention": 0, "mlp": 0}
    for name, weight in layer.named_parameters():
        if weight.ndim < 2 or name.startswith(ROUTER):
            continue
        used = 1.0
        if weight.ndim == 3:
            text = config.get_text_config()
            used = getattr(text, "num_experts_per_tok", None) or weight.shape[0]
            used = used / weight.shape[0]
        part = "attention" if "attn" in name or "attention" in name else "mlp"
        if names is not None:
            part = "attention" if name.startswith(names[1]) else "mlp"
        totals[part] += round(2 * weight.numel() * used)
    return totals
