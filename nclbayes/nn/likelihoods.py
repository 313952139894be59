"""How a network's output becomes a distribution over targets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from nclbayes.data.checking import AllowedTargets, number
from nclbayes.errors import DataError, SettingError


class Likelihood(ABC):
    """A distribution over targets, given a network's output.

    Examples lie along the first dimension of the output; what dimensions follow (time steps) are independent, and a
    mask says which of them count.

    Example:
        >>> import pyro.distributions as dist
        >>> import torch
        >>> from nclbayes.data import AllowedTargets
        >>> from nclbayes.nn import Likelihood
        >>> class Exponential(Likelihood):
        ...     def distribution(self, output):
        ...         return dist.Exponential(output.exp())
        ...     def check(self, output, target):
        ...         self.allowed(output).check(target)
        ...     def allowed(self, output):
        ...         return AllowedTargets(low=0.0, why="waiting times are positive")
        >>> Exponential().observe(torch.zeros(4, 1), torch.ones(4, 1)).mean.squeeze()
        tensor([1., 1., 1., 1.])
    """

    event_dim: int = 0

    @abstractmethod
    def distribution(self, output: Tensor) -> Any:
        """The distribution of the targets.

        Args:
            output: The network's output.

        Returns:
            A Pyro distribution whose batch shape is that of the output less its event dimensions.
        """

    @abstractmethod
    def check(self, output: Tensor, target: Tensor) -> None:
        """Refuse targets that do not fit, before anything is learnt from them.

        Args:
            output: The network's output for the same examples.
            target: What was observed.

        Raises:
            DataError: If shape, dtype or values do not fit.
        """

    def allowed(self, output: Tensor) -> AllowedTargets | None:
        """The values that targets may have, which are checked in every batch.

        Args:
            output: The network's output for some examples.

        Returns:
            Those values; None: check nothing.
        """
        return None

    def weighted(self, output: Tensor, weight: Tensor) -> Any:
        """The distribution of targets that count more or less than once.

        Args:
            output: The network's output.
            weight: What each target counts, positive.

        Raises:
            SettingError: If a weighted likelihood of this kind is no distribution.
        """
        raise SettingError(f"A {type(self).__name__} likelihood takes no weights; a Normal one does.")

    def observe(
        self, output: Tensor, target: Tensor | None, mask: Tensor | None = None, weight: Tensor | None = None
    ) -> Any:
        """The Pyro statement: sample site ``y``, observed if there is a target.

        Args:
            output: The network's output.
            target: What was observed, or None to predict.
            mask: Boolean, which of the targets count; of the distribution's batch shape.
            weight: What each of them counts, of the same shape; a target of weight zero does not count.

        Returns:
            The distribution of the targets.

        Raises:
            DataError: If the target is of another shape.
        """
        if weight is None:
            fn = self.distribution(output)
        else:
            counts = weight > 0
            mask = counts if mask is None else mask & counts
            fn = self.weighted(output, torch.where(counts, weight, torch.ones_like(weight)))
        if mask is not None:
            fn = fn.mask(mask)
        if target is not None:
            _same_shape(target, fn.shape())
        fn = fn.to_event(len(fn.batch_shape) - 1)
        with pyro.plate("data", output.shape[0]):
            pyro.sample("y", fn, obs=target)
        return fn


@dataclass(frozen=True)
class Categorical(Likelihood):
    """Class labels: the output's last dimension holds logits, the targets are integers.

    Example:
        >>> import torch
        >>> from nclbayes import Categorical
        >>> Categorical().distribution(torch.zeros(5, 4)).probs[0]
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    def distribution(self, output: Tensor) -> Any:
        """Categorical with the output as logits."""
        return dist.Categorical(logits=output)

    def check(self, output: Tensor, target: Tensor) -> None:
        """Integers from 0 to the number of logits minus one, one for each row of them."""
        _same_shape(target, output.shape[:-1])
        if target.is_floating_point() or target.is_complex():
            raise DataError(f"Categorical targets must be integers, not {target.dtype}: use target.long().")
        self.allowed(output).check(target)

    def allowed(self, output: Tensor) -> AllowedTargets:
        """Whole numbers from 0 to the number of logits minus one."""
        classes = output.shape[-1]
        return AllowedTargets(0, classes - 1, whole=True, why=f"the network has {classes} outputs")


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """Yes or no for each output, which is a logit.

    Example:
        >>> import torch
        >>> from nclbayes import Bernoulli
        >>> Bernoulli().distribution(torch.zeros(5, 2)).probs[0]
        tensor([0.5000, 0.5000])
    """

    def distribution(self, output: Tensor) -> Any:
        """Bernoulli with the output as logits."""
        return dist.Bernoulli(logits=output)

    def check(self, output: Tensor, target: Tensor) -> None:
        """Floating-point zeros and ones, one for each output."""
        _same_shape(target, output.shape)
        if not target.is_floating_point():
            raise DataError(f"Bernoulli targets must be floating point, not {target.dtype}: use target.float().")
        self.allowed(output).check(target)

    def allowed(self, output: Tensor) -> AllowedTargets:
        """Zeros and ones."""
        return AllowedTargets(0, 1, whole=True, why="a Bernoulli target is 0 or 1")


@dataclass(frozen=True)
class Normal(Likelihood):
    """Real numbers around the output, with a fixed standard deviation.

    Attributes:
        scale: The standard deviation.

    Raises:
        SettingError: If the scale is not positive.

    Example:
        >>> import torch
        >>> from nclbayes import Normal
        >>> Normal(0.1).distribution(torch.ones(5, 2)).mean[0]
        tensor([1., 1.])
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        what = "The scale of a Normal likelihood"
        object.__setattr__(self, "scale", number(what, self.scale, lambda v: v > 0, "positive"))

    def distribution(self, output: Tensor) -> Any:
        """Normal with the output as mean."""
        return dist.Normal(output, self.scale)

    def weighted(self, output: Tensor, weight: Tensor) -> Any:
        """Squared errors times their weight: Normal with the scale divided by the weight's root."""
        return dist.Normal(output, self.scale * weight.rsqrt())

    def check(self, output: Tensor, target: Tensor) -> None:
        """Finite floating-point numbers, one for each output."""
        _same_shape(target, output.shape)
        if not target.is_floating_point():
            raise DataError(f"Normal targets must be floating point, not {target.dtype}: use target.float().")
        self.allowed(output).check(target)

    def allowed(self, output: Tensor) -> AllowedTargets:
        """Finite numbers."""
        return AllowedTargets()


@dataclass(frozen=True)
class Poisson(Likelihood):
    """Counts whose log rate is the output.

    Example:
        >>> import torch
        >>> from nclbayes import Poisson
        >>> Poisson().distribution(torch.zeros(5, 2)).rate[0]
        tensor([1., 1.])
    """

    def distribution(self, output: Tensor) -> Any:
        """Poisson with the exponential of the output as rate."""
        return dist.Poisson(output.exp())

    def check(self, output: Tensor, target: Tensor) -> None:
        """Non-negative whole numbers, one for each output."""
        _same_shape(target, output.shape)
        self.allowed(output).check(target)

    def allowed(self, output: Tensor) -> AllowedTargets:
        """Counts."""
        return AllowedTargets(0, whole=True, why="a Poisson target is a count")


def _same_shape(target: Tensor, shape: torch.Size) -> None:
    if target.shape != shape:
        needs_axis, has_axis = (*target.shape, 1) == tuple(shape), tuple(target.shape) == (*shape, 1)
        remedy = " Pass y.unsqueeze(-1)." if needs_axis else " Pass y.squeeze(-1)." if has_axis else ""
        raise DataError(
            f"The targets of a batch have shape {tuple(target.shape)}, but the network's output needs {tuple(shape)}."
            f"{remedy}"
        )
