"""The sums behind one Kronecker block's Fisher."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nclbayes.blocks import KroneckerBlock
from nclbayes.fisher.gram import GramSum
from nclbayes.watch import LinearUse

# Rows of many small uses (the steps of a recurrent network) are joined up to this number before they are multiplied.
_JOINED_ROWS = 4096


@dataclass(frozen=True)
class KroneckerFisher:
    """The Fisher ``input (x) output`` of a Kronecker block.

    Attributes:
        input: Mean of z z^T over rows, [n, n] or [k, n, n], float64.
        output: Sum of g g^T over rows, scaled to the number of examples asked for, [m, m] or [k, m, m], float64.
        rows: How many rows were summed.
        examples: How many examples they came from.
        rtol: Rounding errors of the two sums relative to their largest entry: the `rtol` for ``kronecker_sum``.
    """

    input: Tensor
    output: Tensor
    rows: float
    examples: int
    rtol: float


class BlockSums:
    """Sums of z z^T and g g^T of one block, with the number of rows.

    A tied weight may also be used transposed (``x @ w`` here, ``x @ w.T`` there). Only the product g z^T of a row
    is defined, so a row of the transposed use enters with its sides exchanged; the two kinds of rows are summed
    apart and put together by :meth:`factors`.

    Args:
        block: The block.
        dtype: The dtype of its rows.
        device: Their device.
    """

    def __init__(self, block: KroneckerBlock, dtype: torch.dtype, device: torch.device) -> None:
        self._block = block
        *stack, m, n = block.shape
        self._rtol = max(m, n) * torch.finfo(dtype).eps
        self._straight = _Sums(GramSum((*stack, n), dtype, device), GramSum((*stack, m), dtype, device))
        self._exchanged = _Sums(GramSum((*stack, m), dtype, device), GramSum((*stack, n), dtype, device))
        self._sides = {False: self._straight, True: self._exchanged}

    def add_inputs(self, uses: list[LinearUse]) -> None:
        """Add the input rows of one batch, once however many targets were backpropagated.

        Args:
            uses: The block's uses in that batch.
        """
        for exchanged, sums in self._sides.items():
            here = [use for use in uses if self._is_exchanged(use) == exchanged]
            pieces = (piece for use in here for piece in use.input_rows(self._bias_column(use, exchanged)))
            for rows in _joined(pieces):
                sums.inputs.add(rows)
            for use in here:
                sums.rows = sums.rows + use.count()

    def add_gradients(self, pairs: list[tuple[LinearUse, Tensor]]) -> None:
        """Add the gradient rows of one backpropagated target.

        Args:
            pairs: Uses, with the gradient of their output.
        """
        for exchanged, sums in self._sides.items():
            pieces = (use.gradient_rows(grad) for use, grad in pairs if self._is_exchanged(use) == exchanged)
            for rows in _joined(pieces):
                sums.gradients.add(rows if not exchanged or self._block.bias is None else F.pad(rows, (0, 1)))

    def factors(self, scale: float, samples: int, examples: int) -> KroneckerFisher:
        """The Fisher ``(N / N_b) (sum z z^T) (x) (sum g g^T) / R``.

        Rows of a transposed use are first rescaled, z by a factor and g by its inverse, so that both kinds have the
        same mean squared input; the trace of the result is then the sum of the traces of the two Fishers.

        Args:
            scale: N / N_b.
            samples: How many targets were drawn for each example.
            examples: N_b.

        Returns:
            The two factors.
        """
        A, G = self._straight.inputs.value(), self._straight.gradients.value() / samples
        rows = float(self._straight.rows)
        other = float(self._exchanged.rows)
        if other > 0:
            A2, G2 = self._exchanged.gradients.value() / samples, self._exchanged.inputs.value()
            power, power2 = (M.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None] for M in (A, A2))
            ratio = torch.where((power > 0) & (power2 > 0), (power / rows) / (power2 / other), torch.ones_like(power))
            A, G, rows = A + ratio * A2, G + torch.where(power2 > 0, G2 / ratio, 0.0), rows + other
        return KroneckerFisher(A / rows, G * scale, rows, examples, self._rtol)

    def non_finite_side(self) -> str | None:
        """Which rows hold NaN or infinity: "inputs", "gradients", or None for neither."""
        for name in ("inputs", "gradients"):
            traces = [getattr(sums, name).trace().sum() for sums in self._sides.values()]
            if not bool(torch.isfinite(torch.stack(traces)).all()):
                return name
        return None

    def _is_exchanged(self, use: LinearUse) -> bool:
        return use.transposed != self._block.transposed

    def _bias_column(self, use: LinearUse, exchanged: bool) -> float | None:
        """What stands in the bias's place of an input row: 1, or 0 where this use adds no bias."""
        if self._block.bias is None or exchanged:
            return None
        return float(use.bias == self._block.bias)


@dataclass
class _Sums:
    inputs: GramSum
    gradients: GramSum
    rows: Tensor | int = 0


def _joined(pieces: Iterable[Tensor]) -> Iterator[Tensor]:
    """Rows of several pieces in fewer, longer ones."""
    held: list[Tensor] = []
    for piece in pieces:
        held.append(piece)
        if sum(p.shape[-2] for p in held) >= _JOINED_ROWS:
            yield held[0] if len(held) == 1 else torch.cat(held, dim=-2)
            held = []
    if held:
        yield held[0] if len(held) == 1 else torch.cat(held, dim=-2)
