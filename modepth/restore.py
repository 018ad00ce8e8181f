"""The tensors of a run, to and from a checkpoint: each process has its own pieces, at any number of processes."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from modepth import checkpoint
from modepth.checkpoint import Checkpoint, Kinds, Piece
from modepth.muon import Muon


def pieces(tensors: dict[str, Tensor]) -> dict[str, Piece]:
    return {name: piece(tensor) for name, tensor in tensors.items()}


def piece(tensor: Tensor) -> Piece:
    """What this process holds of a tensor: all of it, or the rows that fsdp gave it, sharing their memory."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Piece(tensor, shape, 0)
    # As torch.chunk cuts: the last processes may have fewer rows, or none.
    rows = math.ceil(shape[0] / tensor.device_mesh.size())
    held = Piece(tensor.to_local(), shape, min(shape[0], rows * tensor.device_mesh.get_local_rank()))
    assert held.tensor.shape[0] == min(rows, shape[0] - held.offset)
    return held


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, tied ones once, under the first of their names."""
    once = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - once
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state by parameter name."""
    return {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def load_model(model: nn.Module, found: Checkpoint) -> None:
    """Fill the model, or this process's rows of it."""
    held = pieces(model_tensors(model))
    check_fit(found, "model", {name: (each.tensor.dtype, each.shape) for name, each in held.items()})
    checkpoint.load_into({name: each.tensor for name, each in held.items()}, found.load("model", held))


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, found: Checkpoint) -> None:
    """Give the optimiser its state back, shared out as the parameters are."""
    parameters = dict(model.named_parameters())
    owner = {name: name.rpartition(".")[0] for name in found.group("optimizer")}
    known = {name: parameters[name] for name in parameters.keys() & owner.values()}
    check_fit(found, "optimizer", state_kinds(known, optimizer))
    # A moment has its parameter's shape; the count of steps has none and is everyone's.
    shared = {name: piece(parameters[owner[name]]) for name, entry in found.group("optimizer").items() if entry.shape}
    for name, value in found.load("optimizer", shared).items():
        parameter = parameters[owner[name]]
        optimizer.state[parameter][name.rpartition(".")[2]] = (
            like(parameter, value) if name in shared else value.to(parameter.device)
        )


def state_kinds(parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> Kinds:
    """What the optimiser keeps of these parameters; of one that never had a gradient, nothing."""
    by_muon = {id(matrix) for matrix in optimizer.matrices} if isinstance(optimizer, Muon) else set()
    kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, parameter in parameters.items():
        if id(parameter) not in by_muon:
            kinds[f"{name}.step"] = (torch.float32, ())
        for moment in ("momentum",) if id(parameter) in by_muon else ("exp_avg", "exp_avg_sq"):
            kinds[f"{name}.{moment}"] = (parameter.dtype, tuple(parameter.shape))
    return kinds


def check_fit(found: Checkpoint, group: str, expected: Kinds) -> None:
    try:
        checkpoint.check_fit(expected, found.kinds(group))
    except ValueError as error:
        raise ValueError(f"{found.folder}: {group}: {error}") from error


def like(parameter: Tensor, rows: Tensor) -> Tensor:
    """`rows` spread over the processes as the parameter is."""
    spread = torch.zeros_like(parameter, dtype=rows.dtype)
    piece(spread).tensor.copy_(rows)
    return spread
