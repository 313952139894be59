"""A model asked for its output: the same inputs, at one setting of the weights or at many."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch import distributions as torch_dist

from nclbayes.errors import ModelError
from nclbayes.isolation.autocasting import as_called
from nclbayes.isolation.failures import running
from nclbayes.watch import LinearUse, MapRecorder, OtherUse, SiteRecorder
from nclbayes.watch.run import Model
from nclbayes.watch.sites import FROZEN


@dataclass(frozen=True)
class Query:
    """Inputs of a model, and the output site that is asked for.

    Attributes:
        model: The Pyro model.
        inputs: Its positional arguments, without the observed one.
        context: Its keyword arguments.
        outputs: The output sites; the first of them that the model reaches counts.
    """

    model: Model
    inputs: Sequence[Any]
    context: Mapping[str, Any]
    outputs: Sequence[str]

    def at(self, values: Mapping[str, Tensor]) -> Any:
        """The output's distribution at given weights.

        Args:
            values: The weights, by site; one that has none is at the mean of its prior.

        Returns:
            The site's distribution.

        Raises:
            DataError: If the model cannot take the inputs.
            ModelError: If the model reaches no such site when it is called without the observed argument.
        """
        return self.reach(values)[0]

    def watched(self, values: Mapping[str, Tensor], examples: int) -> Seen:
        """The output's distribution at given weights, and what the run did with them.

        Args:
            values: The weights, by site.
            examples: How many examples there are.

        Returns:
            What was seen.
        """
        leaves = {site: value.detach().clone().requires_grad_() for site, value in values.items()}
        maps = MapRecorder(self.model, examples)
        recorder = _OutputRecorder(leaves, self.outputs, draw=False, meet=maps.track)
        state = torch.get_rng_state()
        with running(self.inputs), torch.enable_grad(), as_called(), recorder, maps:
            self.model(*self.inputs, **self.context)
        has_drawn = not torch.equal(state, torch.get_rng_state())
        fn = next(recorder.reached[output] for output in self.outputs if output in recorder.reached)
        return Seen(fn, maps.linear, maps.others, examples, has_drawn)

    def reach(self, values: Mapping[str, Tensor], draw: bool = False) -> tuple[Any, dict[str, Any]]:
        """The output's distribution, and the priors of weights that have no value.

        Args:
            values: The weights, by site.
            draw: Whether to draw those others from their priors; otherwise they are at the mean.

        Returns:
            The output's distribution, and the others' priors by site.
        """
        recorder = _OutputRecorder(values, self.outputs, draw)
        with running(self.inputs), as_called(), recorder:
            self.model(*self.inputs, **self.context)
        for output in self.outputs:
            if output in recorder.reached:
                return recorder.reached[output], recorder.untouched
        names = " or ".join(f"'{output}'" for output in self.outputs)
        raise ModelError(
            f"The model did not reach its output site {names}. To predict it is called with its inputs alone: give its "
            "last argument the default None, and let the site be sampled then."
        )


@dataclass(frozen=True)
class Seen:
    """A run that was watched.

    Attributes:
        fn: The output's distribution, with its graph.
        linear: The uses of weights as linear maps, in order.
        others: All other differentiable uses.
        examples: How many examples it had.
        has_drawn: Whether the model drew random numbers.
    """

    fn: Any
    linear: list[LinearUse]
    others: list[OtherUse]
    examples: int
    has_drawn: bool


class _OutputRecorder(SiteRecorder):
    """Gives weights their values, and keeps the distributions of output sites without drawing from them.

    A weight that no task has touched yet, such as one of a head to come, has its prior: its mean, or a draw.
    """

    def __init__(
        self,
        values: Mapping[str, Tensor],
        outputs: Sequence[str],
        draw: bool,
        meet: Callable[[str, Tensor], None] | None = None,
    ) -> None:
        super().__init__(values, meet)
        self.outputs, self.draw = outputs, draw
        self.reached: dict[str, Any] = {}
        self.untouched: dict[str, Any] = {}

    def _pyro_sample(self, msg: Any) -> None:
        name, fn = msg["name"], msg["fn"]
        if msg["is_observed"] or site_is_subsample(msg) or self._is_unobserved_half(msg):
            return
        if name in self.outputs:
            self.reached[name] = fn
            msg["value"] = fn.mean
        elif FROZEN in msg["infer"]:
            # What tasks left of it before it was frozen is as uncertain as ever.
            msg["value"] = self.values.get(name, msg["infer"][FROZEN].detach())
            if self.meet is not None and name in self.values:
                self.meet(name, msg["value"])
        elif name not in self.values:
            self.untouched[name] = fn
            msg["value"] = fn.sample() if self.draw else fn.mean.expand(fn.shape())
        else:
            super()._pyro_sample(msg)


def base_of(fn: Any) -> Any:
    """A distribution out of its wrappers.

    Args:
        fn: The distribution, perhaps independent in some dimensions, perhaps masked.

    Returns:
        What they wrap.
    """
    while isinstance(fn, (torch_dist.Independent, dist.MaskedDistribution)):
        fn = fn.base_dist
    return fn


def parameters_of(base: Any) -> list[str]:
    """The names of the parameters that define a distribution; of alternatives, the first.

    Args:
        base: The distribution, out of its wrappers.

    Returns:
        Names of its attributes.
    """
    if "logits" in base.arg_constraints:
        return ["logits"] + [n for n in base.arg_constraints if n not in ("logits", "probs")]
    if isinstance(base, torch_dist.MultivariateNormal):
        return ["loc", "scale_tril"]
    return list(base.arg_constraints)


def masked_like(fn: Any, other: Any) -> Any:
    """Another distribution under the masks of one without event dimensions.

    Args:
        fn: The one with the masks.
        other: The other, of the same batch shape.

    Returns:
        The other; a target that a mask leaves out does not count.
    """
    if isinstance(fn, dist.MaskedDistribution):
        return masked_like(fn.base_dist, other).mask(fn._mask)
    return masked_like(fn.base_dist, other) if isinstance(fn, torch_dist.Independent) else other
