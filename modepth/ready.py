"""A decoder rebuilt for a token at a time, where the time of a product is that of reading its weights.

Maps of the same input are joined into one, and weights lie as oneDNN reads them.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modepth.blocks import Attention, FeedForward
from modepth.fused import rotate
from modepth.model import Transformer
from modepth.products import by_onednn, takes

PACKED_FOR = 32  # tokens of a product: the layout chosen for these is the fastest one for 4 and for 512, too
LEAST_ROWS = 4  # fewer take longer: oneDNN has another way for them, which is slower


def ready_to_generate(model: Transformer) -> Transformer:
    """Change the model for generation: it computes what it did, up to rounding, and is not to be trained or saved.

    >>> from modepth import ModelConfig, Transformer
    >>> model = ready_to_generate(Transformer(ModelConfig(vocab_size=101, num_layers=2, dim=32, num_heads=2)))
    >>> model.layers[0].self_attn
    JoinedAttention(
      (qkv_proj): PackedLinear(32, 96)
      (o_proj): PackedLinear(32, 32)
    )
    """
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            for kind, joined in JOINED.items():
                if type(child) is kind:
                    setattr(parent, name, joined(child))
    model.lm_head = packed(model.lm_head.weight)  # beside an embedding of the same weights, of which tokens read rows
    return model.requires_grad_(False)


def packed(*weights: Tensor) -> Any:
    """One map without bias, whose output is that of all these weights, one after the other."""
    weight_OI = torch.cat([each.detach() for each in weights])
    if takes(weight_OI, weight_OI):
        return PackedLinear(weight_OI)
    linear = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight_OI)
    return linear


class PackedLinear(nn.Module):
    """A map whose weights are in a layout of oneDNN's own."""

    packed: Tensor

    def __init__(self, weight_OI: Tensor) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_OI.shape
        self.register_buffer("packed", torch.ops.mkldnn._reorder_linear_weight(weight_OI, PACKED_FOR))

    @property
    def weight(self) -> Tensor:
        return self.packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        num_rows = x.shape[-2]
        if num_rows < LEAST_ROWS:
            return by_onednn(F.pad(x, (0, 0, 0, LEAST_ROWS - num_rows)), self.packed)[..., :num_rows, :]
        return by_onednn(x, self.packed)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}"


class JoinedAttention(Attention):
    def __init__(self, attention: Attention) -> None:
        nn.Module.__init__(self)
        self.number, self.head_dim, self.dropout = attention.number, attention.head_dim, attention.dropout
        maps = attention.q_proj, attention.k_proj, attention.v_proj
        self.num_heads, self.kv_heads, _ = (each.out_features // attention.head_dim for each in maps)
        self.qkv_proj = packed(*(each.weight for each in maps))
        self.o_proj = packed(attention.o_proj.weight)

    def project(self, x_BTD: Tensor, rope_BTE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.qkv_proj(x_BTD).unflatten(-1, (-1, self.head_dim))
        turned, v_BTGE = heads.tensor_split([self.num_heads + self.kv_heads], dim=2)
        q_BTHE, k_BTGE = rotate(turned, rope_BTE).tensor_split([self.num_heads], dim=2)
        return q_BTHE, k_BTGE, v_BTGE


class JoinedFeedForward(FeedForward):
    def __init__(self, feed_forward: FeedForward) -> None:
        nn.Module.__init__(self)
        self.gate_up_proj = packed(feed_forward.gate_proj.weight, feed_forward.up_proj.weight)
        self.down_proj = packed(feed_forward.down_proj.weight)

    def project(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        return self.gate_up_proj(x_BTD).chunk(2, dim=-1)


JOINED = {Attention: JoinedAttention, FeedForward: JoinedFeedForward}
