"""The settings that every engine has, and their validation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import lru_cache
from typing import Any, ClassVar, TypeVar, get_args, get_type_hints

from torch import Tensor

from nclbayes.data.checking import number, shown, whole_number
from nclbayes.errors import SettingError
from nclbayes.fisher import FisherKind
from nclbayes.kronecker import SumRule

Settings = TypeVar("Settings", bound="EngineSettings")

# Where weights outnumber examples: what each example counts, of classes in units of weights an example, and of targets
# with a noise of their own; and how much of a task's deviance must be gone.
_OF_CLASSES, _OF_NOISY, _ENOUGH = 10.0, 3.0, 0.97
# The stiffness with which a task begins.
_FIRM = 200.0
# Learning rates, where none is given.
_RATE, _ADAM_RATE = 0.05, 0.001
# So many targets over all examples are enough for a Fisher, and so many for each.
_DRAWS, _EACH = 3000, 30

PAPER: dict[str, Any] = {
    "schedule": None,
    "likelihood_weight": 1.0,
    "stiffness": None,
    "enough": None,
    "fisher_samples": 1,
}
"""The paper's steps, as settings of either engine: of constant size, to the end, as stiff as a prior is wide."""


class StepRule(str, Enum):
    """What makes a step of a gradient.

    Attributes:
        SGD: The gradient itself, with momentum, as in the paper.
        ADAM: Adam's averages of it, in coordinates in which the precision holds.
    """

    SGD = "sgd"
    ADAM = "adam"


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What all engines have in common; defaults are the paper's for feedforward networks.

    Laplace-NCL and variational NCL themselves decide what can be decided for each task: there `schedule`,
    `likelihood_weight`, `stiffness` and `enough` are "auto", and for the former `fisher_samples`.
    ``LaplaceNCL(**PAPER)`` takes the paper's steps.

    Attributes:
        steps: How many steps to take for each task; None to count epochs instead.
        epochs: How many passes over the data, if `steps` is None.
        batch_size: Examples a step.
        accumulate: Into how many parts each batch is split. They are run one after the other, and what they give is
            added up: the same steps and Fisher, up to rounding, in less memory. Targets are the same where they are
            categorical, Bernoulli or normal; of other distributions each part's are drawn by themselves.
        lr: The learning rate, in units of plain SGD on the mean loss: on the first task it is just that; or of Adam,
            where steps are. None: 0.05, or 0.001 of Adam.
        momentum: rho.
        steps_by: "sgd", or "adam" for networks that plain gradients do not train well, such as transformers: Adam, in
            coordinates that are longer the more firmly a direction is held, so that its steps are bounded by the
            precision as well. On the first task it is Adam itself.
        schedule: What the learning rate is multiplied with, a function of the fraction of steps done; None: 1, as in
            the paper. "auto": steps that fit. The rate is at most what the task's curvature allows, so that
            they do not diverge; and from half of the steps on it goes to 0 in a straight line, so that the last batches
            do not decide the end.
        prior_weight: lambda, the weight of the previous posterior; 1 is Bayes' rule.
        likelihood_weight: What each example counts; 1 is Bayes' rule. A weight w gives the posterior of the likelihood
            to the power w, above 1 a cold one: the mean moves as under a prior sqrt(w) times as wide, while samples
            are sqrt(w) times narrower than those of that wide prior. "auto": 1; but where the weights outnumber the
            examples of a posterior's first task, since the mode under Bayes' rule is then nearly the prior's, ten times
            the weights an example for classes, which can be certain, and 3 for targets with a noise of their own, which
            would otherwise be learnt by heart. It is chosen once, and kept with the posterior.
        stiffness: How firmly to hold on to what earlier tasks have learnt: a direction of the weights that they used as
            much as the mean one is learnt so many times more slowly than a free one. Only the directions of the
            precision count then, and neither the width of the prior nor the number of examples. "auto": 200; and from
            a fifth of the steps on, every tenth of them, half as many, until the task is learnt, or that has not paid
            twice in a row.
            None: steps are those of the precision itself, as in the paper, where a wide prior makes used directions
            stiff.
        enough: Training of a task ends when so large a share of the deviance is gone with which it began: of what its
            loss lies above that of predictions which are all right, or, if that is more, of what a guess among its
            classes loses. What a classifier goes on to learn is to be ever surer, and costs what was learnt before.
            "auto": 0.97, where a task has fewer examples than weights; otherwise never. None: never.
        retention: phi, by which the precision that earlier tasks left fades towards the prior before the next task,
            ``Lambda <- phi Lambda + (1 - phi) Lambda_0``, never below it, in the blocks that the task touches. The
            mean stays. 1 keeps everything; less is for streams where the past loses its worth.
        alpha: Damping: the preconditioner uses Lambda + N alpha^2 I.
        trust_radius: Scale each step back so that 1/2 delta^T Lambda delta <= r^2; None: do not.
        kronecker_sum: The rule by which a task's Fisher is added to the precision. "kl" is the closest; "additive" and
            "bound" never underestimate a precision, and retain more over a few tasks; but what they count too much
            grows with the square of the number of tasks: after 300 small tasks of one teacher a network was frozen at
            68 % with either, where "kl" had 86 % and plain training 85 %.
        fisher: "model", "signs", "exact" or "empirical" (:class:`~nclbayes.FisherKind`).
        fisher_samples: Targets drawn for each example. "auto": one, or where the examples are few and targets are drawn
            from the model as many as make 3,000 with all of them, at most 30; variational NCL, which draws anew at
            every step, one.
        fisher_size: Use so many examples for the Fisher after a task; None: all. Variational NCL averages the Fisher
            over its steps' batches instead.
        fisher_temperature: Divides the logits of a classifier in its Fisher.
        patience: Stop early after so many steps in which the running loss did not fall by a thousandth; None: never.
    """

    steps: int | None = 2000
    epochs: float | None = None
    batch_size: int = 256
    accumulate: int = 1
    lr: float = None  # type: ignore[assignment]
    momentum: float = 0.9
    steps_by: StepRule | str = StepRule.SGD
    schedule: Callable[[float], float] | str | None = None
    prior_weight: float = 1.0
    likelihood_weight: float | str = 1.0
    stiffness: float | str | None = None
    enough: float | str | None = None
    retention: float = 1.0
    alpha: float = 1e-10
    trust_radius: float | None = None
    kronecker_sum: SumRule | str = SumRule.KL
    fisher: FisherKind | str = FisherKind.MODEL
    fisher_samples: int | str = 1
    fisher_size: int | None = None
    fisher_temperature: float = 1.0
    patience: int | None = None
    has_trust_region: ClassVar[bool] = True
    """Whether its steps can be scaled back to a trust radius."""
    has_prior: ClassVar[bool] = True
    """Whether the previous posterior pulls at the weights."""
    can_stiffen: ClassVar[bool] = False
    """Whether its steps can be held by a stiffness."""
    can_fade: ClassVar[bool] = True
    """Whether what earlier tasks left is the precision alone, so that it can fade."""
    has_own_rate: ClassVar[bool] = False
    """Whether learning rate and momentum mean something else than those of plain SGD on the mean loss, or of Adam."""

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise SettingError("Give either `steps` or `epochs`, and None for the other.")
        given: float | None = self.lr
        if given is None:
            object.__setattr__(self, "lr", _ADAM_RATE if self.steps_by == StepRule.ADAM else _RATE)
        for name in ("steps", "batch_size", "accumulate", "fisher_size", "patience"):
            self._require_whole(name)
        if not _is_auto(self.fisher_samples):
            self._require_whole("fisher_samples")
        for name in ("epochs", "lr", "fisher_temperature", "trust_radius"):
            self._require(name, lambda v: v > 0, "positive")
        if not _is_auto(self.likelihood_weight):
            self._require("likelihood_weight", lambda v: v > 0, 'positive, or "auto"')
        if not _is_auto(self.stiffness):
            self._require("stiffness", lambda v: v > 0, 'positive, or "auto", or None')
        if not _is_auto(self.enough):
            self._require("enough", lambda v: 0 < v < 1, 'above 0 and below 1, or "auto", or None')
        self._require("prior_weight", lambda v: v >= 0, "at least 0")
        self._require("alpha", lambda v: 0 <= v <= 1e100, "at least 0 and at most 1e100")
        if not (self.schedule is None or _is_auto(self.schedule) or callable(self.schedule)):
            raise SettingError(
                'schedule must be a function of the fraction of steps done, or "auto", or None, not '
                f"{shown(self.schedule)}."
            )
        self._require("retention", lambda v: 0 < v <= 1, "above 0 and at most 1")
        self._require("momentum", lambda v: 0 <= v < 1, "at least 0 and below 1")
        if self.trust_radius is not None and not self.has_trust_region:
            raise SettingError(f"{type(self).__name__} has no trust region: leave trust_radius at None.")
        if self.prior_weight != 1 and not self.has_prior:
            raise SettingError(f"{type(self).__name__} has no pull of the prior: leave prior_weight at 1.")
        if self.stiffness is not None and not self.can_stiffen:
            raise SettingError(f"{type(self).__name__} knows no stiffness: leave it at None.")
        if self.retention != 1 and not self.can_fade:
            raise SettingError(f"{type(self).__name__} does not let earlier tasks fade: leave retention at 1.")
        for name, kind in (("kronecker_sum", SumRule), ("fisher", FisherKind), ("steps_by", StepRule)):
            try:
                object.__setattr__(self, name, kind(getattr(self, name)))
            except (ValueError, TypeError):
                allowed = ", ".join(repr(member.value) for member in kind)
                raise SettingError(f"{name} is {shown(getattr(self, name))}; choose one of {allowed}.") from None
        if self.steps_by is not StepRule.SGD and not self.has_trust_region:
            raise SettingError(f"{type(self).__name__} takes steps of its own: leave steps_by at 'sgd'.")

    @property
    def preconditioner_damping(self) -> float:
        """What is added to the mean precision before it is inverted, as the root."""
        return self.alpha

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, for a file; a schedule that is a function is left out."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        if callable(self.schedule):
            del values["schedule"]
        return {name: getattr(value, "value", value) for name, value in values.items()}

    def num_steps(self, batches: float) -> int:
        """How many steps a task takes.

        Args:
            batches: How many batches one pass over it has.

        Returns:
            The number of steps, at least 1.
        """
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        total = number("The number of steps, epochs times batches,", self.epochs * batches)
        return max(1, round(total))

    @property
    def firmness(self) -> float:
        """The stiffness that a task begins with."""
        return _FIRM if self.stiffness is None or isinstance(self.stiffness, str) else self.stiffness

    def settled(
        self: Settings, weights: int, examples: float, *, certain: bool, before: float | None = None
    ) -> Settings:
        """The settings with the numbers that the size of a task decides, where they say "auto".

        Args:
            weights: How many weights the task touches.
            examples: How many examples it has.
            certain: Whether its targets can be predicted with certainty, as classes can.
            before: What an earlier "auto" has chosen for each example to count, if one has.

        Returns:
            The settings that the task is learnt with.
        """
        outnumber = weights > examples
        chosen: dict[str, Any] = {}
        if _is_auto(self.likelihood_weight):
            cold = _OF_CLASSES * weights / examples if certain else _OF_NOISY
            chosen["likelihood_weight"] = before or (cold if outnumber else 1.0)
        if _is_auto(self.enough):
            chosen["enough"] = _ENOUGH if outnumber else None
        if _is_auto(self.fisher_samples):
            chosen["fisher_samples"] = self._draws(min(examples, self.fisher_size or math.inf))
        return replace(self, **chosen) if chosen else self

    def _draws(self, examples: float) -> int:
        """How many targets to draw for each of so many examples."""
        return min(_EACH, math.ceil(_DRAWS / examples)) if self.fisher is FisherKind.MODEL else 1

    def rate(self, done: float) -> float:
        """The learning rate at a point of a task.

        Args:
            done: The fraction of steps done.

        Returns:
            `lr` times what the schedule says.

        Raises:
            SettingError: If the schedule says something else than a number of at least 0.
        """
        if self.schedule is None:
            return self.lr
        if isinstance(self.schedule, str):
            return self.lr * min(1.0, 2 * (1 - done))
        try:
            factor: Any = self.schedule(done)
        except (StopIteration, GeneratorExit) as error:
            raise SettingError(f"schedule raised {type(error).__name__}: let it return a number.") from error
        if isinstance(factor, Tensor) and factor.numel() == 1:
            factor = factor.item()
        return self.lr * number(f"schedule({done:.3g})", factor, lambda v: v >= 0, "a number of at least 0")

    def _require(self, name: str, holds: Callable[[Any], bool], what: str) -> None:
        """Refuse a number that is none or out of range; None is one only where the field's type says so."""
        value = getattr(self, name)
        if value is not None or not self._is_optional(name):
            object.__setattr__(self, name, number(name, value, holds, what))

    def _require_whole(self, name: str) -> None:
        value = getattr(self, name)
        if value is not None or not self._is_optional(name):
            object.__setattr__(self, name, whole_number(name, value))

    def _is_optional(self, name: str) -> bool:
        kind: Any = type(self)
        return name in _optional(kind)


@lru_cache(maxsize=64)
def _optional(kind: type[EngineSettings]) -> frozenset[str]:
    """The settings of an engine that may be None; found once, as reading types takes longer than all other checks."""
    try:
        hints = get_type_hints(kind)
        return frozenset(f.name for f in fields(kind) if type(None) in get_args(hints[f.name]))
    except NameError:
        # In an engine that was made inside a function some types cannot be found.
        said = {f.name: str(f.type) for f in fields(kind)}
        return frozenset(name for name, text in said.items() if "None" in text or "Optional" in text)


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == "auto"
