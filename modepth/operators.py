"""Functions that torch's compiler calls and does not look into: it has nothing to add to them."""

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("modepth", "DEF")


def opaque(schema: str, run: Callable[..., Any], allocate: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, on a CPU, as an operator where a model is being compiled and as itself elsewhere, where that is faster.

    It changes none of its inputs; `allocate` makes tensors of the shape and strides of what it returns.

    >>> halved = opaque("halved(Tensor x) -> Tensor", lambda x: x / 2, torch.empty_like)
    >>> torch.compile(halved, fullgraph=True, backend="aot_eager")(torch.ones(2))
    tensor([0.5000, 0.5000])
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, run, "CPU")
    LIBRARY.impl(name, allocate, "Meta")
    operator = getattr(torch.ops.modepth, name)

    def call(*arguments: Any) -> Any:
        return operator(*arguments) if torch.compiler.is_compiling() else run(*arguments)

    return call
