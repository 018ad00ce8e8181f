"""The package `mixture-of-depth` on transformers' Llama. Imports nothing of ours.

It routes every second layer, as we do. In training it lets the capacity fall from 1 over 1,000 steps, which is switched
off here by leaving its routers in evaluation; it computes one token less than k. With a cache its rows share keys and
values, so it prefills without one, and its generation is left out.
"""

from typing import Any

from llama import Llama, new_llama
from MoD import apply_mod_to_hf


def build(shape: dict[str, Any]) -> Llama:
    model = apply_mod_to_hf(new_llama(shape))
    layers = []
    for number, layer in enumerate(model.model.layers):
        routed = number in shape["routed_layers"]
        if routed:
            layer.capacity = shape["capacity"]
            layer.router.train = lambda mode=True, router=layer.router: router
            layer.router.training = False
        layers.append(layer.block if routed else layer)
    return Llama(model, use_cache=False, layers=layers)
