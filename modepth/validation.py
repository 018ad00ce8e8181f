"""Checks of single values, each raising a ValueError with the name, the value and the allowed range."""

import math
import sys
from typing import Any, TypeGuard, get_args

import torch
from torch import Tensor


def check_capacity(value: object) -> None:
    if not is_number(value) or not 0 < value <= 1:
        hint = " (to keep a layer dense, leave it out of the routed layers)" if is_number(value) else ""
        raise ValueError(f"capacity must be a number in (0, 1], got {shown(value)}{hint}")


def check_number(name: str, value: object, *, low: float = -math.inf, high: float = math.inf) -> None:
    """A finite number, `low` included, `high` not."""
    # Compared with the largest float rather than by isfinite, which fails on whole numbers beyond it.
    if not is_number(value) or not low <= value < high or not abs(value) <= sys.float_info.max:
        allowed = "a finite number"
        if high < math.inf:
            allowed = f"a number in [{low}, {high})"
        elif low > -math.inf:
            allowed = f"a finite number >= {low}"
        raise ValueError(f"{name} must be {allowed}, got {shown(value)}")


def check_count(name: str, value: object, *, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name} must be a whole number >= {low}, got {shown(value)}")


def check_seed(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**64:
        raise ValueError(f"{name} must be a whole number from 0 to 2^64 - 1, as torch takes seeds, got {shown(value)}")


def check_layers(layers: object) -> None:
    if not isinstance(layers, tuple) or not layers:
        raise ValueError(f"layers must be a tuple of one or more layer numbers, got {layers!r}")
    for layer in layers:
        check_count("layers", layer, low=0)
    if len(set(layers)) < len(layers):
        raise ValueError(f"layers must name each layer once, got {layers!r}")


def named_layers(layers: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """Layers that a user named, in order; a decoder of `num_layers` must have them."""
    outside = [layer for layer in layers if layer >= num_layers]
    if outside:
        raise ValueError(f"layers must be in 0..{num_layers - 1} for {num_layers} layers, got {outside}")
    return tuple(sorted(layers))


def check_thresholds(thresholds: object) -> None:
    pairs = thresholds if isinstance(thresholds, tuple) else (None,)
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(f"thresholds must be a tuple of pairs (layer, score), got {shown(thresholds)}")
        check_count("a layer of thresholds", pair[0], low=0)
        check_number(f"the threshold of layer {pair[0]}", pair[1])
    if len({layer for layer, _ in pairs}) < len(pairs):
        raise ValueError(f"thresholds must name each layer once, got {shown(thresholds)}")


def check_choice(name: str, value: object, literal: Any) -> None:
    """One of the strings of a Literal type."""
    choices = get_args(literal)
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")


def check_instance(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, got {value!r}")


DTYPES = {"bool": (torch.bool,), "whole": (torch.int32, torch.int64)}


def check_tensor(name: str, value: object, shape: tuple[int | None, ...], *, kind: str = "") -> None:
    """A tensor of a shape, None standing for any size; `kind`: "bool", "whole" for whole numbers, "" for any."""
    if isinstance(value, Tensor):
        sizes = value.shape
        # Equal at once where no size is open: this runs at every layer of every token.
        fits = sizes == shape or (
            len(sizes) == len(shape) and all(want in (None, size) for size, want in zip(sizes, shape, strict=True))
        )
        if fits and (not kind or value.dtype in DTYPES[kind]):
            return
        got = f"{value.dtype} of shape {tuple(value.shape)}"
    else:
        got = type(value).__name__
    form = ", ".join("any" if size is None else str(size) for size in shape)
    of = {"bool": "a bool ", "whole": "an int64 or int32 "}.get(kind, "a ")
    raise ValueError(f"{name} must be {of}tensor of shape ({form}), got {got}")


def shown(value: object) -> str:
    """A value for an error message: short, whatever it is."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of thousands of digits
        text = f"a {type(value).__name__} too long to print"
    return text if len(text) <= 100 else f"{text[:100]}..."


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
