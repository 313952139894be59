"""Uses of weights that are no linear maps: followed through what is computed from weights alone to the examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Size, Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from nclbayes.watch.calls import call_name, is_fused
from nclbayes.watch.separable import Parts, Separable, chained, looked_up, parts_of, products_of, rows_of
from nclbayes.watch.uses import OtherUse


@dataclass(frozen=True)
class Derived:
    """A weight, or a tensor that was computed from weights and from nothing that differs between examples.

    Attributes:
        tensor: The tensor.
        values: The weights, by site.
        version: How often it had been written into then.
        call: The torch function that made it.
    """

    tensor: Tensor
    values: Mapping[str, Tensor]
    version: int
    call: str = ""

    @property
    def is_as_it_was(self) -> bool:
        """Whether nothing has been written into it since."""
        return self.tensor._version == self.version


class OtherUses:
    """Notes them.

    Args:
        examples: How many examples the model is given; None if that is not known.

    Attributes:
        uses: What was noted.
    """

    def __init__(self, examples: int | None) -> None:
        self.uses: list[OtherUse] = []
        self._examples = examples
        self._derived: dict[int, Derived] = {}
        self._consumed: set[int] = set()

    def among(self, tensors: Iterable[Tensor]) -> list[Derived]:
        """What was computed from weights, among the arguments of a call.

        Args:
            tensors: The arguments.

        Returns:
            Each once.
        """
        if not self._derived:
            return []
        found = {id(tensor): self._derived[id(tensor)] for tensor in tensors if id(tensor) in self._derived}
        self._consumed.update(found)
        return list(found.values())

    def add(self, func: Callable[..., Any], sites: Iterable[str]) -> None:
        """Note a use of which nothing is known but that it is one.

        Args:
            func: The torch function.
            sites: The sites.
        """
        self.uses += (OtherUse(site, call_name(func), is_fused(func)) for site in sites)

    def note(
        self, func: Callable[..., Any], out: Any, tensors: list[Tensor], parts: list[Derived], args: Any, kwargs: Any
    ) -> None:
        """Note what a call does with weights, or with what was computed from them, that is no linear map of one.

        Args:
            func: The torch function.
            out: What it returned.
            tensors: All tensors among its arguments.
            parts: Those of them that are meant.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
        """
        if self._follow(func, out, tensors, parts, args, kwargs):
            return
        for part in parts:
            found, index = self._parts(func, part.tensor, out, args, kwargs) if part.is_as_it_was else (None, None)
            for site, value in part.values.items():
                separable = None
                if found is not None:
                    own = index if part.tensor is value else None
                    separable = Separable(edge_of(out), out.shape, chained(found, part.tensor, value), own)
                self.uses.append(OtherUse(site, call_name(func), is_fused(func), separable))

    def finish(self) -> None:
        """Note what the model itself did not use any more: it may be part of a distribution."""
        for key, derived in self._derived.items():
            if key not in self._consumed:
                self.uses += (OtherUse(site, derived.call, idle=True) for site in derived.values)

    def _follow(
        self, func: Callable[..., Any], out: Any, tensors: list[Tensor], parts: list[Derived], args: Any, kwargs: Any
    ) -> bool:
        """Whether a call's output depends on weights alone; it is then followed to where it meets the examples."""
        if is_fused(func) or not all(part.is_as_it_was or part.tensor is out for part in parts):
            return False
        met = {id(part.tensor) for part in parts}
        if not all(id(tensor) in met for tensor in tensors):
            # A table of which the same rows are looked up for all examples, as that of positions.
            index = looked_up(func, parts[0].tensor, args, kwargs) if len(parts) == 1 else None
            if index is None or self._is_batch(index.shape) or bool((index < 0).any()):
                return False
        elif isinstance(out, Tensor) and self._is_batch(out.shape) and func in _EXPANSIONS:
            return False
        values = {site: value for part in parts for site, value in part.values.items()}
        for tensor in (out,) if isinstance(out, Tensor) else out:
            if isinstance(tensor, Tensor):
                self._derived[id(tensor)] = Derived(tensor, values, tensor._version, call_name(func))
                self._consumed.discard(id(tensor))
        return True

    def _is_batch(self, shape: Size) -> bool:
        return len(shape) > 0 and shape[0] == self._examples

    def _parts(
        self, func: Callable[..., Any], weight: Tensor, out: Any, args: Any, kwargs: Any
    ) -> tuple[Parts | None, Tensor | None]:
        """How the gradient of an argument falls into those of examples; and the index, if rows of it are looked up."""
        if not isinstance(out, Tensor) or not self._is_batch(out.shape):
            return None, None
        index = looked_up(func, weight, args, kwargs)
        if index is not None:
            return (rows_of(index, weight), index) if self._is_batch(index.shape) else (None, None)
        if func is F.linear:
            return _of_linear(weight, out, *args, **kwargs), None
        return parts_of(func, weight, out, args, kwargs), None


_EXPANSIONS = {Tensor.expand, Tensor.expand_as, Tensor.repeat}


def edge_of(out: Tensor) -> GradientEdge:
    """Where an output's gradient passes, whatever is done to it in place later.

    Autograd leads an in-place change of a view around the view's own node, so that of its base is taken.

    Args:
        out: The output.

    Returns:
        The edge.
    """
    base = out._base
    if base is not None and base.numel() == out.numel() and base.is_contiguous() and out.is_contiguous():
        return get_gradient_edge(base)
    return get_gradient_edge(out)


def _of_linear(part: Tensor, out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Parts | None:
    """The weight of F.linear, if it is one that was computed; or a bias."""
    if part is input or (part is weight) == (part is bias) or out.ndim < 2 or weight.ndim != 2:
        return None
    return products_of(input, weight) if part is weight else parts_of(Tensor.add, part, out, (out, part), {})
