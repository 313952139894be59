"""The methods by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

import torch

from nclbayes.engines import LaplaceNCL, VariationalNCL
from nclbayes.engines.base import Engine
from nclbayes.errors import SettingError
from nclbayes.methods.joint import JointLearner
from nclbayes.methods.plain import PlainTraining
from nclbayes.posterior import OnlinePosterior
from nclbayes.watch.run import Model


@dataclass(frozen=True)
class Method:
    """A method of continual learning.

    Attributes:
        name: What it is called on the command line.
        summary: One line about it.
        engine: What updates the posterior.
        learner: The posterior's class.
    """

    name: str
    summary: str
    engine: type[Engine]
    learner: type[OnlinePosterior] = OnlinePosterior

    def build(self, model: Model, settings: Mapping[str, Any], generator: torch.Generator) -> OnlinePosterior:
        """A learner that has seen nothing yet.

        Args:
            model: The Pyro model.
            settings: The engine's settings.
            generator: Decides every draw.

        Returns:
            The learner.

        Raises:
            SettingError: If the engine does not have such a setting.
        """
        return self.learner(model, self.engine(**self.checked(settings)), generator=generator)

    def checked(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings, if the engine has all of them.

        Args:
            settings: By name.

        Returns:
            The same.

        Raises:
            SettingError: If the engine does not have such a setting; the nearest name is suggested.
        """
        known = {field.name for field in fields(self.engine)}
        for name in settings:
            if name not in known:
                raise SettingError(f"The method {self.name} has no setting '{name}'{suggestion(name, known)}.")
        return dict(settings)


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("laplace-ncl", "Laplace-NCL: trust-region steps, Fisher added at the mode", LaplaceNCL),
        Method("variational-ncl", "natural variational NCL: the same with samples of the weights", VariationalNCL),
        Method("none", "plain training on the current task only", PlainTraining),
        Method("joint", "plain training on all tasks so far at once", PlainTraining, JointLearner),
    )
}


def find_method(name: str) -> Method:
    """A method by its name.

    Args:
        name: Such as "laplace-ncl".

    Returns:
        The method.

    Raises:
        SettingError: If there is none; the nearest name is suggested.
    """
    if name not in METHODS:
        raise SettingError(
            f"There is no method '{name}'{suggestion(name, METHODS)}. The methods are {', '.join(METHODS)}."
        )
    return METHODS[name]


def suggestion(name: str, known: Any) -> str:
    """A hint at the name that was probably meant.

    Args:
        name: What was given.
        known: The names there are.

    Returns:
        Such as ``" (did you mean 'joint'?)"``, or nothing.
    """
    near = get_close_matches(name, list(known), n=1)
    return f" (did you mean '{near[0]}'?)" if near else ""
