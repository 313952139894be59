"""What a stream finds and retains, against one that is told and methods that need no boundaries, on digits.

``python -m tests.benchmarks.streams [seed ...]``. Ways that have candidates are tuned on permuted digits of seed 100,
with as many of them each. Without seeds it is seed 0, untuned and without those methods, and 10,000 batches of no
change.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from pyro import distributions as dist
from torch import nn

import nclbayes as ncl
from nclbayes.engines.base import Engine
from nclbayes.methods import BGD, FOOVB, IVON
from nclbayes.stream import Changed
from nclbayes.tasks import split_digits
from nclbayes.tasks.streams import TaskStream, blurred, hard, recurring, unchanged

BATCHES, SIZE, TUNED_ON = 300, 16, 100


@dataclass(frozen=True)
class Way:
    """How a stream is learnt.

    Attributes:
        engine: The engine.
        boundaries: "found", "told", "none", or after so many batches.
    """

    engine: Engine
    boundaries: str = "none"


OURS = {"found": [Way(ncl.LaplaceNCL(), "found")], "told": [Way(ncl.LaplaceNCL(), "told")]}
EVERY = {"every 110": [Way(ncl.LaplaceNCL(), "110")]}
RIVALS: dict[str, list[Way]] = {
    "every X": [Way(ncl.LaplaceNCL(), str(length)) for length in (40, 75, 110, 150, 200, 250, 400, 550)],
    "bgd": [Way(BGD(init_scale=scale, lr=lr)) for scale, lr in product((0.06, 0.12, 0.2, 0.3), (1.0, 3.0))],
    "foo-vb": [Way(FOOVB(init_scale=scale, lr=lr)) for scale, lr in product((0.3, 0.6, 1.0, 1.5), (0.5, 1.0))],
    "ivon": [
        Way(IVON(lr=lr, hess_init=h, second_momentum=beta_2))
        for lr, h, beta_2 in product((0.02, 0.1), (0.1, 1.0), (0.999, 0.9999))
    ],
}


def permuted_digits(count: int, seed: int) -> list[ncl.Task]:
    """All ten digits, their 64 pixels in an order of each task's own."""
    parts = split_digits("class", seed=seed)
    train, test = ([torch.cat([getattr(t, s)[i] for t in parts]) for i in (0, 1)] for s in ("train", "test"))
    g = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(64, generator=g) for _ in range(count)]
    pairs = [[(x.flatten(1)[:, order], y) for x, y in (train, test)] for order in orders]
    return [ncl.Task(*pair, name=f"order {k}") for k, pair in enumerate(pairs)]


def run(source: TaskStream, classes: int, way: Way) -> tuple[float, str]:
    """The accuracy over all tasks in the end, in %, and what was found."""
    torch.manual_seed(source.seed)
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, classes)
    )
    model = ncl.BayesianNetwork(net, ncl.Categorical(), prior=dist.Normal(0.0, 1.0))
    length = int(way.boundaries) * SIZE if way.boundaries.isdecimal() else None
    stream = ncl.Stream(
        ncl.OnlinePosterior(model, way.engine),
        segment_size=length or BATCHES * SIZE,
        false_alarm_every=10_000.0 if way.boundaries == "found" else None,
        longest=length,
    )
    for i, item in enumerate(source, 1):
        if way.boundaries == "told" and i in source.boundaries:
            stream.consolidate()
        stream.observe(*item.batch)
    now = stream.present()
    right = [float((now.predict(t.test[0]).probs.argmax(-1) == t.test[1]).float().mean()) for t in source.tasks]
    changes = [(event.first, event.batch) for event in stream.events if isinstance(event, Changed)]
    found = f"boundaries {source.boundaries}, (first, told) {changes}" if way.boundaries == "found" else ""
    return 100 * statistics.fmean(right), found


def best(name: str, candidates: Sequence[Way]) -> Way:
    """Of several candidates, the one that retains most of permuted digits."""
    if len(candidates) == 1:
        return candidates[0]
    tasks = permuted_digits(4, TUNED_ON)
    source = hard(tasks, batches=BATCHES, batch_size=SIZE, seed=TUNED_ON)
    scores = list[float]()
    for way in candidates:
        try:
            scores.append(run(source, 10, way)[0])
        except ncl.errors.NonFiniteError:
            scores.append(0.0)
        told = {what: value for what, value in vars(way.engine).items() if value != getattr(type(way.engine), what)}
        print(f"tuning {name}: {told}, boundaries {way.boundaries}: {scores[-1]:.1f}", flush=True)
    return candidates[scores.index(max(scores))]


def sources(seed: int) -> Iterator[tuple[str, TaskStream, int]]:
    tasks, split = permuted_digits(4, seed), split_digits("domain", seed=seed)
    yield "split digits", hard(split, batches=BATCHES, batch_size=SIZE, seed=seed), 2
    yield "permuted digits", hard(tasks, batches=BATCHES, batch_size=SIZE, seed=seed), 10
    yield "blurred", blurred(tasks, batches=BATCHES, batch_size=SIZE, blur=100, seed=seed), 10
    yield "recurring", recurring(tasks[:3], rounds=2, batches=BATCHES, batch_size=SIZE, seed=seed), 10


if __name__ == "__main__":
    seeds = list(map(int, sys.argv[1:]))
    ways = {name: best(name, candidates) for name, candidates in (OURS | (RIVALS if seeds else EVERY)).items()}
    scores: dict[tuple[str, str], list[float]] = {}
    for seed in seeds or [0]:
        for name, source, classes in sources(seed):
            for how, way in ways.items():
                right, found = run(source, classes, way)
                scores.setdefault((name, how), []).append(right)
                print(f"seed {seed}, {name}, {how}: {right:.1f} {found}", flush=True)
    for (name, how), each in scores.items():
        print(f"{name}, {how}: {statistics.fmean(each):.1f} in the mean of {len(each)}")
    if not seeds:
        source = unchanged(permuted_digits(1, 0)[0], batches=10_000, batch_size=SIZE)
        right, found = run(source, 10, ways["found"])
        print(f"no change: {right:.1f} {found}")
