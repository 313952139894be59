"""Drawing from one generator while the global random state stays as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def restored_on_failure(generator: torch.Generator) -> Iterator[None]:
    """If what is done inside fails, the generator is as if it had never been tried.

    Args:
        generator: The generator.

    Yields:
        Nothing.
    """
    before = generator.get_state()
    try:
        yield
    except BaseException:
        generator.set_state(before)
        raise


@contextmanager
def drawing_from(generator: torch.Generator, device: torch.device) -> Iterator[None]:
    """Inside, whatever draws from torch's global generators draws a stream that `generator` decides.

    torch's distributions take no generator, so the global ones are seeded from it and put back afterwards.

    Args:
        generator: Decides the draws, and advances by one seed.
        device: Where the draws are made, besides the CPU.

    Yields:
        Nothing.
    """
    seed = int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))
    globals_ = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()
        globals_.append(torch.cuda.default_generators[device.index or torch.cuda.current_device()])
    states = [g.get_state() for g in globals_]
    try:
        for g in globals_:
            g.manual_seed(seed)
        yield
    finally:
        for g, state in zip(globals_, states, strict=True):
            g.set_state(state)
