"""One layer of the native decoder: attention, then a feed-forward or experts, around which tokens may be routed.

Shapes: B batch, T tokens, K slots of the routed tokens, D width.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from modepth.blocks import Attention, Context, FeedForward
from modepth.config import Mode, ModelConfig, RoutingConfig
from modepth.experts import ExpertRouting, Experts
from modepth.fused import RMSNorm
from modepth.routing import Router, Routing, apply_routed


class Stream(NamedTuple):
    """What passes from layer to layer."""

    x_BTD: Tensor
    context: Context
    real_BT: Tensor  # bool: not padding
    left: Routing | None = None  # in a filter, or after an exit: the tokens that the last routed layer chose


class Decisions(NamedTuple):
    """What one layer decided; None where it had nothing to."""

    routing: Routing | None
    experts: ExpertRouting | None


class Layer(nn.Module):
    """Attention, then a feed-forward, each added to the stream; a routed layer also has a router."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.dim, eps=config.norm_eps)
        self.self_attn = Attention(config, number)
        self.post_attention_layernorm = RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = Experts(config, number) if number in config.expert_layers else FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)
        self.router: Router | None = None
        if config.routing is not None and number in config.routed_layers:
            self.router = Router(config.dim, config.routing, number)

    def attend(self, x_BTD: Tensor, context: Context) -> Tensor:
        return x_BTD + self.dropout(self.self_attn(self.input_layernorm(x_BTD), context))

    def feed(self, x_BTD: Tensor, real_BT: Tensor, mode: Mode) -> tuple[Tensor, ExpertRouting | None]:
        normed_BTD = self.post_attention_layernorm(x_BTD)
        if isinstance(self.mlp, Experts):
            update_BTD, experts = self.mlp(normed_BTD, real_BT, mode)
            return x_BTD + self.dropout(update_BTD), experts
        return x_BTD + self.dropout(self.mlp(normed_BTD)), None

    def forward(self, stream: Stream, mode: Mode, routing: RoutingConfig | None = None) -> tuple[Stream, Decisions]:
        context, real_BT, left = stream.context, stream.real_BT, stream.left
        met: list[ExpertRouting] = []

        def feed(x: Tensor, slots: Routing | None) -> Tensor:
            """The feed-forward of all tokens, or of those in the slots of a routing."""
            out, experts = self.feed(x, real_BT if slots is None else slots.valid_BK, mode)
            if experts is not None:
                met.append(experts if slots is None else experts.spread(slots))
            return out

        router, decision = self.router, None
        flow = "rejoin" if routing is None else routing.flow
        if router is not None:
            position_BT = None if context.new is None else context.new.position_1N
            decide: Decide = lambda x: router(x, real_BT, mode, routing, position_BT, among=left)  # noqa: E731
            x_BTD, decision = ROUTED_PARTS[router.config.part](self, stream.x_BTD, context, decide, feed)
            left = None if flow == "rejoin" else decision.ungated()
        elif left is not None and flow == "exit":
            x_BTD, _ = route_block(self, stream.x_BTD, context, lambda x: left, feed)
        else:
            x_BTD = feed(self.attend(stream.x_BTD, context), None)
        return Stream(x_BTD, context, real_BT, left), Decisions(decision, met[0] if met else None)


# The router reads the stream where the routed part does.
Decide = Callable[[Tensor], Routing]
Feed = Callable[[Tensor, Routing | None], Tensor]


def route_block(layer: Layer, x_BTD: Tensor, context: Context, decide: Decide, feed: Feed) -> tuple[Tensor, Routing]:
    routing = decide(x_BTD)
    return apply_routed(x_BTD, routing, lambda x: feed(layer.attend(x, context.gather(routing)), routing)), routing


def route_attention(
    layer: Layer, x_BTD: Tensor, context: Context, decide: Decide, feed: Feed
) -> tuple[Tensor, Routing]:
    routing = decide(x_BTD)
    return feed(apply_routed(x_BTD, routing, lambda x: layer.attend(x, context.gather(routing))), None), routing


def route_mlp(layer: Layer, x_BTD: Tensor, context: Context, decide: Decide, feed: Feed) -> tuple[Tensor, Routing]:
    x_BTD = layer.attend(x_BTD, context)
    routing = decide(x_BTD)
    return apply_routed(x_BTD, routing, lambda x: feed(x, routing)), routing


ROUTED_PARTS = {"block": route_block, "attention": route_attention, "mlp": route_mlp}
