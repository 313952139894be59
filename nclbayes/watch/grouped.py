"""Rows of a grouped product: each map of a stack has some of the input's rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True)
class GroupedRows:
    """Rows of ``torch._grouped_mm``: those of each map beside each other, with zeros after the last.

    Attributes:
        ends: Where the rows of each map end; those of the first start at 0, and after the last are none.
    """

    ends: tuple[int, ...]

    @property
    def lead(self) -> tuple[int, ...]:
        """The shape of the rows' index."""
        return (self.count,)

    @property
    def count(self) -> int:
        """The number of rows of all maps."""
        return self.ends[-1]

    @property
    def sizes(self) -> list[int]:
        """The number of rows of each map."""
        return [end - start for start, end in zip((0, *self.ends), self.ends, strict=False)]

    def inputs(self, x: Tensor) -> Iterator[Tensor]:
        """All input rows at once.

        Args:
            x: The input, [rows, n].

        Yields:
            [k, R, n], R the number of rows of the map that has most.
        """
        yield self._beside(x)

    def gradients(self, grad: Tensor) -> Tensor:
        """The gradient rows.

        Args:
            grad: The gradient of the output.

        Returns:
            [k, R, m].
        """
        return self._beside(grad)

    def mask(self, mask: Tensor) -> Tensor:
        """Which rows are valid.

        Args:
            mask: Boolean, [rows].

        Returns:
            [k, R].
        """
        return self._beside(mask)

    def counts(self, device: torch.device) -> Tensor:
        """The number of rows of each map.

        Args:
            device: Where to.

        Returns:
            [k], float64.
        """
        return torch.tensor(self.sizes, dtype=torch.float64, device=device)

    def _beside(self, rows: Tensor) -> Tensor:
        return pad_sequence(rows[: self.count].split(self.sizes), batch_first=True)
