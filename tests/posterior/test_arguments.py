"""What a posterior and its calls refuse before anything is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.errors import DataError, FileError, ModelError, PriorError, SettingError
from nclbayes.methods import METHODS
from tests.engines.test_laplace import classification_task, classifier
from tests.zoo import inputs, labels


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"callbacks": None}, "callbacks must be a list of functions of the progress, not None"),
        ({"callbacks": print}, "callbacks must be a list"),
        ({"callbacks": [3]}, "callbacks must be a list"),
        ({"progress": "yes"}, "progress must be True or False, not 'yes'"),
        ({"generator": 3}, "generator must be a torch.Generator"),
        ({"checkpoint_every": float("nan")}, "checkpoint_every must be finite"),
        ({"checkpoint_every": 0}, "checkpoint_every must be a whole number of at least 1"),
        ({"engine": ncl.LaplaceNCL}, "engine must be one such as"),
        ({"checkpoint": 3}, "checkpoint must be a path, not 3"),
    ],
)
@pytest.mark.parametrize("method", ["laplace-ncl", "replay", "laplace-ncl-coreset", "joint"])
def test_arguments_of_an_update(method: str, settings: dict[str, Any], message: str) -> None:
    learner = METHODS[method].build(classifier(), {"steps": 1}, torch.Generator().manual_seed(0))
    if "keep" in type(learner).learner_settings:
        learner.keep = 4  # type: ignore[attr-defined]
    with pytest.raises(SettingError, match=message):
        learner.update(classification_task(), **settings)
    assert not learner.tasks
    with pytest.raises(SettingError, match=r"must be a Task, such as Task\(\(x, y\), name='a'\), not \(1, 2\)"):
        learner.update((1, 2))  # type: ignore[arg-type]


def test_places_where_no_checkpoint_can_be(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    posterior = ncl.OnlinePosterior(classifier(), ncl.LaplaceNCL(steps=1))
    for path, message in (
        (tmp_path / ("n" * 300), "There can be no checkpoint at"),
        ("a\0b", "There can be no checkpoint at"),
        (tmp_path, "is a folder"),
        (tmp_path / "none" / "file", "folder of the checkpoint .* is not there"),
        (file / "inside", "folder of the checkpoint .* is not there"),
    ):
        with pytest.raises(FileError, match=message):
            posterior.update(classification_task(), checkpoint=path)


def test_an_update_in_a_callback_of_the_same_posterior_is_refused() -> None:
    posterior, other = (ncl.OnlinePosterior(classifier(), ncl.LaplaceNCL(steps=2)) for _ in range(2))
    with pytest.raises(SettingError, match="'classes 2' cannot be learnt in a callback"):
        posterior.update(classification_task(1), callbacks=[lambda p: posterior.update(classification_task(2))])
    assert not posterior.tasks
    posterior.update(classification_task(1), callbacks=[lambda p: other.update(classification_task(2))])
    assert posterior.tasks == ("classes 1",)
    assert other.tasks == ("classes 2", "classes 2")


def test_a_callback_of_no_arguments_is_said_and_its_own_errors_pass() -> None:
    posterior = ncl.OnlinePosterior(classifier(), ncl.LaplaceNCL(steps=2))
    with pytest.raises(SettingError, match="callbacks cannot be called with the progress of task 'classes 1'"):
        posterior.update(classification_task(1), callbacks=[lambda: None])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="has no len"):
        posterior.update(classification_task(1), callbacks=[lambda p: len(p.step)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": 3}, "The model must be a Pyro model"),
        ({"generator": "a"}, "generator must be"),
        ({"initial": [1]}, "initial must be a mapping from sites to tensors"),
        ({"initial": {"0.weight": 3}}, "initial must be a mapping from sites to tensors"),
        (
            {"initial": {"0.weigth": torch.zeros(8, 5)}},
            "initial has values of '0.weigth', and the model has",
        ),
        ({"example": (1, 2)}, "example must be a Task"),
    ],
)
def test_arguments_of_a_posterior(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        ncl.OnlinePosterior(**{"model": classifier(), "engine": ncl.LaplaceNCL(), **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": 3}, "name of a task must be a string, not 3"),
        ({"size": float("nan")}, "Task 't': size must be finite"),
        ({"size": "3"}, "Task 't': size must be"),
        ({"context": [1]}, "Task 't': context must be a mapping"),
        ({"context": {3: 4}}, "Task 't': context must be a mapping"),
    ],
)
def test_arguments_of_a_task(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        ncl.Task((inputs(4, 5), labels(3, 4)), **{"name": "t", **settings})


@pytest.mark.parametrize(
    "settings",
    [{"prior_weight": None}, {"steps": float("inf")}, {"lr": True}, {"batch_size": "8"}, {"momentum": torch.ones(2)}],
)
@pytest.mark.parametrize("method", ["laplace-ncl", "variational-ncl", "ewc", "owm", "gpm", "vcl", "si", "kfac"])
def test_settings_of_another_type(method: str, settings: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=f"{next(iter(settings))} must be"):
        METHODS[method].engine(**settings)


def test_a_schedule_must_give_numbers() -> None:
    posterior = ncl.OnlinePosterior(classifier(), ncl.LaplaceNCL(steps=2, schedule=lambda done: None))  # type: ignore[arg-type, return-value]
    with pytest.raises(SettingError, match=r"'classes 1', step 1: schedule\(0\) must be a number"):
        posterior.update(classification_task(1))


class Changed(nn.Linear):
    change: Any = None

    def forward(self, x: Tensor) -> Any:
        return type(self).change(super().forward(x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out: (out, out), "The network returned a tuple; it must return one tensor"),
        (lambda out: None, "The network returned None"),
        (lambda out: out.sum(), r"returned a tensor of shape \(\)"),
        (lambda out: out.long(), "torch.int64"),
        (lambda out: out.detach(), "depends on none of the model's weights"),
    ],
)
def test_networks_that_return_something_else(change: Any, message: str) -> None:
    net = type("Net", (Changed,), {"change": staticmethod(change)})(5, 3)
    model = ncl.BayesianNetwork(net, ncl.Categorical(), prior=dist.Normal(0.0, 1.0))
    with pytest.raises(ModelError, match=f"Task 'classes 1': .*{message}"):
        ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=2)).update(classification_task(1))


def test_initial_values_of_half_a_block_are_refused() -> None:
    initial = {"0.weight": torch.zeros(8, 5)}
    posterior = ncl.OnlinePosterior(classifier(), ncl.LaplaceNCL(steps=2), initial=initial)
    with pytest.raises(SettingError, match=r"'classes 1': initial has no value of '0\.bias', and '0\.weight'"):
        posterior.update(classification_task(1))
    full = {**initial, "0.bias": torch.zeros(8)}
    ncl.OnlinePosterior(classifier(), ncl.LaplaceNCL(steps=2), initial=full).update(classification_task(1))


@pytest.mark.parametrize("count", [-1, "a", 2.5])
def test_so_many_samples_cannot_be_drawn(count: Any) -> None:
    posterior = ncl.OnlinePosterior(classifier(), ncl.LaplaceNCL(), example=classification_task())
    with pytest.raises(SettingError, match="num_samples must be a whole number of at least 0, not"):
        posterior.sample(count)
    assert posterior.sample(0)["0.weight"].shape == (0, 8, 5)


def test_a_network_without_learnable_weights() -> None:
    net = nn.Linear(5, 3).requires_grad_(False)
    model = ncl.BayesianNetwork(net, ncl.Categorical(), prior=dist.Normal(0.0, 1.0))
    with pytest.raises(ModelError, match="'classes 1': The model has no weights to learn"):
        ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=2)).update(classification_task(1))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_priors_of_no_width(scale: float) -> None:
    import pyro
    import torch.nn.functional as F

    prior = dist.Normal(torch.zeros(3, 5), scale, validate_args=False)

    def function(x: Tensor, y: Tensor | None = None) -> None:
        pyro.sample("y", dist.Categorical(logits=F.linear(x, pyro.sample("w", prior.to_event(2)))), obs=y)

    with pytest.raises(PriorError, match="'classes 1': The prior of site 'w' is not a Normal of finite mean"):
        ncl.OnlinePosterior(function, ncl.LaplaceNCL(steps=2)).update(classification_task(1))
    with pytest.raises(SettingError, match="prior of 'weight' must have a finite mean and a positive"):
        ncl.BayesianNetwork(nn.Linear(5, 3), ncl.Categorical(), prior=dist.Normal(0.0, scale, validate_args=False))


@pytest.mark.parametrize(
    ("inputs_", "settings", "error", "message"),
    [
        ((torch.zeros(4, 9),), {}, DataError, r"cannot take inputs of shape \(4, 9\)"),
        ((), {}, DataError, "called with 0 arguments"),
        ((torch.zeros(4, 5),), {"head": 3}, DataError, "unexpected keyword argument 'head'"),
        ((torch.zeros(4, 5).to_sparse(),), {}, DataError, "An input has the layout"),
        ((torch.zeros(4, 5),), {"num_samples": 2.5}, SettingError, "num_samples must be a whole number"),
        ((torch.zeros(4, 5),), {"method": 3}, SettingError, "method is 3; choose"),
        ((torch.zeros(4, 5),), {"method": "mean", "num_samples": 5}, SettingError, "num_samples has no effect"),
    ],
)
def test_arguments_of_a_prediction(inputs_: Any, settings: Any, error: type[Exception], message: str) -> None:
    posterior = ncl.OnlinePosterior(classifier(), ncl.LaplaceNCL(steps=2))
    posterior.update(classification_task(1))
    with pytest.raises(error, match=message):
        posterior.predict(*inputs_, **settings)
