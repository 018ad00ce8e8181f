"""A model on several processes: whole on each (ddp), or its tensors shared out by rows (fsdp).

Either way a process computes its own rows of the batch, and gradients come out as the mean over processes.
What differs between the two stays in this file, and in how restore.py cuts tensors into pieces.
"""

import contextlib
import warnings
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from modepth.config import TrainConfig
from modepth.experts import ExpertRouting
from modepth.model import Decoder, Output
from modepth.routing import KeptWide, Routing
from modepth.world import World

Decided = TypeVar("Decided", Routing, ExpertRouting)


def spread(model: Decoder, config: TrainConfig, world: World) -> nn.Module:
    """What a training step calls; with fsdp, `model` itself then holds this process's rows only.

    Every process begins with the weights of the first.
    """
    forward = compiled(model, config) if config.compile else model
    if world.size == 1:
        return forward
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)
    if config.parallel == "fsdp":
        share_out(model, world)
        return model
    # Finding unused parameters also keeps DistributedDataParallel from laying out its buckets anew after the first
    # step: a resumed run would then add up the gradients of three or more processes in another order.
    return DistributedDataParallel(LossesOnly(forward), find_unused_parameters=True)


def compiled(model: Decoder, config: TrainConfig) -> nn.Module:
    # Every stage of the capacity is a graph of its own. Past this limit torch goes on uncompiled, and the stage that
    # the most of a run is spent in comes last.
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, config.capacity_stages + 8)
    return torch.compile(model)  # type: ignore[return-value]


def share_out(model: Decoder, world: World) -> None:
    """FSDP2: every layer's tensors by rows, gathered while the layer computes; the rest at once."""
    # Layers return views, which is a trap only for who then changes them in place; no one here does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh(world.device.type, (world.size,))
    for layer in model.blocks():
        # What is gathered together must have one dtype, and routers stay in float32 when a model is cast.
        if len({parameter.dtype for parameter in layer.parameters()}) > 1:
            for router in [module for module in layer.modules() if isinstance(module, KeptWide)]:
                fully_shard(router, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


class LossesOnly(nn.Module):
    """The model with nothing but the losses attached to the graph.

    DistributedDataParallel takes a parameter that any output depends on for one that will get a gradient, and
    waits for it. A router whose gate is `one` reaches the logits in `routings`, but no loss.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # Never used: where all are, DistributedDataParallel complains that it was told to look.
        self.unused = nn.Parameter(next(model.parameters()).new_zeros(1))

    def forward(self, *arguments: Any, **options: Any) -> Output:
        out: Output = self.model(*arguments, **options)
        return out._replace(
            logits_BTV=None,
            router_losses={name: loss.detach() for name, loss in out.router_losses.items()},
            routings=tuple(detached(routing) for routing in out.routings),
            experts=tuple(detached(experts) for experts in out.experts),
        )


def detached(decided: Decided) -> Decided:
    values: dict[str, Any] = {each.name: getattr(decided, each.name) for each in fields(decided)}
    tensors = {name: value.detach() for name, value in values.items() if isinstance(value, Tensor)}
    return replace(decided, **values | tensors)


def sync_gradients(model: nn.Module, last: bool) -> contextlib.AbstractContextManager[Any]:
    """Exchange gradients between processes only in the last backward of a step."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return contextlib.nullcontext()


def clip_gradients(model: nn.Module, limit: float) -> Tensor:
    """Scale all gradients down to the norm `limit`; the norm before, of all processes' rows."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm)
    return norm


def release(model: nn.Module) -> None:
    """Let go of what a forward without a backward has gathered, so that parameters are the optimiser's again."""
    if isinstance(model, FSDPModule):
        model.reshard()
