"""Which sites are data, what scales and masks they keep, and what is refused before it does harm."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
import torch.nn.functional as F
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import Tensor, nn

from nclbayes.errors import DataError, LearnableParameterError, ValuesError
from nclbayes.watch import watch
from tests.zoo import ZOO, inputs, normal


def test_only_data_sites_are_observed_and_the_rest_is_skipped() -> None:
    case = ZOO["two_sites"]()
    run = watch(case.model, case.batch, case.values)
    assert set(run.observed) == {"y", "z_observed"}
    assert set(run.latents) == {"w", "v"}
    assert run.observed["y"].scale == 2.0
    torch.testing.assert_close(run.observed["y"].mask, case.batch[1])
    torch.testing.assert_close(run.observed["z_observed"].mask, ~case.batch[1])


def test_a_plates_scale_is_divided_out_and_a_users_is_kept() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", normal((5,)))
        with pyro.plate("data", 600, subsample_size=len(x)), poutine.scale(scale=3.0):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    run = watch(model, (inputs(12, 5), inputs(12)))
    assert run.observed["y"].scale == pytest.approx(3.0)
    assert run.observed["y"].plates == (("data", -1, 12),)


def test_a_site_without_a_value_gets_its_prior_mean() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.full((5,), 2.5), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    state = torch.get_rng_state()
    run = watch(model, (inputs(12, 5), inputs(12)))
    torch.testing.assert_close(run.latents["w"].value, torch.full((5,), 2.5))
    assert torch.equal(state, torch.get_rng_state())


def test_a_value_of_the_wrong_shape_is_named() -> None:
    case = ZOO["functional"]()
    with pytest.raises(ValuesError, match=r"site 'w2' has shape \(4, 3\), not \(3, 4\)"):
        watch(case.model, case.batch, case.values | {"w2": torch.zeros(4, 3)})


def test_an_empty_batch_is_refused() -> None:
    case = ZOO["functional"]()
    with pytest.raises(DataError, match="0 examples"):
        watch(case.model, case.rows(slice(0, 0)), case.values)
    with pytest.raises(DataError, match="first dimension"):
        watch(case.model, ("x",), case.values)


def test_a_model_that_observes_nothing_is_refused() -> None:
    case = ZOO["functional"]()
    with pytest.raises(DataError, match="no observed site"):
        watch(lambda x, y: case.model(x), case.batch, case.values)


class Mixed(PyroModule):
    """A Bayesian head on a deterministic body."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.body = nn.Linear(5, 4).requires_grad_(not frozen).eval()
        self.shift = nn.Parameter(torch.zeros(4), requires_grad=not frozen)
        self.head = PyroModule[nn.Linear](4, 3, bias=False)
        self.head.weight = PyroSample(normal((3, 4)))

    def forward(self, x: Tensor, y: Tensor) -> None:
        logits = self.head(F.relu(self.body(x) + self.shift))
        pyro.sample("y", dist.Categorical(logits=logits), obs=y)


def test_frozen_parameters_pass_and_the_param_store_stays_empty() -> None:
    pyro.clear_param_store()
    run = watch(Mixed(frozen=True), (inputs(6, 5), torch.zeros(6).long()))
    assert set(run.latents) == {"head.weight"}
    assert len(pyro.get_param_store()) == 0


def test_a_learnable_parameter_of_a_module_is_refused_by_name() -> None:
    pyro.clear_param_store()
    with pytest.raises(LearnableParameterError, match=r"'body.*'.*no prior.*requires_grad_\(False\)"):
        watch(Mixed(frozen=False), (inputs(6, 5), torch.zeros(6).long()))
    assert len(pyro.get_param_store()) == 0


def test_a_learnable_parameter_of_a_closure_is_refused() -> None:
    body = nn.Linear(5, 4)

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", normal((4,)))
        pyro.sample("y", dist.Normal(body(x) @ w, 1.0), obs=y)

    with pytest.raises(LearnableParameterError, match=r"of shape \(4, 5\)"):
        watch(model, (inputs(6, 5), inputs(6)))
    body.requires_grad_(False)
    assert set(watch(model, (inputs(6, 5), inputs(6))).latents) == {"w"}


def test_a_pyro_param_is_refused_before_it_reaches_the_store() -> None:
    pyro.clear_param_store()

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", normal((5,)))
        pyro.sample("y", dist.Normal(x @ w, pyro.param("noise", torch.ones(()))), obs=y)

    with pytest.raises(LearnableParameterError, match="'noise'"):
        watch(model, (inputs(6, 5), inputs(6)))
    assert len(pyro.get_param_store()) == 0


def test_a_pyro_param_of_a_module_is_refused() -> None:
    class Noisy(PyroModule):
        def __init__(self) -> None:
            super().__init__()
            self.w = PyroSample(normal((5,)))
            self.noise = PyroParam(torch.ones(()), constraint=dist.constraints.positive)

        def forward(self, x: Tensor, y: Tensor) -> None:
            pyro.sample("y", dist.Normal(x @ self.w, self.noise), obs=y)

    with pytest.raises(LearnableParameterError, match="'noise'"):
        watch(Noisy(), (inputs(6, 5), inputs(6)))
    pyro.clear_param_store()
