"""Fishers that are made when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from nclbayes.fisher.diagonal import DiagonalFisher
from nclbayes.fisher.sums import BlockSums, KroneckerFisher


@dataclass(frozen=True)
class OneByOne(Mapping[str, KroneckerFisher | DiagonalFisher]):
    """The Fisher of each block, of what has been summed.

    Attributes:
        sums: Of blocks with Kronecker factors, by name.
        squares: Of the others.
        scale: N / N_b.
        samples: How many targets were drawn for each example.
        examples: N_b.
    """

    sums: Mapping[str, BlockSums]
    squares: Mapping[str, Tensor]
    scale: float
    samples: int
    examples: float

    def __getitem__(self, name: str) -> KroneckerFisher | DiagonalFisher:
        if name in self.sums:
            return self.sums[name].factors(self.scale, self.samples, self.examples)
        return DiagonalFisher(self.squares[name] * (self.scale / self.samples), self.examples)

    def __contains__(self, name: object) -> bool:
        return name in self.sums or name in self.squares

    def __iter__(self) -> Iterator[str]:
        yield from self.sums
        yield from self.squares

    def __len__(self) -> int:
        return len(self.sums) + len(self.squares)
