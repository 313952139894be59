"""The methods by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, TypeVar

import torch

from nclbayes.engines import LaplaceNCL, VariationalNCL
from nclbayes.engines.base import Engine
from nclbayes.errors import SettingError
from nclbayes.methods.bgd import BGD
from nclbayes.methods.coreset import CoresetLearner
from nclbayes.methods.decoupled import DecoupledKFAC, ReverseDecoupledKFAC
from nclbayes.methods.diagonal import DiagonalNCL
from nclbayes.methods.ewc import EWC
from nclbayes.methods.foovb import FOOVB
from nclbayes.methods.gpm import GPM
from nclbayes.methods.ivon import IVON
from nclbayes.methods.joint import JointLearner
from nclbayes.methods.kfac import KFAC
from nclbayes.methods.owm import DOWM, OWM, LaplaceDOWM, LaplaceOWM
from nclbayes.methods.plain import PlainTraining
from nclbayes.methods.replay import ReplayLearner
from nclbayes.methods.si import SynapticIntelligence
from nclbayes.methods.vcl import VCL
from nclbayes.posterior import OnlinePosterior
from nclbayes.watch.run import Model

Named = TypeVar("Named")


@dataclass(frozen=True)
class Method:
    """A method of continual learning.

    Attributes:
        name: What it is called on the command line.
        summary: One line about it.
        engine: What updates the posterior.
        learner: The posterior's class.

    Example:
        >>> from nclbayes.methods import find_method
        >>> method = find_method("ewc")
        >>> method.engine.__name__, method.summary
        ('EWC', 'online EWC: diagonal Fisher, Adam')
    """

    name: str
    summary: str
    engine: type[Engine]
    learner: type[OnlinePosterior] = OnlinePosterior

    @property
    def whole_numbers(self) -> frozenset[str]:
        """The settings that are whole numbers."""
        own = {name for name, value in self.learner.learner_settings.items() if isinstance(value, int)}
        return frozenset(
            own | {field.name for field in fields(self.engine) if field.type in ("int", "int | None", "int | str")}
        )

    @property
    def keeps_examples(self) -> bool:
        """Whether its learner keeps examples of earlier tasks."""
        return self.learner is not OnlinePosterior

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
        known, own = self.checked(settings), self.learner.learner_settings
        engine = self.engine(**{name: value for name, value in known.items() if name not in own})
        rest = {name: value for name, value in known.items() if name in own}
        return self.learner(model, engine, generator=generator, **rest)

    def checked(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings, if the engine has all of them.

        Args:
            settings: By name.

        Returns:
            The same.

        Raises:
            SettingError: If the engine does not have such a setting (the nearest name is suggested), or it is out of
                range.
        """
        own = self.learner.learner_settings
        known = {field.name for field in fields(self.engine)} | set(own)
        for name in settings:
            if name not in known:
                raise SettingError(f"The method {self.name} has no setting '{name}'{suggestion(name, known)}.")
        self.engine(**{name: value for name, value in settings.items() if name not in own})
        self.learner.check_settings({name: value for name, value in settings.items() if name in own})
        return dict(settings)


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("laplace-ncl", "Laplace-NCL: trust-region steps, Fisher added at the mode", LaplaceNCL),
        Method("variational-ncl", "natural variational NCL: the same with samples of the weights", VariationalNCL),
        Method("none", "plain training on the current task only", PlainTraining),
        Method("joint", "plain training on all tasks so far at once", PlainTraining, JointLearner),
        Method("replay", "plain training with kept examples of earlier tasks", PlainTraining, ReplayLearner),
        Method("ewc", "online EWC: diagonal Fisher, Adam", EWC),
        Method("si", "synaptic intelligence: importances from the path of training, Adam", SynapticIntelligence),
        Method("kfac", "online Laplace with Kronecker factors, Adam", KFAC),
        Method("decoupled-kfac", "KFAC that overcounts the prior in Adam's preconditioner only", DecoupledKFAC),
        Method("reverse-decoupled-kfac", "KFAC that overcounts it in the gradient only", ReverseDecoupledKFAC),
        Method("owm", "orthogonal weight modification: projection by input activity", OWM),
        Method("dowm", "projection by input and output activity", DOWM),
        Method("laplace-owm", "Laplace-NCL with OWM's factors", LaplaceOWM),
        Method("laplace-dowm", "Laplace-NCL with DOWM's factors", LaplaceDOWM),
        Method("gpm", "gradient projection memory: steps orthogonal to earlier inputs", GPM),
        Method("diagonal-ncl", "Laplace-NCL with independent weights", DiagonalNCL),
        Method("vcl", "mean-field variational continual learning, Adam", VCL),
        Method("bgd", "Bayesian gradient descent: online variational Bayes, a batch at a time", BGD),
        Method("foo-vb", "online variational Bayes with matrix normals, a batch at a time", FOOVB),
        Method("ivon", "variational online Newton with the previous posterior as prior", IVON),
        Method("vcl-coreset", "the same, with some examples kept to refine predictions", VCL, CoresetLearner),
        Method("laplace-ncl-replay", "Laplace-NCL with kept examples of earlier tasks", LaplaceNCL, ReplayLearner),
        Method("laplace-ncl-coreset", "Laplace-NCL, refined by kept examples", LaplaceNCL, CoresetLearner),
        Method("variational-ncl-replay", "variational NCL with kept examples", VariationalNCL, ReplayLearner),
        Method("variational-ncl-coreset", "variational NCL, refined by kept examples", VariationalNCL, CoresetLearner),
    )
}
"""Every method by its name on the command line."""


def find_method(name: str) -> Method:
    """A method by its name.

    Args:
        name: Such as "laplace-ncl".

    Returns:
        The method.

    Raises:
        SettingError: If there is none; the nearest name is suggested.

    Example:
        >>> from nclbayes.methods import find_method
        >>> find_method("laplace-ncl").engine.__name__
        'LaplaceNCL'
    """
    return named(name, METHODS, "method")


def named(name: str, known: Mapping[str, Named], what: str) -> Named:
    """One of several things by its name.

    Args:
        name: The name.
        known: The things there are.
        what: What they are, such as "method".

    Returns:
        The thing.

    Raises:
        SettingError: If there is none of that name; the nearest one is suggested.
    """
    if name not in known:
        kind = what.split()[-1]
        raise SettingError(f"There is no {what} '{name}'{suggestion(name, known)}. The {kind}s are {', '.join(known)}.")
    return known[name]


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
