"""`soup-cli`'s Mixture-of-Depths on transformers' Llama. Imports nothing of ours.

It routes every layer, unless a layer says that it has been patched. It saves nothing with a cache, so it prefills
without one, and its generation, which computes all tokens, is left out.
"""

from typing import Any

from llama import Llama, new_llama
from soup_cli.utils.mod import apply_mod_patch


def build(shape: dict[str, Any]) -> Llama:
    model = new_llama(shape)
    for number, layer in enumerate(model.model.layers):
        layer._soup_mod_patched = number not in shape["routed_layers"]
    apply_mod_patch(model, capacity_factor=shape["capacity"])
    return Llama(model, use_cache=False)
