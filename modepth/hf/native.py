"""A Llama of transformers, converted or not, as what a native decoder is made of: the way back from `export`."""

from typing import Any

from torch import Tensor

from modepth.config import ModelConfig
from modepth.hf.model import PREFIX, ROUTER, RoutedModel, routing_of

LIKE_LLAMA = ("llama", "mistral")


def native_parts(model: Any) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The config and the `state_dict` of the native decoder that computes what `model` does.

    >>> import torch
    >>> from modepth import Transformer
    >>> from modepth.hf import export
    >>> native = Transformer(ModelConfig(vocab_size=97, num_layers=2, dim=32, num_heads=2)).eval()
    >>> config, weights = native_parts(export(native.config, native.state_dict()))
    >>> config.routed_layers == native.config.routed_layers, weights.keys() == native.state_dict().keys()
    (True, True)
    """
    weights = {name.removeprefix("model.").replace(f".{ROUTER}.", ".router."): tensor
               for name, tensor in model.state_dict().items()}  # fmt: skip
    return native_config(model), weights


def native_config(model: Any) -> ModelConfig:
    """The config, or a ValueError that says what the model has and the native decoder does not."""
    theirs = model.config
    family = theirs.model_type.removeprefix(PREFIX)
    reasons = [f"it is a {family}"] if family not in LIKE_LLAMA else differences(theirs)
    if reasons:
        raise ValueError(
            f"{type(model).__name__} cannot become a native decoder: {', '.join(reasons)}. Llamas can, converted or "
            "not; others are served by `transformers serve`"
        )
    return ModelConfig(
        vocab_size=theirs.vocab_size,
        num_layers=theirs.num_hidden_layers,
        dim=theirs.hidden_size,
        num_heads=theirs.num_attention_heads,
        num_kv_heads=theirs.num_key_value_heads if theirs.num_key_value_heads != theirs.num_attention_heads else None,
        mlp_dim=theirs.intermediate_size,
        max_length=theirs.max_position_embeddings,
        rope_theta=rope_of(theirs).get("rope_theta", 10_000.0),
        norm_eps=theirs.rms_norm_eps,
        tie_embeddings=theirs.tie_word_embeddings,
        routing=routing_of(theirs) if isinstance(model, RoutedModel) else None,
    )


def differences(theirs: Any) -> list[str]:
    """What a config asks for that the native decoder cannot do."""
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    found = {
        "it has biases": getattr(theirs, "attention_bias", False) or getattr(theirs, "mlp_bias", False),
        f"its heads have width {head_dim}": head_dim * theirs.num_attention_heads != theirs.hidden_size,
        f"its activation is {theirs.hidden_act}": theirs.hidden_act != "silu",
        "its rotary positions are scaled": rope_of(theirs).get("rope_type", "default") != "default",
        "it has a sliding window": getattr(theirs, "sliding_window", None) is not None,
    }
    return [name for name, is_so in found.items() if is_so]


def rope_of(theirs: Any) -> dict[str, Any]:
    return getattr(theirs, "rope_parameters", None) or {}
