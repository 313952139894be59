"""The paper's toy problems: two losses of two parameters, and the paths of three methods from one to the other.

The first loss is quadratic, so its Laplace approximation is exact::

    l_1(theta) = 1/2 (theta - theta_1)^T Q_1 (theta - theta_1)
    l_2(theta) = 1/2 (theta - theta_2)^T Q_2 (theta - theta_2) + a - a exp(-1/2 (theta - v)^T Q_v (theta - v))

with a = 0 in the convex problem, Q_1 = R(phi_1) diag(1, zeta) R(phi_1)^T, Q_2 = R(phi_2) diag(2, zeta) R(phi_2)^T.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nclbayes.data.task import Task
from nclbayes.errors import SettingError


@dataclass(frozen=True, eq=False)
class ToyProblem:
    """Two losses over theta in R^2; made by :func:`toy_convex` and :func:`toy_nonconvex`.

    Attributes:
        theta_1: Where l_1 is least, [2].
        theta_2: Where the quadratic part of l_2 is least, [2].
        Q_1: Curvature of l_1, [2, 2].
        Q_2: Curvature of the quadratic part of l_2, [2, 2].
        a: Depth of the well in l_2; 0 for the convex problem.
        v: Centre of the well, [2]; None if there is none.
        Q_v: Inverse squared widths of the well, [2, 2]; None if there is none.

    Raises:
        SettingError: If a is negative, or a well lacks its centre or its widths.
    """

    theta_1: Tensor
    theta_2: Tensor
    Q_1: Tensor
    Q_2: Tensor
    a: float = 0.0
    v: Tensor | None = None
    Q_v: Tensor | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.a) and self.a >= 0):
            raise SettingError(f"The depth a of the well must be a finite number of at least 0, not {self.a}.")
        if self.a > 0 and (self.v is None or self.Q_v is None):
            raise SettingError(f"A well of depth a = {self.a} needs its centre v and its Q_v.")

    @property
    def convex(self) -> bool:
        """Whether l_2 is a quadratic without a well."""
        return self.a == 0

    def losses(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Both losses.

        Args:
            theta: Points, [..., 2].

        Returns:
            l_1 and l_2, [...] each.
        """
        l_1 = _quadratic(theta - self.theta_1, self.Q_1)
        l_2 = _quadratic(theta - self.theta_2, self.Q_2)
        return l_1, l_2 if self.convex else l_2 + self.a - self._well(theta)[0]

    def gradients(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of both losses.

        Args:
            theta: Points, [..., 2].

        Returns:
            Those of l_1 and l_2, [..., 2] each.
        """
        g_1 = (theta - self.theta_1) @ self.Q_1
        g_2 = (theta - self.theta_2) @ self.Q_2
        if not self.convex:
            well, pull = self._well(theta)
            g_2 = g_2 + well.unsqueeze(-1) * pull
        return g_1, g_2

    def optima(self) -> Tensor:
        """All local optima of l_1 + l_2, the lowest first.

        Returns:
            Points, [k, 2]; one of them if the problem is convex.
        """
        total = self.Q_1 + self.Q_2
        found = self._minima(total, torch.linalg.solve(total, self.Q_1 @ self.theta_1 + self.Q_2 @ self.theta_2))
        l_1, l_2 = self.losses(found)
        return found[(l_1 + l_2).argsort()]

    def optima_2(self) -> Tensor:
        """All local optima of l_2 alone, the lowest first.

        Returns:
            Points, [k, 2]; theta_2 if the problem is convex.
        """
        found = self._minima(self.Q_2, self.theta_2)
        return found[self.losses(found)[1].argsort()]

    def highest_rate(self) -> float:
        """The learning rate below which every step of every method lowers what that method minimises."""
        curvature = self.Q_1 + self.Q_2
        if self.Q_v is not None:
            curvature = curvature + self.a * self.Q_v
        # In the coordinates L^T theta, with Q_1 = L L^T, preconditioned descent is plain descent.
        root = torch.linalg.cholesky(self.Q_1)
        whitened = torch.linalg.solve(root, torch.linalg.solve(root, curvature).mT)
        return 2 / max(float(torch.linalg.eigvalsh(matrix)[-1]) for matrix in (curvature, whitened))

    def paths(self, rate: float | None = None, steps: int = 10_000) -> dict[str, Tensor]:
        """Where learning task 2 leads from theta_1, by gradient descent of three kinds.

        The steps are::

            laplace:    theta <- theta - rate (grad l_1 + grad l_2)
            projected:  theta <- theta - rate Q_1^-1 grad l_2
            ncl:        theta <- theta - rate Q_1^-1 (grad l_1 + grad l_2)

        Args:
            rate: The learning rate; None: a tenth of :meth:`highest_rate`, which is close to gradient flow.
            steps: How many points of each path, of which theta_1 is the first.

        Returns:
            Paths [steps, 2], by method: "laplace", "projected" and "ncl".

        Raises:
            SettingError: If the rate is not positive or so high that a path may diverge, or there are no steps.

        Example:
            >>> from nclbayes.tasks.toy import toy_convex
            >>> problem = toy_convex(zeta=5.5, angles=(50.0, 10.0))
            >>> path = problem.paths(rate=0.1, steps=200)["ncl"]
            >>> bool((path[-1] - problem.optima()[0]).norm() < 1e-6)
            True
        """
        highest = self.highest_rate()
        rate = highest / 10 if rate is None else rate
        if not 0 < rate < highest:
            raise SettingError(f"rate must be above 0 and below {highest:.4g}, where paths may diverge, not {rate}.")
        if steps < 1:
            raise SettingError(f"steps must be at least 1, not {steps}.")
        inverse = torch.linalg.inv(self.Q_1)
        preconditioner = torch.stack(
            [torch.eye(2, dtype=inverse.dtype, device=inverse.device), inverse, inverse]
        )  # [3, 2, 2]
        keeps_first = inverse.new_tensor([[1.0], [0.0], [1.0]])
        theta = self.theta_1.expand(3, 2)
        points = [theta]
        for _ in range(steps - 1):
            g_1, g_2 = self.gradients(theta)
            step = preconditioner @ (keeps_first * g_1 + g_2).unsqueeze(-1)
            theta = theta - rate * step.squeeze(-1)
            points.append(theta)
        return dict(zip(("laplace", "projected", "ncl"), torch.stack(points, dim=1), strict=True))

    def tasks(self, dtype: torch.dtype = torch.float64) -> list[Task]:
        """The convex problem as two regressions without intercept, of two examples each.

        The inputs of task k are the rows of L^T, with Q_k = L L^T, and its targets are x theta_k: half the summed
        squared error of x theta is then l_k(theta), and the Fisher matrix of unit noise is Q_k.

        Args:
            dtype: Of inputs and targets.

        Returns:
            Two tasks with x [2, 2] and y [2, 1].

        Raises:
            SettingError: If the problem is not convex.
        """
        if not self.convex:
            raise SettingError("Only the convex toy problem is a regression: take the tasks of toy_convex().")
        tasks = []
        for k, (theta, Q) in enumerate(((self.theta_1, self.Q_1), (self.theta_2, self.Q_2)), start=1):
            x = torch.linalg.cholesky(Q).mT
            y = (x @ theta).unsqueeze(-1)
            tasks.append(Task((x.to(dtype), y.to(dtype)), name=f"toy {k}"))
        return tasks

    def _well(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """G = a exp(-1/2 (theta - v)^T Q_v (theta - v)), [...], and Q_v (theta - v), [..., 2]."""
        assert self.v is not None
        assert self.Q_v is not None
        offset = theta - self.v
        return self.a * torch.exp(-_quadratic(offset, self.Q_v)), offset @ self.Q_v

    def _minima(self, A: Tensor, centre: Tensor) -> Tensor:
        """All local minima of 1/2 (theta - centre)^T A (theta - centre) less the well, [k, 2].

        Where the gradient vanishes, (A + g Q_v) theta = A centre + g Q_v v with g = G(theta): a curve theta(g), and one
        equation for g. The roots at which g - G(theta(g)) rises are the minima; those at which it falls are saddles.
        """
        if self.v is None or self.Q_v is None or self.convex:
            return centre.unsqueeze(0)
        # Here, because everybody who imports nclbayes would wait for it.
        from scipy.optimize import brentq

        Q_v, pulled = self.Q_v, self.Q_v @ self.v

        def curve(g: Tensor) -> Tensor:
            return torch.linalg.solve(A + g[..., None, None] * Q_v, A @ centre + g[..., None] * pulled)

        def excess(g: Tensor) -> Tensor:
            return g - self._well(curve(g))[0]

        # G never exceeds a; from 0 up, roots of many sizes are told apart.
        powers = torch.linspace(-12, 0, 4000, dtype=centre.dtype, device=centre.device)
        grid = torch.cat([centre.new_zeros(1), 2 * self.a * 10**powers])
        values = excess(grid)
        rises = ((values[:-1] <= 0) & (values[1:] > 0)).nonzero().squeeze(-1).tolist()
        roots = [
            brentq(lambda g: float(excess(centre.new_tensor(g))), float(grid[i]), float(grid[i + 1])) for i in rises
        ]
        return curve(centre.new_tensor(roots))


def toy_convex(*, zeta: float = 55.0, angles: tuple[float, float] = (20.0, 160.0)) -> ToyProblem:
    """Two quadratic losses with optima theta_1 = (3, -6) and theta_2 = (3, 6).

    The paper has zeta = 5.5 and does not give the angles. By the defaults, the loss on task 1 along the path of Laplace
    rises to almost three times its value at the combined optimum before it falls; NCL comes there without such a
    detour, and projection ends at theta_2. With zeta = 5.5, no angles make Laplace overshoot by more than about one per
    cent; with ``angles=(50.0, 10.0)`` it still forgets more than NCL does at equal loss on task 2.

    Args:
        zeta: How steep both losses are across their flat directions.
        angles: phi_1 and phi_2 in degrees: the directions in which l_1 and l_2 are flat.

    Returns:
        The problem, in double precision.

    Raises:
        SettingError: If zeta is not positive, or an angle is not finite.

    Example:
        >>> from nclbayes.tasks.toy import toy_convex
        >>> problem = toy_convex()
        >>> paths = problem.paths(steps=3000)
        >>> end = problem.losses(problem.optima()[0])[0]
        >>> [round(float(problem.losses(paths[method])[0].max() / end), 1) for method in ("laplace", "ncl")]
        [2.9, 1.0]
    """
    _require_positive(zeta=zeta)
    if len(angles) != 2 or not all(map(math.isfinite, angles)):
        raise SettingError(f"angles must be two finite numbers, not {angles}.")
    Q_1, Q_2 = (_turned(flat, zeta, math.radians(angle)) for flat, angle in zip((1.0, 2.0), angles, strict=True))
    return ToyProblem(_double([3, -6]), _double([3, 6]), Q_1, Q_2)


def toy_nonconvex(
    *,
    zeta: float = 55.0,
    angles: tuple[float, float] = (20.0, 160.0),
    a: float = 1000.0,
    v: tuple[float, float] = (3.0, 0.0),
    width: float = 1.5,
) -> ToyProblem:
    """The convex problem with a well in l_2, so that l_1 + l_2 has a second local optimum.

    The paper does not give a, v and Q_v. By the defaults, the well lies midway between theta_1 and theta_2, and l_1 is
    that of :func:`toy_convex`. Laplace falls into the well, a worse optimum of l_1 + l_2 in which the loss on task 1 is
    almost six times that at the optimum that NCL finds. Projection follows NCL at first and ends in a minimum of l_2.

    Args:
        zeta: As for :func:`toy_convex`.
        angles: As for :func:`toy_convex`.
        a: Depth of the well.
        v: Centre of the well.
        width: Standard deviation of the well in every direction: Q_v = I / width^2.

    Returns:
        The problem, in double precision.

    Raises:
        SettingError: If zeta, a or width is not positive, or an angle or v is not finite.

    Example:
        >>> from nclbayes.tasks.toy import toy_nonconvex
        >>> len(toy_nonconvex().optima())
        2
    """
    _require_positive(a=a, width=width)
    if len(v) != 2 or not all(map(math.isfinite, v)):
        raise SettingError(f"v must be two finite numbers, not {v}.")
    Q_v = _double([[1, 0], [0, 1]]) / width**2
    return replace(toy_convex(zeta=zeta, angles=angles), a=float(a), v=_double(v), Q_v=Q_v)


def _turned(flat: float, steep: float, phi: float) -> Tensor:
    R = _double([[math.cos(phi), -math.sin(phi)], [math.sin(phi), math.cos(phi)]])
    return R @ _double([[flat, 0.0], [0.0, steep]]) @ R.mT


def _require_positive(**settings: float) -> None:
    for name, value in settings.items():
        if not (math.isfinite(value) and value > 0):
            raise SettingError(f"{name} must be positive and finite, not {value}.")


def _double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _quadratic(offset: Tensor, Q: Tensor) -> Tensor:
    return ((offset @ Q) * offset).sum(-1) / 2
