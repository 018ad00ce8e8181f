"""Law 11: the native decoder without routing is the Llama of transformers."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.oracles import tiny_model, tiny_tokens


@pytest.mark.law
@pytest.mark.parametrize("tied", [True, False])
def test_the_dense_decoder_equals_the_llama_of_transformers(tied):
    model = tiny_model(routing=None, tie_embeddings=tied, rope_theta=500.0)
    config = model.config
    llama_config = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.mlp_width,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.max_length,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=tied,
    )
    llama = LlamaForCausalLM(llama_config)
    weights = {name if name.startswith("lm_head") else f"model.{name}": w for name, w in model.state_dict().items()}
    llama.load_state_dict(weights)
    tokens = tiny_tokens()
    ours = model(tokens, targets=tokens.roll(-1, 1))
    theirs = llama(tokens).logits
    assert theirs.abs().max() > 1
    torch.testing.assert_close(model(tokens).logits_BTV, theirs, rtol=1e-5, atol=1e-5)
    ours.loss.backward()
    torch.nn.functional.cross_entropy(theirs.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    for name, parameter in model.named_parameters():
        theirs_name = name if name.startswith("lm_head") else f"model.{name}"
        torch.testing.assert_close(parameter.grad, llama.get_parameter(theirs_name).grad, rtol=1e-4, atol=1e-5)
