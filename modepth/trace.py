"""Record what was routed, as numpy arrays: `with record(model) as trace:`.

Hooks on the routers copy each decision and change nothing; they go when the block ends. Which experts
computed a token is read off what the model returns. What is kept holds no graph and no tensor, so a
trace can outlive its model. A forward that raises is not kept, and neither is what activation checkpointing
computes again in a backward.

Shapes: B batch, T tokens.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from modepth.config import ModelConfig
from modepth.experts import ExpertRouter, ExpertRouting
from modepth.routing import Router, Routing


class RoutedLayer(NamedTuple):
    """What one layer decided in one forward."""

    layer: int
    chosen_BT: NDArray[np.bool_]
    logit_BT: NDArray[np.floating[Any]]  # the router's raw score
    real_BT: NDArray[np.bool_]  # not padding
    gate_BT: NDArray[np.floating[Any]]  # what blends, 0 for a token that skips


class ExpertLayer(NamedTuple):
    """What the experts of one layer computed in one forward."""

    layer: int
    chosen_BTE: NDArray[np.bool_]
    best_BT: NDArray[np.int64]  # of those that computed a token the one of highest score, -1 where none did
    real_BT: NDArray[np.bool_]  # came to the experts


class Trace:
    """The routed layers of each recorded forward, in the order in which they ran."""

    def __init__(self, num_layers: int | None = None, config: ModelConfig | None = None) -> None:
        self.num_layers = num_layers  # of the decoder, dense ones included; None: not known
        self.config = config  # of a decoder of ours
        self.forwards: list[list[RoutedLayer]] = []
        self.experts: list[list[ExpertLayer]] = []  # likewise of the layers that have experts
        self._running: list[RoutedLayer] | None = None

    @property
    def last(self) -> list[RoutedLayer]:
        """The routed layers of the last forward."""
        if not self.forwards:
            raise ValueError("no forward was recorded: call the model inside `with record(model)`")
        if not self.forwards[-1] and not self.experts[-1]:
            raise ValueError("the last forward ran no router: record the module whose layers are routed")
        return self.forwards[-1]

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that the last forward routed."""
        return tuple(each.layer for each in self.last)

    def depth(self) -> NDArray[np.int64]:
        """How many routed layers computed each token of the last forward: (B, T)."""
        return np.sum([each.chosen_BT for each in self.last], axis=0, dtype=np.int64)

    def chosen_map(self, row: int = 0) -> NDArray[np.bool_]:
        """Which layers computed each token of a row of the last forward: (layers, T), dense layers all True.

        After an exit the layers without a router compute what the last router chose.
        """
        layers = self.routed_layers
        if len(set(layers)) < len(layers):
            raise ValueError(f"layers must have distinct numbers, got {layers}: MixtureOfDepths(..., layer=number)")
        number = max(layers) + 1 if self.num_layers is None else self.num_layers
        chosen = np.ones((number, self._row_length(row)), dtype=bool)
        by_layer = {each.layer: each.chosen_BT[row] for each in self.last}
        for layer in range(number):
            decides = layer if self.config is None else self.config.decided_by(layer)
            if decides in by_layer:
                chosen[layer] = by_layer[decides]
        return chosen

    def expert_map(self, row: int = 0) -> NDArray[np.int64]:
        """Which expert computed each token of a row of the last forward: (layers, T).

        Of several the one of highest score; -1 where none did, -2 in layers without experts.
        """
        if not self.forwards or not self.experts[-1]:
            raise ValueError("the last forward met no experts: record a Transformer whose config has some")
        assert self.config is not None  # experts are found in our decoders alone
        experts = np.full((self.config.num_layers, self._row_length(row)), -2)
        for each in self.experts[-1]:
            experts[each.layer] = each.best_BT[row]
        return experts

    def _row_length(self, row: int) -> int:
        B, T = (self.last or self.experts[-1])[0].real_BT.shape
        if not 0 <= row < B:
            raise ValueError(f"row must be in 0..{B - 1}, got {row}")
        return T

    def scores(self) -> tuple[dict[int, NDArray[np.floating[Any]]], dict[int, NDArray[np.bool_]]]:
        """Logits and decisions of the real tokens of all forwards, by layer, each in one dimension."""
        logits: dict[int, list[NDArray[np.floating[Any]]]] = {}
        chosen: dict[int, list[NDArray[np.bool_]]] = {}
        for each in (layer for forward in self.forwards for layer in forward):
            logits.setdefault(each.layer, []).append(each.logit_BT[each.real_BT])
            chosen.setdefault(each.layer, []).append(each.chosen_BT[each.real_BT])
        return (
            {layer: np.concatenate(parts) for layer, parts in logits.items()},
            {layer: np.concatenate(parts) for layer, parts in chosen.items()},
        )

    # -- what the hooks call

    def _begin(self, *_: object) -> None:
        self._running = []

    def _add(self, router: nn.Module, inputs: object, routing: Routing) -> None:
        if self._running is not None:
            self._running.append(copied(routing))

    def _end(self, model: nn.Module, inputs: object, out: Any) -> None:
        if self._running is not None:
            self.forwards.append(self._running)
            self.experts.append([copied_experts(each) for each in getattr(out, "experts", ())])
        self._running = None


@contextmanager
def record(model: nn.Module) -> Iterator[Trace]:
    """Record the routing of every forward of `model` inside the block.

    >>> import torch
    >>> from modepth import MixtureOfDepths, RoutingConfig
    >>> layer = MixtureOfDepths(nn.Identity(), dim=16, routing=RoutingConfig(capacity=0.25))
    >>> with record(layer) as trace:
    ...     out = layer(torch.randn(2, 20, 16))
    >>> trace.depth().sum(axis=1)
    array([5, 5])
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    if not routers and not any(isinstance(module, ExpertRouter) for module in model.modules()):
        raise ValueError(f"nothing to record: this {type(model).__name__} has no router (a dense model routes nothing)")
    if hasattr(model, "_orig_mod") or any(module._compiled_call_impl is not None for module in model.modules()):
        raise ValueError("a compiled model runs without new hooks: record the model that torch.compile was given")
    trace = Trace(num_decoder_layers(model), decoder_config(model))
    with ExitStack() as hooks:
        hooks.callback(model.register_forward_pre_hook(trace._begin).remove)
        for router in routers:
            hooks.callback(router.register_forward_hook(trace._add).remove)
        hooks.callback(model.register_forward_hook(trace._end).remove)
        yield trace


def decoder_config(model: nn.Module) -> ModelConfig | None:
    """The config of the decoder that `model` is or contains, None if it is none of ours."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return next((config for config in configs if isinstance(config, ModelConfig)), None)


def num_decoder_layers(model: nn.Module) -> int | None:
    """The layers of the decoder that `model` is or contains, ours or of transformers; None if there is none."""
    for config in (getattr(module, "config", None) for module in model.modules()):
        count = getattr(config, "num_layers", getattr(config, "num_hidden_layers", None))
        if isinstance(count, int):
            return count
    return None


@torch.no_grad()  # or checkpointing would find tensors that the second forward did not save
def copied(routing: Routing) -> RoutedLayer:
    # The slots of skipped tokens have gate 0, so a scatter into zeros is the gate of every token.
    gate_BT = routing.scatter(routing.logit_BT.new_zeros(routing.logit_BT.shape), routing.gate_BK)
    return RoutedLayer(
        routing.layer, array(routing.chosen_BT), array(routing.logit_BT), array(routing.real_BT), array(gate_BT)
    )


def copied_experts(decided: ExpertRouting) -> ExpertLayer:
    return ExpertLayer(decided.layer, array(decided.chosen_BTE), array(decided.best_expert()), array(decided.real_BT))


def array(tensor: Tensor) -> NDArray[Any]:
    return np.array(tensor.detach().cpu().numpy())
