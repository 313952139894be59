"""The group of the processes that torchrun has started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


def is_launched() -> bool:
    """Whether this process is one of several that torchrun has started."""
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1").isdigit() and int(os.environ["WORLD_SIZE"]) > 1


@contextmanager
def launched(device: str) -> Iterator[None]:
    """Inside, the processes that torchrun has started are a group; with one process alone nothing happens.

    Args:
        device: Where they work: each on a GPU of its own, if on "cuda".

    Yields:
        Nothing.
    """
    if not dist.is_available() or dist.is_initialized() or not is_launched():
        yield
        return
    is_gpu = torch.device(device).type == "cuda"
    if is_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if is_gpu else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()
