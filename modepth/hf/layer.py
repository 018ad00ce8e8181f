"""A decoder layer of transformers that computes only some of its tokens.

`RoutedLayer` is put before a layer's own class (`routed_class`), so that parameters keep their names and whatever
transformers does with layers of that class it does with these. Its forward decides with the same `Router`, and uses
the decision with the same `apply_routed`, as the native decoder; what is particular here is that the layer's
arguments, whatever the family calls them, are cut down to the routed tokens too.

Shapes: B batch, T tokens, D width, R rows that take part, K slots of the routed tokens, H heads, S keys.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from modepth.config import Mode, RoutingConfig
from modepth.hf.cache import Keys, RoutedEntry, Write, entry_of
from modepth.hf.families import CACHES, MASKS, PER_KEY, PER_TOKEN
from modepth.routing import Router, Routing, apply_routed


@dataclass
class RoutingState:
    """What all routed layers of one model share: changed between forwards, never in one."""

    mode: Mode
    config: RoutingConfig


class Tokens(NamedTuple):
    """The tokens of one forward, and how what belongs to them is cut down to the routed ones."""

    B: int
    T: int
    decoding: bool  # one new token a row: then rows are what is routed, so that the others cost nothing

    def flip(self, values_BT: Tensor) -> Tensor:
        """As the router is to see them: when decoding, one row that holds the new token of each."""
        return values_BT.transpose(0, 1) if self.decoding else values_BT

    def gather(self, routing: Routing, values: Tensor, batch_axis: int, token_axis: int) -> Tensor:
        moved_BT = values.movedim((batch_axis, token_axis), (0, 1))
        if moved_BT.shape[0] not in (1, self.B) or moved_BT.shape[1] != self.T:
            raise ValueError(
                f"an argument of shape {tuple(values.shape)} does not fit {self.B} rows of {self.T} tokens"
            )
        moved_BT = moved_BT.expand(self.B, *moved_BT.shape[1:])
        return self.flip(routing.gather(self.flip(moved_BT))).movedim((0, 1), (batch_axis, token_axis))


class RoutedLayer(nn.Module):
    """What is put before a decoder layer's own class."""

    base_class: Any
    argument_names: tuple[str, ...]  # of the base's forward, without the states
    mod_router: Router
    routing_state: RoutingState
    num_returned: int | None  # values in the tuple that the base returns; None: it returns no tuple
    names: tuple[str, str, str, str] | None  # of norm, attention, norm, mlp, where only a part is routed
    routing: Routing | None  # the last decision

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(self.argument_names, args, strict=False)), **kwargs}
        out_BTD, self.routing = ROUTED_PARTS[self.mod_router.config.part](self, hidden_states, arguments)
        return out_BTD if self.num_returned is None else (out_BTD, *(None,) * (self.num_returned - 1))

    def decide(self, x_BTD: Tensor, arguments: dict[str, Any], tokens: Tokens) -> Routing:
        state = self.routing_state
        mask = next((arguments[name] for name in MASKS if arguments.get(name) is not None), None)
        real_BT = None if mask is None else tokens.flip(sees_itself(mask, tokens))
        position = arguments.get("position_ids")
        if position is not None and position.ndim == 2:
            position = tokens.flip(position.expand(tokens.B, -1))
        elif tokens.decoding and state.config.selection in ("random", "stride"):
            raise ValueError(
                f"{type(self).__name__} is not told positions, by which {state.config.selection} selection goes: "
                "generate with use_cache=False"
            )
        else:
            position = None
        return self.mod_router(tokens.flip(x_BTD), real_BT, state.mode, state.config, position)

    def base_call(self, x_BKD: Tensor, arguments: dict[str, Any]) -> Tensor:
        out = super().forward(x_BKD, **arguments)
        if isinstance(out, tuple) != (self.num_returned is not None) or (
            isinstance(out, tuple) and len(out) != self.num_returned
        ):
            found = f"a tuple of {len(out)}" if isinstance(out, tuple) else "a tensor"
            raise ValueError(f"{type(self).__name__} returns {found}: expected {self.num_returned or 'a tensor'}")
        return out[0] if isinstance(out, tuple) else out

    def part(self, number: int) -> nn.Module:
        assert self.names is not None  # such layers are refused at conversion
        return self.get_submodule(self.names[number])

    def attend(self, x_BTD: Tensor, arguments: dict[str, Any]) -> Tensor:
        out = self.part(1)(self.part(0)(x_BTD), **arguments)
        return x_BTD + (out[0] if isinstance(out, tuple) else out)

    def feed(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + self.part(3)(self.part(2)(x_BTD))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return new_routed_layer, (self.base_class,), self.__dict__


@functools.cache
def routed_class(base: Any) -> Any:
    """The class that `base` becomes when it is routed, under the same name."""
    names = tuple(inspect.signature(base.forward).parameters)[2:]
    return type(base.__name__, (RoutedLayer, base), {"base_class": base, "argument_names": names})


def new_routed_layer(base: Any) -> Any:
    """An empty one, for unpickling and copying."""
    cls = routed_class(base)
    return cls.__new__(cls)


# -- the parts that can be routed


def route_attending(
    layer: RoutedLayer, x_BTD: Tensor, arguments: dict[str, Any], block: Callable[[Tensor, dict[str, Any]], Tensor]
) -> tuple[Tensor, Routing]:
    """Route around something that attends, so that its arguments and its cache are cut down too."""
    cache_name = next((name for name in CACHES if arguments.get(name) is not None), None)
    entry = None
    if cache_name is not None:
        if layer.routing_state.mode == "topk":
            raise ValueError(
                "top-k looks at tokens yet to come, so it does not go with a cache: "
                "set routing_mode(model, 'causal'), or pass no past_key_values"
            )
        entry = entry_of(arguments[cache_name], layer.mod_router.layer)
        entry.open(x_BTD.shape[0])
    B, T, _ = x_BTD.shape
    tokens = Tokens(B, T, decoding=entry is not None and T == 1)
    routing = layer.decide(x_BTD, arguments, tokens)

    def routed_block(x_BKD: Tensor) -> Tensor:
        cut = cut_arguments(layer, arguments, tokens, routing, entry, x_BKD.dtype)
        return tokens.flip(block(tokens.flip(x_BKD), cut))

    out_BTD = tokens.flip(apply_routed(tokens.flip(x_BTD), routing, routed_block))
    if entry is not None:
        entry.advance(T)
    return out_BTD, routing


def route_block(layer: RoutedLayer, x_BTD: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Routing]:
    return route_attending(layer, x_BTD, arguments, layer.base_call)


def route_attention(layer: RoutedLayer, x_BTD: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Routing]:
    x_BTD, routing = route_attending(layer, x_BTD, arguments, layer.attend)
    return layer.feed(x_BTD), routing


def route_mlp(layer: RoutedLayer, x_BTD: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Routing]:
    x_BTD = layer.attend(x_BTD, arguments)
    B, T, _ = x_BTD.shape
    tokens = Tokens(B, T, decoding=T == 1 and layer.routing_state.mode == "causal")
    routing = layer.decide(x_BTD, arguments, tokens)
    return tokens.flip(apply_routed(tokens.flip(x_BTD), routing, layer.feed)), routing


ROUTED_PARTS = {"block": route_block, "attention": route_attention, "mlp": route_mlp}


# -- arguments, cut down to the routed tokens


def cut_arguments(
    layer: RoutedLayer,
    arguments: dict[str, Any],
    tokens: Tokens,
    routing: Routing,
    entry: RoutedEntry | None,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """A layer's arguments for the routed tokens alone, the cache replaced by what takes their keys and values."""
    cut, keys, end = dict(arguments), Keys(routing.index_BK, routing.valid_BK), tokens.T
    if entry is not None:
        write = open_write(entry, routing, tokens)
        keys, end = write.keys, entry.length + tokens.T
        cut |= {name: write for name in CACHES if arguments.get(name) is not None}
        if not write.fresh and all(arguments.get(name) is None for name in MASKS):
            cut[next(name for name in MASKS if name in layer.argument_names)] = hide_absent(keys, dtype)
    for name, value in arguments.items():
        if value is not None and name not in CACHES:
            cut[name] = cut_down(name, value, tokens, routing, keys, end)
    return cut


def cut_down(name: str, value: Any, tokens: Tokens, routing: Routing, keys: Keys, end: int) -> Any:
    """One argument of a layer, for the routed tokens alone; `end` is the slot after the newest token."""
    if name in MASKS:
        return cut_mask(value, tokens, routing, keys, end)
    if name in PER_KEY:
        return cut_keys(value, tokens, routing, keys)
    if name in PER_TOKEN:
        parts = value if isinstance(value, tuple) else (value,)
        cut = tuple(tokens.gather(routing, part, *PER_TOKEN[name]) for part in parts)
        return cut if isinstance(value, tuple) else cut[0]
    if isinstance(value, Tensor) and value.numel() > 1:
        raise ValueError(
            f"argument {name} of shape {tuple(value.shape)} is not known: it cannot be cut down to the routed tokens"
        )
    return value


def sees_itself(mask: Tensor, tokens: Tokens) -> Tensor:
    """Which tokens are real: padding is what even its own query may not see."""
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        raise ValueError(
            f"a mask of type {type(mask).__name__} {tuple(getattr(mask, 'shape', ()))} is not known: load the model "
            "with attn_implementation='sdpa' or 'eager'"
        )
    own_BT = mask[:, 0].diagonal(mask.shape[-1] - tokens.T, 1, 2)
    own_BT = own_BT if own_BT.dtype == torch.bool else own_BT > torch.finfo(mask.dtype).min / 2
    return own_BT.expand(tokens.B, tokens.T)


def cut_mask(mask: Tensor, tokens: Tokens, routing: Routing, keys: Keys, end: int) -> Tensor:
    """Rows and columns of the full mask: that carries padding, windows and chunks without knowing which is which."""
    rows_RHKS = tokens.gather(routing, mask, 0, 2)
    column_RS = keys.slot_RS - (end - rows_RHKS.shape[-1])  # a window's mask begins later than the sequence
    there_R11S = (keys.present_RS & (column_RS >= 0))[:, None, None]
    index = column_RS.clamp(min=0)[:, None, None].expand(*rows_RHKS.shape[:3], -1)
    cut_RHKS = rows_RHKS.take_along_dim(index, dim=3)
    if cut_RHKS.dtype != torch.bool:
        return cut_RHKS.masked_fill(~there_R11S, torch.finfo(cut_RHKS.dtype).min)
    seen_RHKS = cut_RHKS & there_R11S
    # A query in an invalid slot may see nothing. What it computes is thrown away, but must be finite.
    return seen_RHKS | ~seen_RHKS.any(-1, keepdim=True)


def hide_absent(keys: Keys, dtype: torch.dtype) -> Tensor | None:
    """The mask of a decode step in rows of different lengths; None if there is nothing to hide."""
    if bool(keys.present_RS.all()):
        return None
    absent_R11S = (~keys.present_RS)[:, None, None]
    return torch.zeros_like(absent_R11S, dtype=dtype).masked_fill(absent_R11S, torch.finfo(dtype).min)


def cut_keys(value: Tensor, tokens: Tokens, routing: Routing, keys: Keys) -> Tensor:
    """What belongs to keys, (B * H, 1, keys), for the keys that the routed rows see."""
    per_row_BH1S = value.unflatten(0, (tokens.B, -1))
    rows_RH1S = per_row_BH1S
    if tokens.decoding:
        rows_RH1S = routing.gather(per_row_BH1S.unsqueeze(0)).squeeze(0)
    index = keys.slot_RS.clamp(min=0)[:, None, None].expand(*rows_RH1S.shape[:3], -1)
    return rows_RH1S.take_along_dim(index, dim=3).flatten(0, 1)


def open_write(entry: RoutedEntry, routing: Routing, tokens: Tokens) -> Write:
    if tokens.decoding:
        rows = routing.index_BK[0].tolist()
        return Write(entry, rows, torch.full_like(routing.index_BK, entry.length).T, routing.valid_BK.T)
    return Write(entry, range(tokens.B), routing.index_BK + entry.length, routing.valid_BK)
