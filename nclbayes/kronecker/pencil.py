"""Joint diagonalisation of a definite matrix and a semi-definite one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nclbayes.errors import MatrixError
from nclbayes.kronecker.blockdiagonal import BlockDiagonal, Matrix, blocks_of
from nclbayes.kronecker.precision import check_symmetric, cholesky


@dataclass(frozen=True)
class Pencil:
    """A pair (A, C), A positive definite and C positive semi-definite, and the basis that diagonalises both.

    ``A = L L^T`` and ``L^-1 C L^-T = U diag(c) U^T`` give ``T = L^-T U`` with ``T^T A T = I`` and
    ``T^T C T = diag(c)``. Any combination ``X = x1 A + x2 C`` then has eigenvalues ``x1 + x2 c`` in that basis,
    ``X^-1 = T diag(1 / (x1 + x2 c)) T^T`` and ``log|X| = log|A| + sum log(x1 + x2 c)``. Eigenvalues, and the basis,
    are computed when they are first asked for.

    Attributes:
        base: A, [..., k, k], float64.
        added: C, [..., k, k], float64.
        root: L, [..., k, k].
    """

    base: Tensor
    added: Tensor
    root: Tensor

    @classmethod
    def of(cls, base: Tensor, added: Tensor, names: tuple[str, str], rtol: float | None = None) -> Pencil:
        """Check a pair (A, C), and take it to float64.

        Args:
            base: A, [..., k, k], positive definite.
            added: C, [..., k, k], positive semi-definite.
            names: What an error message calls A and C.
            rtol: How negative an eigenvalue of C may be, relative to its largest entry, and still count as a
                rounding error. Default: k times the machine epsilon of C's dtype.

        Returns:
            The pencil.

        Raises:
            MatrixError: If A is not positive definite, or C not positive semi-definite, or either not finite.
        """
        check_symmetric(names[0], base)
        check_symmetric(names[1], added)
        if base.shape[-1] != added.shape[-1]:
            raise MatrixError(
                f"{names[0]} and {names[1]} must have the same size, not {base.shape[-1]} and {added.shape[-1]}."
            )
        if rtol is None:
            rtol = added.shape[-1] * torch.finfo(added.dtype).eps
        a, c = _symmetric(base), _symmetric(added)
        _check_semidefinite(names[1], c, rtol)
        return cls(base=a, added=c, root=cholesky(names[0], a))

    @property
    def logdet(self) -> Tensor:
        """log|A|, [...]."""
        return 2 * self.root.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    @property
    def values(self) -> Tensor:
        """The eigenvalues c >= 0 of C relative to A, [..., k], ascending."""
        return self._eigenvalues.clamp(min=0.0)

    @property
    def clipped(self) -> Tensor:
        """How far below zero the lowest eigenvalue was before it was set to zero, [...]."""
        return self._eigenvalues[..., 0].clamp(max=0.0).abs()

    @cached_property
    def basis(self) -> Tensor:
        """T, [..., k, k]."""
        return torch.linalg.solve_triangular(self.root.mT, self._eigenvectors, upper=True)

    @cached_property
    def repaired(self) -> Tensor:
        """C with its negative eigenvalues set to zero, [..., k, k]."""
        if not bool(self.clipped.any()):
            return self.added
        lift = (self.root @ self._eigenvectors) * (-self._eigenvalues).clamp(min=0.0).sqrt().unsqueeze(-2)
        return self.added + lift @ lift.mT

    def rebuilt(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """The matrix that has other eigenvalues relative to A in the same directions.

        Args:
            function: From c, [..., k], to those, which are not negative.

        Returns:
            ``A T diag(f(c)) T^T A``, [..., k, k].
        """
        root = self.base @ self.basis * function(self.values).sqrt().unsqueeze(-2)
        return root @ root.mT

    @cached_property
    def _whitened(self) -> Tensor:
        half = torch.linalg.solve_triangular(self.root, self.added, upper=False)
        return torch.linalg.solve_triangular(self.root.mT, half, upper=True, left=False)

    @cached_property
    def _eigenvalues(self) -> Tensor:
        return torch.linalg.eigvalsh(self._whitened)

    @cached_property
    def _eigenvectors(self) -> Tensor:
        return torch.linalg.eigh(self._whitened).eigenvectors


@dataclass(frozen=True)
class BlockPencil:
    """A pair (A, C) of block-diagonal matrices of the same blocks: the pencils of these.

    Attributes:
        parts: Those of each stack of blocks, with a leading dimension that counts them.
    """

    parts: tuple[Pencil, ...]

    @property
    def base(self) -> BlockDiagonal:
        """A."""
        return BlockDiagonal(tuple(part.base for part in self.parts))

    @property
    def added(self) -> BlockDiagonal:
        """C."""
        return BlockDiagonal(tuple(part.added for part in self.parts))

    @property
    def logdet(self) -> Tensor:
        """log|A|, [...]."""
        return torch.stack([part.logdet.sum(-1) for part in self.parts]).sum(0)

    @cached_property
    def values(self) -> Tensor:
        """The eigenvalues of all blocks, [..., k], ascending."""
        return torch.cat([part.values.flatten(-2) for part in self.parts], dim=-1).sort(-1).values

    @property
    def clipped(self) -> Tensor:
        """How far below zero the lowest eigenvalue was before it was set to zero, [...]."""
        return torch.stack([part.clipped.amax(-1) for part in self.parts]).amax(0)

    @property
    def basis(self) -> BlockDiagonal:
        """T."""
        return BlockDiagonal(tuple(part.basis for part in self.parts))

    @property
    def repaired(self) -> BlockDiagonal:
        """C with its negative eigenvalues set to zero."""
        return BlockDiagonal(tuple(part.repaired for part in self.parts))

    def rebuilt(self, function: Callable[[Tensor], Tensor]) -> BlockDiagonal:
        """The matrix that has other eigenvalues relative to A in the same directions; as of one pencil.

        Args:
            function: From eigenvalues, [..., some], to those.

        Returns:
            The matrix.
        """
        parts = [p.rebuilt(lambda values: function(values.flatten(-2)).view_as(values)) for p in self.parts]
        return BlockDiagonal(tuple(parts))


AnyPencil = Pencil | BlockPencil


def pencil(base: Matrix, added: Matrix, names: tuple[str, str], rtol: float | None = None) -> AnyPencil:
    """The pencil of two matrices, or of two of the same blocks.

    Args:
        base: A, positive definite.
        added: C, positive semi-definite.
        names: What an error message calls them.
        rtol: As in :meth:`Pencil.of`.

    Returns:
        The pencil.

    Raises:
        MatrixError: If one of them is not what it must be, or they are of different sizes or blocks.
    """
    if blocks_of(base) != blocks_of(added):
        raise MatrixError(f"{names[0]} and {names[1]} must both be whole, or have the same blocks.")
    if isinstance(base, BlockDiagonal) and isinstance(added, BlockDiagonal):
        return BlockPencil(tuple(Pencil.of(a, c, names, rtol) for a, c in zip(base.parts, added.parts, strict=True)))
    assert isinstance(base, Tensor)
    assert isinstance(added, Tensor)
    return Pencil.of(base, added, names, rtol)


def _symmetric(matrix: Tensor) -> Tensor:
    """The matrix in float64, freed of rounding asymmetry."""
    double = matrix.double()
    return (double + double.mT) / 2


def _check_semidefinite(name: str, matrix: Tensor, rtol: float) -> None:
    """Refuse eigenvalues below -rtol times the largest entry (one shifted Cholesky tells)."""
    scale = matrix.abs().amax(dim=(-2, -1), keepdim=True)
    scaled = matrix / torch.where(scale > 0, scale, torch.ones_like(scale))
    scaled.diagonal(dim1=-2, dim2=-1).add_(rtol)
    _, info = torch.linalg.cholesky_ex(scaled)
    if bool(info.any()):
        raise MatrixError(
            f"{name} is indefinite: it has an eigenvalue below -{rtol:.3g} times its largest entry. "
            "A Fisher factor is a sum of outer products and cannot have one."
        )
