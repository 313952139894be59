"""The sums behind one Kronecker block's Fisher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nclbayes.blocks import KroneckerBlock
from nclbayes.fisher.bundles import bundled
from nclbayes.fisher.gram import AnyGramSum, gram_sum, rounding
from nclbayes.kronecker import BlockDiagonal
from nclbayes.kronecker.blockdiagonal import Matrix, each, widths_of
from nclbayes.storage import under
from nclbayes.watch import LinearUse


@dataclass(frozen=True)
class KroneckerFisher:
    """The Fisher ``input (x) output`` of a Kronecker block.

    Attributes:
        input: Mean of z z^T over rows, [n, n] or [k, n, n], float64.
        output: Sum of g g^T over rows, scaled to the number of examples asked for, [m, m] or [k, m, m], float64.
        rows: How many rows were summed; of a stack, by the map that has most.
        examples: How many examples they came from.
        rtol: Rounding errors of the two sums relative to their largest entry: the `rtol` for ``kronecker_sum``.
        is_exchanged: Whether rows of a transposed use are among those summed, with their sides exchanged.

    Example:
        >>> import pyro
        >>> import pyro.distributions as dist
        >>> import torch
        >>> from nclbayes import fisher
        >>> def model(x, y):
        ...     w = pyro.sample("w", dist.Normal(torch.zeros(3, 2), 1.0).to_event(2))
        ...     pyro.sample("y", dist.Normal(x @ w, 1.0).to_event(1), obs=y)
        >>> found = fisher(model, {"w": torch.ones(3, 2)}, (torch.ones(5, 3), torch.zeros(5, 2)), kind="exact")
        >>> found["w"].input.shape, found["w"].output.shape, found["w"].rows
        (torch.Size([3, 3]), torch.Size([2, 2]), 5.0)
    """

    input: Matrix
    output: Matrix
    rows: float
    examples: float
    rtol: float
    is_exchanged: bool = False


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
        self._dtype, self._device = dtype, device
        # A bias is the last input, constant 1: its row of the sum of z z^T is the sum of z, and this number of rows.
        self._biased_rows: Tensor | float = 0.0
        self._straight = self._empty(exchanged=False)
        self._exchanged: _Sums | None = None

    def add_inputs(self, uses: list[LinearUse], weight: float = 1.0) -> None:
        """Add the input rows of one batch, once however many targets were backpropagated.

        Args:
            uses: The block's uses in that batch.
            weight: What each of the batch's examples counts.
        """
        for bundle in bundled(uses, self._block.shape):
            use = bundle.first
            sums, biased = self._side(use), use.bias is not None and use.bias == self._block.bias
            for rows in bundle.input_rows():
                sums.inputs.add(rows, weight, in_row_sum=biased)
            count = weight * bundle.count()
            sums.rows = sums.rows + count
            if biased:
                self._biased_rows = self._biased_rows + count

    def add_gradients(self, pairs: list[tuple[LinearUse, Tensor]], weight: float = 1.0) -> None:
        """Add the gradient rows of one backpropagated target.

        Args:
            pairs: Uses, with the gradient of their output.
            weight: What each of the batch's examples counts.
        """
        grads = {id(use): grad for use, grad in pairs}
        for bundle in bundled([use for use, _ in pairs], self._block.shape):
            self._side(bundle.first).gradients.add(bundle.gradient_rows(grads), weight)

    def scale(self, factor: float) -> None:
        """Multiply what has been summed so far.

        Args:
            factor: By what.
        """
        for sums in filter(None, (self._straight, self._exchanged)):
            sums.inputs.scale(factor)
            sums.gradients.scale(factor)
            sums.rows = sums.rows * factor
        self._biased_rows = self._biased_rows * factor

    def factors(self, scale: float, samples: int, examples: float) -> KroneckerFisher:
        """The Fisher ``(N / N_b) (sum z z^T) (x) (sum g g^T) / R``; each map of a stack has its own R.

        Rows of a transposed use are first rescaled, z by a factor and g by its inverse, so that both kinds have the
        same mean squared input; the trace of the result is then the sum of the traces of the two Fishers.

        Args:
            scale: N / N_b.
            samples: How many targets were drawn for each example.
            examples: N_b.

        Returns:
            The two factors.
        """
        rows = rows1 = torch.as_tensor(self._straight.rows, dtype=torch.float64, device=self._device)
        if self._exchanged is not None:
            rows = rows + self._exchanged.rows
        rows = torch.where(rows > 0, rows, 1.0)
        A, G = _scaled(self._straight.inputs, 1 / rows), self._straight.gradients.value(scale / samples)
        if self._exchanged is not None:
            A2 = _scaled(self._exchanged.gradients, 1 / (rows * samples))
            G2 = self._exchanged.inputs.value(scale)
            power, power2 = _trace(A) / _on(rows1), _trace(A2) / _on(rows - rows1)
            ratio = torch.where((power > 0) & (power2 > 0), power / power2, torch.ones_like(power))
            share = torch.where(power2 > 0, 1 / ratio, 0.0)
            A, G = each(torch.add, A, ratio * A2), each(torch.add, G, share * G2)
        if self._block.bias is not None:
            A = self._with_bias(A, rows)
        most = float(rows.max())
        rtol = rounding(max(A.shape[-1], G.shape[-1]), samples * most, self._dtype)
        return KroneckerFisher(A, G, most, examples, rtol, self._exchanged is not None)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that is summed, to be restored exactly."""
        found: dict[str, Tensor] = {}
        sides = {"straight": self._straight, "exchanged": self._exchanged}
        for side, sums in sides.items():
            if sums is not None:
                for part in ("inputs", "gradients"):
                    held = getattr(sums, part).tensors()
                    found |= {f"{side}.{part}.{name}": tensor for name, tensor in held.items()}
        return found | {"counts": self._counts(-1.0).cpu()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`tensors` gave.

        Args:
            tensors: Its result.
        """
        self._biased_rows, straight, exchanged = tensors["counts"].to(self._device, copy=True)
        if bool((exchanged >= 0).all()):
            self._exchanged = self._empty(exchanged=True)
        for side, sums, rows in (("straight", self._straight, straight), ("exchanged", self._exchanged, exchanged)):
            if sums is not None:
                sums.rows = rows
                for part in ("inputs", "gradients"):
                    getattr(sums, part).restore(under(tensors, f"{side}.{part}."))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its rows."""
        return self._dtype

    def totals(self) -> dict[str, Tensor]:
        """What was summed, each number once: such totals may be added up."""
        found: dict[str, Tensor] = {}
        for side, sums in (("straight", self._straight), ("exchanged", self._exchanged)):
            if sums is not None:
                for part in ("inputs", "gradients"):
                    held = getattr(sums, part).totals()
                    found |= {f"{side}.{part}.{name}": tensor for name, tensor in held.items()}
        return found | {"counts": self._counts(0.0)}

    def take(self, totals: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`totals` gave, or a sum of such.

        Args:
            totals: Its result.
        """
        self._biased_rows, self._straight.rows, exchanged = totals["counts"].clone()
        if under(totals, "exchanged."):
            self._exchanged = self._empty(exchanged=True)
            self._exchanged.rows = exchanged
        for side, sums in (("straight", self._straight), ("exchanged", self._exchanged)):
            if sums is not None:
                for part in ("inputs", "gradients"):
                    getattr(sums, part).take(under(totals, f"{side}.{part}."))

    def non_finite_side(self) -> str | None:
        """Which rows hold NaN or infinity: "inputs", "gradients", or None for neither."""
        for sums in filter(None, (self._straight, self._exchanged)):
            if not sums.inputs.is_finite():
                return "inputs"
            if not sums.gradients.is_finite():
                return "gradients"
        return None

    def _counts(self, absent: float) -> Tensor:
        """Numbers of rows: with a bias, straight, and exchanged if there are such; [3], or [3, k] of a stack."""
        exchanged = absent if self._exchanged is None else self._exchanged.rows
        counts = (self._biased_rows, self._straight.rows, exchanged)
        held = (torch.as_tensor(count, dtype=torch.float64, device=self._device) for count in counts)
        return torch.stack([count.expand(self._block.shape[:-2]) for count in held])

    def _side(self, use: LinearUse) -> _Sums:
        if use.transposed == self._block.transposed:
            return self._straight
        if self._exchanged is None:
            self._exchanged = self._empty(exchanged=True)
        return self._exchanged

    def _with_bias(self, A: Matrix, rows: Tensor) -> Matrix:
        """A with the row and column of the bias."""
        if isinstance(A, Tensor):
            return self._bordered(A, rows)
        *others, last = A.blocks()
        is_alone = len(others) + 1 < len(self._widths[0])
        found = [last, self._bordered(last[..., :0, :0], rows)] if is_alone else [self._bordered(last, rows)]
        return BlockDiagonal.of([*others, *found])

    def _bordered(self, A: Tensor, rows: Tensor) -> Tensor:
        """A block with the row and column of the bias."""
        whole, k = F.pad(A, (0, 1, 0, 1)), A.shape[-1]
        sums = self._straight.inputs.row_sum()
        whole[..., -1, :-1] = whole[..., :-1, -1] = sums[..., sums.shape[-1] - k :] / rows.unsqueeze(-1)
        # A number over a tensor would be times its reciprocal, which rounds otherwise than a tensor from a file does.
        whole[..., -1, -1] = torch.as_tensor(self._biased_rows, dtype=rows.dtype, device=rows.device) / rows
        return whole

    @property
    def _widths(self) -> tuple[list[int], list[int]]:
        """Those of the blocks of A and of G."""
        n, m = self._block.shape[-1], self._block.shape[-2]
        return widths_of(n, self._block.widths[0]), widths_of(m, self._block.widths[1])

    def _empty(self, exchanged: bool) -> _Sums:
        stack, (inputs, outputs) = self._block.shape[:-2], self._widths
        is_blocked = len(inputs) > 1, len(outputs) > 1
        if self._block.bias is not None:
            *others, last = inputs
            inputs = [*others, last - 1] if last > 1 else others
        sides = [
            gram_sum((*stack, sum(widths)), widths if blocked else None, self._dtype, self._device)
            for widths, blocked in zip((inputs, outputs), is_blocked, strict=True)
        ]
        return _Sums(*(reversed(sides) if exchanged else sides))


@dataclass
class _Sums:
    inputs: AnyGramSum
    gradients: AnyGramSum
    rows: Tensor | float = 0.0


def _on(counts: Tensor) -> Tensor:
    """Numbers of rows, of all maps or of each, as what multiplies or divides matrices."""
    return counts[..., None, None]


def _scaled(total: AnyGramSum, factor: Tensor) -> Matrix:
    """A sum times a number, or one for each map of a stack."""
    return total.value(float(factor)) if factor.ndim == 0 else total.value() * _on(factor)


def _trace(matrix: Matrix) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
