"""Slow and obviously right: what the laws compare the package with.

Written apart from it, in Python loops and explicit masks, and small models to run both on. Sizes
are distinct, and prime where they can be, so that a swapped axis cannot pass.
"""

import math
from dataclasses import replace

import torch
from torch import nn

from modepth import ModelConfig, RoutingConfig, Transformer

GATES = {
    "sigmoid": lambda r: 1 / (1 + math.exp(-r)),
    "raw": lambda r: r,
    "double_sigmoid": lambda r: 2 / (1 + math.exp(-r)),
    "tanh": lambda r: 1 + 0.2 * math.tanh(r),
    "one": lambda r: 1.0,
}
HARD_SELECTIONS = ("topk", "random", "stride", "token_choice", "threshold")
SELECTIONS = (*HARD_SELECTIONS, "soft")
PARTS = ("block", "attention", "mlp")


def tiny_config(**changes):
    routing = RoutingConfig(capacity=0.3, every=2, router_init="normal")
    config = ModelConfig(
        vocab_size=97, num_layers=5, dim=60, num_heads=6, num_kv_heads=3, mlp_dim=41, max_length=64, routing=routing
    )
    routing_changes = {name: changes.pop(name) for name in list(changes) if hasattr(routing, name)}
    if routing_changes:
        config = replace(config, routing=replace(routing, **routing_changes))
    return replace(config, **changes)


def tiny_model(seed=0, **changes):
    """A small routed decoder whose random routers give widely different scores."""
    torch.manual_seed(seed)
    model = Transformer(tiny_config(**changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
        for layer in model.layers:
            if layer.router is not None and model.config.routing.router_init == "normal":
                layer.router.score.weight.normal_(std=2.0)
    return model


def tiny_tokens(B=3, T=23, seed=1):
    return torch.randint(97, (B, T), generator=torch.Generator().manual_seed(seed))


class MixingBlock(nn.Module):
    """A causal block in which every token depends on all earlier ones, and on its own position if it is given."""

    def __init__(self, dim):
        super().__init__()
        self.mix = nn.Linear(dim, dim)

    def forward(self, x, positions=None):
        count = torch.arange(1, x.shape[1] + 1).unsqueeze(-1)
        update = torch.tanh(self.mix(x.cumsum(1) / count))
        return x + (update if positions is None else update * positions.unsqueeze(-1))


def top_slowly(scores, candidates, k):
    """The k best of `candidates`, the lowest index first among equals, in order of position."""
    return sorted(sorted(candidates, key=lambda token: (-scores[token], token))[:k])


def apply_slowly(x_BTD, routing, block, gate):
    """One row, then one token at a time: x + gate * (block(x) - x) for those chosen, x for the others."""
    out_BTD = x_BTD.clone()
    for row, x_TD in enumerate(x_BTD):
        members = [token for token in range(len(x_TD)) if routing.chosen_BT[row, token]]
        if not members:
            continue
        y_KD = block(x_TD[members].unsqueeze(0))[0]
        for slot, token in enumerate(members):
            weight = gate(routing.logit_BT[row, token].item())
            out_BTD[row, token] = x_TD[token] + weight * (y_KD[slot] - x_TD[token])
    return out_BTD


def attend_masked(layer, config, x_BTD, visible_BT):
    """A layer's attention for all tokens at their own positions, seeing only earlier tokens that are visible."""
    B, T, D = x_BTD.shape
    H, E = config.num_heads, config.head_dim
    attention, x = layer.self_attn, layer.input_layernorm(x_BTD)

    def turned(values):  # rotary positions as a complex factor; their angles are float32 in any model
        frequency = 1.0 / config.rope_theta ** (torch.arange(0, E, 2).float() / E)
        angle = torch.arange(T).float()[:, None] * frequency
        pairs = torch.complex(values[..., : E // 2], values[..., E // 2 :])
        pairs = pairs * torch.complex(angle.cos(), angle.sin())[:, None].to(pairs.dtype)
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    q = turned(attention.q_proj(x).view(B, T, H, E))
    k = turned(attention.k_proj(x).view(B, T, config.kv_heads, E)).repeat_interleave(H // config.kv_heads, dim=2)
    v = attention.v_proj(x).view(B, T, config.kv_heads, E).repeat_interleave(H // config.kv_heads, dim=2)
    score = torch.einsum("bqhe,bkhe->bhqk", q, k) / math.sqrt(E)
    allowed = torch.ones(T, T).tril().bool()[None, None] & visible_BT[:, None, None]
    weight = score.masked_fill(~allowed, -math.inf).softmax(-1).nan_to_num()
    out = torch.einsum("bhqk,bkhe->bqhe", weight, v).reshape(B, T, D)
    return x_BTD + attention.o_proj(out)


def layer_masked(layer, config, x_BTD, routing):
    """A routed layer the slow way: all tokens are computed, unselected keys masked out, then blended by hand."""
    part, everyone = config.routing.part, torch.ones_like(routing.chosen_BT)
    gate_BT = torch.tensor([[GATES[config.routing.gate](r) for r in row] for row in routing.logit_BT.tolist()])
    gate_BT1 = torch.where(routing.chosen_BT, gate_BT, 0.0).unsqueeze(-1)

    def blend(x, y):
        return x + gate_BT1 * (y - x)

    def feed(x):
        return layer.feed(x, everyone, "topk")[0]

    if part == "block":
        return blend(x_BTD, feed(attend_masked(layer, config, x_BTD, routing.chosen_BT)))
    if part == "attention":
        return feed(blend(x_BTD, attend_masked(layer, config, x_BTD, routing.chosen_BT)))
    x_BTD = attend_masked(layer, config, x_BTD, everyone)
    return blend(x_BTD, feed(x_BTD))
