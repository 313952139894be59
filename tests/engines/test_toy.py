"""The paper's convex toy problem: fixed points and paths of NCL, of plain Laplace and of projection."""

from __future__ import annotations

import math

import numpy as np
import pyro.distributions as dist
import torch
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.engines import Progress
from tests.engines.paper import laplace

THETA = [torch.tensor([3.0, -6.0], dtype=torch.float64), torch.tensor([3.0, 6.0], dtype=torch.float64)]
PRIOR = 1e3  # so wide that it hardly counts


class Toy:
    """Two quadratic losses with curvature Q_k around theta_k, their axes turned by angles in degrees."""

    def __init__(self, steep: float, angles: tuple[float, float]) -> None:
        self.Q = []
        for angle, flat in zip(angles, (1.0, 2.0), strict=True):
            c, s = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            rotation = torch.tensor([[c, -s], [s, c]], dtype=torch.float64)
            self.Q.append(rotation @ torch.diag(torch.tensor([flat, steep], dtype=torch.float64)) @ rotation.T)
        self.optimum = torch.linalg.solve(sum(self.Q), self.Q[0] @ THETA[0] + self.Q[1] @ THETA[1])
        self.steep, self.rate = steep, 0.1 / steep

    def loss(self, k: int, theta: Tensor) -> Tensor:
        return torch.einsum("...i,ij,...j->...", theta - THETA[k], self.Q[k], theta - THETA[k]) / 2

    def task(self, k: int) -> ncl.Task:
        """Two regression examples whose summed squared error is the loss."""
        x = torch.linalg.cholesky(self.Q[k]).T
        return ncl.Task((x, (x @ THETA[k]).unsqueeze(-1)), name=f"task {k + 1}")

    def path(self, steps: int, prior_weight: float = 1.0) -> Tensor:
        """Where task 2 leads our engine from the optimum of task 1, [steps, 2]."""
        linear = nn.Linear(2, 1, bias=False).double()
        model = ncl.BayesianNetwork(linear, ncl.Normal(1.0), prior=dist.Normal(0.0, PRIOR))
        first = laplace(steps=round(55 * self.steep), batch_size=2, lr=2 * self.rate, momentum=0.5, fisher="exact")
        posterior = ncl.OnlinePosterior(model, first)
        posterior.update(self.task(0))
        (state,) = posterior.blocks.values()
        torch.testing.assert_close(state.loc.squeeze(0), THETA[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(state.precision.dense(), self.Q[0], rtol=1e-4, atol=1e-4)
        points: list[Tensor] = []

        def keep(progress: Progress) -> None:
            points.append(progress.values()["weight"].squeeze(0).clone())

        # lr tau / N is the step on the bracket
        rate = self.rate * 2 * PRIOR**2
        second = laplace(steps=steps, batch_size=2, lr=rate, momentum=0.0, prior_weight=prior_weight, fisher="exact")
        posterior.update(self.task(1), engine=second, callbacks=[keep])
        return torch.stack(points)

    def plain_path(self, steps: int = 2000) -> Tensor:
        """Gradient descent on the same objective."""
        theta, points = THETA[0].clone(), []
        for _ in range(steps):
            theta = theta - self.rate * sum(q @ (theta - centre) for q, centre in zip(self.Q, THETA, strict=True))
            points.append(theta)
        return torch.stack(points)


def test_ncl_shares_the_fixed_point_of_laplace_and_forgets_less_at_equal_progress() -> None:
    toy = Toy(steep=5.5, angles=(50.0, 10.0))
    path, plain = toy.path(steps=1000), toy.plain_path()
    torch.testing.assert_close(plain[-1], toy.optimum, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(path[-1], toy.optimum, rtol=1e-3, atol=1e-3)
    # the loss on task 1 as a function of that on task 2, which both paths lower all the way
    progress = np.linspace(1.02 * float(toy.loss(1, toy.optimum)), 0.98 * float(toy.loss(1, THETA[0])), 100)
    forgotten = []
    for points in (path, plain):
        first, second = toy.loss(0, points).flip(0).numpy(), toy.loss(1, points).flip(0).numpy()
        assert (np.diff(second) >= -1e-6).all()
        forgotten.append(np.interp(progress, second, first))
    assert (forgotten[0] <= forgotten[1] * 1.001).all()
    assert (forgotten[1] - forgotten[0]).max() > 0.15 * float(toy.loss(0, toy.optimum))


def test_where_plain_laplace_forgets_transiently_ncl_does_not() -> None:
    toy = Toy(steep=55.0, angles=(20.0, 160.0))
    end = float(toy.loss(0, toy.optimum))
    assert float(toy.loss(0, toy.plain_path()).max()) > 2 * end
    path = toy.path(steps=2000)
    torch.testing.assert_close(path[-1], toy.optimum, rtol=1e-3, atol=1e-2)
    assert float(toy.loss(0, path).max()) < 1.01 * end


def test_projection_ends_at_the_optimum_of_the_second_task() -> None:
    toy = Toy(steep=5.5, angles=(50.0, 10.0))
    projected = toy.path(steps=1000, prior_weight=0.0)
    torch.testing.assert_close(projected[-1], THETA[1], rtol=1e-3, atol=1e-3)
    assert float(toy.loss(0, projected[-1])) > 2 * float(toy.loss(0, toy.optimum))
