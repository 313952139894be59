"""The toy problems: losses, optima, and what the paper says of three methods' paths."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from nclbayes.errors import SettingError
from nclbayes.tasks.toy import ToyProblem, toy_convex, toy_nonconvex

PROBLEMS = [toy_convex(), toy_convex(zeta=5.5, angles=(50.0, 10.0)), toy_nonconvex()]


def points(count: int = 50) -> Tensor:
    return 8 * torch.randn(count, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("problem", PROBLEMS)
def test_gradients_are_those_of_the_losses(problem: ToyProblem) -> None:
    theta = points().requires_grad_()
    for loss, gradient in zip(problem.losses(theta), problem.gradients(theta), strict=True):
        assert loss.shape == (50,)
        (expected,) = torch.autograd.grad(loss.sum(), theta)
        torch.testing.assert_close(gradient, expected)


def test_losses_are_the_papers() -> None:
    problem = toy_nonconvex(zeta=5.5, angles=(30.0, 75.0), a=20.0, v=(1.0, 2.0), width=0.5)
    flat = torch.tensor([math.cos(math.radians(30)), math.sin(math.radians(30))], dtype=torch.float64)
    steep = torch.tensor([-flat[1], flat[0]], dtype=torch.float64)
    torch.testing.assert_close(problem.Q_1 @ flat, flat)
    torch.testing.assert_close(problem.Q_1 @ steep, 5.5 * steep)
    torch.testing.assert_close(torch.linalg.eigvalsh(problem.Q_2), torch.tensor([2.0, 5.5], dtype=torch.float64))
    theta = torch.tensor([1.0, 2.5], dtype=torch.float64)
    first, second = theta - torch.tensor([3.0, -6.0]), theta - torch.tensor([3.0, 6.0])
    l_1, l_2 = problem.losses(theta)
    torch.testing.assert_close(l_1, first @ problem.Q_1 @ first / 2)
    # the offset from v is one width
    torch.testing.assert_close(l_2, second @ problem.Q_2 @ second / 2 + 20 * (1 - math.exp(-0.5)))


@pytest.mark.parametrize("problem", [*PROBLEMS, toy_nonconvex(a=1.0), toy_nonconvex(v=(16.0, 0.0), a=50.0)])
def test_optima_are_all_that_descent_finds(problem: ToyProblem) -> None:
    rate = 0.9 * problem.highest_rate()
    for combined, optima in ((True, problem.optima()), (False, problem.optima_2())):
        theta = torch.cat([4 * points(200), optima])
        for _ in range(6000):
            g_1, g_2 = problem.gradients(theta)
            theta = theta - rate * (g_1 + g_2 if combined else g_2)
        nearest = torch.cdist(theta, optima).min(dim=1)
        assert nearest.values.max() < 1e-3
        assert nearest.indices.unique().tolist() == list(range(len(optima)))
        losses = problem.losses(optima)
        values = sum(losses) if combined else losses[1]
        assert isinstance(values, Tensor)
        assert torch.equal(values, values.sort().values)


def test_the_convex_problem_has_one_optimum_of_each_kind() -> None:
    problem = toy_convex()
    torch.testing.assert_close(problem.optima_2(), problem.theta_2.unsqueeze(0))
    (optimum,) = problem.optima()
    torch.testing.assert_close(sum(problem.gradients(optimum)), torch.zeros(2, dtype=torch.float64), atol=1e-9, rtol=0)


def test_a_well_around_the_optimum_moves_nothing() -> None:
    (optimum,) = toy_convex().optima()
    problem = toy_nonconvex(v=tuple(optimum.tolist()), a=10.0)
    torch.testing.assert_close(problem.optima()[0], optimum)


def test_paths_start_at_theta_1_and_lower_what_they_minimise() -> None:
    for problem in PROBLEMS:
        paths = problem.paths(0.99 * problem.highest_rate(), steps=500)
        assert list(paths) == ["laplace", "projected", "ncl"]
        for method, path in paths.items():
            assert path.shape == (500, 2)
            assert torch.equal(path[0], problem.theta_1)
            l_1, l_2 = problem.losses(path)
            value = l_2 if method == "projected" else l_1 + l_2
            assert (value.diff() <= 1e-9).all()


def test_the_first_steps_are_the_papers() -> None:
    problem = toy_nonconvex()
    paths = problem.paths(rate=1e-3, steps=3)
    theta = {method: path[1] for method, path in paths.items()}
    g = {method: problem.gradients(point) for method, point in theta.items()}
    steps = {method: (path[1] - path[2]) / 1e-3 for method, path in paths.items()}
    torch.testing.assert_close(steps["laplace"], sum(g["laplace"]))
    torch.testing.assert_close(problem.Q_1 @ steps["projected"], g["projected"][1])
    torch.testing.assert_close(problem.Q_1 @ steps["ncl"], sum(g["ncl"]))


def test_laplace_forgets_transiently_and_ncl_does_not() -> None:
    problem = toy_convex()
    (optimum,) = problem.optima()
    end = problem.losses(optimum)[0]
    paths = problem.paths(steps=6000)
    for method in ("laplace", "ncl"):
        torch.testing.assert_close(paths[method][-1], optimum, rtol=1e-3, atol=1e-3)
    assert problem.losses(paths["laplace"])[0].max() > 2.5 * end
    assert problem.losses(paths["ncl"])[0].max() < 1.01 * end


def test_projection_follows_ncl_and_then_leaves_for_the_second_task() -> None:
    problem = toy_convex()
    (optimum,) = problem.optima()
    paths = problem.paths(0.9 * problem.highest_rate(), steps=10_000)
    torch.testing.assert_close(paths["projected"][-1], problem.theta_2, rtol=1e-4, atol=1e-4)
    slow = problem.paths(steps=100)
    halfway = int((slow["ncl"][:, 0] < (3 + optimum[0]) / 2).sum())
    assert halfway < 100
    apart = (slow["ncl"] - slow["projected"])[:halfway].norm(dim=-1).max()
    assert apart < 0.05 * (optimum - problem.theta_1).norm()
    assert problem.losses(problem.theta_2)[0] > 20 * problem.losses(optimum)[0]


def test_the_papers_zeta_shows_the_difference_at_equal_progress() -> None:
    problem = toy_convex(zeta=5.5, angles=(50.0, 10.0))
    (optimum,) = problem.optima()
    paths = problem.paths(steps=3000)
    low, high = (float(problem.losses(theta)[1]) for theta in (optimum, problem.theta_1))
    progress = np.linspace(1.02 * low, 0.98 * high, 100)
    forgotten = {}
    for method in ("ncl", "laplace"):
        l_1, l_2 = (loss.flip(0).numpy() for loss in problem.losses(paths[method]))
        forgotten[method] = np.interp(progress, l_2, l_1)
    assert (forgotten["ncl"] <= 1.001 * forgotten["laplace"]).all()
    assert (forgotten["laplace"] - forgotten["ncl"]).max() > 0.15 * float(problem.losses(optimum)[0])


def test_at_the_papers_zeta_laplace_hardly_overshoots_whatever_the_angles() -> None:
    for phi_1 in range(0, 180, 20):
        for phi_2 in range(10, 180, 20):
            problem = toy_convex(zeta=5.5, angles=(phi_1, phi_2))
            end = problem.losses(problem.optima()[0])[0]
            path = problem.paths(steps=200)["laplace"]
            assert problem.losses(path)[0].max() < 1.02 * end


def test_in_the_nonconvex_problem_laplace_forgets_and_ncl_does_not() -> None:
    problem = toy_nonconvex()
    optima = problem.optima()
    assert len(optima) == 2
    for fraction, steps in ((0.9, 3000), (0.2, 12_000)):
        paths = problem.paths(fraction * problem.highest_rate(), steps=steps)
        torch.testing.assert_close(paths["ncl"][-1], optima[0], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(paths["laplace"][-1], optima[1], rtol=1e-3, atol=1e-3)
        first = {method: problem.losses(path)[0] for method, path in paths.items()}
        assert first["laplace"][-1] > 5 * first["ncl"][-1]
        assert first["ncl"].max() < 1.01 * problem.losses(optima[0])[0]


def test_in_the_nonconvex_problem_projection_ends_in_a_minimum_of_the_second_loss() -> None:
    problem = toy_nonconvex()
    path = problem.paths(0.98 * problem.highest_rate(), steps=20_000)["projected"]
    minima = problem.optima_2()
    distance, which = torch.cdist(path[-1:], minima).squeeze(0).min(dim=0)
    assert distance < 0.05
    assert (minima[which] - problem.theta_2).norm() < 0.5
    assert problem.losses(path[-1])[0] > 20 * problem.losses(problem.optima()[0])[0]


def test_tasks_are_regressions_with_the_same_losses() -> None:
    problem = toy_convex()
    theta = points()
    for task, loss, Q in zip(problem.tasks(), problem.losses(theta), (problem.Q_1, problem.Q_2), strict=True):
        x, y = task.train
        assert (x.shape, y.shape, task.size) == ((2, 2), (2, 1), 2)
        torch.testing.assert_close(((theta @ x.mT - y.squeeze(-1)) ** 2).sum(-1) / 2, loss)
        torch.testing.assert_close(x.mT @ x, Q)
    assert all(item.dtype == torch.float32 for task in problem.tasks(torch.float32) for item in task.train)
    with pytest.raises(SettingError, match="Only the convex"):
        toy_nonconvex().tasks()


def test_default_dtype_and_device_do_not_matter() -> None:
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            problem = toy_nonconvex()
            found = problem.paths(steps=3)["ncl"], problem.optima(), toy_convex().tasks()[0].train[0]
        assert all(item.dtype == torch.float64 and item.device.type == "cpu" for item in found)
    finally:
        torch.set_default_dtype(torch.float32)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(SettingError, match="zeta must be positive"):
        toy_convex(zeta=0.0)
    with pytest.raises(SettingError, match="angles must be two finite"):
        toy_convex(angles=(math.nan, 0.0))
    with pytest.raises(SettingError, match="width must be positive"):
        toy_nonconvex(width=-1.0)
    with pytest.raises(SettingError, match="v must be two finite"):
        toy_nonconvex(v=(math.inf, 0.0))
    problem = toy_convex()
    with pytest.raises(SettingError, match=r"below 0\.0205"):
        problem.paths(rate=0.03)
    with pytest.raises(SettingError, match="steps must be"):
        problem.paths(steps=0)
    with pytest.raises(SettingError, match="at least 0"):
        ToyProblem(problem.theta_1, problem.theta_2, problem.Q_1, problem.Q_2, a=-1.0)
    with pytest.raises(SettingError, match="needs its centre"):
        ToyProblem(problem.theta_1, problem.theta_2, problem.Q_1, problem.Q_2, a=1.0)
