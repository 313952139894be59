"""Each task set with the network, likelihood and settings that it is learnt with by default: mostly the paper's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from nclbayes import tasks as task_sets
from nclbayes.data.task import Task
from nclbayes.experiments.networks import SequenceFeatures, SequenceRegressor, perceptron
from nclbayes.experiments.setup import Setup
from nclbayes.methods.registry import named
from nclbayes.nn import Categorical, MultiHead, Normal
from nclbayes.tasks.cifar_features import pretrained, pretrained_path
from nclbayes.tasks.stimulus_response import performance


def find_setup(name: str) -> Setup:
    """A setup by the name of its task set.

    Args:
        name: Such as "split-mnist"; underscores do too.

    Returns:
        The setup.

    Raises:
        SettingError: If there is none; the nearest name is suggested.

    Example:
        >>> from nclbayes.experiments import find_setup
        >>> find_setup("stroke-mnist").units
        30
    """
    return named(name.replace("_", "-"), SETUPS, "task set")


def _perceptron(tasks: list[Task], scenario: str, units: int) -> nn.Module:
    """Two hidden layers for images: a head for each task, one small output layer, or one over all classes."""
    inputs = tasks[0].train[0][0].numel()
    # Of few training examples some classes may be in the test data only.
    classes = 1 + max(int(data[1].max()) for task in tasks for data in (task.train, task.test) if data is not None)
    return perceptron(inputs, (units, units), classes, heads=len(tasks) if scenario == "task" else None)


def _features_of(split: Callable[..., list[Task]]) -> Callable[..., list[Task]]:
    """A set of images as features of the pre-trained layers."""
    return lambda *args, **settings: split(*args, **settings, features=pretrained())


def _which_features() -> str:
    return pretrained_path().stem


def _stroke_network(tasks: list[Task], scenario: str, units: int) -> nn.Module:
    return MultiHead(SequenceFeatures(4, units, last=5, leak=0.2), [nn.Linear(units, 2) for _ in tasks])


def _stimulus_network(tasks: list[Task], scenario: str, units: int) -> nn.Module:
    return SequenceRegressor(11, units, 3, leak=0.2, noise=0.05 * (2 / 0.2) ** 0.5)


def _performance(predicted: Any, batch: tuple[Any, ...]) -> torch.Tensor:
    _, lengths, _, y = batch
    return performance(predicted.mean, y, lengths.to(y.device))


def _weight(x: torch.Tensor, lengths: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight


_SCENARIOS = ("domain", "task", "class")
_MNIST = {"steps": 2000, "batch_size": 256, "lr": 0.05, "momentum": 0.9}
# EWC and SI have no prior of their own: one so wide that it never counts, however large lambda is.
_NO_PRIOR = {scenario: 1e8 for scenario in ("", *_SCENARIOS)}
# A prior of scale 1 that counts 1e5 times would freeze every weight after the first task.
_WEAK_PRIOR = {scenario: 1e3 for scenario in _SCENARIOS}
_MNIST_SCALES = {
    "laplace-ncl": {"task": 0.2887, "domain": 28.87, "class": 288.7},
    "variational-ncl": {"task": 0.2887, "domain": 0.1, "class": 10.0},
    "ewc": _NO_PRIOR,
    "si": _NO_PRIOR,
    "kfac": _WEAK_PRIOR,
}
_VARIATIONAL = {
    # Samples of a wide prior are noise: a narrow one, with a likelihood that counts more, steers as a wide one does.
    "variational-ncl/domain": {"kronecker_sum": "additive", "likelihood_weight": 1e4},
    # A confident classifier has almost no Fisher left; over many classes a tempered one retains far more.
    "variational-ncl/class": {"kronecker_sum": "additive", "fisher_temperature": 10.0},
}
# Its own defaults are for far longer training.
_IVON: dict[str, Mapping[str, Any]] = {"ivon": {"lr": 0.02, "second_momentum": 0.9999, "hess_init": 0.5}}
# The closest sum leaves the room that many recurrent tasks need; `additive` stiffens whatever one of them has used.
_KL = {"kronecker_sum": "kl"}
_RECURRENT: dict[str, Mapping[str, Any]] = {
    **_IVON,
    **dict.fromkeys(("laplace-ncl", "variational-ncl", "laplace-owm", "laplace-dowm"), _KL),
    # The paper tunes lambda here, and finds that 1 does poorly.
    "kfac": {**_KL, "prior_weight": 100.0},
    **dict.fromkeys(("decoupled-kfac", "reverse-decoupled-kfac"), _KL),
}


def _per_scenario(method: str, setting: str, task: float, domain: float, class_: float) -> dict[str, dict[str, float]]:
    """One setting of a method in each scenario."""
    values = {"task": task, "domain": domain, "class": class_}
    return {f"{method}/{scenario}": {setting: value} for scenario, value in values.items()}


# The paper's table of hyperparameters.
_MNIST_METHODS: dict[str, Mapping[str, Any]] = {
    **_per_scenario("si", "prior_weight", 1e0, 1e5, 1e7),
    **_per_scenario("ewc", "prior_weight", 1e8, 1e9, 1e13),
    **_per_scenario("kfac", "prior_weight", 1e10, 1e5, 1e4),
    **_per_scenario("owm", "alpha", 1e-2, 1e-5, 1e-4),
    **_VARIATIONAL,
    **_IVON,
}
_CIFAR_METHODS: dict[str, Mapping[str, Any]] = {
    **_per_scenario("si", "prior_weight", 1e2, 1e3, 1e6),
    **_per_scenario("ewc", "prior_weight", 1e7, 1e5, 1e-3),
    **_per_scenario("kfac", "prior_weight", 1e5, 1e3, 1e10),
    **_per_scenario("owm", "alpha", 1e-2, 1e-2, 1e-4),
    **_VARIATIONAL,
    **_IVON,
}


_SPLIT_MNIST: dict[str, Any] = {
    "scenarios": _SCENARIOS,
    "prior_scales": _MNIST_SCALES,
    "method_settings": _MNIST_METHODS,
    "quick": {"size": 500, "steps": 20},
}
# All ten digits in every task, changed in another way for each.
_CHANGED_MNIST: dict[str, Any] = {
    "prior_scales": {"": {"": 1.0}, "ewc": _NO_PRIOR, "si": _NO_PRIOR},
    "method_settings": _IVON,
    "quick": {"size": 300, "steps": 20},
    "any_number": True,
}


def _mnist(name: str, summary: str, tasks: Callable[..., list[Task]], rest: Mapping[str, Any]) -> Setup:
    """MNIST, or what is learnt as it is."""
    return Setup(name, summary, tasks, _perceptron, 400, Categorical(), settings=_MNIST, **rest)


SETUPS: dict[str, Setup] = {
    setup.name: setup
    for setup in (
        Setup(
            "split-digits",
            "8 x 8 digits of scikit-learn, two classes a task; needs no download",
            task_sets.split_digits,
            _perceptron,
            100,
            Categorical(),
            _SCENARIOS,
            # With so few examples the noise of drawn targets would show.
            settings={"steps": 500, "batch_size": 64, "lr": 0.05, "momentum": 0.9, "fisher": "exact"},
            prior_scales={
                "laplace-ncl": {"task": 1.0, "domain": 30.0, "class": 30.0},
                "variational-ncl": {"task": 0.3, "domain": 0.5, "class": 1.0},
                "ewc": _NO_PRIOR,
                "si": _NO_PRIOR,
            },
            method_settings={
                "si": {"prior_weight": 10.0},
                "ewc": {"prior_weight": 1e3},
                "kfac": {"prior_weight": 10.0},
                "owm": {"alpha": 1e-3},
                "dowm": {"alpha": 1e-2},
                **_IVON,
            },
            quick={"steps": 20},
        ),
        _mnist("split-mnist", "MNIST, two digits a task", task_sets.split_mnist, _SPLIT_MNIST),
        _mnist("split-fashion-mnist", "Fashion-MNIST, two classes a task", task_sets.split_fashion_mnist, _SPLIT_MNIST),
        _mnist(
            "permuted-mnist",
            "MNIST with its pixels in another order for each task",
            task_sets.permuted_mnist,
            _CHANGED_MNIST,
        ),
        _mnist(
            "split-cifar10",
            "features of CIFAR-10 by layers that were trained on it, two classes a task",
            _features_of(task_sets.split_cifar10),
            {**_SPLIT_MNIST, "features": _which_features},
        ),
        _mnist("rotated-mnist", "MNIST turned by another angle for each task", task_sets.rotated_mnist, _CHANGED_MNIST),
        Setup(
            "split-cifar100",
            "features of CIFAR-100, ten classes a task",
            _features_of(task_sets.split_cifar100),
            _perceptron,
            2000,
            Categorical(),
            _SCENARIOS,
            settings={"steps": 5000, "batch_size": 256, "lr": 0.05, "momentum": 0.9},
            prior_scales={
                "laplace-ncl": {"task": 0.4472, "domain": 44.72, "class": 141.4},
                "variational-ncl": {"task": 0.3, "domain": 0.1, "class": 10.0},
                "ewc": _NO_PRIOR,
                "si": _NO_PRIOR,
                "kfac": _WEAK_PRIOR,
            },
            adam={"lr": 0.0001},
            method_settings=_CIFAR_METHODS,
            quick={"size": 200, "steps": 3},
            features=_which_features,
        ),
        Setup(
            "stroke-mnist",
            "digits as pen strokes, fifteen tasks of two digits, for a recurrent network",
            task_sets.stroke_mnist,
            _stroke_network,
            30,
            Categorical(),
            settings={"steps": 3906, "batch_size": 256, "lr": 0.01, "momentum": 0.9, "fisher_size": 2048},
            prior_scales={"variational-ncl": {"": 0.2}, "ewc": _NO_PRIOR, "si": _NO_PRIOR},
            method_settings=_RECURRENT,
            inputs=2,
            quick={"size": 300, "steps": 10},
        ),
        Setup(
            "stimulus-response",
            "six tasks of cognitive neuroscience for a recurrent network",
            task_sets.stimulus_response,
            _stimulus_network,
            256,
            Normal(1.0),
            # The paper averages errors over time; a likelihood sums them over some fifty to a hundred scored steps. Its
            # learning rate 0.005 becomes 1e-4, and its unit prior one of scale 0.1.
            settings={"steps": 31_250, "batch_size": 32, "lr": 1e-4, "momentum": 0.9, "fisher_size": 2048},
            # One over the root of the number of units: samples of the weights must not make a network that explodes.
            prior_scales={"": {"": 0.1}, "variational-ncl": {"": 0.06}, "ewc": _NO_PRIOR, "si": _NO_PRIOR},
            method_settings=_RECURRENT,
            inputs=3,
            weight=_weight,
            endless=True,
            metric=_performance,
            quick={"steps": 5, "fisher_size": 64},
        ),
    )
}
"""Every task set with its network and settings, by name."""
