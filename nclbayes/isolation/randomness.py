"""Drawing from one generator while the global random state stays as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nclbayes.isolation.process import Alone

# Times a number, in 32 bits, it is another for each; torch's generator of the CPU takes no more of a seed.
_SPREAD, _BITS = 0x9E3779B1, 0xFFFFFFFF


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
        which: A number that turns the stream into another, where several have the same generator and are to draw
            different streams.
    """

    def __init__(self, generator: torch.Generator, device: torch.device, which: int = 0) -> None:
        globals_ = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()
            index = torch.cuda.current_device() if device.index is None else device.index
            globals_.append(torch.cuda.default_generators[index])
        super().__init__(*globals_)
        self._generator, self._which = generator, which

    def __enter__(self) -> None:
        seed = int(torch.randint(2**63 - 1, (), generator=self._generator, device=self._generator.device))
        super().__enter__()
        for generator in self._generators:
            generator.manual_seed(seed ^ (self._which * _SPREAD & _BITS))


def stream_apart(kind: int) -> torch.Generator:
    """A stream that the present one, of :class:`drawing_from`, decides without being led on.

    Args:
        kind: What it is for; each has another.

    Returns:
        A generator of its own.
    """
    return torch.Generator().manual_seed(torch.initial_seed() ^ kind)
