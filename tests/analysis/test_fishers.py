"""Dense Fishers of a linear recurrent network against autograd and enumeration."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.func import jacrev

from nclbayes.analysis.fishers import (
    LinearRNN,
    categorical_curvature,
    damped,
    dowm_factors,
    gaussian_curvature,
    owm_factors,
    random_rotation,
)
from nclbayes.errors import SettingError

UNITS, INPUTS, OUTPUTS, BATCH, STEPS = 3, 2, 2, 4, 3


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


RNN = LinearRNN(draw(UNITS, UNITS + INPUTS), draw(OUTPUTS, UNITS))
X, NOISE = draw(BATCH, STEPS, INPUTS), draw(BATCH, STEPS, UNITS, seed=1)
COVARIANCE = draw(OUTPUTS, OUTPUTS) @ draw(OUTPUTS, OUTPUTS).mT + torch.eye(OUTPUTS, dtype=torch.float64)


def outputs(w: Tensor, c: Tensor, x: Tensor, noise: Tensor) -> Tensor:
    """C r_t of one sequence, from column-stacked weights, written step by step."""
    W, C = w.reshape(UNITS + INPUTS, UNITS).mT, c.reshape(UNITS, OUTPUTS).mT
    r, found = torch.zeros(UNITS, dtype=torch.float64), []
    for t in range(STEPS):
        r = W[:, :UNITS] @ r + W[:, UNITS:] @ x[t] + noise[t]
        found.append(C @ r)
    return torch.stack(found)


def jacobians(x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    w, c = RNN.W.mT.flatten(), RNN.C.mT.flatten()
    found: tuple[Tensor, Tensor] = jacrev(outputs, argnums=(0, 1))(w, c, x, noise)
    return found


def test_the_gaussian_fisher_is_that_of_jacobians() -> None:
    found = RNN.fishers(X, gaussian_curvature(COVARIANCE), NOISE)
    for k in range(2):
        expected = torch.zeros_like(found[k])
        for x, noise in zip(X, NOISE, strict=True):
            for J in jacobians(x, noise)[k]:
                expected += J.mT @ torch.linalg.solve(COVARIANCE, J) / BATCH
        torch.testing.assert_close(found[k], expected)


def test_the_categorical_fisher_is_the_expectation_over_all_sequences_of_labels() -> None:
    found = RNN.fishers(X, categorical_curvature, NOISE)
    w, c = RNN.W.mT.flatten(), RNN.C.mT.flatten()

    def log_probability(w: Tensor, c: Tensor, x: Tensor, noise: Tensor, labels: Tensor) -> Tensor:
        return outputs(w, c, x, noise).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).sum()

    expected = [torch.zeros_like(matrix) for matrix in found]
    for x, noise in zip(X, NOISE, strict=True):
        for labels in map(torch.tensor, product(range(OUTPUTS), repeat=STEPS)):
            weight = log_probability(w, c, x, noise, labels).exp()
            scores = jacrev(log_probability, argnums=(0, 1))(w, c, x, noise, labels)
            for k, score in enumerate(scores):
                expected[k] += weight * torch.outer(score, score) / BATCH
    for k in range(2):
        torch.testing.assert_close(found[k], expected[k])


def test_without_noise_it_is_as_with_noise_of_zero() -> None:
    plain, zero = (RNN.fishers(X, categorical_curvature, noise) for noise in (None, torch.zeros_like(NOISE)))
    for a, b in zip(plain, zero, strict=True):
        torch.testing.assert_close(a, b)


def test_run_gives_the_inputs_of_both_maps() -> None:
    z, r = RNN.run(X, NOISE)
    torch.testing.assert_close(r, z @ RNN.W.mT + NOISE)
    torch.testing.assert_close(z[:, 1:, :UNITS], r[:, :-1])
    assert torch.equal(z[..., UNITS:], X)
    assert not bool(z[:, 0, :UNITS].any())


def test_projections_imply_these_precisions() -> None:
    A = draw(5, 5) @ draw(5, 5).mT
    weight = draw(UNITS, 5)
    V = draw(UNITS, 5, seed=7)
    left, right = owm_factors(A, UNITS, 0.1)
    damped_A = A + 0.1 * torch.eye(5)
    torch.testing.assert_close(right @ V @ left, V @ damped_A)
    left, right = dowm_factors(A, weight, 0.1)
    torch.testing.assert_close(left, damped_A)
    torch.testing.assert_close(right @ V, weight @ (A @ (weight.mT @ V)) + 0.1 * V)


def test_damping_does_not_depend_on_units() -> None:
    A = draw(4, 4) @ draw(4, 4).mT
    torch.testing.assert_close(damped(A, 0.01), damped(1e6 * A, 0.01))
    assert float(damped(A, 0.01).diagonal().mean()) == pytest.approx(1.01)


def test_rotations_are_rotations_and_uniform() -> None:
    generator = torch.Generator().manual_seed(0)
    rotations = torch.stack([random_rotation(3, generator) for _ in range(2000)])
    torch.testing.assert_close(rotations @ rotations.mT, torch.eye(3, dtype=torch.float64).expand(2000, 3, 3))
    torch.testing.assert_close(torch.linalg.det(rotations), torch.ones(2000, dtype=torch.float64))
    # Every entry of a uniform rotation has mean 0 and mean square 1/3.
    assert rotations.mean(0).abs().max() < 0.06
    assert (rotations.square().mean(0) - 1 / 3).abs().max() < 0.04


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SettingError, match="units"):
        LinearRNN(draw(3, 3), draw(2, 3))
    with pytest.raises(SettingError, match="C reads 4 units"):
        LinearRNN(draw(3, 5), draw(2, 4))
