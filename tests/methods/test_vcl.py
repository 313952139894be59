"""Mean-field variational continual learning where its answer is known."""

from __future__ import annotations

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import nclbayes as ncl
from nclbayes.methods import VCL
from tests.engines.test_laplace import classification_task, classifier


@pytest.mark.slow
def test_independent_weights_of_a_linear_model_have_their_exact_posterior() -> None:
    """With orthogonal inputs the exact posterior is itself a product, so that the mean field loses nothing."""
    x = 2.0 * torch.linalg.qr(torch.randn(40, 3, generator=torch.Generator().manual_seed(0))).Q
    y = x @ torch.tensor([[1.0], [-0.5], [0.3]])
    model = ncl.BayesianNetwork(nn.Linear(3, 1, bias=False), ncl.Normal(0.5), prior=dist.Normal(0.0, 1.0))
    engine = VCL(steps=1500, batch_size=40, lr=0.02, particles=4, schedule=lambda done: (1 - done) ** 3)
    posterior = ncl.OnlinePosterior(model, engine)
    mean, precision = torch.zeros(3), torch.ones(3)
    for k in range(2):
        posterior.update(ncl.Task((x, y), name=str(k)))
        added = x.square().sum(0) / 0.25
        mean = (precision * mean + (x * y).sum(0) / 0.25) / (precision + added)
        precision = precision + added
        (state,) = posterior.blocks.values()
        torch.testing.assert_close(state.loc[0], mean, rtol=0, atol=0.02)
        torch.testing.assert_close(state.precision[0].float(), precision, rtol=0.06, atol=0)


def test_the_first_task_starts_narrow_and_later_ones_where_the_last_ended() -> None:
    model = ncl.BayesianNetwork(nn.Linear(2, 1), ncl.Normal(1.0), prior=dist.Normal(0.0, 1.0))
    posterior = ncl.OnlinePosterior(model, VCL())
    task = ncl.Task((torch.ones(8, 2), torch.ones(8, 1)), name="ones")
    for scale in (0.02, 0.001):
        posterior.update(task, engine=VCL(steps=1, lr=1e-9, init_scale=scale))
        for state in posterior.blocks.values():
            torch.testing.assert_close(
                state.precision.rsqrt(), torch.full_like(state.precision, 0.02), rtol=1e-4, atol=0
            )


def test_whole_numbers_are_numbers_too() -> None:
    """Adam's own takes no mixture of the two."""
    posterior = ncl.OnlinePosterior(classifier(), VCL(steps=2, second_momentum=0))
    posterior.update(classification_task(), progress=False)
    assert posterior.tasks
