"""What a stream finds and retains, against one that is told: ``python -m tests.benchmarks.streams [seed ...]``."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from pyro import distributions as dist
from torch import nn

import nclbayes as ncl
from nclbayes.stream import Changed
from nclbayes.tasks import split_digits
from nclbayes.tasks.streams import TaskStream, blurred, hard, recurring, unchanged

BATCHES, SIZE = 300, 16


def permuted_digits(count: int, seed: int) -> list[ncl.Task]:
    """All ten digits, their 64 pixels in an order of each task's own."""
    parts = split_digits("class", seed=seed)
    train, test = ([torch.cat([getattr(t, s)[i] for t in parts]) for i in (0, 1)] for s in ("train", "test"))
    g = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(64, generator=g) for _ in range(count)]
    pairs = [[(x.flatten(1)[:, order], y) for x, y in (train, test)] for order in orders]
    return [ncl.Task(*pair, name=f"order {k}") for k, pair in enumerate(pairs)]


def run(source: TaskStream, classes: int, how: str) -> str:
    torch.manual_seed(source.seed)
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, classes)
    )
    model = ncl.BayesianNetwork(net, ncl.Categorical(), prior=dist.Normal(0.0, 1.0))
    every = 10_000.0 if how == "found" else None
    length = BATCHES * SIZE if how != "every 110" else 110 * SIZE
    stream = ncl.Stream(
        ncl.OnlinePosterior(model, ncl.LaplaceNCL()),
        segment_size=length,
        false_alarm_every=every,
        longest=length if how == "every 110" else None,
    )
    for i, item in enumerate(source, 1):
        if how == "told" and i in source.boundaries:
            stream.consolidate()
        stream.observe(*item.batch)
    now = stream.present()
    right = [float((now.predict(t.test[0]).probs.argmax(-1) == t.test[1]).float().mean()) for t in source.tasks]
    changes = [(event.first, event.batch) for event in stream.events if isinstance(event, Changed)]
    return f"{how}: {sum(right) / len(right):.3f}, boundaries {source.boundaries}, (first, told) {changes}"


def sources(seed: int) -> Iterator[tuple[str, TaskStream, int]]:
    tasks, split = permuted_digits(4, seed), split_digits("domain", seed=seed)
    yield "split digits", hard(split, batches=BATCHES, batch_size=SIZE, seed=seed), 2
    yield "permuted digits", hard(tasks, batches=BATCHES, batch_size=SIZE, seed=seed), 10
    yield "blurred", blurred(tasks, batches=BATCHES, batch_size=SIZE, blur=100, seed=seed), 10
    yield "recurring", recurring(tasks[:3], rounds=2, batches=BATCHES, batch_size=SIZE, seed=seed), 10


if __name__ == "__main__":
    for seed in map(int, sys.argv[1:] or ("0",)):
        for name, source, classes in sources(seed):
            for how in ("told", "found", "every 110"):
                print(f"seed {seed}, {name}, {run(source, classes, how)}", flush=True)
    if len(sys.argv) == 1:
        source = unchanged(permuted_digits(1, 0)[0], batches=10_000, batch_size=SIZE)
        print(f"no change, {run(source, 10, 'found')}")
