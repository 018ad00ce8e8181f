"""Tiny random models of the families that transformers has, built from their configs."""

from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY, LAYERS = 97, 5
LARGEST = 3_000_000  # parameters

# By the name of a field, in whatever config has it.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "word_embed_proj_dim": 32,
    "embedding_size": 32,
    "num_hidden_layers": LAYERS,
    "num_layers": LAYERS,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_layers": LAYERS,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "ffn_hidden_size": 48,
    "n_inner": 48,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "sliding_window": 8,
    "attention_chunk_size": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "rotary_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 1,
    "mamba_n_groups": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dropout": 0.0,
    "is_decoder": True,
}


# What one family needs to be small, or to have attention at all.
MIXED = ["mamba", "attention", "mamba", "attention", "attention"]
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3, 4]},
    "cpmant": {"dim_model": 32, "dim_ff": 48, "dim_head": 8},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 2], [["global"], 1]]},
    "granitemoehybrid": {"layer_types": MIXED},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "minimax": {
        "layer_types": ["linear_attention", "full_attention", "full_attention", "full_attention", "full_attention"]
    },
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "attention", "attention", "mlp"]},
    "roc_bert": {"pronunciation_vocab_size": 20, "shape_vocab_size": 20},
    "xmod": {"default_language": "en_XX"},
    "reformer": {"axial_pos_embds_dim": (8, 24), "axial_pos_shape": (8, 16)},
    "zamba2": {"layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid"]},
}


def families() -> list[str]:
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(family: str, **overrides: Any) -> Any:
    config_class = CONFIG_MAPPING[family]
    known = set(getattr(config_class, "__dataclass_fields__", ())) | set(getattr(config_class, "attribute_map", {}))
    sizes = {name: value for name, value in SIZES.items() if name in known}
    if "qk_rope_head_dim" in known:
        sizes.pop("head_dim", None)  # follows from the others
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    # An alias and what it stands for would be set twice.
    for alias, name in getattr(config_class, "attribute_map", {}).items():
        if name in sizes:
            sizes.pop(alias, None)
    return config_class(**{**sizes, **OVERRIDES.get(family, {}), **overrides})


def tiny_model(family: str, **overrides: Any) -> PreTrainedModel:
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    model_class = getattr(transformers, name if isinstance(name, str) else name[0])
    config = tiny_config(family, **overrides)
    with torch.device("meta"):
        size = sum(weight.numel() for weight in model_class(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters are not tiny: a size is missing in tests/tiny_models.py")
    torch.manual_seed(0)
    return model_class(config).eval()
