"""What decides a run: task set, method, seed, settings and device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from nclbayes.errors import FileError, SettingError
from nclbayes.experiments.setups import find_setup
from nclbayes.methods import find_method
from nclbayes.posterior.saving import fitted_learner, fitted_settings
from nclbayes.storage import read_document, refused, write_document

_FORMAT = 1


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run.

    Attributes:
        set: The task set.
        method: The method.
        scenario: The scenario, empty where there is just one.
        seed: Decides the tasks, the initial weights and every draw.
        prior_scale: The prior's standard deviation.
        settings: The method's settings.
        size: At most so many training examples a task; None: all.
        tasks: Learn only the first so many tasks; None: all.
        num_samples: Evaluate with so many samples of the weights; None: at the mean.
        units: Units in each hidden layer; None: the set's.
        device: Where to compute.
        keep_each: Whether the folder keeps the posterior after each task, and not only after the last.
        shuffle: Whether the tasks come in an order that the seed decides; seed 0 has them as they are.
        features: Which layers the inputs are features of, where there are some to choose from.

    Example:
        >>> from nclbayes.experiments import RunConfig
        >>> config = RunConfig.of("split-digits", "laplace-ncl", "task", seed=3)
        >>> config.set, config.scenario, config.prior_scale
        ('split-digits', 'task', 1.0)
    """

    set: str
    method: str
    scenario: str = ""
    seed: int = 0
    prior_scale: float = 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    size: int | None = None
    tasks: int | None = None
    num_samples: int | None = None
    units: int | None = None
    device: str = "cpu"
    keep_each: bool = False
    shuffle: bool = False
    features: str = ""

    @classmethod
    def of(
        cls,
        set: str,
        method: str,
        scenario: str | None = None,
        seed: int = 0,
        *,
        prior_scale: float | None = None,
        settings: Mapping[str, Any] | None = None,
        quick: bool = False,
        **rest: Any,
    ) -> RunConfig:
        """A run with the defaults of its task set and method.

        Args:
            set: The task set.
            method: The method.
            scenario: The scenario; None: the set's first.
            seed: The seed.
            prior_scale: The prior's standard deviation; None: the default for this set, method and scenario.
            settings: What to change in the method's settings.
            quick: Few steps on few examples, to see that all is well.
            **rest: The other attributes.

        Returns:
            The configuration.

        Raises:
            SettingError: If the set, the method or the scenario is unknown, or a setting is wrong.

        Example:
            >>> from nclbayes.experiments import RunConfig
            >>> config = RunConfig.of("split-digits", "none", settings={"steps": 50})
            >>> config.scenario, config.settings["steps"]
            ('domain', 50)
        """
        setup, chosen = find_setup(set), find_method(method)
        scenario = setup.scenario(scenario)
        short = dict(setup.quick) if quick else {}
        size = short.pop("size", None)
        if rest.get("size") is None and size is not None:
            rest["size"] = size
        merged = {**setup.engine_settings(method, scenario), **short, **(settings or {})}
        chosen.checked(merged)
        if setup.endless and merged["steps"] is None:
            raise SettingError(f"The data of {setup.name} have no end, and so no epochs: give the number of `steps`.")
        if setup.endless and rest.get("size") is None:
            rest["size"] = merged["steps"] * merged["batch_size"]
        scale = setup.prior_scale(method, scenario) if prior_scale is None else prior_scale
        if setup.features is not None:
            rest["features"] = setup.features()
        config = cls(setup.name, method, scenario, seed, scale, merged, **rest)
        config._check()
        return config

    def save(self, path: Path) -> None:
        """Write the configuration.

        Args:
            path: The file.

        Raises:
            FileError: If it cannot be written.
        """
        write_document(path, asdict(self), _FORMAT)

    @classmethod
    def load(cls, path: Path) -> RunConfig:
        """Read a configuration.

        Args:
            path: The file.

        Returns:
            The configuration.

        Raises:
            FileError: If it is not one.
        """
        config: RunConfig = read_document(path, cls, "a configuration of a run", _FORMAT)
        try:
            with refused(path, "a configuration of a run"):
                _check_types(config)
            config._check()
        except (SettingError, TypeError, ValueError, ArithmeticError) as error:
            raise FileError(f"'{path}' is not a configuration of a run: {error}") from error
        return config

    def _check(self) -> None:
        """Refuse a set, a method, or a value that is none."""
        find_setup(self.set).scenario(self.scenario or None)
        find_method(self.method).checked(self.settings)
        if not 0 < self.prior_scale < math.inf:
            raise SettingError(f"prior_scale must be a positive number, not {self.prior_scale}.")
        if not 0 <= self.seed < 2**63:
            raise SettingError(f"The seed must lie from 0 to 2^63 - 1, not at {self.seed}.")
        for name in ("size", "tasks", "num_samples", "units"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingError(f"{name} must be at least 1, not {value}.")


def _check_types(config: RunConfig) -> None:
    """Refuse settings of other types than the method's own."""
    method = find_method(config.method)
    own = {name: value for name, value in config.settings.items() if name in method.learner.learner_settings}
    fitted_learner(method.learner, own)
    fitted_settings(method.engine, {k: v for k, v in config.settings.items() if k not in own}, "settings")


def check_device(name: str) -> None:
    """Refuse a device that is not here.

    Args:
        name: Such as "cpu", "cuda" or "cuda:1".

    Raises:
        SettingError: If there is no such device.
    """
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise SettingError(f"device is '{name}'; choose cpu, cuda, or one of several as cuda:0, cuda:1.")
    if kind == "cuda" and int(index or 0) >= (count := torch.cuda.device_count()):
        here = f"there are {count} CUDA devices" if count else "there is no CUDA device"
        raise SettingError(f"device is '{name}', and {here} here: use --device cpu, with --config too.")
