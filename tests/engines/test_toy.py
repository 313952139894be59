"""The paper's convex toy problem: fixed points and paths of NCL, of plain Laplace and of projection."""

from __future__ import annotations

import math

import pyro.distributions as dist
import torch
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.engines import Progress

THETA = [torch.tensor([3.0, -6.0], dtype=torch.float64), torch.tensor([3.0, 6.0], dtype=torch.float64)]
PRIOR = 1e3  # so wide that it hardly counts


def curvature(angle: float, flat: float, steep: float = 5.5) -> Tensor:
    c, s = math.cos(angle), math.sin(angle)
    rotation = torch.tensor([[c, -s], [s, c]], dtype=torch.float64)
    return rotation @ torch.diag(torch.tensor([flat, steep], dtype=torch.float64)) @ rotation.T


Q = [curvature(math.pi / 3, 1.0), curvature(-math.pi / 4, 2.0)]


def task(k: int) -> ncl.Task:
    """Two regression examples whose summed squared error is the quadratic loss Q_k around theta_k."""
    x = torch.linalg.cholesky(Q[k]).T
    return ncl.Task((x, (x @ THETA[k]).unsqueeze(-1)), name=f"task {k + 1}")


def loss(k: int, theta: Tensor) -> Tensor:
    return torch.einsum("...i,ij,...j->...", theta - THETA[k], Q[k], theta - THETA[k]) / 2


def path(prior_weight: float) -> Tensor:
    """Where task 2 leads from the optimum of task 1, [steps, 2]."""
    model = ncl.BayesianNetwork(nn.Linear(2, 1, bias=False).double(), ncl.Normal(1.0), prior=dist.Normal(0.0, PRIOR))
    first = ncl.LaplaceNCL(steps=500, batch_size=2, lr=0.2, momentum=0.0, fisher="exact")
    posterior = ncl.OnlinePosterior(model, first)
    posterior.update(task(0))
    (state,) = posterior.blocks.values()
    torch.testing.assert_close(state.loc.squeeze(0), THETA[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.precision.dense(), Q[0], rtol=1e-4, atol=1e-4)
    points: list[Tensor] = []
    # lr tau / N is the step on the bracket: 0.02
    second = ncl.LaplaceNCL(
        steps=4000, batch_size=2, lr=0.02 * 2 * PRIOR**2, momentum=0.0, prior_weight=prior_weight, fisher="exact"
    )

    def keep(progress: Progress) -> None:
        points.append(progress.values()["weight"].squeeze(0).clone())

    posterior.update(task(1), engine=second, callbacks=[keep])
    return torch.stack(points)


def laplace_path() -> Tensor:
    """Plain gradient descent on the same objective."""
    theta, points = THETA[0].clone(), []
    for _ in range(4000):
        theta = theta - 0.02 * (Q[0] @ (theta - THETA[0]) + Q[1] @ (theta - THETA[1]))
        points.append(theta)
    return torch.stack(points)


def test_ncl_and_laplace_share_the_fixed_point_and_ncl_forgets_less_on_the_way() -> None:
    ncl_path, plain = path(prior_weight=1.0), laplace_path()
    optimum = torch.linalg.solve(Q[0] + Q[1], Q[0] @ THETA[0] + Q[1] @ THETA[1])
    torch.testing.assert_close(plain[-1], optimum, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ncl_path[-1], optimum, rtol=1e-3, atol=1e-3)
    # plain descent passes through a loss on task 1 that is far above where it ends; NCL never does
    end = float(loss(0, optimum))
    assert float(loss(0, plain).max()) > 1.5 * end
    assert float(loss(0, ncl_path).max()) < 1.01 * end


def test_projection_ends_at_the_optimum_of_the_second_task() -> None:
    projected = path(prior_weight=0.0)
    torch.testing.assert_close(projected[-1], THETA[1], rtol=1e-3, atol=1e-3)
    # on the way it passes close to where NCL stays, and then leaves
    optimum = torch.linalg.solve(Q[0] + Q[1], Q[0] @ THETA[0] + Q[1] @ THETA[1])
    assert float(loss(0, projected).max()) > 3 * float(loss(0, optimum))
