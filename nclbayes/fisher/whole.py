"""Targets drawn for a batch that is run in parts, or by several ranks: the same ones, however many there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch import distributions as torch_dist

from nclbayes.fisher.draws import Place, drawn_from, is_noise
from nclbayes.fisher.targets import Draws
from nclbayes.isolation import drawing_from, stream_apart
from nclbayes.ranks import Share
from nclbayes.watch import ModelRun, Observed

# Of parameters that say the same, one is enough.
_SAME = (("logits", "probs"), ("scale_tril", "covariance_matrix", "precision_matrix"))
# The stream of draws that are no functions of the whole batch's noise.
_OTHERS = 0x6F746872
# That of what the model draws itself.
_NOISE = 0x6E6F6973


class WholeBatch(Draws):
    """The distributions of a whole batch's targets, of which some examples' are known here.

    Where a draw is a function of noise, the noise of all examples is drawn, and that of these is taken. Other
    distributions are put together from what all ranks run at the same time: where a batch is split into parts, their
    draws depend on the parts, and on the number of ranks. Those that cannot be taken apart into their parameters are
    drawn from by each rank for itself.

    Args:
        observed: The observed sites of the examples' run.
        run: The run.
        share: Which examples these are.
        signs: As of :class:`Draws`.
    """

    def __init__(self, observed: Mapping[str, Observed], run: ModelRun, share: Share, signs: bool = False) -> None:
        super().__init__(observed, signs)
        self._share, self._apart = share, stream_apart(_OTHERS)
        self._places: dict[str, Place] = {}
        self._gathered: dict[str, tuple[Any, int, int]] = {}
        for name, site in observed.items():
            axis = run.axes[name]
            if axis is None:
                continue
            if is_noise(site.fn, signs):
                self._places[name] = Place(axis, share.start, share.examples)
                continue
            taken = _taken_apart(site.fn, axis)
            if taken is not None:
                tensors, made = taken
                whole = share.ranks.gather_rows(f"the outputs '{name}'", tensors)
                self._gathered[name] = (made(whole), axis, len(tensors[0]))

    def _place(self, name: str) -> Place | None:
        return self._places.get(name)

    def _drawn(self, name: str, fn: Any) -> Tensor:
        if name in self._places:
            return drawn_from(fn, self._places[name])
        share, device = self._share, self._observed[name].value.device
        if name not in self._gathered:
            with drawing_from(self._apart, device, share.start):
                return drawn_from(fn)
        whole, axis, rows = self._gathered[name]
        # The whole batch is drawn from as it would be by one process; a part of it as nothing else is.
        with drawing_from(self._apart, device, share.part) if share.part else nullcontext():
            return drawn_from(whole).narrow(axis, share.ahead, rows)


def own_noise(share: Share, device: torch.device) -> AbstractContextManager[object]:
    """A context for the run of a model that draws random numbers itself: of each share others.

    Args:
        share: Which examples of a batch it runs. The stream of their targets is left as it is, if that is not all.
        device: Where they are.

    Returns:
        The context.
    """
    return drawing_from(stream_apart(_NOISE), device, share.start) if share.examples else nullcontext()


Made = Callable[[Sequence[Tensor]], Any]


def _taken_apart(fn: Any, axis: int) -> tuple[list[Tensor], Made] | None:
    """The parameters of a distribution, examples first, and what makes it of them; None if that is not clear."""
    if isinstance(fn, dist.MaskedDistribution):
        return _taken_apart(fn.base_dist, axis)
    if isinstance(fn, torch_dist.Independent):
        found = _taken_apart(fn.base_dist, axis)
        if found is None:
            return None
        tensors, inner = found
        return tensors, lambda whole: dist.Independent(inner(whole), fn.reinterpreted_batch_ndims)
    if not type(fn).__module__.startswith(("pyro.distributions", "torch.distributions")):
        return None
    if isinstance(fn, torch_dist.TransformedDistribution):
        return None
    names = [name for name in fn.arg_constraints if isinstance(fn.__dict__.get(name), Tensor)]
    for same in _SAME:
        spare = [name for name in same if name in names][1:]
        names = [name for name in names if name not in spare]
    batch = fn.batch_shape
    values = [fn.__dict__[name].detach() for name in names]
    if not values or any(value.shape[: len(batch)] != batch or value.dtype != values[0].dtype for value in values):
        return None
    tensors = [value.movedim(axis, 0) for value in values]

    def made(whole: Sequence[Tensor]) -> Any:
        given = {name: tensor.movedim(0, axis) for name, tensor in zip(names, whole, strict=True)}
        return type(fn)(**given, validate_args=False)

    return tensors, made
