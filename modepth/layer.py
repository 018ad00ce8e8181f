"""Mixture-of-Depths around a block of one's own."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from modepth.config import Mode, RoutingConfig
from modepth.routing import Router, Routing, apply_routed, real_tokens
from modepth.validation import check_instance


class MixtureOfDepths(nn.Module):
    """Routes tokens around any block that maps (B, T, D) to (B, T, D) and contains its residual.

    The block sees only the chosen tokens, (B, K, D), in order of position. Whatever else it takes
    travels by keyword, declared by name, never guessed from sizes:

    per_token   (B, T, ...), or (1, T, ...) shared by the rows: positions, segment ids
    per_pair    (B, ..., T, T), queries then keys: attention masks and biases; 1 may stand for B and
                for the queries, so (B, 1, 1, T) is a mask of keys
    shared      handed on as it is
    valid_name  the keyword by which the block receives the (B, K) mask of slots that take part.
                A causal block needs none, since invalid slots come last; any other block must
                keep its tokens from looking at them.
    layer       the layer's number: errors name it, random selection differs by it

    >>> import torch
    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.mix = nn.Linear(16, 16)
    ...     def forward(self, x, positions):
    ...         return x + self.mix(x) * positions[..., None].cos()
    >>> layer = MixtureOfDepths(Block(), dim=16, routing=RoutingConfig(capacity=0.25), per_token=["positions"])
    >>> x, positions = torch.randn(2, 20, 16), torch.arange(20)[None]
    >>> layer(x, lengths=torch.tensor([20, 8]), positions=positions).shape
    torch.Size([2, 20, 16])
    >>> layer.routing.chosen_BT.sum(1)  # a quarter of each row's real tokens
    tensor([5, 2])
    """

    def __init__(
        self,
        block: nn.Module,
        *,
        dim: int,
        routing: RoutingConfig | None = None,
        per_token: Sequence[str] = (),
        per_pair: Sequence[str] = (),
        shared: Sequence[str] = (),
        valid_name: str | None = None,
        layer: int = 0,
    ) -> None:
        super().__init__()
        config = RoutingConfig() if routing is None else routing
        check_instance("routing", config, RoutingConfig)
        check_names(per_token=per_token, per_pair=per_pair, shared=shared)
        if config.part != "block":
            raise ValueError(f"part must be block here, got {config.part!r}: wrap the attention or the mlp itself")
        if config.flow != "rejoin":
            raise ValueError(f"flow must be rejoin here, got {config.flow!r}: only a decoder knows the layers before")
        self.block = block
        self.router = Router(dim, config, layer)
        self.per_token = tuple(per_token)
        self.per_pair = tuple(per_pair)
        self.shared = tuple(shared)
        self.valid_name = valid_name
        self.routing: Routing | None = None  # of the last forward, for losses and pictures

    def forward(
        self,
        x_BTD: Tensor,
        *,
        lengths: Tensor | None = None,
        real: Tensor | None = None,
        mode: Mode = "topk",
        **arguments: Any,
    ) -> Tensor:
        """Padding, given by `lengths` (B,) or by `real` (B, T), takes no capacity and passes unchanged."""
        if lengths is not None and real is not None:
            raise ValueError("padding is given twice: pass lengths or real, not both")
        if lengths is not None:
            real = real_tokens(lengths, *x_BTD.shape[:2])
        routing = self.router(x_BTD, real, mode=mode)
        slots = {name: self._to_slots(name, value, routing) for name, value in arguments.items()}
        if self.valid_name is not None:
            slots[self.valid_name] = routing.valid_BK
        self.routing = routing
        return apply_routed(x_BTD, routing, lambda x_BKD: self.block(x_BKD, **slots))

    def _to_slots(self, name: str, value: Any, routing: Routing) -> Any:
        """An argument of all tokens as an argument of the routed ones."""
        if name in self.shared or value is None:
            return value
        B, T = routing.logit_BT.shape
        if name in self.per_token:
            check_axes(name, value, {0: (1, B), 1: (T,)}, "(B or 1, T, ...)")
            return routing.gather(value.expand(B, *value.shape[1:]))
        if name in self.per_pair:
            check_axes(name, value, {0: (1, B), -1: (T,), -2: (1, T)}, "(B or 1, ..., T or 1, T)")
            queries = value.expand(B, *value.shape[1:-2], T, T).movedim(-2, 1)
            keys = routing.index_BK.view(B, 1, *[1] * (value.dim() - 3), -1)
            return routing.gather(queries).take_along_dim(keys, dim=-1).movedim(1, -2)
        raise TypeError(
            f"the block's argument {name!r} is not declared: "
            f"name it in per_token, per_pair or shared when you make the MixtureOfDepths"
        )

    def __getstate__(self) -> dict[str, Any]:
        # The last routing belongs to a graph, which can be neither copied nor pickled.
        return {**super().__getstate__(), "routing": None}


def check_names(**declared: Sequence[str]) -> None:
    for kind, names in declared.items():
        if isinstance(names, str):
            raise ValueError(f"{kind} must be a list of names, got {names!r}: write [{names!r}]")
        taken = {"lengths", "real", "mode"} & set(names)
        if taken:
            raise ValueError(f"{kind} names {taken.pop()!r}, which MixtureOfDepths takes itself: rename the block's")


def check_axes(name: str, value: object, sizes: dict[int, tuple[int, ...]], shape: str) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be one tensor of shape {shape}, got {type(value).__name__}")
    for axis, allowed in sizes.items():
        if value.dim() <= abs(axis) or value.shape[axis] not in allowed:
            raise ValueError(f"{name} must have the shape {shape}, got {tuple(value.shape)} (axis {axis}: {allowed})")
