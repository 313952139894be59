"""Tensors that are a weight in another view: transposed, broadcast, or a part of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, NamedTuple

from torch import Tensor

from nclbayes.watch.calls import COPIES


class Range(NamedTuple):
    """Some neighbouring indices of a dimension.

    Attributes:
        start: The first of them.
        size: How many there are.
        whole: How long the dimension is.
    """

    start: int
    size: int
    whole: int

    @property
    def stop(self) -> int:
        """The first index after them."""
        return self.start + self.size


@dataclass(frozen=True)
class Part:
    """Which part of a weight a view of it is.

    Attributes:
        ranges: For each dimension of the weight, the indices that the view has.
        kept: The dimensions that the view has itself; of any other it is at one index.
    """

    ranges: tuple[Range, ...]
    kept: tuple[int, ...]


@dataclass(frozen=True)
class Alias:
    """A tensor that is a site's value, or a view of it.

    Attributes:
        site: The site.
        value: Its value.
        transposed: Whether the last two dimensions are exchanged.
        tensor: The tensor.
        part: Which part of the value it is; None: all of it.
        version: How often it had been written into then.
    """

    site: str
    value: Tensor
    transposed: bool
    tensor: Tensor
    part: Part | None = None
    version: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "version", self.tensor._version)

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The indices of the value that it has, along each dimension."""
        return tuple(Range(0, size, size) for size in self.value.shape) if self.part is None else self.part.ranges

    @property
    def kept(self) -> tuple[int, ...]:
        """The dimensions of the value that it has."""
        return tuple(range(self.value.ndim)) if self.part is None else self.part.kept

    @property
    def ndim(self) -> int:
        """How many of its dimensions are the value's own, and not those of broadcasting."""
        return len(self.kept)

    @property
    def stacked(self) -> bool:
        """Whether a product sees a stack of matrices."""
        return self.ndim == 3

    @property
    def is_column(self) -> bool:
        """Whether it is a vector that was a column of a matrix."""
        return self.ndim == 1 and self.kept[0] == self.value.ndim - 2

    def followed(self, func: Callable[..., Any], out: Any) -> list[Alias] | None:
        """What a call returned, if all of that is the weight itself in another view.

        Args:
            func: The torch function, which was given this tensor.
            out: What it returned.

        Returns:
            One for each tensor; None if any of them is something else.
        """
        found = []
        for tensor in (out,) if isinstance(out, Tensor) else out:
            alias = self._followed(func, tensor) if isinstance(tensor, Tensor) else None
            if alias is None:
                return None
            found.append(alias)
        return found

    def _followed(self, func: Callable[..., Any], out: Tensor) -> Alias | None:
        if out is self.tensor:
            # A call that does nothing, or one that writes into it.
            return self if out._version == self.version else None
        if func in COPIES and out.shape == self.tensor.shape:
            return replace(self, tensor=out)
        if not out._is_view():
            return None
        return self._turned(out) or self._cut(out)

    def _turned(self, out: Tensor) -> Alias | None:
        """A transpose of this tensor, or one that repeats it."""
        if out.data_ptr() != self.tensor.data_ptr() or self.tensor.ndim < 2:
            return None
        kept = 3 if self.stacked else 2
        lead, last, same = len(out.shape) - kept, _axes(out)[-kept:], _axes(self.tensor)[-kept:]
        if lead < 0 or any(size > 1 and stride > 0 for size, stride in _axes(out)[:lead]):
            return None
        if _match(last, same):
            return replace(self, tensor=out)
        if _match(last, [*same[:-2], same[-1], same[-2]]):
            return replace(self, tensor=out, transposed=not self.transposed)
        return None

    def _cut(self, out: Tensor) -> Alias | None:
        """Neighbouring rows, columns or matrices of this tensor, or one of them, however they were asked for."""
        own = self.tensor
        if self.value.ndim > 3 or own.ndim != self.ndim or not own.ndim - 1 <= out.ndim <= own.ndim:
            return None
        if out.dtype != own.dtype or out.untyped_storage().data_ptr() != own.untyped_storage().data_ptr():
            return None
        starts = _starts(own, int(out.storage_offset() - own.storage_offset()))
        for axes in combinations(range(own.ndim), out.ndim):
            sizes = dict(zip(axes, out.shape, strict=True))
            fits = all(out.stride(i) == own.stride(axis) for i, axis in enumerate(axes))
            if fits and starts and all(starts[i] + sizes.get(i, 1) <= own.shape[i] for i in range(own.ndim)):
                return self._at(out, starts, sizes)
        return None

    def _at(self, out: Tensor, starts: list[int], sizes: dict[int, int]) -> Alias | None:
        """A part, by where it starts along each axis of this tensor, and how long it is along those that it has."""
        dims = [*self.kept[:-2], *reversed(self.kept[-2:])] if self.transposed else list(self.kept)
        ranges = list(self.ranges)
        for axis, dim in enumerate(dims):
            ranges[dim] = Range(ranges[dim].start + starts[axis], sizes.get(axis, 1), ranges[dim].whole)
        kept = tuple(sorted(dims[axis] for axis in sizes))
        if self.value.ndim == 3 and 0 in kept and len(kept) < 3:
            # One row of each matrix of a stack.
            return None
        is_all = len(kept) == self.value.ndim and all(part.size == part.whole for part in ranges)
        part = None if is_all else Part(tuple(ranges), kept)
        return replace(self, tensor=out, part=part, transposed=self.transposed and len(kept) > 1)


def _starts(tensor: Tensor, offset: int) -> list[int]:
    """The index of the number that lies so far behind a tensor's first; empty if that is not clear."""
    starts, reach = [0] * tensor.ndim, 0
    if offset < 0:
        return []
    for stride, axis in sorted(((s, i) for i, s in enumerate(tensor.stride()) if tensor.shape[i] > 1), reverse=True):
        if stride == 0 or (reach and stride * tensor.shape[axis] > reach):
            return []
        starts[axis], offset, reach = offset // stride, offset % stride, stride
    return starts if offset == 0 else []


def _axes(tensor: Tensor) -> list[tuple[int, int]]:
    return list(zip(tensor.shape, tensor.stride(), strict=True))


def _match(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> bool:
    """Whether axes are the same; the stride of an axis of length one means nothing."""
    return all(a == b or (a[0] == b[0] == 1) for a, b in zip(first, second, strict=True))
