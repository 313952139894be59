"""What tells two ranks' batches apart, and loaders that would give each rank other ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import nclbayes as ncl
from nclbayes.data.agreement import batch_mark, refuse_distributed
from nclbayes.errors import DataError

X, Y = torch.arange(24.0).reshape(8, 3), torch.arange(8)


@pytest.mark.parametrize(
    "other",
    [
        (X, Y.flip(0)),
        (X + 1, Y),
        (X.reshape(8, 1, 3), Y),
        ({"a": X}, Y),
        (X.double(), Y),
        (X.expand(2, 8, 3).reshape(8, 6), Y),
    ],
)
def test_other_numbers_shapes_and_names_have_another_mark(other: tuple[object, Tensor]) -> None:
    assert batch_mark((X.clone(), Y.clone())) == batch_mark((X, Y))
    assert batch_mark(other) != batch_mark((X, Y))


def test_of_a_large_input_some_numbers_count_and_every_target() -> None:
    x, y = torch.zeros(500, 40), torch.zeros(5000)
    shifted, last = x + 1e-3, y.clone()
    last[1234] = 1.0
    assert batch_mark((shifted, y)) != batch_mark((x, y))
    assert batch_mark((x, last)) != batch_mark((x, y))


def test_what_has_no_plain_memory_is_passed_over() -> None:
    assert batch_mark((X.to_sparse(), Y)) == batch_mark(((X + 1).to_sparse(), Y))


@pytest.mark.parametrize("test", [False, True])
def test_a_distributed_sampler_is_refused_where_it_counts(test: bool) -> None:
    data = TensorDataset(X, Y)
    loader = DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    task = ncl.Task((X, Y), loader, name="own") if test else ncl.Task(loader, (X, Y), name="own", size=8)
    refuse_distributed(task, test=not test)
    with pytest.raises(DataError, match="loader of task 'own' has a DistributedSampler"):
        refuse_distributed(task, test=test)
