"""Block-diagonal matrices: what stands for a factor that is too large to be held whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Size, Tensor


def widths_of(size: int, most: int) -> list[int]:
    """The widths of the fewest blocks of nearly one width that make a matrix.

    Args:
        size: The size of the matrix.
        most: How wide a block may be; 0: as wide as the matrix.

    Returns:
        The widths in order, which differ by 1 at most.

    Example:
        >>> from nclbayes.kronecker.blockdiagonal import widths_of
        >>> widths_of(10, 4), widths_of(10, 0)
        ([4, 3, 3], [10])
    """
    count = -(-size // most) if most else 1
    width, longer = divmod(size, count)
    return [width + 1] * longer + [width] * (count - longer)


def stacks_of(size: int, most: int) -> list[tuple[int, int]]:
    """The same blocks by width: how many of one width follow each other.

    Args:
        size: The size of the matrix.
        most: How wide a block may be; 0: as wide as the matrix.

    Returns:
        (count, width) of each stack.
    """
    return [(len(list(group)), width) for width, group in groupby(widths_of(size, most))]


@dataclass(frozen=True)
class BlockDiagonal:
    """A square matrix of blocks along its diagonal, held without the zeros beside them.

    It multiplies, and is multiplied with, as a matrix [..., k, k] is. Blocks of one width that follow each other lie in
    one stack, so that two matrices of the same blocks are combined stack by stack.

    Attributes:
        parts: The stacks in order, [..., count, width, width] each.

    Example:
        >>> import torch
        >>> from nclbayes.kronecker import BlockDiagonal
        >>> matrix = BlockDiagonal.of([torch.full((2, 2), 3.0), torch.eye(1)])
        >>> torch.ones(1, 3) @ matrix
        tensor([[6., 6., 1.]])
    """

    parts: tuple[Tensor, ...]

    @classmethod
    def of(cls, blocks: Iterable[Tensor]) -> BlockDiagonal:
        """Blocks in order, [..., width, width] each."""
        grouped = groupby(blocks, key=lambda block: block.shape[-1])
        return cls(tuple(torch.stack(list(group), dim=-3) for _, group in grouped))

    def blocks(self) -> list[Tensor]:
        """The blocks in order, [..., width, width] each."""
        return [block for part in self.parts for block in part.unbind(-3)]

    @property
    def sizes(self) -> list[int]:
        """How many rows each stack has."""
        return [part.shape[-3] * part.shape[-1] for part in self.parts]

    @property
    def width(self) -> int:
        """The width of the widest block."""
        return max(part.shape[-1] for part in self.parts)

    @property
    def shape(self) -> Size:
        """That of the whole matrix, [..., k, k]."""
        return Size((*self.parts[0].shape[:-3], sum(self.sizes), sum(self.sizes)))

    @property
    def ndim(self) -> int:
        """The dimensions of the whole matrix."""
        return self.parts[0].ndim - 1

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the blocks."""
        return self.parts[0].dtype

    @property
    def device(self) -> torch.device:
        """The device of the blocks."""
        return self.parts[0].device

    @property
    def mT(self) -> BlockDiagonal:
        """The transpose."""
        return self.map(lambda part: part.mT)

    def map(self, function: Callable[..., Tensor], *others: BlockDiagonal) -> BlockDiagonal:
        """Apply a function stack by stack, to this and to others of the same blocks.

        Args:
            function: From stacks to a stack.
            *others: The others.

        Returns:
            The matrix of the results.
        """
        return BlockDiagonal(tuple(map(function, self.parts, *(other.parts for other in others))))

    def to(self, *args: Any) -> BlockDiagonal:
        """As ``Tensor.to``."""
        return self.map(lambda part: part.to(*args))

    def double(self) -> BlockDiagonal:
        """In float64."""
        return self.map(Tensor.double)

    def contiguous(self) -> BlockDiagonal:
        """As ``Tensor.contiguous``."""
        return self.map(Tensor.contiguous)

    def expand(self, *shape: Any) -> BlockDiagonal:
        """As ``Tensor.expand``, to further leading dimensions."""
        lead = tuple(shape[0] if len(shape) == 1 else shape)[:-2]
        return self.map(lambda part: part.expand(*lead, *part.shape[-3:]))

    def diagonal(self, **_: int) -> Tensor:
        """The diagonal, [..., k]."""
        return torch.cat([part.diagonal(dim1=-2, dim2=-1).flatten(-2) for part in self.parts], dim=-1)

    def entries(self) -> Tensor:
        """All entries inside of blocks, [..., entries]."""
        return torch.cat([part.flatten(-3) for part in self.parts], dim=-1)

    def square(self) -> BlockDiagonal:
        """The square of every entry."""
        return self.map(Tensor.square)

    def abs(self) -> BlockDiagonal:
        """The absolute value of every entry."""
        return self.map(Tensor.abs)

    def sum(self, dim: int | tuple[int, int]) -> Tensor:
        """The sums of rows, for ``dim=-1``; otherwise that of all entries."""
        if dim == -1:
            return torch.cat([part.sum(-1).flatten(-2) for part in self.parts], dim=-1)
        return self.entries().sum(-1)

    def dense(self) -> Tensor:
        """The whole matrix, [..., k, k]."""
        whole = self.parts[0].new_zeros(self.shape)
        start = 0
        for block in self.blocks():
            stop = start + block.shape[-1]
            whole[..., start:stop, start:stop] = block
            start = stop
        return whole

    def __matmul__(self, other: Any) -> Any:
        if isinstance(other, BlockDiagonal):
            return self.map(torch.matmul, other)
        pieces = other.split(self.sizes, dim=-2)
        return torch.cat([_times(part, piece) for part, piece in zip(self.parts, pieces, strict=True)], dim=-2)

    def __rmatmul__(self, other: Tensor) -> Tensor:
        return (self.mT @ other.mT).mT

    def __add__(self, other: BlockDiagonal) -> BlockDiagonal:
        return self.map(torch.add, other)

    def __mul__(self, other: Any) -> BlockDiagonal:
        """Entry by entry; a tensor [..., 1, 1] multiplies each matrix of a stack."""
        if isinstance(other, BlockDiagonal):
            return self.map(torch.mul, other)
        factor = other.unsqueeze(-3) if isinstance(other, Tensor) and other.ndim else other
        return self.map(lambda part: part * factor)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> BlockDiagonal:
        return self * (1 / other)


Matrix = Tensor | BlockDiagonal


def each(function: Callable[..., Tensor], *matrices: Matrix) -> Any:
    """What a function of matrices gives, for all of them, or block by block.

    Args:
        function: From matrices [..., k, k] to one.
        *matrices: All whole, or all of the same blocks.

    Returns:
        The same kind.
    """
    first, *others = matrices
    if isinstance(first, BlockDiagonal):
        return first.map(function, *others)  # type: ignore[arg-type]
    return function(*matrices)


def whole(matrix: Matrix) -> Tensor:
    """A matrix with its zeros.

    Args:
        matrix: [..., k, k].

    Returns:
        [..., k, k].
    """
    return matrix.dense() if isinstance(matrix, BlockDiagonal) else matrix


def blocks_of(matrix: Matrix) -> list[tuple[int, int]]:
    """How many blocks of which width follow each other along a matrix's diagonal; a whole one has none.

    Args:
        matrix: [..., k, k].

    Returns:
        (count, width) of each stack.
    """
    return [(p.shape[-3], p.shape[-1]) for p in matrix.parts] if isinstance(matrix, BlockDiagonal) else []


def identity_like(matrix: Matrix) -> Any:
    """The identity in the form of a matrix.

    Args:
        matrix: [..., k, k].

    Returns:
        The same form.
    """
    return each(lambda m: torch.eye(m.shape[-1], dtype=m.dtype, device=m.device).expand_as(m), matrix)


def _times(part: Tensor, piece: Tensor) -> Tensor:
    """A stack of blocks [..., count, width, width] times the rows that it meets, [..., count * width, n]."""
    rows = piece.unflatten(-2, part.shape[-3:-1])
    return (part * rows if part.shape[-1] == 1 else part @ rows).flatten(-3, -2)
