"""Whether the log evidence of a run orders settings as held-out examples do.

``python -m tests.benchmarks.evidence`` learns each stream with each value of the prior's scale, and with each
stiffness, by Laplace-NCL with ``likelihood_weight=1`` and all its steps, and prints what both say of it, as means over
the seeds, with Spearman's rank correlation of these. One thread; seconds for each run.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import nn

import nclbayes as ncl
from nclbayes.analysis.evaluation import among_seen
from tests.benchmarks.defaults import STREAMS, Stream
from tests.benchmarks.timing import table

SCALES = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
STIFFNESSES = (20.0, 63.0, 200.0, 630.0, 2000.0)
# The prior's scale while the stiffness varies.
SCALE = 10.0
# Steps a task; to the end, as the evidence is that of a mode.
TOLD: dict[str, Any] = {"steps": 200, "enough": None, "likelihood_weight": 1.0}


def _small() -> Stream:
    """Friedman's function, where a task has more examples than the network has weights."""
    return replace(
        STREAMS["friedman"](), network=lambda tasks: nn.Sequential(nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 1))
    )


CASES = {
    "split-digits/domain": STREAMS["split-digits/domain"],
    "friedman": STREAMS["friedman"],
    "friedman/10": _small,
}


@dataclass(frozen=True)
class Judged:
    """What the two say of a setting.

    Attributes:
        evidence: The sum over tasks of the log evidence, in nats for each training example.
        accuracy: The share of right test examples after the last task; where there are no classes, minus the mean
            square error.
        log_predictive: The mean log probability of the targets of test examples after the last task.
        fresh: The same of each task when it had just been learnt.
    """

    evidence: float
    accuracy: float
    log_predictive: float
    fresh: float


def judged(name: str, seed: int, scale: float, **settings: Any) -> Judged:
    """Learn a stream, and judge it both ways."""
    stream = CASES[name]()
    tasks = stream.tasks(seed)
    torch.manual_seed(seed)
    net = stream.network(tasks)
    model = ncl.BayesianNetwork(net, stream.likelihood, prior=ncl.priors.scaled(scale), **stream.model)
    told = {k: v for k, v in stream.settings.items() if k != "fisher"}
    engine = ncl.LaplaceNCL(**{**told, **TOLD, **settings})
    posterior = ncl.OnlinePosterior(model, engine, generator=torch.Generator().manual_seed(seed))
    evidence, fresh = 0.0, []
    for task in tasks:
        found = posterior.update(task, progress=False).log_evidence
        assert found is not None
        evidence += found
        fresh += [-score.loss for score in ncl.evaluate(posterior, [task], metric=stream.metric)]
    seen = [among_seen(task, tasks[-1]) for task in tasks]
    scores = ncl.evaluate(posterior, seen, metric=stream.metric)
    return Judged(
        evidence=evidence / sum(task.size for task in tasks),
        accuracy=statistics.fmean(score.accuracy for score in scores),
        log_predictive=-statistics.fmean(score.loss for score in scores),
        fresh=statistics.fmean(fresh),
    )


def mean_of(each: Sequence[Judged]) -> Judged:
    """The mean over seeds."""
    return Judged(*(statistics.fmean(getattr(one, what) for one in each) for what in Judged.__annotations__))


def compared(title: str, column: str, found: dict[float, Judged]) -> str:
    """The table of one grid, with rank correlations below."""
    rows: list[tuple[object, ...]] = [
        (f"{value:g}", *(f"{getattr(one, what):.3f}" for what in Judged.__annotations__))
        for value, one in found.items()
    ]
    evidence = [one.evidence for one in found.values()]
    ranks = [
        float(spearmanr(evidence, [getattr(one, what) for one in found.values()]).statistic)
        for what in ("accuracy", "log_predictive", "fresh")
    ]
    rows.append(("Spearman's rank correlation", "", *(f"{rank:.2f}" for rank in ranks)))
    header = (column, "evidence an example", "accuracy", "log predictive", "when learnt")
    return table(title, header, rows)


def run(name: str, grid: str, seeds: Sequence[int]) -> str:
    """A grid of a stream, one setting after the other.

    Args:
        name: The stream's among `CASES`.
        grid: "scale" or "stiffness".
        seeds: What to take means over.

    Returns:
        The table.
    """
    if grid == "scale":
        return compared(name, "prior scale", {s: mean_of([judged(name, seed, s) for seed in seeds]) for s in SCALES})
    found = {s: mean_of([judged(name, seed, SCALE, stiffness=s) for seed in seeds]) for s in STIFFNESSES}
    return compared(f"{name}, prior scale {SCALE:g}", "stiffness", found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--grids", nargs="+", choices=("scale", "stiffness"), default=["scale", "stiffness"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.streams:
        for grid in given.grids:
            print(run(name, grid, given.seeds), flush=True)


if __name__ == "__main__":
    main()
