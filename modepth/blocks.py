"""The parts of a decoder layer: attention with rotary positions, and the feed-forward.

Shapes: B batch, T tokens, D width, H heads, G heads of keys and values, E width of a head.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from modepth.attention import causal_attention
from modepth.cache import NewTokens
from modepth.config import ModelConfig
from modepth.fused import rotate, swiglu
from modepth.products import Linear
from modepth.routing import Routing


class Context(NamedTuple):
    """What attention knows of the tokens besides their states: it travels with them when some are left out."""

    rope_BTE: Tensor
    new: NewTokens | None = None  # the rows and caches of `extend`

    def gather(self, routing: Routing) -> "Context":
        return Context(routing.gather(self.rope_BTE), None if self.new is None else self.new.gather(routing))


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped keys and values."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        self.number = number  # of the layer
        self.head_dim = config.head_dim
        self.dropout = config.dropout
        kv_dim = config.kv_heads * config.head_dim
        self.q_proj = Linear(config.dim, config.dim)
        self.k_proj = Linear(config.dim, kv_dim)
        self.v_proj = Linear(config.dim, kv_dim)
        self.o_proj = Linear(config.dim, config.dim)

    def project(self, x_BTD: Tensor, rope_BTE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, turned, and values, each (B, T, H or G, E)."""
        q_BTHE, k_BTGE, v_BTGE = (
            each(x_BTD).unflatten(-1, (-1, self.head_dim)) for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(q_BTHE, rope_BTE), rotate(k_BTGE, rope_BTE), v_BTGE

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        q_BTHE, k_BTGE, v_BTGE = self.project(x_BTD, context.rope_BTE)
        if context.new is not None:
            return self.o_proj(context.new.attend(self.number, q_BTHE, k_BTGE, v_BTGE).flatten(2))
        # Routed tokens are sorted by position and padding comes last, so lower triangular is right for all.
        q_BHTE, k_BGTE, v_BGTE = (each.transpose(1, 2) for each in (q_BTHE, k_BTGE, v_BTGE))
        out_BHTE = causal_attention(q_BHTE, k_BGTE, v_BGTE, self.dropout if self.training else 0.0)
        return self.o_proj(out_BHTE.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.dim, config.mlp_width)
        self.up_proj = Linear(config.dim, config.mlp_width)
        self.down_proj = Linear(config.mlp_width, config.dim)

    def project(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        return self.gate_proj(x_BTD), self.up_proj(x_BTD)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(swiglu(*self.project(x_BTD)))


def rotary(position_BT: Tensor, head_dim: int, theta: float) -> Tensor:
    """Cosines, then sines, of each position's angles, in float32: (B, T, E)."""
    exponent = torch.arange(0, head_dim, 2, device=position_BT.device).float() / head_dim
    angle = position_BT.unsqueeze(-1).float() * (1.0 / theta**exponent)
    return torch.cat((angle.cos(), angle.sin()), dim=-1)
