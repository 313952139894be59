"""What a setup is: how a task set is learnt."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyro.distributions as dist
import torch
from torch import nn

from nclbayes.analysis.evaluation import Metric
from nclbayes.data.task import Task
from nclbayes.engines import PAPER, VariationalNCL
from nclbayes.errors import SettingError
from nclbayes.methods.adam import AdamEngine
from nclbayes.methods.registry import find_method, suggestion
from nclbayes.nn import BayesianNetwork, Likelihood
from nclbayes.priors import scaled

Scales = Mapping[str, float]
# The settings of all methods that do not fit those with a learning rate of their own.
_RATES = ("lr", "momentum")


@dataclass(frozen=True)
class Prior:
    """The prior of a run's weights, as plain values.

    Attributes:
        kind: "normal", the same for all weights; or "scaled", 1 / sqrt(fan in) of each layer.
        scale: Its standard deviation; of a scaled one, in units of that.

    Raises:
        SettingError: If there is no such kind, or the scale is not positive.
    """

    kind: str
    scale: float

    def __post_init__(self) -> None:
        if self.kind not in ("normal", "scaled"):
            raise SettingError(f"prior is '{self.kind}'; choose normal or scaled.")
        if not 0 < self.scale < math.inf:
            raise SettingError(f"prior_scale must be a positive number, not {self.scale}.")

    def make(self) -> Any:
        """What a model takes as its prior."""
        if self.kind == "scaled":
            return scaled(self.scale)
        return dist.Normal(torch.zeros((), device="cpu"), torch.full((), self.scale, device="cpu"))


@dataclass(frozen=True)
class Setup:
    """How a task set is learnt.

    Attributes:
        name: The task set.
        summary: One line about it.
        tasks: Makes the tasks; called with ``seed``, and with ``scenario`` and ``size`` where they are given.
        network: Makes the network of a list of tasks in a scenario, with so many units in each hidden layer.
        units: How many those are by default.
        likelihood: What its output means.
        scenarios: Those that apply, the default first; empty: there is just one.
        settings: The settings of every method.
        adam: What changes for the methods that are optimised by Adam.
        prior_scales: Of each method, the prior's standard deviation in each scenario ("" where there is just one); the
            entry "" is for methods that are not named. For engines that decide themselves it is the one with the
            paper's steps.
        method_settings: What a method changes in a scenario, by "method" or "method/scenario"; of engines that decide
            themselves, with the paper's steps only.
        inputs: How many inputs the network takes.
        weight: What each target counts, a function of the inputs.
        endless: Whether its training data have no end: N is then the number of examples that training sees.
        metric: What counts as right, if not the most probable class.
        quick: Settings for a short run: of the tasks ("size") and of the methods.
        any_number: Whether there can be any number of tasks, which `tasks` then takes as ``num_tasks``.
        features: Says which layers the inputs are features of, where they are.

    Example:
        >>> from nclbayes.experiments import find_setup
        >>> setup = find_setup("split-mnist")
        >>> setup.scenarios, setup.units, setup.settings["steps"]
        (('domain', 'task', 'class'), 400, 2000)
    """

    name: str
    summary: str
    tasks: Callable[..., list[Task]]
    network: Callable[[list[Task], str, int], nn.Module]
    units: int
    likelihood: Likelihood
    scenarios: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    adam: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.001})
    prior_scales: Mapping[str, Scales] = field(default_factory=dict)
    method_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    inputs: int = 1
    weight: Callable[..., torch.Tensor] | None = None
    endless: bool = False
    metric: Metric | None = None
    quick: Mapping[str, Any] = field(default_factory=dict)
    any_number: bool = False
    features: Callable[[], str] | None = None

    def scenario(self, name: str | None) -> str:
        """A scenario that applies.

        Args:
            name: Its name; None: the default.

        Returns:
            Its name, empty if there is just one.

        Raises:
            SettingError: If it does not apply.
        """
        if name is None:
            return self.scenarios[0] if self.scenarios else ""
        if name in self.scenarios or (name == "" and not self.scenarios):
            return name
        known = ", ".join(self.scenarios) or "none: there is just one"
        raise SettingError(
            f"{self.name} has no scenario '{name}'{suggestion(name, self.scenarios)}; its scenarios are {known}."
        )

    def prior(self, method: str, scenario: str, paper: bool = False) -> Prior:
        """The prior of a method in a scenario.

        Args:
            method: The method.
            scenario: The scenario.
            paper: Whether engines that decide themselves take the paper's steps instead.

        Returns:
            The prior.
        """
        if decides(method) and not paper:
            return Prior("scaled", 1.0)
        named = (self.prior_scales.get(name) for name in (method, base_name(method), ""))
        return Prior("normal", next(filter(None, named), {}).get(scenario, 1.0))

    def engine_settings(self, method: str, scenario: str, paper: bool = False) -> dict[str, Any]:
        """A method's settings in a scenario.

        Args:
            method: The method.
            scenario: The scenario.
            paper: Whether engines that decide themselves take the paper's steps instead.

        Returns:
            What it does not leave at its defaults.
        """
        if decides(method) and not paper:
            return dict(self.settings)
        engine = find_method(method).engine
        adam = self.adam if issubclass(engine, AdamEngine) else {}
        usual = {name: value for name, value in self.settings.items() if not (engine.has_own_rate and name in _RATES)}
        changed = paper_steps(method) if decides(method) else {}
        for name in (base_name(method), f"{base_name(method)}/{scenario}", method, f"{method}/{scenario}"):
            changed |= self.method_settings.get(name, {})
        return {**usual, **adam, **changed}

    def make_tasks(
        self, scenario: str, seed: int, size: int | None, count: int | None = None, active: str = "all"
    ) -> list[Task]:
        """The tasks.

        Args:
            scenario: The scenario, empty if there is just one.
            seed: Decides them.
            size: At most so many training examples a task; None: all.
            count: How many tasks, the first of the set; None: all.
            active: With one head over all classes, whether its softmax goes over "all" or those "seen" so far.

        Returns:
            The tasks, in order.

        Raises:
            SettingError: If the set has not so many.
        """
        given: dict[str, Any] = {"seed": seed}
        if scenario:
            given["scenario"] = scenario
        if size is not None:
            given["size"] = size
        if active == "seen":
            given["active"] = active
        if self.any_number and count is not None:
            given["num_tasks"] = count
        return self.first(self.tasks(**given), count)

    def first(self, tasks: list[Task], count: int | None) -> list[Task]:
        """The first of the set's tasks.

        Args:
            tasks: All of them.
            count: How many; None: all.

        Returns:
            So many.

        Raises:
            SettingError: If there are not so many.
        """
        if count is not None and count > len(tasks):
            raise SettingError(f"{self.name} has {len(tasks)} tasks, not {count}.")
        return tasks[:count]

    def make_model(
        self, tasks: list[Task], scenario: str, prior: Prior, seed: int, units: int | None = None
    ) -> BayesianNetwork:
        """The model: a network initialised by the seed, with priors on its weights.

        Args:
            tasks: The tasks.
            scenario: The scenario.
            prior: The prior of its weights.
            seed: Decides the initial weights; the global random state is left as found.
            units: Units in each hidden layer; None: the set's.

        Returns:
            The model.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = self.network(tasks, scenario, self.units if units is None else units)
        return BayesianNetwork(network, self.likelihood, prior.make(), inputs=self.inputs, weight=self.weight)


def paper_steps(method: str) -> dict[str, Any]:
    """The settings by which an engine takes the paper's steps.

    Args:
        method: A method of that engine.

    Returns:
        The settings.
    """
    is_variational = issubclass(find_method(method).engine, VariationalNCL)
    return {**PAPER, "kronecker_sum": "bound"} if is_variational else dict(PAPER)


def decides(method: str) -> bool:
    """Whether a method's engine decides itself how firmly to hold on, and with what steps.

    Args:
        method: The method.

    Returns:
        Whether it does.
    """
    return find_method(method).engine().stiffness is not None


def base_name(method: str) -> str:
    """The method that one with kept examples builds on.

    Args:
        method: Such as "laplace-ncl-replay".

    Returns:
        Its base, such as "laplace-ncl"; of others their own name.
    """
    return method.removesuffix("-replay").removesuffix("-coreset")
