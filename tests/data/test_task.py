"""Tasks: four kinds of data source, order, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)

import nclbayes as ncl
from nclbayes.data.mixture import TaskMixture
from nclbayes.errors import DataError, SettingError
from nclbayes.methods.replay import ReplayTask

X, Y = torch.arange(10.0).unsqueeze(-1), torch.arange(10)


class Squares(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index], Y[index]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    "source", [(X, Y), Squares(), TensorDataset(X, Y)], ids=["tensors", "dataset", "tensor dataset"]
)
def test_finite_data_are_used_once_in_an_epoch(source: object) -> None:
    task = ncl.Task(source, name="t")
    assert task.size == 10
    first = [y for _, y in islice(task.batches(5, generator()), 4)]
    for epoch in (first[:2], first[2:]):
        assert sorted(torch.cat(epoch).tolist()) == list(range(10))
    assert torch.cat(first[:2]).tolist() != torch.cat(first[2:]).tolist()
    again = [y for _, y in islice(task.batches(5, generator()), 4)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(torch.cat([y for _, y in task.epoch(4)]), Y)
    assert sum(len(y) for _, y in task.epoch(4, generator(), size=7)) == 7


def test_a_short_last_batch_is_left_out_unless_it_is_the_only_one() -> None:
    task = ncl.Task((X, Y), name="t")
    assert [len(y) for _, y in islice(task.batches(4, generator()), 4)] == [4, 4, 4, 4]
    assert [len(y) for _, y in islice(task.batches(64, generator()), 2)] == [10, 10]


def test_a_data_loader_keeps_its_own_batches() -> None:
    task = ncl.Task(DataLoader(TensorDataset(X, Y), batch_size=3), name="t")
    assert task.size == 10
    assert [len(y) for _, y in islice(task.batches(99, generator()), 5)] == [3, 3, 3, 1, 3]
    assert torch.equal(torch.cat([y for _, y in task.epoch(99)]), Y)


def test_a_sampler_makes_endless_data_of_a_given_size() -> None:
    def sampler(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 2, generator=g)
        return x, x.sum(-1)

    task = ncl.Task(sampler, name="t", size=1000)
    first, second = (list(islice(task.batches(4, generator()), 3)) for _ in range(2))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0][0], first[1][0])
    assert [len(y) for _, y in task.epoch(400, generator())] == [400, 400, 200]
    with pytest.raises(SettingError, match="give its `size`"):
        ncl.Task(sampler, name="t")


def test_test_data_and_their_absence() -> None:
    task = ncl.Task((X, Y), (X[:3], Y[:3]), name="t")
    assert torch.equal(torch.cat([y for _, y in task.epoch(2, test=True)]), Y[:3])
    with pytest.raises(DataError, match="'t' has no test data"):
        list(ncl.Task((X, Y), name="t").epoch(2, test=True))


def test_bad_data_are_refused_by_name() -> None:
    with pytest.raises(DataError, match="'t' is empty"):
        ncl.Task((X[:0], Y[:0]), name="t")
    with pytest.raises(DataError, match=r"different lengths: \[10, 9\]"):
        ncl.Task((X, Y[:9]), name="t")
    with pytest.raises(SettingError, match="are a str"):
        ncl.Task("mnist", name="t")
    with pytest.raises(DataError, match="0 examples"):
        ncl.Task((X, Y), name="t", size=0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_so_are_tensors_of_uneven_examples(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([X, X[:3]], layout=layout)
    with pytest.raises(DataError, match=r"Tensor 0 of task 't' is nested.*to_padded_tensor"):
        ncl.Task((nested, Y[:2]), name="t")


class Noisy(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Examples that are augmented with torch's global generator."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return index + torch.rand(2), torch.tensor(index)


@pytest.mark.parametrize("source", [Noisy(), DataLoader(Noisy(), batch_size=4, shuffle=True)], ids=["items", "loader"])
def test_the_generator_decides_shuffling_and_augmentation(source: object) -> None:
    def everything(seed: int) -> list[Tensor]:
        task, generator = ncl.Task(source, name="t"), torch.Generator().manual_seed(seed)
        batches = task.batches(4, generator)
        found = [next(batches)[0] for _ in range(7)]
        return found + [batch[0] for size in (None, 5) for batch in task.epoch(4, generator, size)]

    before = torch.get_rng_state()
    first = everything(0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert all(torch.equal(a, b) for a, b in zip(first, everything(0), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, everything(1), strict=True))


def test_some_examples_of_a_loader_are_drawn_from_all_of_them() -> None:
    loader = DataLoader(Noisy(), batch_size=4)
    found = torch.cat([y for _, y in ncl.Task(loader, name="t").epoch(4, torch.Generator().manual_seed(0), size=6)])
    assert len(set(found.tolist())) == 6
    assert found.max() > 5


def test_a_place_is_found_again_before_and_after_the_first_batch() -> None:
    own = torch.Generator().manual_seed(9)
    for source in (Noisy(), DataLoader(Noisy(), batch_size=4, shuffle=True, generator=own)):
        for taken in (0, 2, 4):
            batches = ncl.Task(source, name="t").batches(4, torch.Generator().manual_seed(0))
            for _ in range(taken):
                next(batches)
            place, state = batches.place(), batches._generator.get_state()
            expected = [next(batches)[0] for _ in range(5)] if taken else []
            again = ncl.Task(source, name="t").batches(4, torch.Generator().manual_seed(1))
            again.seek(place)
            again._generator.set_state(state)
            assert bool(place) == (taken > 0)
            assert all(torch.equal(next(again)[0], batch) for batch in expected)


def test_epochs_count_a_loaders_own_batches() -> None:
    x, y = torch.zeros(64, 3), torch.zeros(64, 1)
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    model = ncl.BayesianNetwork(nn.Linear(3, 1), ncl.Normal(1.0), prior=dist.Normal(0.0, 1.0))
    posterior = ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=None, epochs=2))
    assert posterior.update(ncl.Task(loader, name="loader")).steps == 32
    assert posterior.update(ncl.Task((x, y), name="tensors")).steps == 2


def test_a_loader_of_some_examples_counts_and_gives_those_alone() -> None:
    chosen = [1, 3, 5, 7]
    loader = DataLoader(Squares(), batch_size=3, sampler=SubsetRandomSampler(chosen))
    task = ncl.Task(loader, name="odd")
    assert task.size == 4
    assert sorted(int(i) for _, y in task.epoch(3, generator()) for i in y) == chosen
    some = [int(i) for _, y in task.epoch(3, generator(), size=2) for i in y]
    assert len(some) == 2
    assert set(some) < set(chosen)


def test_epochs_are_passes_over_the_data_whatever_their_source() -> None:
    x, y = torch.zeros(64, 3), torch.zeros(64, 1)
    pairs = TensorDataset(x, y)

    def task(source: object, **settings: int) -> ncl.Task:
        return ncl.Task(source, name="t", **settings)  # type: ignore[arg-type]

    by_four = DataLoader(pairs, batch_sampler=BatchSampler(RandomSampler(pairs), 4, drop_last=False))
    assert task(by_four).num_batches(32) == 16
    assert task((x, y), size=6400).num_batches(32) == 2
    assert task(lambda count, g: (x[:count], y[:count]), size=640).num_batches(32) == 20
    mixture = TaskMixture([task(DataLoader(pairs, batch_size=8)), task((x, y))], name="both")
    assert mixture.num_batches(32) == 8 + 2
    assert ReplayTask(task((x, y)), [task((x, y))]).num_batches(32) == 2


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([(X[i], Y[i]) for i in range(10)])


def test_a_stream_without_a_length_needs_a_size() -> None:
    loader = DataLoader(Stream(), batch_size=4)
    with pytest.raises(SettingError, match="give its `size`"):
        ncl.Task(loader, name="stream")
    task = ncl.Task(loader, name="stream", size=10)
    assert [len(y) for _, y in task.epoch(4, generator())] == [4, 4, 2]
    assert [len(y) for _, y in task.epoch(4, generator(), size=5)] == [4, 1]


def test_arrays_are_refused_with_the_remedy() -> None:
    with pytest.raises(SettingError, match=r"tuple of ndarray, ndarray.*torch\.as_tensor"):
        ncl.Task((np.zeros((3, 2)), np.zeros(3)), name="t")
