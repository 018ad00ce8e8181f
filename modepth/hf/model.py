"""A converted model: what is put before a causal language model's own class, and how layers become routed ones.

All routed layers share one `RoutingState`: how they decide, and in which mode. The config keeps the routing, so that
it is saved with the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel

from modepth.config import Mode, RoutingConfig, as_tuples, build
from modepth.hf.balance import forward_with_balance
from modepth.hf.families import CACHES, PRE_NORM, RETURNS
from modepth.hf.layer import RoutedLayer, RoutingState, routed_class
from modepth.losses import router_losses, weighted_sum
from modepth.routing import Router, Routing
from modepth.validation import check_choice

PREFIX = "mod_"
ROUTER = "mod_router"


class RoutedModel(PreTrainedModel, GenerationMixin):
    """What is put before a causal language model's own class."""

    routing_state: RoutingState
    argument_names: tuple[str, ...]
    # Quantisers look at the one, loading at the other.
    _keep_in_fp32_modules = [ROUTER]  # noqa: RUF012 - as the library declares it
    _keep_in_fp32_modules_strict = [ROUTER]  # noqa: RUF012

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        install(self, routing_of(config))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(self.argument_names, args, strict=False)), **kwargs}
        if self.routing_state.mode == "causal":
            return self.base_forward(arguments)
        if any(arguments.get(name) is not None for name in CACHES):
            raise ValueError(
                "top-k looks at tokens yet to come, so it takes no cache: set routing_mode(model, 'causal')"
            )
        out = self.base_forward({**arguments, "use_cache": False})
        labels = arguments.get("labels")
        if labels is None:
            return out
        added = self.router_loss() * share_of_batch(labels, arguments.get("num_items_in_batch"))
        if isinstance(out, tuple):
            return (out[0] + added.to(out[0]), *out[1:])
        out.loss = out.loss + added.to(out.loss)
        return out

    def base_forward(self, arguments: dict[str, Any]) -> Any:
        return forward_with_balance(self, decoder_layers(self), super().forward, arguments)

    def router_loss(self) -> Tensor:
        """The weighted losses of the last forward's routings."""
        routings = self.routings
        if torch.is_grad_enabled() and any(
            layer.mod_router.score.weight.requires_grad and not layer.routing.logit_BT.requires_grad
            for layer in routed_layers(self).values()
            if layer.routing is not None
        ):
            raise ValueError(
                "the router scores carry no gradient: reentrant checkpointing drops it; use "
                "gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        config = self.routing_state.config
        return weighted_sum(router_losses(routings, config), config.losses)

    @property
    def routings(self) -> tuple[Routing, ...]:
        """What the routed layers decided in the last forward, in order."""
        return tuple(layer.routing for layer in routed_layers(self).values() if layer.routing is not None)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        with routing_mode(self, "causal"):
            parent: Any = super()
            return parent.generate(*args, **kwargs)

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        model, info = loaded
        refuse_misfits(info, cls.__name__)
        return (model, info) if output_loading_info else model


def refuse_misfits(info: dict[str, Any], where: str) -> None:
    """Raise if loading left a tensor out, or found one too many: the library only warns, and fills in noise."""
    wrong = {name: sorted(map(str, info[name])) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    listed = "; ".join(f"{name.replace('_', ' ')}: {', '.join(keys)}" for name, keys in wrong.items() if keys)
    if listed:
        raise ValueError(f"the tensors do not fit {where}: {listed}")


def share_of_batch(labels_BT: Tensor, num_items: Tensor | int | None) -> Tensor | float:
    """What a micro-batch counts where losses are sums over a batch's targets, divided by their number."""
    if num_items is None:
        return 1.0
    return (labels_BT[..., 1:] != -100).sum() / num_items


class routing_mode:  # noqa: N801 - used like a function
    """Set how the routed layers decide, from now on; in a `with`, until its end.

    "causal", as loaded and converted models are: each token by itself. "topk": as in training.
    """

    def __init__(self, model: nn.Module, mode: Mode) -> None:
        check_choice("mode", mode, Mode)
        self.states = states_of(model)
        if not self.states:
            raise ValueError(f"{type(model).__name__} has no routed layers: convert it first")
        self.before = [state.mode for state in self.states]
        for state in self.states:
            state.mode = mode

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for state, mode in zip(self.states, self.before, strict=True):
            state.mode = mode


def states_of(model: nn.Module) -> list[RoutingState]:
    """The routing states in a model, however deep it is wrapped."""
    states = (module.routing_state for module in model.modules() if isinstance(module, RoutedLayer))
    return list({id(state): state for state in states}.values())


def set_routing(model: nn.Module, routing: RoutingConfig) -> None:
    """Route as this says from now on; what the model is made of must stay: layers, part, predictor."""
    for module in model.modules():
        if isinstance(module, RoutedModel):
            own = module.routing_state.config
            for name in ("layers", "every", "part", "flow", "predictor"):
                if getattr(routing, name) != getattr(own, name):
                    raise ValueError(f"routing may not change {name} of a model that stands: {own} was converted")
            module.routing_state.config = routing
            module.config.routing = plain(routing)


# -- installing


def routed_layers(model: nn.Module) -> dict[int, Any]:
    """By number, in order."""
    return {layer.mod_router.layer: layer for layer in model.modules() if isinstance(layer, RoutedLayer)}


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The one list of layers that a decoder has."""
    count = model.config.get_text_config().num_hidden_layers
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and hasattr(module[0], "forward")
    ]
    outermost = [
        module for name, module in lists if not any(name.startswith(f"{other}.") for other, _ in lists if other != name)
    ]
    if len(outermost) != 1:
        raise ValueError(f"{type(model).__name__} has {len(outermost)} lists of {count} layers: which is its decoder?")
    return outermost[0]


def install(model: Any, routing: RoutingConfig) -> None:
    """Turn layers into routed ones, with new routers."""
    layers = decoder_layers(model)
    text_config = model.config.get_text_config()
    model.routing_state = RoutingState("causal", routing)
    if routing.flow != "rejoin":
        raise ValueError(f"flow must be rejoin in a converted model, got {routing.flow!r}: it is for native decoders")
    weight = next(layers[0].parameters())
    family = model.config.model_type.removeprefix(PREFIX)
    for number in routing.routed_layers(len(layers)):
        layer: Any = layers[number]
        layer.__class__ = routed_class(layer.__class__)
        layer.mod_router = Router(text_config.hidden_size, routing, number).to(weight.device, weight.dtype)
        layer.routing_state, layer.routing = model.routing_state, None
        layer.num_returned = RETURNS.get(family)
        layer.names = next((names for names in PRE_NORM if all(hasattr(layer, name) for name in names)), None)
        if layer.names is None and routing.part != "block":
            raise ValueError(part_refused(model, routing.part))


def part_refused(model: PreTrainedModel, part: str) -> str:
    return (
        f"part {part!r} cannot be routed in {type(model).__name__}: its layers are not x + attention(norm(x)), then "
        "x + mlp(norm(x)); route the whole block"
    )


def uninstall(model: PreTrainedModel) -> None:
    """The layers as they were."""
    for layer in routed_layers(model).values():
        del layer.mod_router, layer.routing_state, layer.routing, layer.num_returned, layer.names
        layer.__class__ = layer.base_class
    del model.routing_state


@contextmanager
def as_dense(model: nn.Module) -> Iterator[None]:
    """The model without its routing, for the time of a `with`."""
    layers = list(routed_layers(model).values())
    for layer in layers:
        layer.__class__ = layer.base_class
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = routed_class(layer.__class__)


# -- the config


def plain(routing: RoutingConfig) -> dict[str, Any]:
    return asdict(routing)


def routing_of(config: PreTrainedConfig) -> RoutingConfig:
    """The routing that a config holds, checked as all our configs are."""
    return build(RoutingConfig, as_tuples(config.routing or {}), where="routing.")
