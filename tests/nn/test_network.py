"""Networks as Pyro models: priors, frozen parameters, likelihoods and masks."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.errors import DataError, SettingError
from nclbayes.watch import watch
from tests.zoo import inputs, labels


def test_parameters_become_sites_and_frozen_ones_stay() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    net[0].requires_grad_(False)
    model = ncl.BayesianNetwork(net, ncl.Categorical(), prior=dist.Normal(0.0, 2.0))
    trace = poutine.trace(model).get_trace(inputs(6, 4), labels(3, 6))
    latent = {n for n, s in trace.nodes.items() if s["type"] == "sample" and not s["is_observed"] and n != "data"}
    assert latent == {"2.weight", "2.bias"}
    assert trace.nodes["2.weight"]["fn"].base_dist.scale.unique().tolist() == [2.0]
    assert len(pyro.get_param_store()) == 0
    assert type(net) is nn.Sequential
    assert all(torch.equal(v, dict(net.named_parameters())[k]) for k, v in model.initial_values().items())


def test_priors_by_pattern_and_by_function() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    by_pattern = ncl.BayesianNetwork(
        net,
        ncl.Categorical(),
        prior={"0.*": dist.Normal(1.0, 0.1), "*.bias": dist.Normal(0.0, 5.0), "*": dist.Normal(0, 1.0)},
    )
    run = watch(by_pattern, (inputs(6, 4), labels(3, 6)))
    scales = {name: float(site.fn.base_dist.scale.flatten()[0]) for name, site in run.latents.items()}
    assert scales == pytest.approx({"0.weight": 0.1, "0.bias": 0.1, "1.weight": 1.0, "1.bias": 5.0})
    by_function = ncl.BayesianNetwork(
        net,
        ncl.Categorical(),
        prior=lambda name, p: dist.Normal(torch.zeros(p.shape), p.shape[-1] ** -0.5).to_event(p.ndim),
    )
    run = watch(by_function, (inputs(6, 4), labels(3, 6)))
    assert float(run.latents["0.weight"].fn.base_dist.scale[0, 0]) == pytest.approx(0.5)


def test_a_prior_that_does_not_fit_is_refused() -> None:
    net = nn.Linear(4, 3)
    with pytest.raises(SettingError, match="matches the parameter 'bias'"):
        ncl.BayesianNetwork(net, ncl.Categorical(), prior={"weight": dist.Normal(0.0, 1.0)})
    with pytest.raises(SettingError, match="'weight' must be a Normal, not Laplace"):
        ncl.BayesianNetwork(net, ncl.Categorical(), prior=dist.Laplace(0.0, 1.0))
    with pytest.raises(SettingError, match=r"'weight' has shape \(7,\)"):
        ncl.BayesianNetwork(net, ncl.Categorical(), prior=dist.Normal(torch.zeros(7), 1.0))


def test_the_prior_moves_with_the_model() -> None:
    model = ncl.BayesianNetwork(nn.Linear(4, 3), ncl.Categorical(), prior=dist.Normal(0.0, 1.0))
    model.double()
    run = watch(model, (inputs(6, 4).double(), labels(3, 6)))
    assert run.latents["weight"].fn.base_dist.loc.dtype == torch.float64


def test_sequences_are_masked_by_a_function_of_the_inputs() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core, self.out = ncl.nn.RNN(2, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            states = self.core(x, lengths)
            with ncl.valid_steps(valid(x, lengths)):
                return self.out(states)

    def valid(x: Tensor, lengths: Tensor) -> Tensor:
        return torch.arange(x.shape[1]) < lengths[:, None]

    torch.manual_seed(0)
    model = ncl.BayesianNetwork(Net(), ncl.Categorical(), prior=dist.Normal(0.0, 1.0), inputs=2, mask=valid)
    x, lengths, y = inputs(5, 6, 2), torch.tensor([6, 2, 3, 1, 4]), labels(3, 5, 6)
    fisher = ncl.fisher(model, model.initial_values(), (x, lengths, y), kind="exact")
    assert fisher["out"].rows == fisher["core"].rows == 16
    longer = torch.cat([x, 9 * torch.ones(5, 3, 2)], 1), lengths, torch.cat([y, torch.zeros(5, 3).long()], 1)
    padded = ncl.fisher(model, model.initial_values(), longer, kind="exact")
    for name in fisher:
        torch.testing.assert_close(fisher[name].input, padded[name].input, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(fisher[name].output, padded[name].output, rtol=1e-6, atol=1e-7)
    posterior = ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=5, batch_size=5))
    posterior.update(ncl.Task((x, lengths, y), name="sequences"))
    assert posterior.predict(x, lengths).event_shape == (6,)


def test_weighted_squared_errors_are_normals_of_other_scales() -> None:
    class Net(nn.Linear):
        def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
            return super().forward(x)

    torch.manual_seed(0)
    net = Net(4, 2)
    model = ncl.BayesianNetwork(net, ncl.Normal(0.5), dist.Normal(0.0, 1.0), inputs=2, weight=lambda x, w: w)
    x, y, w = inputs(6, 4), inputs(6, 2), torch.tensor([[1.0, 2.0]] * 5 + [[0.0, 3.0]])
    trace = poutine.trace(poutine.condition(model, model.initial_values())).get_trace(x, w, y)
    trace.compute_log_prob()
    expected = (dist.Normal(net(x), 0.5 / w.clamp(min=1e-9).sqrt()).log_prob(y) * (w > 0)).sum(-1)
    torch.testing.assert_close(trace.nodes["y"]["log_prob"], expected)
    # a weight multiplies the Fisher of its output
    exact = ncl.fisher(model, model.initial_values(), (x[:5], w[:5], y[:5]), kind="exact")["weight"]
    expected = torch.diag(torch.tensor([20.0, 40.0], dtype=torch.float64))
    torch.testing.assert_close(exact.output, expected, rtol=1e-5, atol=1e-5)
    refused = ncl.BayesianNetwork(net, ncl.Bernoulli(), dist.Normal(0.0, 1.0), inputs=2, weight=lambda x, w: w)
    with pytest.raises(SettingError, match="Bernoulli likelihood takes no weights"):
        refused(x, w, y)


@pytest.mark.parametrize(
    ("likelihood", "output", "target", "message"),
    [
        (ncl.Categorical(), (6, 3), torch.zeros(5).long(), r"shape \(5,\).*needs \(6,\)"),
        (ncl.Categorical(), (6, 3), torch.full((6,), 3), "range from 3 to 3"),
        (ncl.Bernoulli(), (6, 2), torch.full((6, 2), 2.0), "0 or 1"),
        (ncl.Bernoulli(), (6, 2), torch.zeros(6, 2).long(), "floating point"),
        (ncl.Normal(), (6, 2), torch.zeros(6), r"needs \(6, 2\)\.$"),
        (ncl.Normal(), (6, 1), torch.zeros(6), r"needs \(6, 1\)\. Pass y\.unsqueeze\(-1\)"),
        (ncl.Categorical(), (6, 3), torch.zeros(6, 1).long(), r"needs \(6,\)\. Pass y\.squeeze\(-1\)"),
        (ncl.Poisson(), (6, 2), torch.full((6, 2), -1.0), "a count"),
        (ncl.Poisson(), (6, 2), torch.full((6, 2), 0.5), "whole"),
    ],
)
def test_targets_that_do_not_fit_are_refused(
    likelihood: ncl.nn.Likelihood, output: tuple[int, ...], target: Tensor, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        likelihood.check(torch.zeros(output), target)


def test_the_wrong_number_of_arguments_is_explained() -> None:
    model = ncl.BayesianNetwork(nn.Linear(4, 3), ncl.Categorical(), prior=dist.Normal(0.0, 1.0))
    with pytest.raises(DataError, match="takes 1 input"):
        model(inputs(2, 4), inputs(2, 4), labels(3, 2))
    with pytest.raises(SettingError, match="scale"):
        ncl.Normal(0.0)


def test_what_is_no_prior_or_no_likelihood_is_refused() -> None:
    with pytest.raises(SettingError, match=r"such as ncl\.priors\.scaled\(1\.0\) or dist\.Normal.*not a float"):
        ncl.BayesianNetwork(nn.Linear(2, 1), ncl.Normal(), prior=10.0)
    with pytest.raises(SettingError, match=r"such as Categorical\(\).*not the class Categorical"):
        ncl.BayesianNetwork(nn.Linear(2, 1), ncl.Categorical, prior=dist.Normal(0.0, 1.0))  # type: ignore[arg-type]


def test_inputs_of_another_dtype_are_refused_with_the_remedy() -> None:
    model = ncl.BayesianNetwork(nn.Linear(2, 1), ncl.Normal(), prior=dist.Normal(0.0, 1.0))
    with pytest.raises(DataError, match=r"torch\.float64.*x\.float\(\), or net\.double\(\)"):
        model.check(torch.zeros(4, 2).double(), torch.zeros(4, 1))


def test_without_a_prior_it_is_as_wide_as_each_layer_wants_and_another_can_take_its_place() -> None:
    net = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 2))
    model = ncl.BayesianNetwork(net, ncl.Normal(1.0), inputs=1, weight=lambda x: x[:, :1])
    scales = {name: float(prior.base_dist.scale.flatten()[0]) for name, prior in model._site_priors().items()}
    assert scales == {"0.weight": 0.25, "0.bias": 0.25, "1.weight": 0.5, "1.bias": 0.5}
    other = model.with_prior(dist.Normal(0.0, 3.0))
    assert other.network is net
    assert (other.likelihood, other.inputs, other.weight) == (model.likelihood, model.inputs, model.weight)
    assert float(other._site_priors()["1.bias"].base_dist.scale.flatten()[0]) == 3.0


class Twice(nn.Module):
    """Holds a table in two modules under three names."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.reader = nn.ModuleDict({"words": self.words})
        self.out = nn.Linear(4, 10, bias=False)
        self.again, self.out.weight = self.words.weight, self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.reader["words"](x).mean(1)) + self.again.sum() - self.again.detach().sum()


def test_a_parameter_of_several_names_is_one_site_and_the_network_gets_it_back() -> None:
    torch.manual_seed(0)
    net, data = Twice(), (torch.randint(10, (40, 5)), torch.randint(10, (40,)))
    parameter, start = net.words.weight, net.words.weight.detach().clone()
    model = ncl.BayesianNetwork(net, ncl.Categorical())
    posterior = ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=5))
    with torch.no_grad():
        net.words.weight.fill_(1.0)
        ones = net(data[0])
        net.words.weight.copy_(start)
        trace = poutine.trace(poutine.condition(model, {"again": torch.ones(10, 4)})).get_trace(*data)
        torch.testing.assert_close(trace.nodes["y"]["fn"].logits, ones.log_softmax(-1))
    means = [model.initial_values()["again"]]
    for name in ("first", "second"):
        report = posterior.update(ncl.Task(data, name=name), progress=False)
        assert not report.unused
        means.append(posterior.mean()["again"])
        assert all(
            held is parameter for held in (net.words.weight, net.reader["words"].weight, net.out.weight, net.again)
        )
        torch.testing.assert_close(parameter.detach(), start, rtol=0, atol=0)
    assert not torch.equal(means[0], means[1])
    assert not torch.equal(means[1], means[2]), "what a run leaves in the network must not pass for a frozen weight"
