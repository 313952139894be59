"""Streams that one generator decides."""

from __future__ import annotations

import torch
from torch import Tensor

from nclbayes.isolation import drawing_from, stream_apart

CPU = torch.device("cpu")


def drawn(which: int, seed: int = 3) -> Tensor:
    with drawing_from(torch.Generator().manual_seed(seed), CPU, which):
        return torch.rand(4)


def test_several_draw_different_streams_from_one_generator() -> None:
    found = torch.stack([drawn(which) for which in range(1000)])
    assert len(found.unique(dim=0)) == 1000
    with drawing_from(torch.Generator().manual_seed(3), CPU):
        assert torch.equal(torch.rand(4), found[0])


def test_a_stream_apart_is_decided_by_the_present_one_and_leaves_it() -> None:
    found = []
    for seed, kind in ((3, 1), (3, 1), (3, 2), (4, 1)):
        with drawing_from(torch.Generator().manual_seed(seed), CPU):
            before = torch.get_rng_state()
            found.append(torch.rand(4, generator=stream_apart(kind)))
            assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(found[0], found[1])
    assert len(torch.stack([*found, drawn(0)]).unique(dim=0)) == 4
