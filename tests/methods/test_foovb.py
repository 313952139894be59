"""FOO-VB's fixed points against the conditions that they solve, against BGD, and against Bayes' rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.errors import SettingError
from nclbayes.gaussians import KroneckerState
from nclbayes.kronecker import KroneckerPrecision
from nclbayes.kronecker.blockdiagonal import whole
from nclbayes.methods import BGD, FOOVB, sampling
from nclbayes.methods.foovb import KroneckerMove, Solution
from tests.engines.test_laplace import classification_task, classifier
from tests.zoo import inputs

SOLUTIONS = [Solution.JOINT, Solution.PUBLISHED]


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise whose second moments are those of standard normals: all that a quadratic loss asks of it."""
    count = 0

    def designed(like: Tensor, generator: torch.Generator) -> Tensor:
        nonlocal count
        size = like.numel()
        found = torch.zeros(size, dtype=like.dtype)
        found[count // 2 % size] = (-1) ** count * size**0.5
        count += 1
        return found.reshape(like.shape)

    monkeypatch.setattr(sampling, "noise_like", designed)


def linear(m: int, n: int, scale: float = 1.0) -> ncl.BayesianNetwork:
    torch.manual_seed(0)
    net = nn.Linear(n, m, bias=False).double()
    prior = dist.Normal(torch.zeros((), dtype=torch.float64), torch.full((), scale, dtype=torch.float64))
    return ncl.BayesianNetwork(net, ncl.Normal(0.5), prior=prior)


def prior_state(widths: tuple[int, int] = (0, 0)) -> KroneckerState:
    """That of a map of four outputs and six inputs, after a task that has given it a precision of no special form."""
    structure: Any = {"*": max(widths)} if any(widths) else "auto"
    posterior = ncl.OnlinePosterior(linear(4, 6), ncl.LaplaceNCL(steps=2, fisher="exact"), structure=structure)
    x = inputs(30, 6, seed=2).double()
    posterior.update(ncl.Task((x, x[:, :4].contiguous()), name="before"))
    (state,) = posterior.blocks.values()
    assert isinstance(state, KroneckerState)
    return state


def stepped(
    state: KroneckerState, solution: Solution, scale: float
) -> tuple[KroneckerMove, list[Tensor], list[Tensor]]:
    """A step with random gradients, its noise and those."""
    g = torch.Generator().manual_seed(5)
    move = KroneckerMove(state, float("inf"), solution)
    phi, psi = ([torch.randn(4, 6, generator=g, dtype=torch.float64) for _ in range(7)] for _ in range(2))
    psi = [scale * each / 7 for each in psi]
    for noise, gradient in zip(phi, psi, strict=True):
        move.gather(noise, gradient)
    move.step(state.loc.clone(), 1.0)
    return move, phi, psi


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_a_step_solves_the_conditions_of_a_stationary_point(scale: float) -> None:
    """That r^2 X X^T + V E X^T = V, with the part of E by which nothing but the covariance changes."""
    state = prior_state()
    B_0, A_0 = whole(state.precision.output_root), whole(state.precision.input_root)
    move, phi, psi = stepped(state, Solution.JOINT, scale)
    B, A = whole(move._B), whole(move._A)
    V_B, V_A = B_0 @ B_0.T, A_0 @ A_0.T
    E_B = sum((p @ A_0 @ e.T for p, e in zip(psi, phi, strict=True)), torch.zeros(4, 4)) / 6
    E_A = sum((p.T @ B @ e for p, e in zip(psi, phi, strict=True)), torch.zeros(6, 6)) / 4
    r2 = torch.trace(torch.linalg.solve(V_B, B @ B.T)) / 4
    for V, root, E, new, t in ((V_B, B_0, E_B, B, torch.ones(())), (V_A, A_0, E_A, A, r2)):
        E = torch.linalg.solve(root.T, root.T @ E + E.T @ root) / 2
        torch.testing.assert_close(
            t * new @ new.T + V @ E @ new.T, V, rtol=0, atol=1e-12 * float(1 + scale) * float(V.norm())
        )
    assert torch.linalg.matrix_norm(V_A - A @ A.T) > 0.01 * torch.linalg.matrix_norm(V_A)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_the_published_solution_is_that_of_the_published_equation(scale: float) -> None:
    """X X^T + V E X^T = V with X = L Q - V E / 2, L L^T = V + V E E^T V / 4, Q = S W^T of L^-1 V E = S k W^T."""
    state = prior_state()
    move, phi, psi = stepped(state, Solution.PUBLISHED, scale)
    B_0, A_0 = whole(state.precision.output_root), whole(state.precision.input_root)
    E_B = sum((p @ A_0 @ e.T for p, e in zip(psi, phi, strict=True)), torch.zeros(4, 4)) / 6
    E_A = sum((p.T @ B_0 @ e for p, e in zip(psi, phi, strict=True)), torch.zeros(6, 6)) / 4
    for root, E, new in ((B_0, E_B, whole(move._B)), (A_0, E_A, whole(move._A))):
        V = root @ root.T
        VE = V @ E
        L = torch.linalg.cholesky(V + VE @ VE.T / 4)
        S, _, Wt = torch.linalg.svd(torch.linalg.solve(L, VE))
        X = L @ S @ Wt - VE / 2
        torch.testing.assert_close(X @ X.T + VE @ X.T, V, rtol=0, atol=1e-11 * float(V.norm()))
        torch.testing.assert_close(new @ new.T, X @ X.T, rtol=0, atol=1e-10 * float(V.norm()))
        assert float(torch.linalg.eigvalsh(V - new @ new.T).min()) > -1e-12


@pytest.mark.parametrize("structure", ["auto", 1])
def test_of_one_output_and_a_diagonal_factor_it_is_bgd(structure: Any, drawn: list[Tensor]) -> None:
    """With the same noise; a single weight needs no diagonal factor to be told."""
    n = 5 if structure == 1 else 1
    x = inputs(20, n, seed=1).double()
    task = ncl.Task((x, x.sum(-1, keepdim=True)), name="sum")
    ends = []
    for engine in (
        FOOVB(steps=9, particles=3, init_scale=0.3 * n**0.5, solution="joint"),
        BGD(steps=9, particles=3, init_scale=0.3),
    ):
        posterior = ncl.OnlinePosterior(
            linear(1, n), engine, structure=structure, generator=torch.Generator().manual_seed(0)
        )
        posterior.update(task)
        (state,) = posterior.blocks.values()
        precision = state.precision
        ends.append((state.loc, precision.dense().diagonal() if isinstance(state, KroneckerState) else precision[0]))
    assert torch.equal(drawn[0], drawn[len(drawn) // 2])
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-12)
    assert float(ends[0][1].max()) > 1.5 / 0.09


def test_a_step_on_a_quadratic_loss_is_at_the_optimum_of_its_variational_objective(exact: None) -> None:
    """Its conditions with the expectations of the new Gaussian, up to the square of how much one step tells."""
    residuals = []
    for size in (0.04, 0.02):
        x = size * inputs(12, 3, seed=1).double()
        posterior = ncl.OnlinePosterior(
            linear(2, 3), FOOVB(steps=1, particles=12, init_scale=1e6, batch_size=12, solution="joint")
        )
        posterior.update(ncl.Task((x, torch.zeros(12, 2).double()), name="small"))
        (state,) = posterior.blocks.values()
        V_A, V_B = (torch.linalg.inv(factor) for factor in (state.precision.input, state.precision.output))
        # KL(q || q_0) + E_q[L], whose curvature is x^T x / s^2 (x) I, around q_0 of unit variance.
        H, start = x.T @ x / 0.25, posterior.model.network.weight.detach()
        of_B = 3 * (torch.linalg.inv(V_B)) - torch.eye(2) * (torch.trace(V_A) + torch.trace(H @ V_A))
        of_A = 2 * (torch.linalg.inv(V_A)) - (torch.eye(3) + H) * torch.trace(V_B)
        of_M = state.loc - start + state.loc @ H
        residuals.append(torch.stack([of_A.norm(), of_B.norm(), of_M.norm()]))
        told = H.norm()
    assert bool((residuals[1] < 0.05 * told).all())
    assert bool((residuals[1] < residuals[0] / 12).all())


def test_many_small_steps_come_to_the_posterior_of_bayes_rule_wherever_segments_end(exact: None) -> None:
    """That of a linear model with isotropic noise is a matrix normal."""
    x = inputs(300, 3, seed=1).double() * 0.06
    y = x @ torch.tensor([[1.0, 0.5], [-0.5, 0.0], [0.3, 2.0]]).double()
    ends = []
    for cuts in ((), (20, 155)):
        posterior = ncl.OnlinePosterior(linear(2, 3), FOOVB(particles=12, init_scale=1e6, solution="joint"))
        found = ncl.Stream(posterior, false_alarm_every=None)
        for i, (a, b) in enumerate(zip(x.split(1), y.split(1), strict=True)):
            if i in cuts:
                found.consolidate()
            found.observe(a, b)
        (state,) = found.present().blocks.values()
        ends.append((state.loc, state.precision.dense()))
    precision = torch.eye(3) + x.T @ x / 0.25
    (mean, dense), cut = ends
    torch.testing.assert_close((mean, dense), cut, rtol=1e-6, atol=1e-8)
    expected = torch.kron(precision, torch.eye(2).double())
    assert torch.linalg.matrix_norm(expected, ord=2) > 4
    torch.testing.assert_close(dense, expected, rtol=0.03, atol=0.03)
    start = posterior.model.network.weight.detach()
    torch.testing.assert_close(mean, torch.linalg.solve(precision, start.T + x.T @ y / 0.25).T, rtol=0, atol=0.02)


@pytest.mark.parametrize("solution", SOLUTIONS)
def test_factors_in_blocks_move_as_the_blocks_of_whole_ones(solution: Solution) -> None:
    split, together = prior_state((3, 3)), prior_state()
    assert split.block.is_split
    dense = KroneckerMove(together, float("inf"), solution)
    dense._A, dense._B = whole(split.precision.input_root), whole(split.precision.output_root)
    blocks, phi, psi = stepped(split, solution, 0.5)
    # Whole factors whose products are cut to the same blocks.
    mask_A, mask_B = (torch.block_diag(*[torch.ones(k, k)] * 2) for k in (3, 2))
    K_B = sum(dense._B.T @ p @ dense._A @ e.T for p, e in zip(psi, phi, strict=True)) / 6 * mask_B
    step = _step_of(K_B, solution)
    r = float((step.square().sum() / 4).sqrt()) if solution is Solution.JOINT else 1.0
    B = dense._B @ step if solution is Solution.JOINT else dense._B
    K_A = sum(dense._A.T @ p.T @ B @ e for p, e in zip(psi, phi, strict=True)) / 4 * mask_A
    A = dense._A @ _step_of(K_A / r, solution) / r
    for found, expected in ((blocks._B, dense._B @ step), (blocks._A, A)):
        torch.testing.assert_close(whole(found), expected, rtol=1e-9, atol=1e-12)


def test_each_matrix_of_a_stack_moves_as_if_it_were_alone() -> None:
    def stacked(x: Tensor, y: Tensor | None = None) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2, 4, 3), 1.0).to_event(3))
        out = torch.bmm(x.transpose(0, 1), w).transpose(0, 1)
        pyro.sample("y", dist.Normal(out, 1.0).to_event(2), obs=y)

    x = inputs(20, 2, 4, seed=1)
    posterior = ncl.OnlinePosterior(stacked, ncl.LaplaceNCL(steps=3, fisher="exact", lr=0.01))
    posterior.update(ncl.Task((x, x[..., :3].contiguous()), name="two maps"))
    (state,) = posterior.blocks.values()
    assert isinstance(state, KroneckerState)
    k, m, n = state.block.shape
    g = torch.Generator().manual_seed(2)
    phi, psi = (torch.randn(5, k, m, n, generator=g) for _ in range(2))
    for solution in SOLUTIONS:
        moves = [KroneckerMove(state, float("inf"), solution)]
        for i in range(k):
            factors = KroneckerPrecision.factorise(state.precision.input[i], state.precision.output[i])
            moves.append(KroneckerMove(replace(state, loc=state.loc[i], precision=factors), float("inf"), solution))
        means = [state.loc.clone(), *(loc.clone() for loc in state.loc)]
        for i, (move, mean) in enumerate(zip(moves, means, strict=True)):
            for noise, gradient in zip(phi, psi, strict=True):
                move.gather(noise if i == 0 else noise[i - 1], gradient if i == 0 else gradient[i - 1])
            move.step(mean, 0.5)
        whole_stack, *alone = moves
        torch.testing.assert_close(means[0], torch.stack(means[1:]), rtol=1e-5, atol=1e-6)
        for side in ("_A", "_B"):
            each = torch.stack([getattr(move, side) for move in alone])
            torch.testing.assert_close(getattr(whole_stack, side), each, rtol=1e-4, atol=1e-6)


def _step_of(K: Tensor, solution: Solution) -> Tensor:
    """sqrt(1 + K^2 / 4) - K / 2 of the symmetric part, or of the root of K K^T."""
    if solution is Solution.PUBLISHED:
        k, U = torch.linalg.eigh(K @ K.T)
        k = k.clamp(min=0).sqrt()
    else:
        k, U = torch.linalg.eigh((K + K.T) / 2)
    return U @ torch.diag((1 + k.square() / 4).sqrt() - k / 2) @ U.T


def test_a_map_begins_as_wide_as_is_asked_and_goes_on_as_it_was_left() -> None:
    posterior = ncl.OnlinePosterior(classifier(prior=1.0), FOOVB())
    task = classification_task()
    for k, scale in enumerate((0.1, 5.0)):
        posterior.update(task, engine=FOOVB(steps=1, lr=1e-9, likelihood_weight=1e-9, init_scale=scale))
        for state, n in zip(posterior.blocks.values(), (6, 9), strict=True):
            variance = state.distribution.variance
            torch.testing.assert_close(variance, torch.full_like(variance, 0.01 / n), rtol=1e-4, atol=0, msg=str(k))
    narrow = ncl.OnlinePosterior(classifier(prior=0.02), FOOVB(steps=1, lr=1e-9, likelihood_weight=1e-9))
    narrow.update(task)
    for state in narrow.blocks.values():
        torch.testing.assert_close(state.distribution.stddev.mean(), torch.tensor(0.02), rtol=1e-4, atol=0)


def test_layers_that_are_no_maps_take_the_steps_of_bgd() -> None:
    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x)

    x = inputs(20, 4, seed=1)
    ends = []
    for engine in (FOOVB(steps=5, init_scale=0.2), BGD(steps=5, init_scale=0.1)):
        model = ncl.BayesianNetwork(Gain(), ncl.Normal(0.5), prior=dist.Normal(1.0, 1.0))
        posterior = ncl.OnlinePosterior(model, engine, generator=torch.Generator().manual_seed(0))
        posterior.update(ncl.Task((x, x), name="gain"))
        ends.append({name: (state.loc, state.precision) for name, state in posterior.blocks.items()})
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)


def test_another_solution_is_refused() -> None:
    for name in ("both", None):
        with pytest.raises(SettingError, match="choose one of 'published', 'joint'"):
            FOOVB(solution=name)  # type: ignore[arg-type]
