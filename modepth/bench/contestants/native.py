"""Our decoder: routed where the shape has a capacity, else dense."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modepth.allocator import keep_freed_memory
from modepth.calibration import calibrate
from modepth.config import ModelConfig, RoutingConfig
from modepth.cross_entropy import IGNORED
from modepth.flops import num_parameters
from modepth.generation import generate
from modepth.model import Transformer
from modepth.ready import ready_to_generate
from modepth.sampling import Sampling


def build(shape: dict[str, Any]) -> "Native":
    routing = None if shape["capacity"] is None else RoutingConfig(capacity=shape["capacity"], every=2)
    config = ModelConfig(
        vocab_size=shape["vocab_size"],
        num_layers=shape["num_layers"],
        dim=shape["dim"],
        num_heads=shape["num_heads"],
        mlp_dim=shape["mlp_width"],
        max_length=shape["length"],
        routing=routing,
    )
    model = Transformer(config)
    if routing is not None:
        # Random weights route their capacity only when told at what score.
        routing = calibrate(model, torch.randint(config.vocab_size, (4, shape["length"])), routing.capacity)
    if shape["task"] == "train":
        keep_freed_memory()  # as `modepth train` does
    else:
        ready_to_generate(model)  # as `modepth generate` and `modepth serve` do
    timed_layers = shape["routed_layers"] if shape["task"] == "decode" else []  # clocks would break a compiled graph
    return Native(model, routing, timed_layers)


class Native:
    """Times, in generation, the blocks of some layers."""

    def __init__(self, model: Transformer, routing: RoutingConfig | None, timed_layers: list[int]) -> None:
        self.model, self.routing = model, routing
        self.num_parameters = num_parameters(model.config)  # a model that is ready has packed most of them
        self.layers = list(model.layers)
        self.block_seconds = 0.0
        for number in timed_layers:
            for name in ("attend", "feed"):
                setattr(self.layers[number], name, self.timed(getattr(self.layers[number], name)))

    def timed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed_run(*arguments: Any) -> Any:
            start = time.perf_counter()
            out = run(*arguments)
            self.block_seconds += time.perf_counter() - start
            return out

        return timed_run

    def loss(self, tokens_BT: Tensor) -> Tensor:
        targets_BT = torch.nn.functional.pad(tokens_BT[:, 1:], (0, 1), value=IGNORED)  # as transformers shifts them
        out = self.model(tokens_BT, targets=targets_BT, mode="topk")
        assert out.loss is not None  # targets were given
        return out.loss + out.router_loss

    def prefill(self, tokens_BT: Tensor) -> object:
        return self.generate(tokens_BT[:, :-1], 1)

    def generate(self, tokens_BT: Tensor, count: int) -> object:
        return generate(self.model, tokens_BT.tolist(), Sampling(max_tokens=count), routing=self.routing)
