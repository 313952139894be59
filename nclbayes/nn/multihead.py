"""One body, a head for each task."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from nclbayes.errors import DataError


class MultiHead(nn.Module):
    """A shared body with one head for each task; a call uses the head that its context names.

    Heads that a call does not use are not touched by it: their weights keep their posterior.

    Args:
        body: Maps inputs to features.
        heads: One module for each task, each mapping features to outputs.

    Example:
        >>> import torch
        >>> from nclbayes import MultiHead
        >>> net = MultiHead(torch.nn.Linear(4, 8), [torch.nn.Linear(8, 2) for _ in range(3)])
        >>> net(torch.zeros(5, 4), head=1).shape
        torch.Size([5, 2])
    """

    def __init__(self, body: nn.Module, heads: Iterable[nn.Module]) -> None:
        super().__init__()
        self.body = body
        self.heads = nn.ModuleList(heads)

    def forward(self, *inputs: Any, head: int, **named: Any) -> Tensor:
        """The outputs of one head.

        Args:
            *inputs: What the body takes.
            head: Which head, counted from 0.
            **named: What the body takes by name, as the parts of a batch that is a mapping.

        Returns:
            That head's outputs.

        Raises:
            DataError: If there is no such head.
        """
        if not 0 <= head < len(self.heads):
            raise DataError(f"There is no head {head}: the network has heads 0 to {len(self.heads) - 1}.")
        return self.heads[head](self.body(*inputs, **named))
