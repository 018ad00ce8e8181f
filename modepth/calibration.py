"""The dial: one trained model at several budgets, by thresholds that route a wanted share of tokens."""

from torch import Tensor

from modepth.config import RoutingConfig
from modepth.generation import inference
from modepth.model import Transformer, check_tokens
from modepth.thresholds import with_threshold, without_thresholds

ROWS = 16  # computed at once


def calibrate(
    model: Transformer, tokens_BT: Tensor, capacity: float, *, routing: RoutingConfig | None = None
) -> RoutingConfig:
    """A routing whose causal rule routes the share `capacity` of tokens like these, held out from training.

    Layer by layer, since what a layer sees depends on what those before it routed: the threshold is one that
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
    model.check_shapes(tokens_BT, None)
    routing = routing or model.config.routing
    if routing is None:
        raise ValueError("a dense model has no thresholds to calibrate: its config has no routing")
    routing = without_thresholds(routing, capacity)
    with inference(model):
        parts = [model.embed(part_BT) for part_BT in tokens_BT.split(ROWS)]
        for number, layer in enumerate(model.layers):
            if number in model.config.routed_layers:
                made = [model.run_layer(layer, part, "causal", routing)[1].routing for part in parts]
                routing = with_threshold(routing, made)
            parts = [model.run_layer(layer, part, "causal", routing)[0] for part in parts]
    return routing
