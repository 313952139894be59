"""What decides a run: task set, method, seed, settings and device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from nclbayes.errors import FileError, SettingError
from nclbayes.experiments.setup import Prior, decides, paper_steps
from nclbayes.experiments.setups import find_setup
from nclbayes.methods import METHODS, find_method
from nclbayes.posterior.saving import fitted_learner, fitted_settings
from nclbayes.storage import read_document, refused, write_document

# Before format 2 every prior was a normal one, and every engine's defaults were the paper's.
_FORMAT = 2

STREAMS = ("hard", "blurred", "recurring", "unchanged")
BOUNDARIES = ("found", "told", "none")


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run.

    Attributes:
        set: The task set.
        method: The method.
        scenario: The scenario, empty where there is just one.
        seed: Decides the tasks, the initial weights and every draw.
        prior_scale: The prior's standard deviation; of a scaled one, in units of 1 / sqrt(fan in).
        settings: The method's settings.
        size: At most so many training examples a task; None: all.
        tasks: Learn only the first so many tasks; None: all.
        num_samples: Evaluate with so many samples of the weights; None: at the mean.
        units: Units in each hidden layer; None: the set's.
        device: Where to compute.
        keep_each: Whether the folder keeps the posterior after each task, and not only after the last.
        shuffle: Whether the tasks come in an order that the seed decides; seed 0 has them as they are.
        features: Which layers the inputs are features of, where there are some to choose from.
        prior: "normal", or "scaled" by each layer's number of inputs.
        active: With one head over all classes, whether its softmax goes over "all" of them or those "seen" so far.
        stream: "hard", "blurred", "recurring" or "unchanged": the tasks come as such a stream, one batch after the
            other; empty: as tasks.
        boundaries: Where a segment of a stream ends: where a change is "found", where tasks are "told" to end, "none",
            or after so many batches; empty: "found".

    Example:
        >>> from nclbayes.experiments import RunConfig
        >>> config = RunConfig.of("split-digits", "laplace-ncl", "task", seed=3)
        >>> config.set, config.scenario, config.prior
        ('split-digits', 'task', 'scaled')
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
    prior: str = "normal"
    active: str = "all"
    stream: str = ""
    boundaries: str = ""

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
        paper: bool = False,
        **rest: Any,
    ) -> RunConfig:
        """A run with the defaults of its task set and method.

        Args:
            set: The task set.
            method: The method.
            scenario: The scenario; None: the set's first.
            seed: The seed.
            prior_scale: The prior's scale; None: the default for this set, method and scenario.
            settings: What to change in the method's settings.
            quick: Few steps on few examples, to see that all is well.
            paper: Whether all is as in the paper: engines that decide themselves take its steps instead, with the prior
                and the settings that were tuned for them, and a softmax goes over all classes from the start.
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
        merged = {**setup.engine_settings(method, scenario, paper), **short, **(settings or {})}
        chosen.checked(merged)
        if setup.endless and merged["steps"] is None:
            raise SettingError(f"The data of {setup.name} have no end, and so no epochs: give the number of `steps`.")
        if setup.endless and rest.get("size") is None:
            rest["size"] = merged["steps"] * merged["batch_size"]
        prior = setup.prior(method, scenario, paper)
        scale = prior.scale if prior_scale is None else prior_scale
        if setup.features is not None:
            rest["features"] = setup.features()
        # Of examples that a learner keeps, the classes that were seen when they came are no longer all.
        if scenario == "class" and not (paper or rest.get("shuffle") or rest.get("stream") or chosen.keeps_examples):
            rest.setdefault("active", "seen")
        config = cls(setup.name, method, scenario, seed, scale, merged, prior=prior.kind, **rest)
        config.check()
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
        config: RunConfig = read_document(path, cls, "a configuration of a run", _FORMAT, upgrade=_upgraded)
        try:
            with refused(path, "a configuration of a run"):
                _check_types(config)
            config.check()
        except (SettingError, TypeError, ValueError, ArithmeticError) as error:
            raise FileError(f"'{path}' is not a configuration of a run: {error}") from error
        return config

    def check(self) -> None:
        """Refuse a set, a method, or a value that is none.

        Raises:
            SettingError: If one is.
        """
        find_setup(self.set).scenario(self.scenario or None)
        find_method(self.method).checked(self.settings)
        Prior(self.prior, self.prior_scale)
        if self.active not in ("all", "seen") or (self.active == "seen" and self.scenario != "class"):
            raise SettingError(f"active is '{self.active}'; choose all, or in the scenario class seen.")
        if self.active == "seen" and self.shuffle:
            raise SettingError("With active='seen' the classes come in their order: leave out shuffle.")
        self._check_stream()
        if not 0 <= self.seed < 2**63:
            raise SettingError(f"The seed must lie from 0 to 2^63 - 1, not at {self.seed}.")
        for name in ("size", "tasks", "num_samples", "units"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingError(f"{name} must be at least 1, not {value}.")

    def _check_stream(self) -> None:
        if self.stream not in ("", *STREAMS):
            raise SettingError(f"stream is '{self.stream}'; choose one of {', '.join(STREAMS)}.")
        is_known = self.boundaries in ("", *BOUNDARIES) or (self.boundaries.isdecimal() and int(self.boundaries) > 0)
        if not is_known:
            known = ", ".join(BOUNDARIES)
            raise SettingError(f"boundaries is '{self.boundaries}'; choose {known}, or a number of batches.")
        if self.boundaries and not self.stream:
            raise SettingError("Boundaries are looked for in a stream only: say which, such as 'hard'.")
        if self.stream and self.active == "seen":
            raise SettingError("In a stream nobody says which classes have come: leave active at 'all'.")
        if self.stream and self.keep_each:
            raise SettingError("A stream keeps what is open, and no posterior after each task: leave out keep_each.")


def _upgraded(config: RunConfig, version: int) -> RunConfig:
    """What a configuration of an earlier format means: what it does not say was as in the paper."""
    if version > 1 or config.method not in METHODS or not decides(config.method):
        return config
    return replace(config, settings={**paper_steps(config.method), **config.settings})


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
