"""A decoder rebuilt for a token at a time, where the time of a product is that of reading its weights.

Maps of the same input are joined into one, and weights lie by columns, which a product of few tokens reads faster.
"""

import torch
from torch import Tensor, nn

from modepth.blocks import Attention, FeedForward
from modepth.fused import rotate
from modepth.model import Transformer


def ready_to_generate(model: Transformer) -> Transformer:
    """Change the model for generation: it computes what it did, up to rounding, but is not to be trained or saved.

    >>> from modepth import ModelConfig, Transformer
    >>> model = ready_to_generate(Transformer(ModelConfig(vocab_size=101, num_layers=2, dim=32, num_heads=2)))
    >>> model.layers[0].self_attn
    JoinedAttention(
      (o_proj): Linear(in_features=32, out_features=32, bias=False)
      (qkv_proj): Linear(in_features=32, out_features=96, bias=False)
    )
    """
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            for kind, joined in JOINED.items():
                if type(child) is kind:
                    setattr(parent, name, joined(child))
    for module in model.modules():
        # Of an embedding that is also the `lm_head`, tokens read rows.
        if isinstance(module, nn.Linear) and module.weight is not model.embed_tokens.weight:
            module.weight = nn.Parameter(module.weight.detach().t().contiguous().t(), requires_grad=False)
    return model


def join(*maps: nn.Linear) -> nn.Linear:
    """One map whose output is that of all, one after the other."""
    joined = nn.Linear(maps[0].in_features, sum(each.out_features for each in maps), bias=False, device="meta")
    joined.weight = nn.Parameter(torch.cat([each.weight.detach() for each in maps]), requires_grad=False)
    return joined


class JoinedAttention(Attention):
    def __init__(self, attention: Attention) -> None:
        nn.Module.__init__(self)
        self.number, self.head_dim, self.dropout = attention.number, attention.head_dim, attention.dropout
        self.o_proj = attention.o_proj
        self.qkv_proj = join(attention.q_proj, attention.k_proj, attention.v_proj)
        self.num_heads, self.kv_heads = (
            each.out_features // attention.head_dim for each in (attention.q_proj, attention.k_proj)
        )

    def project(self, x_BTD: Tensor, rope_BTE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.qkv_proj(x_BTD).unflatten(-1, (-1, self.head_dim))
        turned, v_BTGE = heads.tensor_split([self.num_heads + self.kv_heads], dim=2)
        q_BTHE, k_BTGE = rotate(turned, rope_BTE).tensor_split([self.num_heads], dim=2)
        return q_BTHE, k_BTGE, v_BTGE


class JoinedFeedForward(FeedForward):
    def __init__(self, feed_forward: FeedForward) -> None:
        nn.Module.__init__(self)
        self.down_proj = feed_forward.down_proj
        self.gate_up_proj = join(feed_forward.gate_proj, feed_forward.up_proj)

    def project(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        return self.gate_up_proj(x_BTD).chunk(2, dim=-1)


JOINED = {Attention: JoinedAttention, FeedForward: JoinedFeedForward}
