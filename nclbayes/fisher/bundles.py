"""Uses of parts of a weight, put together to rows of the whole.

Where parts that make different outputs read the same input, as query, key and value of a packed matrix do, a row has
one input, and the gradients of all of these outputs: it is that of the product with the whole matrix. Parts that read
different inputs have rows of their own, whose gradients are zero outside the part. Those of different maps of a stack
lie beside each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nclbayes.watch import LinearUse
from nclbayes.watch.parts import PartRows


@dataclass(frozen=True)
class Bundle:
    """Uses whose rows are added to a sum at once.

    Attributes:
        shared: Lists of uses; those of a list have the same input rows.
        stack: How many maps the block has, if these are of some of them only.
    """

    shared: list[list[LinearUse]]
    stack: int | None = None

    @property
    def first(self) -> LinearUse:
        """One of the uses, of which all have the same bias, and are transposed or not."""
        return self.shared[0][0]

    def input_rows(self) -> Iterator[Tensor]:
        """The input rows.

        Yields:
            [R, n] or [k, R, n].
        """
        if self.stack is None:
            yield from self.first.input_rows()
        else:
            yield self._beside(torch.cat(list(uses[0].input_rows()), dim=-2) for uses in self.shared)

    def gradient_rows(self, grads: Mapping[int, Tensor]) -> Tensor:
        """The gradient rows.

        Args:
            grads: The gradient of the output of each use, by the use's id.

        Returns:
            [R, m] or [k, R, m].
        """
        summed = (_sum(use.gradient_rows(grads[id(use)]) for use in uses) for uses in self.shared)
        return next(summed) if self.stack is None else self._beside(summed)

    def count(self) -> Tensor | int:
        """The number of valid rows; [k] for a stack whose maps need not have the same."""
        if self.stack is None:
            return self.first.count()
        counts = torch.zeros(self.stack, dtype=torch.float64, device=self.first.input.device)
        for (use, *_), maps in zip(self.shared, self._maps(), strict=True):
            counts[maps] += use.count()
        return counts

    def _maps(self) -> list[slice]:
        return [uses[0].maps or slice(None) for uses in self.shared]

    def _beside(self, pieces: Iterable[Tensor]) -> Tensor:
        """Rows of some maps of a stack, [maps, R, k] each, as those of all of them, with zeros after the last."""
        assert self.stack is not None
        held, ends = list(zip(self._maps(), pieces, strict=True)), [0] * self.stack
        places = []
        for maps, piece in held:
            start = max(ends[maps])
            ends[maps] = [start + piece.shape[-2]] * len(piece)
            places.append(start)
        like = held[0][1]
        rows = like.new_zeros(self.stack, max(ends), like.shape[-1])
        for start, (maps, piece) in zip(places, held, strict=True):
            rows[maps, start : start + piece.shape[-2]] = piece
        return rows


def bundled(uses: Sequence[LinearUse], shape: Sequence[int]) -> list[Bundle]:
    """The uses of a block, by what is added to its sums at once.

    Args:
        uses: The uses.
        shape: The shape of the block's matrix, or stack of them.

    Returns:
        In the order of the first use of each.
    """
    bundles: list[Bundle] = []
    beside: dict[Any, Bundle] = {}
    for shared in _sharing(uses):
        kind = shared[0].transposed, shared[0].bias
        if shared[0].maps is not None and kind in beside:
            beside[kind].shared.append(shared)
            continue
        bundle = Bundle([shared], None if shared[0].maps is None else shape[0])
        bundles.append(bundle)
        if bundle.stack is not None:
            beside[kind] = bundle
    return bundles


def _sharing(uses: Sequence[LinearUse]) -> list[list[LinearUse]]:
    """Lists of uses that have the same input rows, and outputs of their own."""
    found: list[list[LinearUse]] = []
    readers: dict[Any, list[list[LinearUse]]] = {}
    for use in uses:
        known = readers.setdefault(_reading(use), [])
        for shared in known:
            if all(_apart(use, other) for other in shared):
                shared.append(use)
                break
        else:
            known.append([use])
            found.append(known[-1])
    return found


def _reading(use: LinearUse) -> Any:
    """What uses that have the same input rows have in common."""
    if not isinstance(use.rows, PartRows):
        return id(use)
    x = use.input
    read = x.data_ptr(), x.dtype, x.shape, x.stride(), x._version
    return read, use.rows.reading, use.transposed, use.bias


def _apart(first: LinearUse, second: LinearUse) -> bool:
    """Whether parts have different outputs, and the same valid rows."""
    assert isinstance(first.rows, PartRows)
    assert isinstance(second.rows, PartRows)
    one, other = first.rows.outputs, second.rows.outputs
    if one.start < other.stop and other.start < one.stop:
        return False
    if first.mask is None or second.mask is None:
        return first.mask is second.mask
    return torch.equal(first.mask, second.mask)


def _sum(rows: Iterable[Tensor]) -> Tensor:
    first, *others = rows
    for other in others:
        first = first + other
    return first
