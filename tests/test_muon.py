"""Muon against singular values, and one matrix at a time."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from modepth.muon import COEFFICIENTS, MOMENTUM, RMS_OF_ADAM, ROUNDS, Muon, orthogonal
from modepth.run import Stopped, train
from modepth.train import make_optimizer
from tests.oracles import tiny_model
from tests.training import CONFIG, assert_same_end, make_data, new_model, stop_after


def by_singular_values(matrix):
    """The same polynomial, of each singular value by itself."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.square().sum().sqrt()
    a, b, c = COEFFICIENTS
    for _ in range(ROUNDS):
        values = a * values + b * values**3 + c * values**5
    return left @ values.diag() @ right


@pytest.mark.law
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 11), st.integers(1, 11)),
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
    seed=st.integers(0, 99),
)
def test_singular_values_go_near_1_and_their_vectors_stay(shape, scale, seed):
    x_MRC = scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = torch.stack([by_singular_values(matrix) for matrix in x_MRC])
    assert_close(orthogonal(x_MRC), expected, rtol=1e-9, atol=1e-9)


def test_a_gradient_of_zero_moves_nothing():
    assert orthogonal(torch.zeros(2, 3, 5)).equal(torch.zeros(2, 3, 5))


@pytest.mark.law
def test_matrices_of_one_shape_move_together_as_each_would_alone():
    torch.manual_seed(0)
    shapes = [(3, 5), (7, 2), (3, 5), (5, 3), (3, 5)]
    matrices = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
    expected = [matrix.detach().clone() for matrix in matrices]
    momenta = [torch.zeros_like(matrix) for matrix in expected]
    optimizer = Muon(matrices, [], lr=0.1, weight_decay=0.3)
    for step in range(3):
        slopes = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
        for number, (matrix, slope) in enumerate(zip(matrices, slopes, strict=True)):
            matrix.grad = None if (step, number) == (1, 2) else slope.clone()  # one that got none
            if matrix.grad is None:
                continue
            momenta[number] = MOMENTUM * momenta[number] + (1 - MOMENTUM) * slope
            ahead = MOMENTUM * momenta[number] + (1 - MOMENTUM) * slope
            size = RMS_OF_ADAM * max(slope.shape) ** 0.5
            expected[number] = expected[number] * (1 - 0.1 * 0.3) - 0.1 * size * by_singular_values(ahead)
        optimizer.step()
    for matrix, wanted in zip(matrices, expected, strict=True):
        assert_close(matrix.detach(), wanted, rtol=1e-10, atol=1e-10)


def test_an_update_is_of_the_size_that_adamw_makes():
    torch.manual_seed(0)
    sizes = []
    for make in (lambda p: Muon([p], [], lr=1.0), lambda p: torch.optim.AdamW([p], lr=1.0, betas=(0.9, 0.95))):
        matrix = nn.Parameter(torch.zeros(64, 96))
        optimizer = make(matrix)
        for _ in range(30):
            before = matrix.detach().clone()
            matrix.grad = torch.randn(64, 96)
            optimizer.step()
        sizes.append((matrix - before).square().mean().sqrt().item())
    assert 0.5 < sizes[0] / sizes[1] < 2


def test_muon_moves_the_matrices_of_layers_and_adamw_the_rest():
    model = tiny_model(predictor=5)
    optimizer = make_optimizer(model, replace(CONFIG, optimizer="muon"))
    by_muon = {id(matrix) for matrix in optimizer.matrices}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in by_muon}
    assert names == {name for name, _ in model.named_parameters() if name.startswith("layers.") and "proj" in name}
    assert any(".router." in name for name, _ in model.named_parameters())
    groups = optimizer.param_groups
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert [group["weight_decay"] for group in groups] == [CONFIG.weight_decay, CONFIG.weight_decay, 0.0]


def test_a_run_with_muon_resumes_to_the_bit(tmp_path):
    data, config = make_data(tmp_path), replace(CONFIG, optimizer="muon")
    train(new_model(), config, data, tmp_path / "whole")
    with pytest.raises(Stopped):
        train(new_model(), config, data, tmp_path / "stopped", on_row=stop_after(6))
    train(new_model(), config, data, tmp_path / "stopped")
    assert_same_end(tmp_path / "whole", tmp_path / "stopped")


def test_a_run_does_not_go_on_with_another_optimizer(tmp_path):
    data = make_data(tmp_path)
    with pytest.raises(Stopped):
        train(new_model(), CONFIG, data, tmp_path / "run", on_row=stop_after(6))
    with pytest.raises(ValueError, match=r"optimizer: .*layers.0.mlp.down_proj.weight.momentum"):
        train(new_model(), replace(CONFIG, optimizer="muon"), data, tmp_path / "run")


def test_muon_and_fsdp_are_refused_together():
    with pytest.raises(ValueError, match="needs whole matrices, and parallel 'fsdp' cuts them"):
        replace(CONFIG, optimizer="muon", parallel="fsdp")
