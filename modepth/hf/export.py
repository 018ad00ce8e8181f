"""A native decoder as a transformers model: a Llama, and routers where it has them.

The native names are Llama's, so that only a prefix is added. What generates, evaluates and serves transformers
models then takes ours.
"""

from typing import Any

from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from modepth.config import ModelConfig
from modepth.hf.classes import model_class
from modepth.hf.model import ROUTER, plain


def export(config: ModelConfig, weights: dict[str, Tensor], *, end_of_text: int | None = None) -> Any:
    """The transformers model of a native one's config and `state_dict()`, in causal mode.

    >>> import torch
    >>> from modepth import Transformer
    >>> native = Transformer(ModelConfig(vocab_size=97, num_layers=2, dim=32, num_heads=2)).eval()
    >>> llama, tokens = export(native.config, native.state_dict()), torch.randint(97, (2, 9))
    >>> torch.allclose(llama(tokens).logits, native(tokens).logits_BTV, atol=1e-5)
    True
    """
    model = empty(config, end_of_text).to(next(iter(weights.values())).dtype)
    model.load_state_dict({exported_name(name): tensor for name, tensor in weights.items()}, strict=True)
    return model.eval()


def empty(config: ModelConfig, end_of_text: int | None) -> Any:
    if config.experts is not None:
        raise ValueError(f"experts cannot be exported: a Llama has one feed-forward a layer, got {config.experts}")
    llama = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.mlp_width,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.max_length,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tie_embeddings,
        bos_token_id=None,
        eos_token_id=end_of_text,
        pad_token_id=end_of_text,
    )
    if config.routing is None:
        return LlamaForCausalLM(llama)
    made = model_class(LlamaForCausalLM)
    llama.__class__ = made.config_class
    llama.routing = plain(config.routing)
    return made(llama)


def exported_name(name: str) -> str:
    """As transformers calls a native parameter."""
    name = name.replace(".router.", f".{ROUTER}.")
    return name if name.startswith("lm_head.") else f"model.{name}"
