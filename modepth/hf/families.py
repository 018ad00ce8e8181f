"""All that is known of single architectures of transformers, in one place.

Everything else in this package treats decoders alike: whatever is not listed here is handled by the general rule,
checked by `verify` at conversion, and refused if it does not fit.
"""

# Families that are refused although a short test might pass, or that no layer-wise routing can serve.
REFUSED = {
    "gpt_neo": "its attention masks by index inside a buffer of its own, so tokens left out would shift the others",
    "recurrent_gemma": "its attention counts positions by itself",
    "llama4_text": "its layers without rotary positions scale queries by index",
    "llama4": "its layers without rotary positions scale queries by index",
    "minimax_m3": "its attention counts positions by itself",
    "mpt": "its position bias is laid out by index, for all tokens",
    "cpmant": "its position bias is laid out by index, for all tokens",
    "gemma3n": "its layers share keys and values with later ones",
    "gemma3n_text": "its layers share keys and values with later ones",
    "falcon_h1": "its layers mix attention with a state that every token must enter",
    "zaya": "its layers mix attention with a state that every token must enter",
    "mamba": "it has no attention layers: every token must enter its state",
    "mamba2": "it has no attention layers: every token must enter its state",
    "falcon_mamba": "it has no attention layers: every token must enter its state",
    "rwkv": "it has no attention layers: every token must enter its state",
    "xlstm": "it has no attention layers: every token must enter its state",
}

# Names of a layer's arguments. Any other tensor with more than one element is refused.
CACHES = ("past_key_values", "layer_past", "past_key_value")
MASKS = ("attention_mask", "causal_mask")
PER_TOKEN = {  # name: (axis of the batch, axis of the tokens), from the end
    "position_ids": (-2, -1),
    "position_embeddings": (-3, -2),
    "sinusoidal_pos": (-4, -2),
}
PER_KEY = ("alibi",)  # (batch * heads, 1, keys)

# The number of values that a layer returns, where it is a tuple.
RETURNS = {
    "bamba": 2,
    "bloom": 2,
    "codegen": 2,
    "falcon": 2,
    "gpt_neox_japanese": 2,
    "gptj": 2,
    "megatron-bert": 2,
    "mvp": 1,
    "rembert": 2,
    "roformer": 2,
    "trocr": 1,
}

# Where norms, attention and feed-forward are, in layers of the form x + attention(norm(x)), then x + mlp(norm(x)).
PRE_NORM = (
    ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"),
    ("ln_1", "attn", "ln_2", "mlp"),
)
