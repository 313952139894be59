"""Predictions of sequences, vectors and masked targets, against a loop over samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.errors import DataError, ModelError
from nclbayes.isolation.randomness import drawing_from
from tests.zoo import inputs, labels


def learnt(model: Any, x: Tensor, y: Tensor) -> ncl.OnlinePosterior:
    posterior = ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=20, batch_size=20))
    posterior.update(ncl.Task((x, y), name="t"))
    return posterior


def loop(posterior: ncl.OnlinePosterior, x: Tensor, y: Tensor, count: int) -> Tensor:
    """The log of the mean over samples of an example's likelihood, one network at a time."""
    generator = torch.Generator().manual_seed(5)
    with drawing_from(generator, torch.device("cpu")):
        draws = posterior.sample(count, generator)
    found = []
    for i in range(count):
        values = {site: value[i] for site, value in draws.items()}
        found.append(pyro.condition(posterior.model, data=values)(x).log_prob(y))
    return torch.stack(found).logsumexp(0) - torch.tensor(float(count)).log()


def network(likelihood: ncl.nn.Likelihood, outputs: int, mask: Callable[..., Tensor] | None = None) -> Any:
    torch.manual_seed(0)
    return ncl.BayesianNetwork(nn.Linear(3, outputs), likelihood, dist.Normal(0.0, 1.0), mask=mask)


def correlated(x: Tensor, y: Tensor | None = None) -> Any:
    w = pyro.sample("w", dist.Normal(torch.zeros(3, 2), 1.0).to_event(2))
    fn = dist.MultivariateNormal(x @ w, torch.tensor([[1.0, 0.5], [0.5, 2.0]]))
    pyro.sample("y", fn, obs=y)
    return fn


CASES: dict[str, tuple[Callable[[], Any], Tensor, Tensor]] = {
    "labels of a sequence": (lambda: network(ncl.Categorical(), 4), inputs(20, 5, 3), labels(4, 20, 5)),
    "numbers of a sequence": (lambda: network(ncl.Normal(0.5), 2), inputs(20, 5, 3), inputs(20, 5, 2)),
    "masked numbers": (
        lambda: network(ncl.Normal(0.5), 2, mask=lambda x: x[..., :2] > 0),
        inputs(20, 5, 3),
        inputs(20, 5, 2),
    ),
    "correlated vectors": (lambda: correlated, inputs(20, 3), inputs(20, 2)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", [5, 8])
def test_samples_are_averaged_as_by_a_loop(name: str, count: int) -> None:
    make, x, y = CASES[name]
    posterior = learnt(make(), x, y)
    predicted = posterior.predict(x, num_samples=count, generator=torch.Generator().manual_seed(5))
    # drawn in one chunk, as the loop's are
    torch.testing.assert_close(predicted.log_prob(y), loop(posterior, x, y, count), rtol=1e-4, atol=1e-4)


def test_masked_targets_count_neither_at_the_mean_nor_in_an_average() -> None:
    x, y = inputs(20, 3), inputs(20, 2)
    model = network(ncl.Normal(0.5), 2, mask=lambda x: torch.tensor([True, False]).expand(len(x), 2))
    posterior = learnt(model, x, y)
    wrong = y.clone()
    wrong[:, 1] = 100.0
    for how in ({}, {"num_samples": 4}):
        scores = [
            posterior.predict(x, **how, generator=torch.Generator().manual_seed(0)).log_prob(t) for t in (y, wrong)
        ]
        torch.testing.assert_close(*scores)


def test_nor_in_a_linearised_prediction() -> None:
    x = inputs(20, 3)
    y, wrong = labels(4, 20), labels(4, 20, seed=9)
    posterior = learnt(network(ncl.Categorical(), 4, mask=lambda x: x[:, 0] > 0), x, y)
    predicted = posterior.predict(x, method="linearized")
    scores = [predicted.log_prob(torch.where(x[:, 0] > 0, y, t)) for t in (y, wrong)]
    torch.testing.assert_close(*scores)
    assert (scores[0] == 0).sum() == (x[:, 0] <= 0).sum()


def test_of_a_linearised_vector_the_outputs_that_count_have_their_own_density() -> None:
    x, y = inputs(20, 3), inputs(20, 3, seed=4)
    model = network(ncl.Normal(0.5), 3, mask=lambda x: torch.tensor([True, False, True]).expand(len(x), 3))
    predicted = learnt(model, x, y).predict(x, method="linearized")
    wrong = y.clone()
    wrong[:, 1] = 100.0
    torch.testing.assert_close(predicted.log_prob(y), predicted.log_prob(wrong))
    kept = torch.tensor([0, 2])
    part = dist.MultivariateNormal(predicted.mean[:, kept], predicted.covariance_matrix[:, kept][..., kept])
    torch.testing.assert_close(predicted.log_prob(y), part.log_prob(y[:, kept]))


@pytest.mark.parametrize("likelihood", [ncl.Categorical(), ncl.Normal(0.5)])
def test_a_sequence_is_not_linearised(likelihood: ncl.nn.Likelihood) -> None:
    x = inputs(20, 5, 3)
    y = labels(4, 20, 5) if isinstance(likelihood, ncl.Categorical) else inputs(20, 5, 4)
    posterior = learnt(network(likelihood, 4), x, y)
    with pytest.raises(ModelError, match=r"event shape \(5(, 4)?,?\)\. Use num_samples"):
        posterior.predict(x, method="linearized")


def test_an_array_is_refused() -> None:
    posterior = learnt(network(ncl.Normal(0.5), 2), inputs(20, 3), inputs(20, 2))
    with pytest.raises(DataError, match=r"ndarray: make a tensor of it with torch\.as_tensor"):
        posterior.predict(np.zeros((4, 3)))


def test_a_head_that_no_task_has_touched_predicts_by_its_prior() -> None:
    torch.manual_seed(0)
    heads = [nn.Linear(3, 1, bias=False) for _ in range(2)]
    net = ncl.MultiHead(nn.Identity(), heads)
    model = ncl.BayesianNetwork(net, ncl.Normal(0.5), prior=dist.Normal(0.0, 2.0))
    posterior = ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=200, batch_size=40, lr=0.1, fisher="exact"))
    x = inputs(40, 3)
    posterior.update(ncl.Task((x, x.sum(-1, keepdim=True)), name="sum", context={"head": 0}))
    # The variance of the noise plus x^T Sigma x, of the posterior for the first head and of the prior for the second.
    precision = torch.eye(3) / 4 + x.T @ x / 0.25
    sigmas = [torch.linalg.inv(precision), 4 * torch.eye(3)]
    for head, sigma in enumerate(sigmas):
        variance = 0.25 + ((x @ sigma) * x).sum(-1, keepdim=True)
        sampled = posterior.predict(x, num_samples=2000, head=head)
        torch.testing.assert_close(sampled.variance, variance, rtol=0.15, atol=0.0)
        linearized = posterior.predict(x, method="linearized", head=head)
        torch.testing.assert_close(linearized.variance, variance, rtol=1e-4, atol=1e-5)
    assert float(posterior.predict(x, head=1).mean.abs().max()) == 0
    assert list(posterior.blocks) == ["heads.0"]


def test_a_single_number_among_the_weights_is_linearised() -> None:
    def model(x: Tensor, y: Tensor | None = None) -> None:
        scale = pyro.sample("scale", dist.Normal(1.0, 1.0))
        pyro.sample("y", dist.Normal(scale * x, 0.5), obs=y)

    x = inputs(30)
    posterior = ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=200, batch_size=30, lr=0.1, fisher="exact"))
    posterior.update(ncl.Task((x, 2 * x), name="twice"))
    variance = 0.25 + x.square() / (1 + float(x.square().sum()) / 0.25)
    torch.testing.assert_close(posterior.predict(x, method="linearized").variance, variance, rtol=1e-4, atol=1e-6)


class Looking(nn.Sequential):
    """A network that branches on its data, which cannot be vectorised."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if float(x.abs().max()) >= 0 else -x)


@pytest.mark.parametrize("likelihood", [ncl.Categorical(), ncl.Normal(0.3)])
def test_the_linearised_predictive_of_a_model_that_cannot_be_vectorised(likelihood: Any) -> None:
    found = []
    for kind in (nn.Sequential, Looking):
        torch.manual_seed(0)
        net = kind(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2))
        posterior = ncl.OnlinePosterior(ncl.BayesianNetwork(net, likelihood), ncl.LaplaceNCL(steps=10, batch_size=20))
        x = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
        y = (x[:, 0] > 0).long() if isinstance(likelihood, ncl.Categorical) else x[:, :2]
        posterior.update(ncl.Task((x, y), name="task"), progress=False)
        draws = torch.Generator().manual_seed(2)
        if kind is Looking:
            with pytest.warns(UserWarning, match="cannot vectorise"):
                found.append(posterior.predict(x, method="linearized", generator=draws))
        else:
            found.append(posterior.predict(x, method="linearized", generator=draws))
    first, second = found
    if isinstance(likelihood, ncl.Categorical):
        torch.testing.assert_close(first.probs, second.probs, rtol=1e-3, atol=1e-3)
    else:
        torch.testing.assert_close(first.covariance_matrix, second.covariance_matrix)


def test_the_linearised_predictive_of_a_noisy_model_is_refused() -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 2))
    posterior = ncl.OnlinePosterior(ncl.BayesianNetwork(net, ncl.Categorical()), ncl.LaplaceNCL(steps=3))
    x = torch.randn(20, 3)
    posterior.update(ncl.Task((x, (x[:, 0] > 0).long()), name="task"), progress=False)
    with pytest.raises(ModelError, match=r"draws random numbers.*net\.eval"):
        posterior.predict(x, method="linearized")
    net.eval()
    assert posterior.predict(x, method="linearized").probs.shape == (20, 2)
