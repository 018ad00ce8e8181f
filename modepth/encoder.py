"""The sequence encoder: vectors over time in, one vector out, every layer routed.

    x -> input projection -> for each layer: x = layer(x) -> last real step -> norm

`build` makes it. Positions are rotary, those of the steps in their row, and travel with the steps. Rows
are padded at their end.

Three things are unusual. The last real step is read out, so a layer that skips steps always computes that
one, within its k. A step counts in the attention of others as much as its gate says: no loss looks at the
steps that are not read out, so a router could else hardly learn which of them matter. And padding is
replaced by zeros where it enters: it may hold anything, NaN included.

Shapes: B batch, T steps, K slots of the routed steps, D width, H heads, E width of a head.
"""

import inspect
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modepth.blocks import rotary
from modepth.config import ModelConfig, RoutingConfig
from modepth.fused import rotate
from modepth.routing import Router, apply_routed, real_tokens
from modepth.validation import check_choice, check_count, check_flag, check_number, check_tensor, is_number, shown

LEAST_WEIGHT = 1e-6  # of a step in attention, for a finite logarithm

EncoderRouting = Literal["topk", "soft", "random"]
EncoderGate = Literal["sigmoid", "one"]


def build(
    embed_dim: int,
    hidden_size: int = 256,
    num_heads: int = 4,
    capacity_ratio: float = 0.5,
    num_layers: int = 4,
    dropout: float = 0.1,
    window_size: int = 60,
    *,
    routing: EncoderRouting = "topk",
    gate: EncoderGate = "sigmoid",
    causal: bool = False,
) -> "Encoder":
    """An encoder from (B, T, embed_dim) to (B, hidden_size).

    capacity_ratio   the share of a row's steps that a layer computes, in (0, 1]
    window_size      the longest sequence that is accepted
    routing          topk: the best steps are computed, the last one always, the others skip;
                     soft: all are computed and attend, the best are blended by their gate;
                     random: as topk, by noise instead of scores, a control
    gate             what blends: sigmoid of a step's score, or one; one with capacity_ratio 1 is the dense encoder
    causal           whether a step attends to earlier steps only

    >>> encoder = build(embed_dim=7, hidden_size=32)
    >>> encoder(torch.randn(3, 20, 7), lengths=torch.tensor([20, 9, 1])).shape
    torch.Size([3, 32])
    """
    counts = {"embed_dim": embed_dim, "hidden_size": hidden_size, "num_heads": num_heads, "num_layers": num_layers}
    for name, value in {**counts, "window_size": window_size}.items():
        check_count(name, value, low=1)
    if hidden_size % (2 * num_heads):
        raise ValueError(
            f"hidden_size must be an even multiple of num_heads (rotary positions turn pairs), "
            f"got hidden_size {hidden_size} and num_heads {num_heads}"
        )
    if not is_number(capacity_ratio) or not 0 < capacity_ratio <= 1:
        raise ValueError(
            f"capacity_ratio must be a number in (0, 1], got {shown(capacity_ratio)} "
            "(for a dense encoder: capacity_ratio=1.0, gate='one')"
        )
    check_number("dropout", dropout, low=0.0, high=1.0)
    check_choice("routing", routing, EncoderRouting)
    check_choice("gate", gate, EncoderGate)
    check_flag("causal", causal)
    config = RoutingConfig(capacity=capacity_ratio, selection=routing, gate=gate)
    blocks = [Block(hidden_size, num_heads, dropout, causal) for _ in range(num_layers)]
    layers = [RoutedBlock(block, config, number) for number, block in enumerate(blocks)]
    return Encoder(embed_dim, layers, window_size)


def recommended_defaults() -> dict[str, Any]:
    """The options of `build` that have defaults, with those.

    >>> recommended_defaults()["capacity_ratio"]
    0.5
    """
    parameters = inspect.signature(build).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def output_size(**options: Any) -> int:
    """The width of what `build(**options)` returns; `embed_dim` may be left out.

    >>> output_size(), output_size(embed_dim=287, hidden_size=64)
    (256, 64)
    """
    given = inspect.signature(build).bind_partial(**options).arguments  # a TypeError for an unknown option
    hidden_size: int = {**recommended_defaults(), **given}["hidden_size"]
    check_count("hidden_size", hidden_size, low=1)
    return hidden_size


class Encoder(nn.Module):
    """What `build` makes: an input projection, routed blocks, the last real step, a norm."""

    def __init__(self, embed_dim: int, layers: "list[RoutedBlock]", window_size: int) -> None:
        super().__init__()
        self.window_size = window_size
        self.head_dim = layers[0].block.head_dim
        self.project = nn.Linear(embed_dim, layers[0].block.dim)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(layers[0].block.dim, eps=ModelConfig.norm_eps)

    def forward(self, x_BTC: Tensor, lengths: Tensor | None = None) -> Tensor:
        """The vector of each row's last real step.

        lengths   the number of real steps of each row, (B,), the rest being padding; None: there is none.
                  A forward must not branch on data, so they are not checked here but by `check_lengths`:
                  a row of length 0 gives zeros, an impossible length NaN.
        """
        self.check_steps(x_BTC)
        B, T, _ = x_BTC.shape
        if lengths is None:
            lengths = torch.full((B,), T, device=x_BTC.device)
        real_BT = real_tokens(lengths, B, T)
        position_1T = torch.arange(T, device=x_BTC.device).unsqueeze(0)
        last_BT = position_1T == lengths.unsqueeze(1) - 1
        x_BTD = self.project(x_BTC.masked_fill(~real_BT.unsqueeze(-1), 0.0))
        rope_1TE = rotary(position_1T, self.head_dim, ModelConfig.rope_theta).to(x_BTD.dtype)
        rope_BTE = rope_1TE.expand(B, -1, -1).contiguous()
        for layer in self.layers:
            x_BTD = layer(x_BTD, rope_BTE, real_BT, last_BT)
        out_BD = self.norm(x_BTD.masked_fill(~last_BT.unsqueeze(-1), 0.0).sum(1))  # one step a row: the sum is exact
        impossible_B = (lengths < 0) | (lengths > T)
        return out_BD.masked_fill(impossible_B.unsqueeze(1), torch.nan)

    def check_steps(self, x_BTC: Tensor) -> None:
        check_tensor("x", x_BTC, (None, None, self.project.in_features))
        if not x_BTC.is_floating_point():
            raise ValueError(f"x must hold floating-point numbers, got {x_BTC.dtype}: convert it, x.float()")
        if not 1 <= x_BTC.shape[1] <= self.window_size:
            raise ValueError(
                f"a sequence must have 1 to {self.window_size} steps, got {x_BTC.shape[1]}: "
                f"pass its last {self.window_size}, or build with a larger window_size"
            )


class RoutedBlock(nn.Module):
    """A block with its router."""

    def __init__(self, block: "Block", routing: RoutingConfig, number: int) -> None:
        super().__init__()
        self.block = block
        self.router = Router(block.dim, routing, number)
        self.skips = routing.selection != "soft"

    def forward(self, x_BTD: Tensor, rope_BTE: Tensor, real_BT: Tensor, last_BT: Tensor) -> Tensor:
        routing = self.router(x_BTD, real_BT, always_BT=last_BT if self.skips else None)
        weight_BK = routing.gate_BK if self.skips else torch.ones_like(routing.gate_BK)
        rope_BKE = routing.gather(rope_BTE)
        return apply_routed(x_BTD, routing, lambda x: self.block(x, rope_BKE, routing.valid_BK, weight_BK))


class Block(nn.Module):
    """Attention among the steps in its slots, then a feed-forward, each added to the stream.

    A step of weight 0.5 counts half in everyone's attention, so one of weight 0 is as good as skipped.
    """

    def __init__(self, dim: int, num_heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.dim = dim
        self.head_dim = dim // num_heads
        self.causal = causal
        self.attention_norm = nn.RMSNorm(dim, eps=ModelConfig.norm_eps)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.mlp_norm = nn.RMSNorm(dim, eps=ModelConfig.norm_eps)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BKD: Tensor, rope_BKE: Tensor, valid_BK: Tensor, weight_BK: Tensor) -> Tensor:
        x_BKD = x_BKD + self.dropout(self.attend(self.attention_norm(x_BKD), rope_BKE, valid_BK, weight_BK))
        return x_BKD + self.dropout(self.mlp(self.mlp_norm(x_BKD)))

    def attend(self, x_BKD: Tensor, rope_BKE: Tensor, valid_BK: Tensor, weight_BK: Tensor) -> Tensor:
        q_BKHE, k_BKHE, v_BKHE = self.qkv(x_BKD).unflatten(-1, (3, -1, self.head_dim)).unbind(2)
        slot_K = torch.arange(x_BKD.shape[1], device=x_BKD.device)
        # A slot sees itself, even an invalid one: a softmax over nothing has the gradient NaN.
        seen_BKK = valid_BK.unsqueeze(1) | (slot_K == slot_K.unsqueeze(1))
        if self.causal:  # slots are sorted by position
            seen_BKK = seen_BKK & (slot_K <= slot_K.unsqueeze(1))
        bias_BKK = weight_BK.clamp(min=LEAST_WEIGHT).log().unsqueeze(1).masked_fill(~seen_BKK, -torch.inf)
        out_BHKE = F.scaled_dot_product_attention(
            rotate(q_BKHE, rope_BKE).transpose(1, 2),
            rotate(k_BKHE, rope_BKE).transpose(1, 2),
            v_BKHE.transpose(1, 2),
            attn_mask=bias_BKK.unsqueeze(1).to(q_BKHE.dtype),
            dropout_p=self.dropout.p if self.training else 0.0,
        )
        return self.out(out_BHKE.transpose(1, 2).flatten(2))


def check_lengths(lengths_B: Tensor, num_steps: int) -> None:
    """Raise unless all lengths are in 1..num_steps. Call it where data enters: a forward must not branch on data.

    >>> check_lengths(torch.tensor([5, 9]), num_steps=8)
    Traceback (most recent call last):
    ValueError: lengths must be in 1..8, got 9 at row 1: cut the row to its last 8 steps, or leave an empty row out
    """
    check_tensor("lengths", lengths_B, (None,), kind="whole")
    outside_B = (lengths_B < 1) | (lengths_B > num_steps)
    if outside_B.any():
        row = int(outside_B.nonzero()[0])
        raise ValueError(
            f"lengths must be in 1..{num_steps}, got {lengths_B[row].item()} at row {row}: "
            f"cut the row to its last {num_steps} steps, or leave an empty row out"
        )
