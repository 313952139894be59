"""Drawing from one generator while the global random state stays as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nclbayes.isolation.process import Alone


@contextmanager
def restored(*generators: torch.Generator) -> Iterator[None]:
    """Whatever is drawn inside, the generators are as before afterwards.

    Args:
        *generators: The generators.

    Yields:
        Nothing.
    """
    before = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


class drawing_from(Alone):
    """A context in which whatever draws from torch's global generators draws a stream that `generator` decides.

    torch's distributions take no generator, so the global ones are seeded from it and put back afterwards. They are
    shared by all threads: no other thread runs a model meanwhile.

    Args:
        generator: Decides the draws, and advances by one seed.
        device: Where the draws are made, besides the CPU.
        rank: The number of this process, where several draw alike and are to draw different streams.
    """

    def __init__(self, generator: torch.Generator, device: torch.device, rank: int = 0) -> None:
        globals_ = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()
            index = torch.cuda.current_device() if device.index is None else device.index
            globals_.append(torch.cuda.default_generators[index])
        super().__init__(*globals_)
        self._generator, self._rank = generator, rank

    def __enter__(self) -> None:
        seed = int(torch.randint(2**63 - 1, (), generator=self._generator, device=self._generator.device))
        super().__enter__()
        for generator in self._generators:
            generator.manual_seed(seed ^ (self._rank << 32))
