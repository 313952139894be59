"""Sources of data: right ones, and ones that are wrong in many ways."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from tests.fuzzing.values import MineError, as_mine

Pair = tuple[Any, Any]


class Items(Dataset[Any]):
    """A data set whose items are made by a function of the index."""

    def __init__(self, count: Any, item: Callable[[int], Any]) -> None:
        self.count, self.item = count, as_mine(item)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


class Stream(IterableDataset[Any]):
    """A data set that is read from its start to its end; perhaps once only."""

    def __init__(self, items: list[Any], once: bool = False) -> None:
        self.items, self.once = items, iter(items) if once else None

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items) if self.once is None else self.once


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise error

    return call


def pairs_of(x: Any, y: Any) -> list[Any]:
    try:
        return [(x[i], y[i]) for i in range(len(x))]
    except (TypeError, IndexError, RuntimeError):
        return []


def sampler_of(x: Tensor, y: Tensor, own: bool = True) -> Callable[[int, torch.Generator], Pair]:
    """A sampler that draws from the generator it is given, or from torch's own."""

    @as_mine
    def sampler(count: int, generator: torch.Generator) -> Pair:
        index = torch.randint(len(x), (min(count, 64),), generator=generator if own else None)
        return x[index], y[index]

    return sampler


def in_time(good: Callable[..., Any], bad: Callable[[Any], Any], after: int) -> Callable[..., Any]:
    """A sampler whose batches are right at first."""
    calls = [0]

    @as_mine
    def sampler(count: int, generator: torch.Generator) -> Any:
        calls[0] += 1
        batch = good(count, generator)
        return batch if calls[0] <= after else bad(batch)

    return sampler


GOOD_SOURCES: dict[str, Callable[[Tensor, Tensor, random.Random], Any]] = {
    "tensors": lambda x, y, r: (x, y),
    "data set": lambda x, y, r: TensorDataset(x, y),
    "items": lambda x, y, r: Items(len(x), lambda i: (x[i], y[i])),
    "loader": lambda x, y, r: DataLoader(TensorDataset(x, y), batch_size=r.choice([1, 3, 8]), shuffle=r.random() < 0.5),
    "own loader": lambda x, y, r: DataLoader(
        TensorDataset(x, y), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(r.randrange(99))
    ),
    "sampler": lambda x, y, r: sampler_of(x, y),
    "global sampler": lambda x, y, r: sampler_of(x, y, own=False),
    "stream": lambda x, y, r: DataLoader(Stream(pairs_of(x, y)), batch_size=4),
}
"""What a task may come from."""

BAD_BATCHES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda batch: None,
    "no batch": lambda batch: (),
    "number": lambda batch: 3,
    "text": lambda batch: "text",
    "dictionary": lambda batch: {"x": batch[0], "y": batch[1]},
    "texts": lambda batch: ("a", "b"),
    "nones": lambda batch: (None, None),
    "one tensor": lambda batch: batch[0],
    "inputs only": lambda batch: (batch[0],),
    "three": lambda batch: (*batch, batch[1]),
    "empty": lambda batch: (batch[0][:0], batch[1][:0]),
    "no columns": lambda batch: (batch[0], batch[1].reshape(len(batch[1]), -1)[:, :0]),
    "shorter targets": lambda batch: (batch[0], batch[1][:-1]),
    "one target": lambda batch: (batch[0], batch[1][:1]),
    "wider": lambda batch: (torch.cat([batch[0], batch[0]], -1), batch[1]),
    "double": lambda batch: (batch[0].double(), batch[1]),
    "nan inputs": lambda batch: (batch[0] * float("nan"), batch[1]),
    "nan targets": lambda batch: (batch[0], batch[1] * float("nan")),
    "labels": lambda batch: (batch[0], batch[1] + 99),
    "negative": lambda batch: (batch[0], -batch[1] - 1),
    "sparse": lambda batch: (batch[0].to_sparse(), batch[1]),
    "arrays": lambda batch: (batch[0].numpy(), batch[1].numpy()),
    "lists": lambda batch: (batch[0].tolist(), batch[1].tolist()),
    "scalars": lambda batch: (batch[0].sum(), batch[1].sum()),
    "meta": lambda batch: (batch[0].to("meta"), batch[1].to("meta")),
    "stop": lambda batch: raising(StopIteration())(),
    "exit": lambda batch: raising(GeneratorExit())(),
    "mine": lambda batch: raising(MineError("batch"))(),
}
"""What a sampler, or a collate function, may hand over instead of a batch."""

BAD_ITEMS: dict[str, Callable[[Any, int], Any]] = {
    "nothing": lambda pair, i: None,
    "text": lambda pair, i: "text",
    "texts": lambda pair, i: ("a", "b"),
    "objects": lambda pair, i: (object(), object()),
    "dictionary": lambda pair, i: {"x": pair[0], "y": pair[1]},
    "one tensor": lambda pair, i: pair[0],
    "arrays": lambda pair, i: (pair[0].numpy(), pair[1].numpy()),
    "number": lambda pair, i: i,
    "three": lambda pair, i: (*pair, i),
    "empty": lambda pair, i: (),
    "ragged": lambda pair, i: (torch.zeros(i + 1), pair[1]),
    "sometimes one more": lambda pair, i: pair if i % 2 else (*pair, pair[1]),
    "sometimes nothing": lambda pair, i: pair if i % 2 else None,
    "late label": lambda pair, i: (pair[0], pair[1] + 99 * (i > 8)),
    "late nan": lambda pair, i: (pair[0], pair[1] * float("nan") if i > 8 else pair[1]),
    "stop": lambda pair, i: raising(StopIteration())() if i > 3 else pair,
    "mine": lambda pair, i: raising(MineError("item"))() if i > 3 else pair,
    "mine at once": lambda pair, i: raising(MineError("item"))(),
    "double": lambda pair, i: (pair[0].double(), pair[1]),
    "sparse": lambda pair, i: (pair[0].to_sparse(), pair[1]),
    "draws": lambda pair, i: (pair[0] + torch.rand(pair[0].shape), pair[1]),
}
"""What a data set may have for items."""


def odd_source(x: Tensor, y: Tensor, rng: random.Random) -> tuple[str, Any]:
    """A source that is wrong, or unusual, in some way, with a name for that."""
    kind = rng.choice(["sampler", "in time", "items", "collate", "loader", "thing"])
    name = rng.choice(list(BAD_BATCHES))
    if kind == "sampler":
        return f"sampler: {name}", in_time(sampler_of(x, y), BAD_BATCHES[name], 0)
    if kind == "in time":
        return f"sampler in time: {name}", in_time(sampler_of(x, y), BAD_BATCHES[name], rng.randint(1, 6))
    if kind == "items":
        name = rng.choice(list(BAD_ITEMS))
        items = Items(len(x), lambda i: BAD_ITEMS[name]((x[i], y[i]), i))
        if rng.random() < 0.5:
            return f"items: {name}", items
        return f"loaded items: {name}", DataLoader(items, batch_size=4)
    if kind == "collate":
        after, calls = rng.choice([0, 0, 2]), [0]

        @as_mine
        def collate(items: list[Any]) -> Any:
            calls[0] += 1
            batch = tuple(torch.utils.data.default_collate(items))
            return batch if calls[0] <= after else BAD_BATCHES[name](batch)

        return f"collate: {name}", DataLoader(TensorDataset(x, y), batch_size=4, collate_fn=collate)
    return _odd_loader(x, y, rng) if kind == "loader" else _no_source(x, y, rng)


def _odd_loader(x: Tensor, y: Tensor, rng: random.Random) -> tuple[str, Any]:
    pairs = pairs_of(x, y)
    loaders: dict[str, Callable[[], Any]] = {
        "once": lambda: DataLoader(Stream(pairs, once=True), batch_size=4),
        "once, long": lambda: DataLoader(Stream(pairs * 20, once=True), batch_size=4),
        "empty stream": lambda: DataLoader(Stream([]), batch_size=4),
        "nothing left": lambda: DataLoader(TensorDataset(x, y), batch_size=10_000, drop_last=True),
        "unbatched": lambda: DataLoader(TensorDataset(x, y), batch_size=None),
        "no batches": lambda: DataLoader(TensorDataset(x, y), batch_sampler=[]),
        "empty batches": lambda: DataLoader(TensorDataset(x, y), batch_sampler=[[], [0]]),
        "own batches": lambda: DataLoader(TensorDataset(x, y), batch_sampler=[[0], [0, 1, 2]]),
        "beyond": lambda: DataLoader(TensorDataset(x, y), batch_sampler=[[0], [10_000]]),
        "bare stream": lambda: Stream(pairs),
        "mine": lambda: DataLoader(Items(len(x), raising(MineError("loader"))), batch_size=4),
        "stops": lambda: DataLoader(Items(len(x), raising(StopIteration())), batch_size=4),
    }
    name = rng.choice(list(loaders))
    return f"loader: {name}", loaders[name]()


def _no_source(x: Tensor, y: Tensor, rng: random.Random) -> tuple[str, Any]:
    things: dict[str, Any] = {
        "nothing": None,
        "number": 3,
        "text": "mnist",
        "no tensors": (),
        "tensor": x,
        "list": [x, y],
        "arrays": (x.numpy(), y.numpy()),
        "dictionary": {"x": x, "y": y},
        "pairs": pairs_of(x, y),
        "class": TensorDataset,
        "iterator": iter(pairs_of(x, y)),
        "function of nothing": lambda: (x, y),
        "function of three": lambda a, b, c: (x, y),
        "no length": Items(None, lambda i: (x[i], y[i])),
        "negative length": Items(-3, lambda i: (x[i], y[i])),
        "length of nothing": Items(0, lambda i: (x[i], y[i])),
        "length of text": Items("3", lambda i: (x[i], y[i])),
        "one tensor": (x,),
        "half a pair": (x, None),
    }
    name = rng.choice(list(things))
    return f"source: {name}", things[name]
