"""transformers' Llama with our routing."""

from typing import Any

import torch
from llama import Llama, new_llama
from torch import Tensor

from modepth.config import RoutingConfig
from modepth.hf import calibrate, convert, routing_mode


def build(shape: dict[str, Any]) -> "Converted":
    model = convert(new_llama(shape), RoutingConfig(capacity=shape["capacity"], every=2), router_init="normal")
    sample = torch.randint(shape["vocab_size"], (4, shape["length"]))
    calibrate(model, sample, shape["capacity"])
    return Converted(model)


class Converted(Llama):  # type: ignore[misc]
    """Trained by top-k; prefill and generation are causal."""

    def loss(self, tokens_BT: Tensor) -> Tensor:
        routing_mode(self.model, "topk")
        loss = super().loss(tokens_BT)
        routing_mode(self.model, "causal")
        return loss
