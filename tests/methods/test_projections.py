"""OWM, DOWM, their Laplace forms and GPM against their formulas."""

from __future__ import annotations

import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.errors import SettingError
from nclbayes.methods import DOWM, GPM, OWM, LaplaceDOWM, LaplaceOWM, PlainTraining
from nclbayes.methods.gpm import grow_basis
from tests.engines.test_laplace import classification_task, classifier
from tests.zoo import inputs, labels


def activities(values: dict[str, Tensor], task: ncl.Task) -> dict[str, Tensor]:
    """E[z z^T] of both layers, z ending in 1."""
    x = task.train[0].double()
    h = torch.tanh(F.linear(x, values["0.weight"].double(), values["0.bias"].double()))
    rows = {"0": F.pad(x, (0, 1), value=1.0), "2": F.pad(h, (0, 1), value=1.0)}
    return {name: z.mT @ z / len(z) for name, z in rows.items()}


@pytest.mark.parametrize("engine", [OWM, DOWM])
def test_steps_are_projected_and_nothing_pulls(engine: type[OWM]) -> None:
    alpha, settings = 0.3, {"batch_size": 60, "alpha": 0.3}
    posterior = ncl.OnlinePosterior(classifier(), engine(steps=20, **settings))  # type: ignore[arg-type]
    means: list[dict[str, tuple[Tensor, Tensor]]] = []
    for seed in (1, 2):
        task = classification_task(seed)
        posterior.update(task)
        found = activities(posterior.mean(), task)
        W = {name: state.loc.double() for name, state in posterior.blocks.items()}
        means.append({name: (E, W[name] @ E @ W[name].mT) for name, E in found.items()})
    task = classification_task(7)
    theta = {name: state.loc.double() for name, state in posterior.blocks.items()}
    momentum = {name: torch.zeros_like(t) for name, t in theta.items()}
    for _ in range(4):
        leaves: dict[str, Tensor] = {}
        for name, state in posterior.blocks.items():
            leaves |= state.block.unpack(theta[name].clone().requires_grad_())
        x, y = task.train[0].double(), task.train[1]
        h = torch.tanh(F.linear(x, leaves["0.weight"], leaves["0.bias"]))
        loss = F.cross_entropy(F.linear(h, leaves["2.weight"], leaves["2.bias"]), y)
        grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        for name, state in posterior.blocks.items():
            E, WEW = ((means[0][name][i] + means[1][name][i]) / 2 for i in (0, 1))
            P_R = alpha * torch.linalg.inv(E + alpha * torch.eye(len(E)).double())
            P_L = alpha * torch.linalg.inv(WEW + alpha * torch.eye(len(WEW)).double())
            P_L = P_L if engine is DOWM else torch.eye(len(WEW)).double()
            momentum[name] = 0.9 * momentum[name] + P_L @ state.block.pack(grads) @ P_R
            theta[name] = theta[name] - 0.05 * momentum[name]
    report = posterior.update(task, engine=engine(steps=4, **settings))  # type: ignore[arg-type]
    assert report.log_evidence is None
    for name, state in posterior.blocks.items():
        torch.testing.assert_close(state.loc.double(), theta[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", [LaplaceOWM, LaplaceDOWM])
def test_the_laplace_forms_are_ncl_with_those_factors(engine: type[LaplaceOWM]) -> None:
    posterior = ncl.OnlinePosterior(classifier(), engine(steps=20, batch_size=60, kronecker_sum="kl"))
    task = classification_task()
    posterior.update(task)
    for name, E in activities(posterior.mean(), task).items():
        state = posterior.blocks[name]
        W = state.loc.double()
        D = 60 * (W @ E @ W.mT if engine is LaplaceDOWM else torch.eye(len(W)).double())
        A, B = torch.eye(len(E)).double(), torch.eye(len(W)).double()
        expected = ncl.kronecker_sum(A, B, E, D, "kl", rtol=1e-5)
        torch.testing.assert_close(state.precision.dense(), expected.dense(), rtol=1e-4, atol=1e-4)  # type: ignore[union-attr]


def test_gpm_protects_the_leading_directions_of_each_task() -> None:
    g = torch.Generator().manual_seed(0)
    first = torch.randn(200, 2, generator=g).double() @ torch.randn(2, 6, generator=g).double()
    second = torch.randn(200, 3, generator=g).double() @ torch.randn(3, 6, generator=g).double()
    basis = grow_basis(None, first.mT @ first / 200, 0.999)
    assert basis.shape == (6, 2)
    torch.testing.assert_close(first @ basis @ basis.mT, first)
    both = grow_basis(basis, second.mT @ second / 200, 0.95)
    torch.testing.assert_close(both.mT @ both, torch.eye(both.shape[1]).double(), rtol=0, atol=1e-10)
    torch.testing.assert_close(both @ both.mT @ basis, basis)
    held = (second @ both).square().sum() / second.square().sum()
    fewer = both[:, :-1]
    assert held >= 0.95 > (second @ fewer).square().sum() / second.square().sum()
    assert torch.equal(grow_basis(both, first.mT @ first / 200, 0.999), both)


@pytest.mark.parametrize("engine", [OWM, DOWM])
def test_the_first_task_is_plain_training_whatever_the_prior(engine: type[OWM]) -> None:
    found = []
    for method in (engine(steps=3, batch_size=60, lr=0.1), PlainTraining(steps=3, batch_size=60, lr=0.1)):
        torch.manual_seed(0)
        prior = {"*bias": dist.Normal(0.0, 10.0), "*": dist.Normal(0.0, 1.0)}
        model = ncl.BayesianNetwork(nn.Linear(5, 3), ncl.Categorical(), prior=prior)
        posterior = ncl.OnlinePosterior(model, method)
        posterior.update(classification_task())
        found.append(posterior.mean())
    for site, value in found[1].items():
        torch.testing.assert_close(found[0][site], value)


def test_gpm_protects_every_map_of_a_stack() -> None:
    net = nn.Sequential(nn.Conv1d(4, 6, 1, groups=2), nn.Flatten(), nn.Linear(12, 2))
    model = ncl.BayesianNetwork(net, ncl.Categorical(), prior=dist.Normal(0.0, 1.0))
    posterior = ncl.OnlinePosterior(model, GPM(steps=20, batch_size=30, threshold=1.0))
    # the first group's inputs leave a direction open, the second's do not
    x = inputs(30, 4, 2)
    x[:, 1] = x[:, 0]
    posterior.update(ncl.Task((x, labels(2, 30)), name="a"))
    kept = posterior.mean()
    posterior.update(ncl.Task((inputs(30, 4, 2, seed=5), labels(2, 30, seed=6)), name="b"))
    after = posterior.mean()
    outputs = [F.conv1d(x, m["0.weight"], m["0.bias"], groups=2) for m in (kept, after)]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-4)
    assert not torch.equal(kept["0.weight"], after["0.weight"])


def test_gpm_leaves_the_outputs_on_protected_inputs_as_they_were() -> None:
    task = classification_task(1)
    posterior = ncl.OnlinePosterior(classifier(), GPM(steps=30, batch_size=60, threshold=1.0))
    flat = ncl.Task((F.pad(task.train[0][:, :2], (0, 3)), task.train[1]), name="two inputs")
    posterior.update(flat)
    learnt = posterior.mean()
    before = F.linear(flat.train[0], learnt["0.weight"], learnt["0.bias"])
    posterior.update(classification_task(7))
    after = F.linear(flat.train[0], posterior.mean()["0.weight"], posterior.mean()["0.bias"])
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    moved = F.linear(task.train[0], posterior.mean()["0.weight"], posterior.mean()["0.bias"])
    assert not torch.allclose(moved, F.linear(task.train[0], learnt["0.weight"], learnt["0.bias"]), atol=1e-2)


@pytest.mark.parametrize("engine", [OWM, DOWM])
def test_an_alpha_below_the_rounding_of_the_inputs_power_will_do(engine: type[OWM]) -> None:
    """Inputs that span a few directions, as pixels do: what is left of the others is rounding, of either sign."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(400, 3, generator=g) @ torch.randn(3, 60, generator=g)
    model = ncl.BayesianNetwork(nn.Linear(60, 2), ncl.Categorical(), prior=dist.Normal(0.0, 1.0))
    posterior = ncl.OnlinePosterior(model, engine(steps=5, alpha=1e-12))
    posterior.update(ncl.Task((x, x[:, 0].gt(0).long()), name="plane"))
    before = posterior.mean()
    posterior.update(ncl.Task((x.flip(1), x[:, 0].gt(0).long()), name="another"))
    after = posterior.mean()
    outputs = [F.linear(x, m["weight"], m["bias"]) for m in (before, after)]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("engine", "settings"),
    [(OWM, {"alpha": 0.0}), (OWM, {"prior_weight": 1.0}), (GPM, {"threshold": 0.0}), (GPM, {"threshold": 1.5})],
)
def test_settings_out_of_range_are_refused(engine: type[OWM], settings: dict[str, float]) -> None:
    with pytest.raises(SettingError, match=next(iter(settings))):
        engine(**settings)  # type: ignore[arg-type]
