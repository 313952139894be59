"""What `Stream.observe` takes, with the detection, against a step of `update` and against the engine's step alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pyro.distributions as dist
import torch
from torch import Tensor

import nclbayes as ncl
from tests.benchmarks.fisher import BATCH, batches, network
from tests.benchmarks.timing import table

# One batch in 16 is added to the Fisher, one step in 10 has the pull, before one in 50 curvature is measured.
ROUND, TURN, ROUNDS = 100, 4, 6


def updates(engine: ncl.engines.Engine, batch_size: int) -> float:
    """Seconds of the processor's for a step of `update`, on a second task; the best of some rounds."""
    model = ncl.BayesianNetwork(network(), ncl.Categorical(), prior=dist.Normal(0.0, 1.0))
    x = torch.cat([x for x, _ in batches(10_000)])
    y = (x[:, :10] * 3).argmax(-1)
    settings = {"batch_size": batch_size, "enough": None, "patience": None}
    posterior = ncl.OnlinePosterior(model, replace(engine, steps=ROUND, **settings))
    posterior.update(ncl.Task((x, y), name="first"), progress=False)
    posterior.engine = replace(engine, steps=ROUND * (ROUNDS + 1), **settings)
    at: list[float] = []
    posterior.update(
        ncl.Task((x, y), name="second"), callbacks=[lambda _: at.append(time.process_time())], progress=False
    )
    ends = at[ROUND - 1 :: ROUND]
    return min(after - before for before, after in pairwise(ends)) / ROUND


def times(engine: ncl.engines.Engine, batch_size: int) -> dict[str, float]:
    """Seconds of the processor's for a batch, in the second segment of a stream; the best of some rounds."""
    model = ncl.BayesianNetwork(network(), ncl.Categorical(), prior=dist.Normal(0.0, 1.0))
    stream = ncl.Stream(ncl.OnlinePosterior(model, engine), segment_size=12_000)
    data = [(x[:batch_size], (x[:batch_size, :10] * 3).argmax(-1)) for x, _ in batches(10_000)[:-1]]
    for x, y in data[:30]:
        stream.observe(x, y)
    stream.consolidate()
    stream.observe(*data[0])
    segment = stream._segment
    assert segment is not None
    stepper, rate = segment.engine.begun(segment.problem), segment.engine.rate(0.0)
    stepper.step(data[0], rate)
    contestants: dict[str, Callable[[tuple[Tensor, Tensor]], object]] = {
        "step": lambda batch: stepper.step(batch, rate),
        "observe": lambda batch: stream.observe(*batch),
        "score": segment.score,
    }
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(ROUNDS):
        total = dict.fromkeys(contestants, 0.0)
        for start in range(0, ROUND, TURN):
            now = [data[(start + i) % len(data)] for i in range(TURN)]
            for name, run in contestants.items():
                # As in the engines' loop; `observe` does so itself, and puts it back.
                torch.set_flush_denormal(True)
                started = time.process_time()
                for batch in now:
                    run(batch)
                total[name] += time.process_time() - started
        best = {name: min(best[name], total[name] / ROUND) for name in best}
    assert stream._segment is segment
    return {"update": updates(engine, batch_size), **best}


def run(threads: str) -> str:
    rows = []
    for engine in (ncl.LaplaceNCL(), ncl.VariationalNCL()):
        for size in (BATCH // 2, BATCH):
            found = times(engine, size)
            each = (f"{1e3 * seconds:.2f} ms" for seconds in found.values())
            ratios = (f"{found['observe'] / found[name]:.2f}" for name in ("update", "step"))
            rows.append((type(engine).__name__, size, threads, *each, *ratios))
    header = ("engine", "batch", "threads", "in update", "step", "observe", "score", "/ in update", "/ step")
    return table(f"Stream.observe on 784-400-400-10, the best of {ROUNDS} rounds of {ROUND} batches", header, rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(run("1"))
