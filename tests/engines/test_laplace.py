"""Laplace-NCL against what is known exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from itertools import pairwise
from typing import Optional

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.engines.base import ENGINES, Engine
from nclbayes.errors import DataError, NonFiniteError, SettingError
from nclbayes.gaussians.preconditioners import Elementwise, TwoSided
from tests.engines.paper import laplace, variational
from tests.zoo import inputs, labels


def regression_task(seed: int, examples: int = 40, features: int = 3) -> ncl.Task:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(examples, features, generator=g)
    y = x @ torch.randn(features, 1, generator=g) + 0.3 * torch.randn(examples, 1, generator=g)
    return ncl.Task((x, y), name=f"regression {seed}")


def conjugate(tasks: list[ncl.Task], scale: float, prior: float) -> tuple[Tensor, Tensor]:
    """Exact posterior mean and precision of (w, b) for y ~ N(x w + b, scale^2), w, b ~ N(0, prior^2)."""
    precision = torch.eye(4, dtype=torch.float64) / prior**2
    moment = torch.zeros(4, 1, dtype=torch.float64)
    for task in tasks:
        z = F.pad(task.train[0].double(), (0, 1), value=1.0)
        precision = precision + z.T @ z / scale**2
        moment = moment + z.T @ task.train[1].double() / scale**2
    return torch.linalg.solve(precision, moment), precision


@pytest.mark.parametrize(
    ("rule", "weight", "steps"), [("kl", 1.0, 300), ("mse", 1.0, 300), ("additive", 1.0, 300), ("additive", 4.0, 800)]
)
def test_the_linear_gaussian_posterior_is_exact_after_every_task(rule: str, weight: float, steps: int) -> None:
    """A likelihood to the power w is one of noise 1 / sqrt(w) times as large."""
    tasks = [regression_task(seed) for seed in range(3)]
    model = ncl.BayesianNetwork(nn.Linear(3, 1), ncl.Normal(0.5), prior=dist.Normal(0.0, 2.0))
    settings = {"steps": steps, "batch_size": 40, "kronecker_sum": rule, "likelihood_weight": weight}
    engine = ncl.LaplaceNCL(lr=0.1, fisher="exact", **settings)
    posterior = ncl.OnlinePosterior(model, engine)
    for k, task in enumerate(tasks):
        # a fixed number of steps with the full batch: the step size follows the curvature of the first task
        posterior.update(task, engine=engine if k == 0 else ncl.LaplaceNCL(**{**engine.to_dict(), "lr": 0.4}))
        mean, precision = conjugate(tasks[: k + 1], 0.5 / math.sqrt(weight), 2.0)
        (state,) = posterior.blocks.values()
        torch.testing.assert_close(state.loc.double(), mean.T, rtol=1e-4, atol=1e-4)
        found = torch.kron(state.precision.input, state.precision.output)
        torch.testing.assert_close(found, precision, rtol=1e-4, atol=1e-4)


def test_the_log_evidence_of_a_linear_gaussian_task_is_exact() -> None:
    task = regression_task(0)
    model = ncl.BayesianNetwork(nn.Linear(3, 1), ncl.Normal(0.5), prior=dist.Normal(0.0, 2.0))
    posterior = ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=400, batch_size=40, lr=0.1, fisher="exact"))
    report = posterior.update(task)
    z = F.pad(task.train[0].double(), (0, 1), value=1.0)
    covariance = 0.25 * torch.eye(40, dtype=torch.float64) + 4.0 * z @ z.T
    exact = torch.distributions.MultivariateNormal(torch.zeros(40).double(), covariance).log_prob(
        task.train[1].double().squeeze(-1)
    )
    assert report.log_evidence == pytest.approx(float(exact), abs=1e-2)
    assert posterior.log_evidence == report.log_evidence


def test_the_log_evidences_of_two_tasks_add_up_to_that_of_both() -> None:
    """To 0.02 nats of some -60: what float32 and the steps leave."""
    tasks = [regression_task(seed) for seed in (0, 1)]
    model = ncl.BayesianNetwork(nn.Linear(3, 1), ncl.Normal(0.5), prior=dist.Normal(0.0, 2.0))
    engine = ncl.LaplaceNCL(steps=400, batch_size=40, lr=0.1, fisher="exact", likelihood_weight=1.0)
    posterior = ncl.OnlinePosterior(model, engine)
    later = ncl.LaplaceNCL(**{**engine.to_dict(), "lr": 0.4})
    found = [posterior.update(task, engine=e).log_evidence for task, e in zip(tasks, (engine, later), strict=True)]
    z = F.pad(torch.cat([task.train[0] for task in tasks]).double(), (0, 1), value=1.0)
    y = torch.cat([task.train[1] for task in tasks]).double().squeeze(-1)
    covariance = 0.25 * torch.eye(80, dtype=torch.float64) + 4.0 * z @ z.T
    exact, first = (
        float(torch.distributions.MultivariateNormal(torch.zeros(n).double(), covariance[:n, :n]).log_prob(y[:n]))
        for n in (80, 40)
    )
    assert found == [pytest.approx(first, abs=1e-2), pytest.approx(exact - first, abs=1e-2)]
    # The order of the tasks is another way to the same number; the second alone has another evidence.
    alone = ncl.OnlinePosterior(model, engine).update(tasks[1]).log_evidence
    assert abs(alone - found[1]) > 1.0


def classifier(seed: int = 0, prior: float = 1.0) -> ncl.BayesianNetwork:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    return ncl.BayesianNetwork(net, ncl.Categorical(), prior=dist.Normal(0.0, prior))


def classification_task(seed: int = 1, examples: int = 60) -> ncl.Task:
    return ncl.Task((inputs(examples, 5, seed=seed), labels(3, examples, seed=seed + 1)), name=f"classes {seed}")


def test_the_first_task_is_sgd_with_momentum_on_the_mean_loss_plus_the_prior() -> None:
    model, task = classifier(prior=0.7), classification_task()
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    net.load_state_dict(model.initial_values())
    x, y = task.train
    velocity = [torch.zeros_like(p) for p in net.parameters()]
    for _ in range(25):
        penalty = sum(p.square().sum() for p in net.parameters()) / (2 * 0.7**2 * 60)
        grads = torch.autograd.grad(F.cross_entropy(net(x), y) + penalty, list(net.parameters()))
        with torch.no_grad():
            for p, v, g in zip(net.parameters(), velocity, grads, strict=True):
                v.mul_(0.9).add_(g)
                p.sub_(0.05 * v)
    posterior = ncl.OnlinePosterior(model, laplace(steps=25, batch_size=60, lr=0.05))
    posterior.update(task)
    for name, value in posterior.mean().items():
        torch.testing.assert_close(value, dict(net.named_parameters())[name].detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weight", [0.25, 40.0])
def test_a_weighted_likelihood_steers_as_a_wider_prior_does_and_samples_are_narrower(weight: float) -> None:
    """Precision of the prior over weight of the likelihood is all that counts; the covariance is 1 / w of the other."""
    settings = {"steps": 20, "batch_size": 60, "fisher": "exact"}
    weighted = ncl.OnlinePosterior(classifier(prior=0.5), laplace(likelihood_weight=weight, **settings))
    wide = ncl.OnlinePosterior(classifier(prior=0.5 * math.sqrt(weight)), laplace(**settings))
    for seed in (1, 7):
        for posterior in (weighted, wide):
            posterior.update(classification_task(seed))
        for name, state in weighted.blocks.items():
            torch.testing.assert_close(state.loc, wide.blocks[name].loc, rtol=1e-4, atol=1e-5)
            expected = weight * wide.blocks[name].precision.dense()
            torch.testing.assert_close(state.precision.dense(), expected, rtol=1e-3, atol=1e-3 * weight)


def before_a_second_task() -> tuple[ncl.OnlinePosterior, ncl.Task]:
    posterior = ncl.OnlinePosterior(classifier(), laplace(steps=20, batch_size=60))
    posterior.update(classification_task(1))
    return posterior, classification_task(7)


def test_a_later_task_follows_the_trust_region_rule() -> None:
    """theta <- theta - lr tau/N M, M <- rho M - Lambda^-1 grad + lambda (theta - mu), by dense algebra."""
    posterior, task = before_a_second_task()
    before = dict(posterior.blocks)
    x, y = task.train
    theta = {name: state.loc.double().clone() for name, state in before.items()}
    momentum = {name: torch.zeros_like(t) for name, t in theta.items()}
    for _ in range(5):
        sites = {}
        for name, state in before.items():
            sites |= state.block.unpack(theta[name])
        leaves = {k: v.clone().requires_grad_() for k, v in sites.items()}
        out = torch.tanh(F.linear(x.double(), leaves["0.weight"], leaves["0.bias"]))
        loss = F.cross_entropy(F.linear(out, leaves["2.weight"], leaves["2.bias"]), y, reduction="sum")
        grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        for name, state in before.items():
            dense = torch.kron(state.precision.input, state.precision.output)
            g = state.block.pack(grads).mT.reshape(-1)
            natural = torch.linalg.solve(dense, g).reshape(theta[name].mT.shape).mT
            momentum[name] = 0.9 * momentum[name] + natural + 0.5 * (theta[name] - state.loc.double())
            theta[name] = theta[name] - 0.05 * math.exp(state.log_scale) / 60 * momentum[name]
    posterior.update(task, engine=laplace(steps=5, batch_size=60, prior_weight=0.5))
    for name, state in posterior.blocks.items():
        torch.testing.assert_close(state.loc.double(), theta[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", ["kl", "additive", "bound"])
def test_the_precision_grows_by_the_fisher_at_the_new_mean(rule: str) -> None:
    model, task = classifier(), classification_task()
    engine = laplace(steps=20, batch_size=60, fisher="exact", kronecker_sum=rule)
    posterior = ncl.OnlinePosterior(model, engine)
    posterior.update(task)
    fisher = ncl.fisher(model, posterior.mean(), task.train, kind="exact")
    for name, state in posterior.blocks.items():
        n, m = fisher[name].input.shape[0], fisher[name].output.shape[0]
        expected = ncl.kronecker_sum(
            torch.eye(n).double(), torch.eye(m).double(), fisher[name].input, fisher[name].output, rule, rtol=1e-6
        )
        torch.testing.assert_close(state.precision.dense(), expected.dense(), rtol=1e-5, atol=1e-5)


def test_a_trust_radius_bounds_every_step() -> None:
    model = classifier()
    posterior = ncl.OnlinePosterior(model, laplace(steps=10, batch_size=60))
    posterior.update(classification_task(1))
    before = dict(posterior.blocks)
    trail = [posterior.mean()]
    posterior.update(
        classification_task(7),
        engine=laplace(steps=10, batch_size=60, lr=5.0, trust_radius=0.3),
        callbacks=[lambda p: trail.append({k: v.clone() for k, v in p.values().items()})],
    )
    assert len(trail) == 11
    lengths = []
    for first, second in pairwise(trail):
        shift = {k: second[k] - first[k] for k in first}
        lengths.append(sum(state.quadratic(state.block.pack(shift)) for state in before.values()) / 2)
    assert max(lengths) <= 0.3**2 * 1.001
    assert max(lengths) > 0.3**2 * 0.9


def test_damping_that_changes_nothing_costs_nothing() -> None:
    """The default alpha under a wide prior on a wide layer: no pull of its own, and no product of matrices for it."""
    model = ncl.BayesianNetwork(nn.Linear(300, 200), ncl.Categorical(), prior=dist.Normal(0.0, 100.0))
    task = ncl.Task((torch.zeros(4, 300), torch.zeros(4, dtype=torch.int64)), name="t")
    (prior,) = ncl.OnlinePosterior(model, ncl.LaplaceNCL(), example=task).blocks.values()
    assert isinstance(prior.preconditioner(1.0, 12_000 * 1e-20), Elementwise)
    assert isinstance(prior.preconditioner(1.0, 1e-10), TwoSided)


def test_damping_enters_by_a_kl_sum() -> None:
    model = classifier()
    posterior = ncl.OnlinePosterior(model, laplace(steps=10, batch_size=60))
    posterior.update(classification_task(1))
    before = dict(posterior.blocks)
    plain, damped = (
        ncl.OnlinePosterior(model, laplace(steps=1, batch_size=60, momentum=0.0, alpha=alpha)) for alpha in (0.0, 1.0)
    )
    for other in (plain, damped):
        other._belief = posterior._belief
        other.update(classification_task(7))
    for name, state in before.items():
        p = state.precision
        total = ncl.kronecker_sum(
            p.input, p.output, 60.0 * torch.eye(p.input.shape[0]).double(), torch.eye(p.output.shape[0]).double()
        )
        step, damped_step = (other.blocks[name].loc.double() - state.loc.double() for other in (plain, damped))
        torch.testing.assert_close(damped_step, total.solve(p.times(step)), rtol=1e-3, atol=1e-6)


def test_early_stopping_and_a_schedule() -> None:
    task = classification_task()
    engine = laplace(steps=500, batch_size=60, lr=0.05, patience=5, schedule=lambda done: float(done < 0.02))
    report = ncl.OnlinePosterior(classifier(), engine).update(task)
    assert report.stopped_early
    assert 10 < report.steps < 500
    assert report.losses[-1] == pytest.approx(report.losses[-2])
    epochs = laplace(steps=None, epochs=3, batch_size=20)
    assert ncl.OnlinePosterior(classifier(), epochs).update(task).steps == 9


def test_a_diverging_update_leaves_the_posterior_as_it_was() -> None:
    model = classifier()
    posterior = ncl.OnlinePosterior(model, laplace(steps=10, batch_size=60))
    posterior.update(classification_task(1))
    before, tasks = dict(posterior.blocks), posterior.tasks
    x, y = classification_task(7).train
    with (
        pytest.raises(NonFiniteError, match="loss became nan at step 1 of task 'bad'"),
        pyro.validation_enabled(False),
    ):
        posterior.update(ncl.Task((x * float("nan"), y), name="bad"))
    assert posterior.tasks == tasks
    assert all(posterior.blocks[name] is state for name, state in before.items())


def test_a_log_likelihood_that_is_no_number_is_refused() -> None:
    """One target whose square is too large, in none of the batches that steps were taken on."""
    x = inputs(32, 3)
    y = torch.zeros(32, 1)
    y[5] = 3e19
    model = ncl.BayesianNetwork(nn.Linear(3, 1), ncl.Normal(1.0), prior=dist.Normal(0.0, 1.0))
    posterior = ncl.OnlinePosterior(model, laplace(steps=1, batch_size=8))
    with pytest.raises(NonFiniteError, match="log likelihood became -inf with the last step of task 'far'"):
        posterior.update(ncl.Task((x, y), name="far"))
    assert not posterior.blocks


def test_weights_that_diverge_are_named() -> None:
    posterior = ncl.OnlinePosterior(classifier(), laplace(steps=200, batch_size=60, lr=1e30))
    diverged = r"site '\d\.\w+' became NaN or infinite at step \d+ of task|loss became|not finite at step \d+"
    with pytest.raises(NonFiniteError, match=diverged):
        posterior.update(classification_task(1))
    assert not posterior.blocks


def test_labels_and_shapes_that_do_not_fit_are_refused_before_anything_changes() -> None:
    posterior = ncl.OnlinePosterior(classifier(), ncl.LaplaceNCL(steps=5))
    with pytest.raises(DataError, match="range from 0 to 7, but the network has 3 outputs"):
        posterior.update(ncl.Task((inputs(6, 5), torch.tensor([0, 7, 1, 2, 0, 1])), name="labels"))
    with pytest.raises(DataError, match=r"cannot take inputs of shape \(6, 4\)"):
        posterior.update(ncl.Task((inputs(6, 4), labels(3, 6)), name="shapes"))
    with pytest.raises(DataError, match="must be integers"):
        posterior.update(ncl.Task((inputs(6, 5), inputs(6)), name="dtype"))
    assert not posterior.blocks


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "lr must be positive"),
        ({"likelihood_weight": 0.0}, "likelihood_weight must be positive"),
        ({"momentum": 1.0}, "momentum must be"),
        ({"batch_size": 0}, "batch_size must be a whole number"),
        ({"steps": None}, "either `steps` or `epochs`"),
        ({"steps": 10, "epochs": 1}, "either `steps` or `epochs`"),
        ({"kronecker_sum": "best"}, "'kl', 'additive'"),
        ({"fisher": "true"}, "'model', 'signs', 'exact'"),
        ({"prior_weight": -1}, "prior_weight must be at least 0"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        ncl.LaplaceNCL(**settings)  # type: ignore[arg-type]


def test_a_setting_may_be_none_however_its_type_says_so() -> None:
    class Local:
        """A type that cannot be found from outside."""

    @dataclass(frozen=True, kw_only=True)
    class Postponed(ncl.LaplaceNCL):
        batch_size: Optional[int] = None  # type: ignore[assignment]  # noqa: UP045

    @dataclass(frozen=True, kw_only=True)
    class Hidden(Postponed):
        other: Local | None = None

    plain = [("batch_size", Optional[int], None)]  # noqa: UP045
    kinds = [Postponed, Hidden, make_dataclass("Plain", plain, bases=(ncl.LaplaceNCL,), frozen=True, kw_only=True)]
    for kind in kinds:
        del ENGINES[kind.__name__]
        assert kind().batch_size is None
        with pytest.raises(SettingError, match="momentum must be"):
            kind(momentum=None)


@pytest.mark.parametrize("engine", [laplace, variational])
def test_an_exploding_recurrent_network_stops_with_the_step(engine: Callable[..., Engine]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core, self.out = ncl.nn.RNN(2, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.core(x))

    torch.manual_seed(0)
    model = ncl.BayesianNetwork(Net(), ncl.Normal(0.1), prior=dist.Normal(0.0, 1.0))
    posterior = ncl.OnlinePosterior(model, engine(steps=200, batch_size=20, lr=1.0))
    x = torch.randn(40, 30, 2, generator=torch.Generator().manual_seed(1))
    with pytest.raises(NonFiniteError, match=r"at step \d+ of task 'noise'. The posterior is as it was before"):
        posterior.update(ncl.Task((x, x[..., :1]), name="noise"))
    assert not posterior.blocks
