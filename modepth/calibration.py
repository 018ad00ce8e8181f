"""The dial: one trained model at several budgets, by thresholds that route a wanted share of tokens."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from modepth.config import RoutingConfig
from modepth.generation import inference
from modepth.model import Context, Transformer, check_tokens
from modepth.routing import Routing, num_routed, rule_score

ROWS = 16  # computed at once


def calibrate(
    model: Transformer, tokens_BT: Tensor, capacity: float, *, routing: RoutingConfig | None = None
) -> RoutingConfig:
    """A routing whose causal rule routes the share `capacity` of tokens like these, held out from training.

    Layer by layer, since what a layer sees depends on what those before it routed: the threshold is the score that
    `capacity` of all the tokens reach. Pass the result as `routing=` to the model or to `generate`.

    >>> from modepth import ModelConfig, RoutingConfig, Transformer
    >>> config = ModelConfig(vocab_size=101, num_layers=4, dim=32, num_heads=2, routing=RoutingConfig())
    >>> model, tokens = Transformer(config), torch.randint(101, (4, 50))
    >>> routing = calibrate(model, tokens, 0.3)
    >>> [int(each.chosen_BT.sum()) for each in model(tokens, routing=routing).routings]
    [60]
    """
    check_tokens(tokens_BT, model.config.vocab_size)
    model.check_shapes(tokens_BT, None)
    routing = routing or model.config.routing
    if routing is None:
        raise ValueError("a dense model has no thresholds to calibrate: its config has no routing")
    if routing.selection not in ("topk", "soft"):
        raise ValueError(f"selection {routing.selection!r} follows no rule, so there is nothing to calibrate")
    routing = replace(routing, capacity=capacity, thresholds=())
    with inference(model):
        parts = [model.embed(part_BT) for part_BT in tokens_BT.split(ROWS)]
        for number, layer in enumerate(model.layers):
            if number in model.config.routed_layers:
                routing = with_threshold(routing, [run(model, layer, part, routing)[1] for part in parts])
            parts = [(run(model, layer, part, routing)[0], *part[1:]) for part in parts]
    return routing


def run(
    model: Transformer, layer: nn.Module, part: tuple[Tensor, Context, Tensor], routing: RoutingConfig
) -> tuple[Tensor, Routing | None]:
    return model.run_layer(layer, *part, "causal", routing)


def with_threshold(routing: RoutingConfig, decisions: Sequence[Routing | None]) -> RoutingConfig:
    """The routing with one layer's threshold added, the score that `capacity` of these tokens reach."""
    made = [decision for decision in decisions if decision is not None]
    for decision in made:
        decision.check()
    scores = torch.cat([rule_score(decision, routing.rule).flatten() for decision in made]).sort(descending=True).values
    threshold = scores[num_routed(len(scores), routing.capacity) - 1].item()
    return replace(routing, thresholds=(*(routing.thresholds or ()), (made[0].layer, threshold)))
