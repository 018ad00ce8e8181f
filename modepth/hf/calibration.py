"""The dial of a converted model: thresholds that route a wanted share of tokens like those given."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from modepth.config import RoutingConfig
from modepth.hf.model import RoutedModel, routed_layers, routing_mode, set_routing
from modepth.thresholds import with_threshold, without_thresholds


@torch.no_grad()
def calibrate(
    model: PreTrainedModel, input_ids: Tensor, capacity: float, *, attention_mask: Tensor | None = None
) -> RoutingConfig:
    """Set the thresholds with which the model's causal rule routes the share `capacity` of such tokens; returns them.

    One forward for each routed layer, since what a layer sees depends on what those before it routed.
    """
    if not isinstance(model, RoutedModel):
        raise ValueError(f"{type(model).__name__} has no routed layers: convert it first")
    before = model.routing_state.config
    routing, training = without_thresholds(before, capacity), model.training
    model.eval()
    try:
        with routing_mode(model, "causal"):
            for layer in routed_layers(model).values():
                set_routing(model, routing)
                model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
                routing = with_threshold(routing, [layer.routing])
        set_routing(model, routing)
    except BaseException:
        set_routing(model, before)
        raise
    finally:
        model.train(training)
    return routing
