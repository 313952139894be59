"""What processes that learn together must have in common of their data: the same batches."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from nclbayes.data.checking import has_plain_memory
from nclbayes.data.task import Task
from nclbayes.errors import DataError
from nclbayes.storage import memory_of
from nclbayes.watch.nesting import tensors_of

# So many numbers of each input count: to read all of them would take longer than to compare them is worth.
_SOME = 1000


def batch_mark(batch: tuple[Any, ...]) -> int:
    """A checksum that tells whether two ranks have the same batch.

    Args:
        batch: The batch.

    Returns:
        That of its targets, and of up to a thousand numbers of each other tensor, evenly spaced over it.
    """
    mark, targets = 0, batch[-1]
    for name, tensor in tensors_of(batch):
        if has_plain_memory(tensor):
            mark = zlib.crc32(memory_of(tensor if tensor is targets else evenly(tensor, _SOME)), mark)
            mark = zlib.crc32(f"{name} {tuple(tensor.shape)}".encode(), mark)
    return mark


def evenly(tensor: Tensor, most: int) -> Tensor:
    """Numbers of a tensor that are evenly spaced over it.

    Args:
        tensor: The tensor.
        most: How many at most.

    Returns:
        All of it, where it has no more than so many; else a vector.

    Example:
        >>> import torch
        >>> from nclbayes.data.agreement import evenly
        >>> evenly(torch.arange(101), 5)
        tensor([  0,  25,  50,  75, 100])
    """
    if tensor.numel() <= most:
        return tensor
    flat = tensor.reshape(-1)
    index = torch.linspace(0, len(flat) - 1, most, dtype=torch.float64, device=flat.device)
    return flat[index.round().long()]


def refuse_distributed(task: Task, test: bool = False) -> None:
    """Refuse loaders that give each rank other examples: every rank takes its share of the same batches.

    Args:
        task: The task.
        test: Whether its test data count, or what it is learnt from.

    Raises:
        DataError: If it has one.
    """
    for part in task.parts:
        loader = part.test if test else part.train
        if isinstance(loader, DataLoader):
            samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
            if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
                raise DataError(
                    f"The {'test ' if test else ''}loader of task '{part.name}' has a DistributedSampler, and would "
                    "give each rank other examples. Leave it out: every rank is given the same batches, and runs its "
                    "share of each."
                )
