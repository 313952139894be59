"""Task sets as streams: what comes when, and the same again."""

from __future__ import annotations

import pytest
import torch

import nclbayes as ncl
from nclbayes.errors import DataError, SettingError
from nclbayes.tasks import split_digits
from nclbayes.tasks.streams import blurred, hard, recurring, unchanged


def constants(count: int = 3, examples: int = 40) -> list[ncl.Task]:
    """Tasks whose examples are the task's number."""
    numbers = [torch.full((examples, 2), float(k)) for k in range(count)]
    return [ncl.Task((x, x[:, 0].long()), name=f"{k}") for k, x in enumerate(numbers)]


def test_hard_boundaries_are_hard() -> None:
    stream = hard(constants(), batches=7, batch_size=4)
    items = list(stream)
    assert [item.task for item in items] == [0] * 7 + [1] * 7 + [2] * 7
    assert all(bool((item.batch[1] == item.task).all()) and len(item.batch[0]) == 4 for item in items)
    assert stream.boundaries == (8, 15)
    assert len(stream) == len(items) == 21


def test_blurred_boundaries_cross_over() -> None:
    stream = blurred(constants(2), batches=100, batch_size=40, blur=40)
    items = list(stream)
    shares = [float((item.batch[1] == 1).float().mean()) for item in items]
    assert shares[:80] == [0.0] * 80
    assert shares[120:] == [1.0] * 80
    for item, share in zip(items[80:120], shares[80:120], strict=True):
        assert abs(item.share - share) < 0.35
        assert bool((item.batch[0][:, 0].long() == item.batch[1]).all())
    rising = torch.tensor(shares[80:120])
    assert torch.corrcoef(torch.stack([rising, torch.arange(40.0)]))[0, 1] > 0.9
    assert [item.task for item in items] == [0] * 100 + [1] * 100


def test_tasks_come_back() -> None:
    stream = recurring(constants(), rounds=2, batches=3, batch_size=4)
    assert [item.task for item in stream] == [0, 0, 0, 1, 1, 1, 2, 2, 2] * 2
    assert stream.boundaries == (4, 7, 10, 13, 16)


def test_one_task_alone_has_no_boundary() -> None:
    stream = unchanged(constants()[1], batches=50, batch_size=4)
    assert stream.boundaries == ()
    assert {item.task for item in stream} == {0}


def test_seeds_decide_everything() -> None:
    before = torch.get_rng_state()
    tasks = split_digits()
    found = {}
    for seed in (0, 0, 1):
        x = torch.cat([item.batch[0] for item in blurred(tasks, batches=20, batch_size=8, blur=10, seed=seed)])
        assert seed not in found or torch.equal(found[seed], x)
        found[seed] = x
    assert not torch.equal(found[0], found[1])
    assert torch.equal(torch.get_rng_state(), before)


def test_what_can_be_no_stream_is_refused() -> None:
    with pytest.raises(SettingError, match="different contexts"):
        hard(split_digits("task"), batches=3, batch_size=4)
    with pytest.raises(SettingError, match="at least one"):
        hard([], batches=3, batch_size=4)
    with pytest.raises(SettingError, match="blur is 5"):
        blurred(constants(), batches=4, batch_size=4, blur=5)
    with pytest.raises(SettingError, match="batch_size"):
        hard(constants(), batches=4, batch_size=0)
    odd = [constants(1)[0], ncl.Task((torch.zeros(40, 3), torch.zeros(40)), name="wide")]
    with pytest.raises(DataError, match="of one shape"):
        list(blurred(odd, batches=4, batch_size=4, blur=4))
