"""Batches that are held while it is not clear which segment they belong to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nclbayes.errors import NCLError
from nclbayes.stream.segment import Batch


class UnlearnableError(Exception):
    """A batch that was held cannot be learnt.

    Args:
        batch: The batch.

    Attributes:
        batch: The batch.
    """

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self.batch = batch


@contextmanager
def learning(batch: Batch, present: Batch | None = None) -> Iterator[None]:
    """Tell the faults of a batch that was held from those of the present one.

    Args:
        batch: What is learnt.
        present: The present batch.

    Raises:
        UnlearnableError: If a batch that was held is at fault.
    """
    try:
        yield
    except NCLError as error:
        if batch is present:
            raise
        raise UnlearnableError(batch) from error
