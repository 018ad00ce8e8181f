"""What changes during a run, each a pure function of the step: nothing to save, nothing to restore."""

import math
from collections import Counter
from dataclasses import replace

from modepth import flops
from modepth.adopted import AnyConfig
from modepth.config import RoutingConfig, TrainConfig


def window_length(config: TrainConfig, model: AnyConfig) -> int:
    return model.max_length if config.length is None else config.length


def num_steps(config: TrainConfig, model: AnyConfig) -> int:
    """Steps of the run, whichever way its length is given; a budget is never exceeded."""
    length = window_length(config, model)
    if config.steps is not None:
        return config.steps
    if config.tokens is not None:
        steps = config.tokens // (config.batch_size * length)
    else:
        assert config.target_flops is not None  # the config demands one of the three
        steps = int(config.target_flops // step_flops(config, model))
    if steps == 0:
        name = "target_flops" if config.tokens is None else "tokens"
        needed = step_flops(config, model) if config.tokens is None else config.batch_size * length
        raise ValueError(
            f"{name} is less than one step of {config.batch_size} windows of {length} tokens needs, {needed:,}; got "
            f"{getattr(config, name):,}: raise it, or lower batch_size"
        )
    return steps


def step_flops(config: TrainConfig, model: AnyConfig, *, half_causal: bool = True) -> int:
    """Training FLOPs of one step at the model's own capacity, the optimiser's among them."""
    passes = config.batch_size * flops.training_flops(model, window_length(config, model), half_causal=half_causal)
    return passes + flops.update_flops(model, config.optimizer)


def learning_rate_at(step: int, steps: int, config: TrainConfig) -> float:
    """A straight rise, then a cosine down to a fraction."""
    rise = math.ceil(config.warmup * steps)
    if step < rise:
        return config.learning_rate * (step + 1) / rise
    progress = (step - rise) / max(1, steps - 1 - rise)
    low = config.final_fraction
    return config.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))


def routing_at(step: int, steps: int, config: TrainConfig, routing: RoutingConfig) -> RoutingConfig:
    """The model's routing, its capacity lowered from 1 in equal stages at the start of the run."""
    fall = config.capacity_warmup * steps
    capacity = capacity_at(step, fall, config.capacity_stages, routing.capacity)
    return routing if capacity == routing.capacity else replace(routing, capacity=capacity)


def capacity_at(step: int, fall: float, stages: int, target: float) -> float:
    """A capacity that falls from 1 to `target` in equal stages over the first `fall` steps."""
    return target if step >= fall else 1 - (1 - target) * int(stages * step / fall) / stages


def flops_until(step: int, steps: int, config: TrainConfig, model: AnyConfig) -> int:
    """Training FLOPs of the first `step` steps, each at the capacity that it had."""
    if model.routing is None or not config.capacity_warmup:
        return step * step_flops(config, model)
    capacities = Counter(routing_at(number, steps, config, model.routing).capacity for number in range(step))
    return sum(
        count * step_flops(config, replace(model, routing=replace(model.routing, capacity=capacity)))
        for capacity, count in capacities.items()
    )
