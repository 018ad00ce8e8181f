"""What must be equal: between the processes of a run, and between a run and the one that goes on with it."""

import json
import warnings
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from modepth.adopted import AnyConfig, config_from_dict
from modepth.checkpoint import Checkpoint
from modepth.config import TrainConfig, model_config_to_dict
from modepth.data import TokenFile
from modepth.world import World


def check_same_start(
    world: World, model: nn.Module, model_config: AnyConfig, config: TrainConfig, data: dict[str, TokenFile]
) -> None:
    """Raise on every process if one was started with another model, config, data or torch than the first."""
    here = plain(
        {
            "model": model_config_to_dict(model_config),
            "tensors": {name: f"{tensor.dtype} {tuple(tensor.shape)}" for name, tensor in model.state_dict().items()},
            "train": asdict(config),
            "data": {name: {"sha256": tokens.sha256, "count": tokens.count} for name, tokens in data.items()},
            "torch": torch.__version__,
        }
    )
    first, *others = world.exchange(here)
    for rank, other in enumerate(others, start=1):
        found = differences(first, other, "is {old} on rank 0, {new} on rank {rank}", rank=rank)
        if found:
            raise ValueError(f"the processes were started differently: {'; '.join(found)}; start all of them alike")


def check_same_run(
    found: Checkpoint, model_config: AnyConfig, config: TrainConfig, data: TokenFile, world: World
) -> str:
    """Refuse another model, warn where bits may differ; what changed in the training config."""
    before, now = (plain(model_config_to_dict(each)) for each in (saved_model(found), model_config))
    changed = differences(before, now)
    if changed:
        raise ValueError(
            f"{found.folder}: holds another model: {'; '.join(changed)}; "
            "choose another run folder, or restore the config"
        )
    other = differences(found.state["setting"], setting(config, data, world))
    if other:
        warnings.warn(f"going on at step {found.step}, but not bit-exact: {'; '.join(other)}", stacklevel=2)
    return "; ".join(differences(found.state["train"], plain(asdict(config))))


def saved_model(found: Checkpoint) -> AnyConfig:
    """The model that a run's checkpoint says it holds; a state that no run wrote is refused."""
    path = found.folder / "state.json"
    state = found.state if isinstance(found.state, dict) else {}
    for part in ("model", "train", "setting"):
        if not isinstance(state.get(part), dict):
            raise ValueError(f"{path}: has no {part}, so it is not of a run of modepth: choose another folder")
    try:
        return config_from_dict(state["model"])
    except ValueError as error:
        raise ValueError(f"{path}: model: {error}") from error


def setting(config: TrainConfig, data: TokenFile, world: World) -> dict[str, Any]:
    """What must be equal for a resumed run to be bit-exact."""
    return {
        "data": data.sha256,
        "world_size": world.size,
        "parallel": config.parallel if world.size > 1 else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def differences(
    before: dict[str, Any], now: dict[str, Any], form: str = "was {old}, is {new}", prefix: str = "", **words: Any
) -> list[str]:
    """The fields that differ between two trees of plain data, each as its name and `form`."""
    found = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, form, f"{prefix}{name}.", **words)
        elif old != new:
            found.append(f"{prefix}{name} {form.format(old=old, new=new, **words)}")
    return found


def plain(data: dict[str, Any]) -> dict[str, Any]:
    """As it will look once it has been JSON: tuples are lists."""
    tree: dict[str, Any] = json.loads(json.dumps(data))
    return tree
