"""The sums behind diagonal Fishers: squared gradients of one example at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from nclbayes.blocks import Block, KroneckerBlock
from nclbayes.errors import NonFiniteError
from nclbayes.fisher.per_example import Moments, NoisyModelError
from nclbayes.fisher.squares import example_axes, summed_squares
from nclbayes.fisher.verify import agree, verify_sum
from nclbayes.watch import LinearUse

Pairs = list[tuple[LinearUse, Tensor]]
Alone = Callable[[Sequence[Block]], dict[str, Moments]]
"""From some blocks to what the gradients of each example's log likelihood add up to there."""
# Per-example gradients of so many numbers are cheap enough to check others against.
_FEW_NUMBERS = 1 << 22


@dataclass(frozen=True)
class DiagonalFisher:
    """The diagonal Fisher of a block.

    Attributes:
        diagonal: Sum of squared per-example gradients, scaled to the number of examples asked for, float64.
        examples: How many examples it came from.

    Example:
        >>> import pyro
        >>> import pyro.distributions as dist
        >>> import torch
        >>> from nclbayes import fisher
        >>> def model(x, y):
        ...     gain = pyro.sample("gain", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        ...     pyro.sample("y", dist.Normal(x * gain, 1.0).to_event(1), obs=y)
        >>> found = fisher(model, {"gain": torch.ones(2)}, (torch.ones(5, 2), torch.zeros(5, 2)), kind="exact")
        >>> found["gain"].diagonal.tolist(), found["gain"].examples
        ([5.0, 5.0], 5.0)
    """

    diagonal: Tensor
    examples: float


class DiagonalSums:
    """Sums of squared per-example gradients, by block.

    Attributes:
        squares: What has been summed, float64, of each block's shape.
    """

    def __init__(self) -> None:
        self.squares: dict[str, Tensor] = {}
        self._not_finite: str | None = None
        # Which dimension of a map's rows is the examples'; -1: none is.
        self._axes: dict[str, int] = {}

    def add(
        self,
        blocks: Sequence[Block],
        seen: Mapping[str, Pairs],
        told: Mapping[str, Moments],
        examples: int,
        alone: Alone,
        weight: float,
    ) -> None:
        """Add one backpropagated target.

        Args:
            blocks: Those to sum; of linear maps that the likelihood did not reach, nothing is added.
            seen: For each linear map, its uses with the gradient of their outputs.
            told: What the uses of others tell.
            examples: How many examples the batch has.
            alone: Asked where rows do not tell which example they belong to.
            weight: What each example counts.

        Raises:
            NoisyModelError: If it had to be asked, and the model draws random numbers.
        """
        found, tables = dict[str, Tensor](), dict[str, Tensor]()
        for block in blocks:
            if block.name in told:
                moments = told[block.name]
                found[block.name] = moments.squares
                if moments.rows is not None:
                    tables[block.name] = moments.rows
        unclear: list[Block] = []
        for block in blocks:
            if block.name in found:
                continue
            if isinstance(block, KroneckerBlock):
                if not seen[block.name]:
                    continue
                squares = self._from_rows(block, seen[block.name], examples)
                if squares is not None:
                    found[block.name] = squares
                    continue
            unclear.append(block)
        if unclear:
            found |= _one_by_one(unclear, seen, examples, alone)
        for block in blocks:
            if block.name in found:
                self._take(block, found[block.name], weight, tables.get(block.name))

    def _take(self, block: Block, squares: Tensor, weight: float, rows: Tensor | None) -> None:
        """Add squares, those of a table's rows say, to a block's sum."""
        if block.name not in self.squares:
            self.squares[block.name] = squares.new_zeros(block.shape)
        into = self.squares[block.name]
        into.add_(squares, alpha=weight) if rows is None else into.index_add_(0, rows, squares, alpha=weight)
        # No term is negative, so that none makes up for another.
        if not math.isfinite(float(squares.sum())):
            self._not_finite = block.name

    def verify(
        self, blocks: Sequence[KroneckerBlock], seen: Mapping[str, Pairs], examples: int, alone: Alone, eps: float
    ) -> None:
        """On few examples, compare what rows give with gradients of one example at a time.

        A dimension may be as long as the batch by chance: if it is not the examples', rows are not asked again.

        Args:
            blocks: Linear maps.
            seen: For each, its uses with the gradient of their outputs.
            examples: How many examples the batch has.
            alone: What to compare with.
            eps: The machine epsilon of the run.

        Raises:
            UnsupportedUseError: If the examples' gradients do not add up to that of the batch.
        """
        for block in blocks:
            if seen[block.name] and examples * block.size <= _FEW_NUMBERS:
                squares = self._from_rows(block, seen[block.name], examples)
                if squares is not None:
                    try:
                        moments = alone([block])[block.name]
                    except NoisyModelError:
                        # There is nothing to compare with; that the rows add up to the gradient is checked elsewhere.
                        return
                    if not agree(moments.squares, squares, eps=eps):
                        verify_sum(block, seen[block.name], moments.total, eps)
                        self._axes[block.name] = -1

    def _from_rows(self, block: KroneckerBlock, pairs: Pairs, examples: int) -> Tensor | None:
        """Summed squares from rows, where these tell which example they are of: the same dimension in every batch."""
        axes = example_axes(pairs, examples)
        if axes is None or len(axes) > 1:
            return None
        axis = axes[0] if axes else -1
        if axis != self._axes.setdefault(block.name, axis):
            return None
        return None if axis < 0 else summed_squares(block, pairs, examples, axis)

    def scale(self, factor: float) -> None:
        """Multiply what has been summed so far.

        Args:
            factor: By what.
        """
        self.squares = {name: squares * factor for name, squares in self.squares.items()}

    def check_finite(self, examples: float) -> None:
        """Refuse NaN and infinity.

        Args:
            examples: How many examples have been added, for the message.

        Raises:
            NonFiniteError: If there are any.
        """
        if self._not_finite is not None:
            raise NonFiniteError(
                f"NaN or infinity in the gradients of site '{self._not_finite}', up to example {examples:g}."
            )


def _one_by_one(blocks: Sequence[Block], seen: Mapping[str, Pairs], examples: int, alone: Alone) -> dict[str, Tensor]:
    """Summed squares from the gradient of each example by itself."""
    try:
        return {name: moments.squares for name, moments in alone(blocks).items()}
    except NoisyModelError:
        found = {}
        for block in blocks:
            squares = None
            if isinstance(block, KroneckerBlock):
                axes = example_axes(seen[block.name], examples)
                # Of several dimensions of that length the examples' comes first, as in every batch.
                squares = summed_squares(block, seen[block.name], examples, axes[0]) if axes else None
            if squares is None:
                raise
            found[block.name] = squares
        return found
