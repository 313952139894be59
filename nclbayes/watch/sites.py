"""Pyro's side of a run: feed the latent sites their values, note what is observed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_factor, site_is_subsample
from torch import Tensor, nn

from nclbayes.errors import LearnableParameterError, ValuesError


@dataclass(frozen=True)
class Latent:
    """A latent site as it was met: its prior, its value, and the plates around it."""

    name: str
    fn: Any
    value: Tensor
    plates: frozenset[str]


@dataclass(frozen=True)
class Observed:
    """An observed data site as it was met.

    Attributes:
        name: The site's name.
        fn: Its distribution, given the weights.
        value: What was observed.
        mask: From ``poutine.mask`` or ``obs_mask``; broadcasts against the log probability.
        scale: The user's own ``poutine.scale``; a plate's size over subsample size is divided out.
        plates: (name, dim, size) of the vectorised plates around it.
    """

    name: str
    fn: Any
    value: Tensor
    mask: Tensor | bool | None
    scale: Tensor | float
    plates: tuple[tuple[str, int, int], ...]


class SiteRecorder(Messenger):
    """An effect handler that gives latent sites their values and records every site.

    A latent site without a value gets its prior mean. Nothing is scored and nothing is drawn; frozen parameters pass,
    learnable ones are refused before they reach Pyro's param store.

    Args:
        values: Values of latent sites by name; each must require grad.
        meet: Called with the name and value of each latent site when the model meets it.
    """

    def __init__(self, values: Mapping[str, Tensor], meet: Callable[[str, Tensor], None] | None = None) -> None:
        super().__init__()
        self.values = values
        self.meet = meet
        self._shapes = {name: value.shape for name, value in values.items()}
        self.latents: dict[str, Latent] = {}
        self.observed: dict[str, Observed] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if msg["is_observed"] or site_is_subsample(msg) or self._is_unobserved_half(msg):
            return
        name, fn = msg["name"], msg["fn"]
        value = self.values.get(name)
        if value is None:
            value = fn.mean.detach().expand(fn.shape()).clone().requires_grad_()
        elif self._shapes[name] != fn.shape():
            raise ValuesError(
                f"The value of site '{name}' has shape {tuple(self._shapes[name])}, not {tuple(fn.shape())}."
            )
        msg["value"] = value
        if self.meet is not None:
            self.meet(name, value)

    def _pyro_post_sample(self, msg: Any) -> None:
        if site_is_subsample(msg) or site_is_factor(msg) or msg["infer"].get("_deterministic"):
            return
        name, frames = msg["name"], msg["cond_indep_stack"]
        if not msg["is_observed"]:
            if not self._is_unobserved_half(msg):
                plates = frozenset(frame.name for frame in frames)
                self.latents[name] = Latent(name, msg["fn"], msg["value"], plates)
            return
        scale = msg["scale"]
        for frame in frames:
            if frame.full_size is not None:
                scale = scale * frame.size / frame.full_size
        plates_here = tuple((f.name, f.dim, f.size) for f in frames if f.vectorized)
        self.observed[name] = Observed(name, msg["fn"], msg["value"], msg["mask"], scale, plates_here)

    def _pyro_param(self, msg: Any) -> None:
        tensor = msg["args"][1] if len(msg["args"]) > 1 else None
        if not isinstance(tensor, nn.Parameter) or tensor.requires_grad:
            raise learnable_parameter(msg["name"])
        msg["value"] = tensor

    def _is_unobserved_half(self, msg: Any) -> bool:
        """Whether this is the part that `obs_mask` leaves unobserved: not a weight, and nothing scores it."""
        name: str = msg["name"]
        return name.endswith("_unobserved") and name.removesuffix("unobserved") + "observed" in self.observed


def learnable_parameter(name: str) -> LearnableParameterError:
    """The refusal of a learnable parameter that has no prior.

    Args:
        name: The parameter, as the message shall call it.

    Returns:
        The error to raise.
    """
    return LearnableParameterError(
        f"The model uses the learnable parameter '{name}', which has no prior. Give it one (PyroSample, or the `prior` "
        "of a BayesianNetwork), or freeze it with requires_grad_(False)."
    )
