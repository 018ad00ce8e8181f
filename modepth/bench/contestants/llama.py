"""transformers' Llama, dense; what the converted one and the peers are made of, too. Imports nothing of ours."""

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM


def build(shape: dict[str, Any]) -> "Llama":
    return Llama(new_llama(shape))


def new_llama(shape: dict[str, Any]) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["dim"],
        intermediate_size=shape["mlp_width"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_heads"],
        max_position_embeddings=shape["length"],
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    config.architectures = ["LlamaForCausalLM"]
    return LlamaForCausalLM(config)


class Llama:
    """A transformers model, called as its users call it."""

    def __init__(self, model: LlamaForCausalLM, use_cache: bool = True, layers: list[Any] | None = None) -> None:
        self.model = model
        self.use_cache = use_cache
        self.layers = list(model.model.layers) if layers is None else layers

    def loss(self, tokens_BT: Tensor) -> Tensor:
        return self.model(input_ids=tokens_BT, labels=tokens_BT, position_ids=places(tokens_BT), use_cache=False).loss

    def prefill(self, tokens_BT: Tensor) -> Tensor:
        out = self.model.model(input_ids=tokens_BT, position_ids=places(tokens_BT), use_cache=self.use_cache)
        return self.model.lm_head(out.last_hidden_state[:, -1:])

    def generate(self, tokens_BT: Tensor, count: int) -> object:
        model: Any = self.model
        return model.generate(
            tokens_BT, attention_mask=torch.ones_like(tokens_BT), max_new_tokens=count, do_sample=False
        )


def places(tokens_BT: Tensor) -> Tensor:
    """Given in full, since one peer does not spread them over the rows."""
    return torch.arange(tokens_BT.shape[1]).expand(tokens_BT.shape)
