"""Drawing from one generator while the global random state stays as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def restored(*generators: torch.Generator, only_on_failure: bool = False) -> Iterator[None]:
    """Whatever is drawn inside, the generators are as before afterwards.

    Args:
        *generators: The generators.
        only_on_failure: Whether they are put back only if what is done inside fails, as if it had never been tried.

    Yields:
        Nothing.
    """
    before = [generator.get_state() for generator in generators]
    failed = True
    try:
        yield
        failed = False
    finally:
        if failed or not only_on_failure:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)


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
        index = torch.cuda.current_device() if device.index is None else device.index
        globals_.append(torch.cuda.default_generators[index])
    with restored(*globals_):
        for g in globals_:
            g.manual_seed(seed)
        yield
