"""The loss without logits, against the plain one; gradients included."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from modepth.cross_entropy import IGNORED, LEAST_ROWS, loss_of_logits, loss_of_states, pieces

DIM, VOCABULARY = 7, 11


def some(num_rows, length, seed=0, dtype=torch.float64):
    """States, weights, targets of which some do not count, and which tokens are real."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(num_rows, length, DIM, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, DIM, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(VOCABULARY, (num_rows, length), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = IGNORED
    real = torch.rand(targets.shape, generator=generator) < 0.8
    return states, weight, targets, real


def plain_loss(states, weight, targets, real):
    return loss_of_logits(states @ weight.T, targets, real)


def with_gradients(loss, states, weight, targets, real, scale=1.0):
    value = loss(states, weight, targets, real)
    return value, *torch.autograd.grad(scale * value, (states, weight))


@pytest.mark.law
@given(
    num_rows=st.integers(1, 3),
    length=st.integers(1, 3 * LEAST_ROWS),
    scale=st.sampled_from([1.0, -2.5]),
    seed=st.integers(0, 99),
)
def test_the_loss_without_logits_is_that_of_the_logits_gradients_included(num_rows, length, scale, seed):
    given_values = some(num_rows, length, seed)
    ours = with_gradients(loss_of_states, *given_values, scale=scale)
    for value, expected in zip(ours, with_gradients(plain_loss, *given_values, scale=scale), strict=True):
        assert_close(value, expected, rtol=1e-12, atol=1e-12)


def test_pieces_hold_every_token_once_and_several_are_met_in_these_tests():
    states, weight = torch.empty(3 * LEAST_ROWS - 5, DIM), torch.empty(VOCABULARY, DIM)
    met = [token for rows in pieces(states, weight) for token in range(len(states))[rows]]
    assert met == list(range(len(states)))
    assert len(pieces(states, weight)) > 1


def test_logits_of_a_piece_take_the_room_of_all_states_or_that_of_the_fewest_rows():
    states = torch.empty(64 * LEAST_ROWS, 64)
    assert len(pieces(states, torch.empty(512, 64))) == 8
    assert len(pieces(states, torch.empty(2**20, 64))) == 64


def test_where_no_target_counts_loss_and_gradients_are_0():
    states, weight, targets, real = some(2, 5)
    for value in with_gradients(loss_of_states, states, weight, targets, torch.zeros_like(real)):
        assert not value.any()


def test_what_needs_no_gradient_gets_none():
    states, weight, targets, real = some(2, 5)
    loss_of_states(states.detach(), weight, targets, real).backward()
    assert weight.grad is not None
    weight.grad = None
    loss_of_states(states, weight.detach(), targets, real).backward()
    assert states.grad is not None
    assert weight.grad is None
    with torch.no_grad():
        quiet = loss_of_states(states, weight, targets, real)
    assert not quiet.requires_grad
    assert_close(quiet, plain_loss(states, weight, targets, real).detach())


@pytest.mark.parametrize("target", [VOCABULARY, -5])
def test_a_target_outside_the_vocabulary_is_refused(target):
    states, weight, targets, real = some(2, 5)
    targets[1, 2], real[1, 2] = target, True
    with pytest.raises(RuntimeError, match="out of bounds"):
        loss_of_states(states, weight, targets, real)


def test_a_state_that_is_not_a_number_shows_in_the_loss_unless_it_does_not_count():
    states, weight, targets, real = some(2, 5)
    real[:] = True
    targets[1, 2] = 3
    harmed = states.detach().clone()
    harmed[1, 2] = float("nan")
    assert loss_of_states(harmed, weight, targets, real).isnan()
    targets[1, 2] = IGNORED
    assert loss_of_states(harmed, weight, targets, real).isfinite()


@pytest.mark.parametrize("autocast", [True, False])
def test_in_bfloat16_the_loss_is_no_worse_than_the_plain_one(autocast):
    wide = some(2, 300, dtype=torch.float32)
    exact = with_gradients(plain_loss, *wide)
    narrow = [each.detach().bfloat16().requires_grad_() for each in wide[:2]]
    values = wide if autocast else (*narrow, *wide[2:])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        ours, plain = with_gradients(loss_of_states, *values), with_gradients(plain_loss, *values)
    assert ours[0].dtype == torch.float32
    for mine, other, reference in zip(ours, plain, exact, strict=True):
        error, of_plain = ((each.float() - reference).norm() for each in (mine, other))
        assert error <= 1.5 * of_plain + 1e-4 * reference.norm()
