"""Sources that end, fail, or go wrong late: what is said, and what passes as it is."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import nclbayes as ncl
from nclbayes.errors import DataError, SettingError
from nclbayes.methods import CoresetLearner, PlainTraining, ReplayLearner
from tests.engines.test_laplace import classifier
from tests.zoo import inputs, labels, normal


class OwnError(Exception):
    """A user's own."""


class Once(IterableDataset[Any]):
    """A stream that can be read once."""

    def __init__(self, count: int) -> None:
        self.items = iter([(inputs(5, seed=i), torch.tensor(i % 3)) for i in range(count)])

    def __iter__(self) -> Iterator[Any]:
        return self.items


class Items(Dataset[Any]):
    def __init__(self, item: Any, count: int = 20) -> None:
        self.item, self.count = item, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


def raising(error: Exception) -> Any:
    def call(*args: Any) -> Any:
        raise error

    return call


def once(count: int) -> ncl.Task:
    return ncl.Task(DataLoader(Once(count), batch_size=4), name="once", size=count)


def refused(task: ncl.Task, engine: Any = None) -> str:
    posterior = ncl.OnlinePosterior(classifier(), engine or ncl.LaplaceNCL(steps=12, batch_size=4))
    state = posterior.generator.get_state()
    with pytest.raises(DataError) as error:
        posterior.update(task)
    assert not posterior.tasks
    assert torch.equal(posterior.generator.get_state(), state)
    assert f"'{task.name}'" in str(error.value)
    return str(error.value)


def test_an_exhausted_loader_does_not_end_a_loop_of_the_callers() -> None:
    posterior = ncl.OnlinePosterior(classifier(), ncl.LaplaceNCL(steps=3))
    good = ncl.Task((inputs(8, 5), labels(3, 8)), name="good")
    with pytest.raises(DataError, match=r"'once', step .*can be read once only"):
        list(map(posterior.update, [good, once(8), good]))
    assert posterior.tasks == ("good",)


def test_a_loader_that_can_be_read_once_serves_one_pass() -> None:
    plain = PlainTraining(steps=4)
    posterior = ncl.OnlinePosterior(classifier(), plain)
    posterior.update(once(20))
    assert posterior.tasks == ("once",)
    assert "step 5: " in refused(once(20), PlainTraining(steps=5))
    assert "The source of the data gave no batch" in refused(once(20), ncl.LaplaceNCL(steps=4))


@pytest.mark.parametrize(
    "source",
    [
        raising(StopIteration()),
        Items(raising(StopIteration())),
        DataLoader(Items(raising(StopIteration())), batch_size=4),
        DataLoader(Once(0), batch_size=4),
    ],
    ids=["sampler", "items", "loader", "empty"],
)
def test_stop_iteration_never_leaves_an_update(source: Any) -> None:
    assert "read" in refused(ncl.Task(source, name="stops", size=20))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_is_cut_short_is_refused(workers: int) -> None:
    def item(index: int) -> Any:
        if index == 20:
            raise StopIteration
        return inputs(5, seed=index), torch.tensor(index % 3)

    task = ncl.Task(DataLoader(Items(item, 32), batch_size=8, num_workers=workers), name="cut")
    assert "A loader ended after 2 of its 4 batches" in refused(task, PlainTraining(steps=3))


def test_nor_does_that_of_a_network_or_a_callback() -> None:
    class Stops(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise StopIteration

    task = ncl.Task((inputs(8, 5), labels(3, 8)), name="good")
    model = ncl.BayesianNetwork(Stops(5, 3), ncl.Categorical(), prior=dist.Normal(0.0, 1.0))
    with pytest.raises(ncl.errors.ModelError, match="'good': The network raised StopIteration"):
        ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=2)).update(task)
    with pytest.raises(SettingError, match="callbacks of task 'good' raised StopIteration at step 1"):
        ncl.OnlinePosterior(classifier(), ncl.LaplaceNCL(steps=2)).update(task, callbacks=[raising(StopIteration())])


@pytest.mark.parametrize("error", [OwnError("mine"), KeyError("mine")], ids=["own", "key"])
@pytest.mark.parametrize("kind", ["sampler", "items", "loader", "collate"])
def test_errors_of_the_users_own_pass_as_they_are(error: Exception, kind: str) -> None:
    pairs = TensorDataset(inputs(8, 5), labels(3, 8))
    sources = {
        "sampler": raising(error),
        "items": Items(raising(error)),
        "loader": DataLoader(Items(raising(error)), batch_size=4),
        "collate": DataLoader(pairs, batch_size=4, collate_fn=raising(error)),
    }
    with pytest.raises(type(error)) as found:
        ncl.OnlinePosterior(classifier(), ncl.LaplaceNCL(steps=2)).update(
            ncl.Task(sources[kind], name="fails", size=20)
        )
    assert found.value is error


def test_what_torch_cannot_make_a_batch_of_is_said() -> None:
    assert "No batch could be made" in refused(ncl.Task(Items(lambda i: (object(), i)), name="objects"))
    assert "No batch could be made" in refused(ncl.Task(Items(lambda i: (torch.zeros(i + 1), i)), name="ragged"))
    assert "No batch could be made" in refused(ncl.Task(lambda: None, name="no arguments", size=20))
    with pytest.raises(SettingError, match="'stream' are a stream: hand over a DataLoader"):
        ncl.Task(Once(3), name="stream", size=3)


def sources_of(x: Tensor, y: Tensor) -> dict[str, Any]:
    calls = iter(range(10**6))

    def sampler(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        rows = slice(0, 8) if next(calls) < 5 else slice(32, 40)
        return x[rows], y[rows]

    return {
        "items": TensorDataset(x, y),
        "loader": DataLoader(TensorDataset(x, y), batch_size=8),
        "sampler": sampler,
    }


@pytest.mark.parametrize("kind", ["items", "loader", "sampler"])
@pytest.mark.parametrize("written_out", [False, True], ids=["network", "function"])
def test_a_label_out_of_range_is_refused_wherever_it_lies(kind: str, written_out: bool) -> None:
    def function(x: Tensor, y: Tensor | None = None) -> None:
        w = pyro.sample("w", normal((3, 5)))
        pyro.sample("y", dist.Categorical(logits=F.linear(x, w)), obs=y)

    x, y = inputs(40, 5), labels(3, 40)
    y[39] = 7
    task = ncl.Task(sources_of(x, y)[kind], name="late", size=40)
    model = function if written_out else classifier()
    posterior = ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=12, batch_size=8))
    with pytest.raises(DataError, match=r"Task 'late', (step|its Fisher)") as error:
        posterior.update(task)
    assert not posterior.tasks
    if not written_out:
        assert "range from 0 to 7, but the network has 3 outputs" in str(error.value)


@pytest.mark.parametrize(
    ("likelihood", "good", "bad"),
    [
        (ncl.Normal(1.0), 0.5, float("nan")),
        (ncl.Bernoulli(), 1.0, 0.5),
        (ncl.nn.Poisson(), 3.0, -1.0),
        (ncl.nn.Poisson(), 3.0, float("inf")),
    ],
)
def test_so_are_other_targets(likelihood: Any, good: float, bad: float) -> None:
    y = torch.full((40, 3), good)
    y[39, 1] = bad
    model = ncl.BayesianNetwork(torch.nn.Linear(5, 3), likelihood, prior=dist.Normal(0.0, 1.0))
    posterior = ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=12, batch_size=8))
    loader = DataLoader(TensorDataset(inputs(40, 5), y), batch_size=8)
    with pytest.raises(DataError, match="Task 'late', step 5: The targets"):
        posterior.update(ncl.Task(loader, name="late"))


def test_a_batch_of_another_shape_is_named() -> None:
    def collate(items: Any) -> tuple[Tensor, Tensor]:
        x, y = torch.utils.data.default_collate(items)
        return (x, y) if len(x) == 8 else (x[:, :4], y)

    loader = DataLoader(TensorDataset(inputs(20, 5), labels(3, 20)), batch_size=8, collate_fn=collate)
    message = refused(ncl.Task(loader, name="uneven"))
    assert "step 3: The model cannot take inputs of shape (4, 4) and torch.float32" in message


@pytest.mark.parametrize("learner", [CoresetLearner, ReplayLearner])
def test_what_is_kept_is_checked_when_it_is_kept(learner: type[CoresetLearner | ReplayLearner]) -> None:
    x, y = inputs(40, 5), labels(3, 40)
    y[20:] = 7
    posterior = learner(classifier(), PlainTraining(steps=1, batch_size=4), keep=30)
    with pytest.raises(DataError, match="Task 'late': The targets range from 0 to 7"):
        posterior.update(ncl.Task(TensorDataset(x, y), name="late"))
    assert not posterior.tasks
    assert not posterior.memory


def test_a_sampler_sees_its_own_generator_and_leaves_the_global_one_alone() -> None:
    def own(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(count, 2, generator=generator), torch.randn(count, generator=generator)

    def both(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(count, 2, generator=generator), torch.randn(count)

    def found(sampler: Any, seed: int = 0) -> list[tuple[Tensor, ...]]:
        task, generator = ncl.Task(sampler, name="t", size=20), torch.Generator().manual_seed(seed)
        return [*islice(task.batches(4, generator), 5), *task.epoch(8, generator)]

    expected, generator = [], torch.Generator().manual_seed(0)
    for count in (4, 4, 4, 4, 4, 8, 8, 4):
        expected.append(own(count, generator))
    for batch, other in zip(found(own), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(batch, other, strict=True))
    before = torch.get_rng_state()
    first = found(both)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    again, other = found(both), found(both, seed=1)
    assert all(torch.equal(a[1], b[1]) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a[1], b[1]) for a, b in zip(first, other, strict=True))
    assert len({float(y[0]) for _, y in first}) == len(first)


def test_a_sampler_goes_on_where_it_was() -> None:
    def sampler(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(count, 2, generator=generator), torch.randn(count)

    task = ncl.Task(sampler, name="t", size=20)
    batches = task.batches(4, torch.Generator().manual_seed(0))
    for _ in range(3):
        next(batches)
    place, state = batches.place(), batches._generator.get_state()
    expected = [next(batches) for _ in range(3)]
    again = task.batches(4, torch.Generator().manual_seed(5))
    again.seek(place)
    again._generator.set_state(state)
    for batch in expected:
        assert all(torch.equal(a, b) for a, b in zip(batch, next(again), strict=True))
