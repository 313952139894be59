from __future__ import annotations

from typing import Any

import pytest
import torch

from nclbayes.data.splitting import lengths_of, split

X, Y = torch.arange(14.0).reshape(7, 2), torch.arange(7)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100])
def test_parts_are_of_nearly_one_size_and_make_the_batch(count: int) -> None:
    parts = split((X, Y), count)
    sizes = [len(y) for _, y in parts]
    assert len(parts) == min(count, 7)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == lengths_of(7, len(parts))
    assert torch.equal(torch.cat([x for x, _ in parts]), X)
    assert torch.equal(torch.cat([y for _, y in parts]), Y)


def test_mappings_and_lists_are_split_and_what_is_of_no_example_is_in_every_part() -> None:
    words = [f"word {i}" for i in range(7)]
    batch: tuple[Any, ...] = (3, {"ids": X, "texts": words, "gain": torch.ones(())}, [X, torch.zeros(2)], Y)
    first, second = split(batch, 2)
    for part, which in ((first, slice(0, 3)), (second, slice(3, 7))):
        number, named, pair, y = part
        assert number == 3
        assert torch.equal(named["ids"], X[which])
        assert named["texts"] == words[which]
        assert torch.equal(named["gain"], torch.ones(()))
        assert torch.equal(pair[0], X[which])
        assert torch.equal(pair[1], torch.zeros(2))
        assert torch.equal(y, Y[which])
