"""Training converted models with the Trainer of transformers, or one built on it: two callbacks, and a freeze."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from modepth.cutoffs import cutoff_weight_at, lowest_by_place, mean_cutoffs, move_cutoffs
from modepth.hf.model import ROUTER, routed_layers, routing_mode, set_routing, states_of
from modepth.schedule import capacity_at
from modepth.validation import check_capacity, check_count, check_number
from modepth.world import World


def train_routers_only(model: nn.Module) -> int:
    """Freeze all but the routers and predictors; returns the number of parameters that are left to train."""
    if not routed_layers(model):
        raise ValueError(f"{type(model).__name__} has no routed layers: convert it first")
    for name, weight in model.named_parameters():
        weight.requires_grad_(f"{ROUTER}." in name)
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


class RoutingCallback(TrainerCallback):
    """Top-k within training steps, causal outside them, so that evaluation and saved models are causal.

    Also keeps each router's cutoff, from the last micro-batch of every step.
    """

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        routing_mode(kwargs["model"], "topk")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        model: nn.Module = kwargs["model"]
        routing_mode(model, "causal")
        routings = [layer.routing for layer in routed_layers(model).values()]
        with torch.no_grad():
            cutoffs = mean_cutoffs([lowest_by_place(routings, ())], current_world(model))
            move_cutoffs(model, cutoffs, cutoff_weight_at(state.global_step - 1))


class CapacitySchedule(TrainerCallback, ExportableState):
    """Lowers the capacity from 1 to `capacity`, in equal stages over the first `share` of the steps.

    The capacity is a function of the step, and the callback's settings are kept in the checkpoints: a run that is
    resumed goes on at the capacity that it had.
    """

    def __init__(self, capacity: float, share: float = 0.5, stages: int = 8) -> None:
        check_capacity(capacity)
        check_number("share", share, low=0.0, high=1.0)
        check_count("stages", stages, low=1)
        self.capacity, self.share, self.stages = capacity, share, stages

    def state(self) -> dict[str, Any]:
        return {"args": {"capacity": self.capacity, "share": self.share, "stages": self.stages}, "attributes": {}}

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        now = capacity_at(state.global_step, self.share * state.max_steps, self.stages, self.capacity)
        model: nn.Module = kwargs["model"]
        (routing,) = {each.config for each in states_of(model)}
        if routing.capacity != now:
            set_routing(model, replace(routing, capacity=now))


def current_world(model: nn.Module) -> World:
    """The processes that the trainer started, if it did."""
    device = next(model.parameters()).device
    if dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size(), device)
    return World(0, 1, device)
