"""The dial: one trained model at several budgets, by thresholds that route a wanted share of tokens."""

from dataclasses import replace

from torch import Tensor

from modepth.config import RoutingConfig
from modepth.generation import inference
from modepth.model import Transformer, check_tokens
from modepth.routing import num_routed, rule_score


def calibrate(
    model: Transformer, tokens_BT: Tensor, capacity: float, *, routing: RoutingConfig | None = None
) -> RoutingConfig:
    """A routing whose causal rule routes the share `capacity` of tokens like these, held out from training.

    Layer by layer, since what a layer sees depends on what those before it routed: the threshold is the score that
    `capacity` of all the tokens reach. Pass the result as `routing=` to the model or to `generate`.

    >>> import torch
    >>> from modepth import ModelConfig, RoutingConfig, Transformer
    >>> config = ModelConfig(vocab_size=101, num_layers=4, dim=32, num_heads=2, routing=RoutingConfig())
    >>> model, tokens = Transformer(config), torch.randint(101, (4, 50))
    >>> routing = calibrate(model, tokens, 0.3)
    >>> [int(each.chosen_BT.sum()) for each in model(tokens, routing=routing).routings]
    [60]
    """
    check_tokens(tokens_BT, model.config.vocab_size)
    routing = routing or model.config.routing
    if routing is None:
        raise ValueError("a dense model has no thresholds to calibrate: its config has no routing")
    if routing.selection not in ("topk", "soft"):
        raise ValueError(f"selection {routing.selection!r} follows no rule, so there is nothing to calibrate")
    routing = replace(routing, capacity=capacity, thresholds=())
    for layer in model.config.routed_layers:
        with inference(model):
            (decision,) = [each for each in model(tokens_BT, routing=routing).routings if each.layer == layer]
        decision.check()
        scores = rule_score(decision, routing.rule).flatten().sort(descending=True).values
        threshold = scores[num_routed(len(scores), capacity) - 1].item()
        routing = replace(routing, thresholds=(*(routing.thresholds or ()), (layer, threshold)))
    return routing
