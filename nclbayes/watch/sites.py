"""Pyro's side of a run: feed the latent sites their values, note what is observed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_factor, site_is_subsample
from torch import Tensor, nn
from torch import distributions as torch_dist

from nclbayes.errors import LatentError, LearnableParameterError, PriorError, ValuesError

FROZEN = "nclbayes_frozen"
"""In the `infer` of a site: the parameter that it stands for, which is frozen, so that nothing is to be learnt."""


@dataclass(frozen=True)
class Latent:
    """A latent site as it was met: its prior, its value, and the plates around it.

    Example:
        >>> import torch, pyro.distributions as dist
        >>> import nclbayes as ncl
        >>> model = ncl.BayesianNetwork(torch.nn.Linear(3, 2), ncl.Normal(1.0), prior=dist.Normal(0.0, 1.0))
        >>> run = ncl.watch.watch(model, (torch.ones(5, 3), torch.zeros(5, 2)))
        >>> run.latents["weight"].value.shape
        torch.Size([2, 3])
    """

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
        plates: (name, dim, size) of the plates around it; dim is None for a loop.

    Example:
        >>> import torch, pyro.distributions as dist
        >>> import nclbayes as ncl
        >>> model = ncl.BayesianNetwork(torch.nn.Linear(3, 2), ncl.Normal(1.0), prior=dist.Normal(0.0, 1.0))
        >>> run = ncl.watch.watch(model, (torch.ones(5, 3), torch.zeros(5, 2)))
        >>> run.observed["y"].fn.mean[0].tolist()  # at the prior mean
        [0.0, 0.0]
    """

    name: str
    fn: Any
    value: Tensor
    mask: Tensor | bool | None
    scale: Tensor | float
    plates: tuple[tuple[str, int | None, int], ...]


class SiteRecorder(Messenger):
    """An effect handler that gives latent sites their values and records every site.

    A latent site without a value gets its prior mean. Nothing is scored and nothing is drawn; frozen parameters pass,
    learnable ones are refused before they reach Pyro's param store. A site of a parameter that was frozen later has its
    value, or else that of the parameter, and no gradient.

    Args:
        values: Values of latent sites by name; each must require grad.
        meet: Called with the name and value of each latent site when the model meets it.

    Example:
        >>> import torch, pyro.distributions as dist
        >>> import nclbayes as ncl
        >>> model = ncl.BayesianNetwork(torch.nn.Linear(3, 2), ncl.Normal(1.0), prior=dist.Normal(0.0, 1.0))
        >>> with ncl.watch.SiteRecorder({"weight": torch.ones(2, 3, requires_grad=True)}) as recorder:
        ...     out = model(torch.ones(5, 3), torch.zeros(5, 2))
        >>> list(recorder.latents), recorder.observed["y"].fn.mean[0].tolist()
        (['weight', 'bias'], [3.0, 3.0])
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
        value, frozen = self.values.get(name), msg["infer"].get(FROZEN)
        if value is None and frozen is not None:
            value = frozen
        elif value is None:
            if not isinstance(_innermost(fn), torch_dist.Normal):
                return  # whoever makes blocks of this run will refuse it
            value = fn.mean.detach().expand(fn.shape()).clone().requires_grad_()
        elif self._shapes[name] != fn.shape():
            raise ValuesError(
                f"The value of site '{name}' has shape {tuple(self._shapes[name])}, not {tuple(fn.shape())}."
            )
        # Without a gradient tasks leave it as it is.
        msg["value"] = value if frozen is None else value.detach()
        if self.meet is not None and frozen is None:
            self.meet(name, value)

    def _pyro_post_sample(self, msg: Any) -> None:
        if site_is_subsample(msg) or site_is_factor(msg) or msg["infer"].get("_deterministic"):
            return
        name, frames = msg["name"], msg["cond_indep_stack"]
        if not msg["is_observed"]:
            is_other = self._is_unobserved_half(msg) or (FROZEN in msg["infer"] and name not in self.values)
            if not is_other:
                plates = frozenset(frame.name for frame in frames)
                self.latents[name] = Latent(name, msg["fn"], msg["value"], plates)
            return
        scale = msg["scale"]
        for frame in frames:
            if frame.full_size is not None:
                scale = scale * frame.size / frame.full_size
        plates_here = tuple((f.name, f.dim, f.size) for f in frames)
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


def base_normal(name: str, fn: Any) -> torch_dist.Normal:
    """The Normal under a latent site's prior.

    Args:
        name: The site.
        fn: Its prior.

    Returns:
        The Normal.

    Raises:
        LatentError: If the prior is not Normal.
        PriorError: If it depends on another latent site.
    """
    fn = _innermost(fn)
    if not isinstance(fn, torch_dist.Normal):
        raise LatentError(
            f"The latent site '{name}' has a {type(fn).__name__} prior; a Gaussian posterior can hold Normal weights "
            "only. Use a Normal prior (and transform the value inside the model if it must be positive), or fix it."
        )
    if fn.loc.requires_grad or fn.scale.requires_grad:
        raise PriorError(
            f"The prior of site '{name}' depends on another latent site. The first prior of a Gaussian block must be "
            "fixed: write the dependence into the likelihood (w = scale * unit_normal), or fix it."
        )
    return fn


def _innermost(fn: Any) -> Any:
    while isinstance(fn, torch_dist.Independent):
        fn = fn.base_dist
    return fn


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
