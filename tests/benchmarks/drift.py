"""When to end a segment of a stream that drifts and never jumps: ``python -m tests.benchmarks.drift [seed ...]``.

Digits whose 64 pixels are turned, a little with each batch, from one random frame of axes to the next one. What is
asked in the end is how well all places of the way are known: at nine of them all test digits are tried. Segments end
after so many batches, or when the trace of a segment's Fisher is so many times that of the precision before it.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator

import torch
from pyro import distributions as dist
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.stream import Changed, Consolidated
from nclbayes.tasks import split_digits

BATCHES, SIZE, FRAMES, LOOK = 1200, 16, 4, 10

Ends = Callable[[ncl.Stream, int], bool]


def drifting(seed: int) -> tuple[Iterator[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """The batches, and all test digits at nine places of the way."""
    parts = split_digits("class", seed=seed)
    (x, y), test = ([torch.cat([getattr(t, s)[i] for t in parts]) for i in (0, 1)] for s in ("train", "test"))
    g = torch.Generator().manual_seed(seed)
    logs = [torch.zeros(64, 64)]
    for _ in range(FRAMES - 1):
        free = torch.randn(64, 64, generator=g) / 8
        logs.append(logs[-1] + (free - free.T) / 2)

    def turned(images: Tensor, place: float) -> Tensor:
        k = min(int(place * (FRAMES - 1)), FRAMES - 2)
        part = place * (FRAMES - 1) - k
        return images.flatten(1) @ torch.matrix_exp((1 - part) * logs[k] + part * logs[k + 1])

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for k in range(BATCHES):
            index = torch.randint(len(x), (SIZE,), generator=g)
            yield turned(x[index], k / (BATCHES - 1)), y[index]

    return batches(), [(turned(test[0], place / 8), test[1]) for place in range(9)]


def after(batches: int) -> Ends:
    """After so many batches."""
    return lambda stream, k: k % batches == 0


def at_ratio(ratio: float) -> Ends:
    """When the Fisher of the segment has so many times the trace of the precision before it."""
    return lambda stream, k: k % LOOK == 0 and traces(stream) >= ratio


def traces(stream: ncl.Stream) -> float:
    """That ratio of the open segment, over all blocks."""
    segment = stream._segment
    if segment is None or segment._fisher is None or not segment.batches:
        return 0.0
    # To ask changes how sums round.
    before = {name: tensor.clone() for name, tensor in segment.tensors().items()}
    fishers = segment._fisher.factors(float(segment.engine.likelihood_weight) * segment.examples)
    new, old = 0.0, 0.0
    for name, state in segment.problem.states.items():
        fisher, precision = fishers[name], state.whole().precision
        new += float(fisher.input.trace() * fisher.output.trace())
        old += float(precision.input.trace() * precision.output.trace())
    segment.restore(before)
    return new / old


WAYS: dict[str, Ends] = {
    "never": lambda stream, k: False,
    **{f"after {batches} batches": after(batches) for batches in (40, 75, 150, 300, 600)},
    **{f"at {ratio:g} times the precision": at_ratio(ratio) for ratio in (0.1, 0.3, 1.0, 3.0)},
}


def run(seed: int, ends: Ends) -> tuple[float, float, int, int]:
    """Accuracy over the way, that at its end, segments, and changes that were told."""
    batches, places = drifting(seed)
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 10))
    model = ncl.BayesianNetwork(net, ncl.Categorical(), prior=dist.Normal(0.0, 1.0))
    stream = ncl.Stream(ncl.OnlinePosterior(model, ncl.LaplaceNCL()), segment_size=300 * SIZE)
    for k, batch in enumerate(batches, 1):
        stream.observe(*batch)
        if ends(stream, k):
            stream.consolidate()
    now = stream.present()
    right = [100 * float((now.predict(x).probs.argmax(-1) == y).float().mean()) for x, y in places]
    told = sum(isinstance(event, Changed) for event in stream.events)
    return statistics.fmean(right), right[-1], sum(isinstance(e, Consolidated) for e in stream.events), told


if __name__ == "__main__":
    seeds = list(map(int, sys.argv[1:])) or [0]
    for name, ends in WAYS.items():
        found = [run(seed, ends) for seed in seeds]
        whole, last, segments, told = (statistics.fmean(column) for column in zip(*found, strict=True))
        print(
            f"{name}: {whole:.1f} % over the way, {last:.1f} % at its end, {segments:.1f} segments, {told:.1f} told",
            flush=True,
        )
