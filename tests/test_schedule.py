"""What changes during a run: pure functions of the step."""

import math
from dataclasses import replace

import pytest

from modepth import RoutingConfig, flops
from modepth.config import TrainConfig
from modepth.schedule import flops_until, learning_rate_at, num_steps, routing_at, step_flops
from tests.oracles import tiny_config


def test_the_learning_rate_rises_then_falls_by_a_cosine_to_its_fraction():
    config = TrainConfig(steps=100, learning_rate=2.0, warmup=0.1, final_fraction=0.25)
    rates = [learning_rate_at(step, 100, config) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rates[10] == 2.0
    assert rates[99] == pytest.approx(0.5)
    middle = 10 + 89 / 2
    assert (rates[math.floor(middle)] + rates[math.ceil(middle)]) / 2 == pytest.approx(1.25, rel=1e-3)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_without_warmup_the_first_step_has_the_whole_rate():
    assert learning_rate_at(0, 5, TrainConfig(steps=5, learning_rate=2.0, warmup=0.0)) == 2.0


def test_the_length_of_a_run_in_steps_tokens_or_flops():
    model = tiny_config()
    assert num_steps(TrainConfig(steps=7), model) == 7
    assert num_steps(TrainConfig(tokens=10_000, batch_size=3, length=20), model) == 166
    config = TrainConfig(target_flops=1e10, batch_size=3, length=20)
    steps = num_steps(config, model)
    one = 3 * flops.training_flops(model, 20, half_causal=True)
    assert steps * one <= 1e10 < (steps + 1) * one
    assert step_flops(config, model) == one
    assert step_flops(replace(config, optimizer="muon"), model) == one + flops.update_flops(model, "muon") > one


def test_the_flops_of_a_run_are_those_of_its_steps_each_at_its_own_capacity():
    model = tiny_config(capacity=0.25)
    falling = TrainConfig(steps=40, batch_size=2, length=32, capacity_warmup=0.5, capacity_stages=3)
    expected = 0
    for step in range(41):
        assert flops_until(step, 40, falling, model) == expected
        now = replace(model, routing=routing_at(step, 40, falling, model.routing))
        expected += 2 * flops.training_flops(now, 32, half_causal=True)
    assert flops_until(40, 40, falling, model) > 40 * step_flops(falling, model)
    assert flops_until(7, 40, falling, replace(model, routing=None)) == 7 * step_flops(falling, flops.dense(model))


@pytest.mark.parametrize("budget", [{"tokens": 59}, {"target_flops": 1000.0}])
def test_a_budget_below_one_step_is_refused(budget):
    with pytest.raises(ValueError, match=f"{next(iter(budget))} is less than one step of 3 windows of 20 tokens"):
        num_steps(TrainConfig(**budget, batch_size=3, length=20), tiny_config())


def test_capacity_falls_from_one_to_its_own_in_stages():
    routing = RoutingConfig(capacity=0.2)
    config = TrainConfig(steps=100, capacity_warmup=0.4, capacity_stages=4)
    capacities = [routing_at(step, 100, config, routing).capacity for step in range(100)]
    assert capacities[:40] == pytest.approx([1.0] * 10 + [0.8] * 10 + [0.6] * 10 + [0.4] * 10)
    assert capacities[40:] == [0.2] * 60
    assert routing_at(0, 100, replace(config, capacity_warmup=0.0), routing) is routing


@pytest.mark.parametrize("given", [{}, {"steps": 3, "tokens": 5}, {"tokens": 3, "target_flops": 5.0}])
def test_a_run_has_one_length(given):
    with pytest.raises(ValueError, match="set exactly one of steps, tokens and target_flops"):
        TrainConfig(**given)


def test_a_flop_budget_and_a_capacity_schedule_do_not_mix():
    with pytest.raises(ValueError, match="capacity_warmup changes the FLOPs of a step"):
        TrainConfig(target_flops=1e9, capacity_warmup=0.5)
