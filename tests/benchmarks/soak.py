"""A soak: hundreds of short tasks in a row, with every rule of the Kronecker sum.

``python -m tests.benchmarks.soak --tasks 300 --seeds 3`` prints the table; with ``--drift 0.02`` the teacher slowly
changes his mind.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

import pyro.distributions as dist
import torch
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.engines import PAPER, Engine
from nclbayes.methods import PlainTraining
from tests.benchmarks.timing import table

INPUTS, UNITS, EXAMPLES, STEPS = 20, 32, 64, 20
WINDOW = 50  # so many tasks at the beginning, and at the end, are averaged over
RULES = ("kl", "additive", "bound", "mse")
RETENTIONS = (1.0, 0.99)
# Variational NCL learns at samples of the weights: those of a unit prior make no sensible network of this size.
PRIOR_SCALES: dict[type[Engine], float] = {ncl.VariationalNCL: 0.3}
HEADER = (
    *("engine", "steps", "rule", "retention", "newest before", "and after", "teacher", "first tasks"),
    *("sound", "time: last / first", "memory growth"),
)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(INPUTS, UNITS), nn.ReLU(), nn.Linear(UNITS, UNITS), nn.ReLU(), nn.Linear(UNITS, 2))


class Teacher:
    """A random network of the pupil's form, which labels inputs; every task has inputs around a place of its own.

    Inputs are N(shift, I), the shift of each task drawn from N(0, I / 4). The teacher's threshold is the median over
    inputs without a shift. With a drift, his weights turn towards fresh ones before each task,
    ``W <- sqrt(1 - d) W + sqrt(d) V``: after 1 / d tasks little is left of what he taught.
    """

    def __init__(self, seed: int, drift: float) -> None:
        self._generator, self._drift = torch.Generator().manual_seed(seed), drift
        self._net = network().requires_grad_(False)
        for parameter in self._net.parameters():
            parameter.copy_(self._draw(parameter))
        self._settle()

    def turn(self) -> None:
        if self._drift:
            for parameter in self._net.parameters():
                parameter.mul_((1 - self._drift) ** 0.5).add_(self._draw(parameter), alpha=self._drift**0.5)
            self._settle()

    def shift(self) -> Tensor:
        return torch.randn(INPUTS, generator=self._generator) / 2

    def examples(self, count: int, shift: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, INPUTS, generator=self._generator) + shift
        return x, (self._margin(x) > self._threshold).long()

    def _draw(self, like: Tensor) -> Tensor:
        fan_in = like.shape[1] if like.ndim == 2 else UNITS
        return torch.randn(like.shape, generator=self._generator) / fan_in**0.5

    def _margin(self, x: Tensor) -> Tensor:
        return self._net(x) @ torch.tensor([-1.0, 1.0])

    def _settle(self) -> None:
        self._threshold = self._margin(torch.randn(2000, INPUTS, generator=self._generator)).median()


@dataclass(frozen=True)
class Run:
    """One learner, and the stream that it meets."""

    engine: Engine
    tasks: int
    seed: int
    drift: float


def accuracy(posterior: ncl.OnlinePosterior, data: tuple[Tensor, Tensor]) -> float:
    return float((posterior.predict(data[0]).probs.argmax(-1) == data[1]).double().mean())


def soak(run: Run) -> dict[str, float]:
    """Learn every task of a run."""
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    teacher = Teacher(run.seed, run.drift)
    prior = dist.Normal(0.0, PRIOR_SCALES.get(type(run.engine), 1.0))
    model = ncl.BayesianNetwork(
        network(), ncl.Categorical(), prior=ncl.priors.scaled() if run.engine.stiffness else prior
    )
    posterior = ncl.OnlinePosterior(model, run.engine, generator=torch.Generator().manual_seed(run.seed))
    window = min(WINDOW, run.tasks // 2)
    first, before, after, seconds = [], [], [], []
    peak = 0
    for k in range(run.tasks):
        teacher.turn()
        shift = teacher.shift()
        task, fresh = ncl.Task(teacher.examples(EXAMPLES, shift), name=f"task {k}"), teacher.examples(500, shift)
        if k < 10:
            first.append(fresh)
        if k >= run.tasks - window:
            before.append(accuracy(posterior, fresh))
        start = time.perf_counter()
        posterior.update(task, progress=False)
        seconds.append(time.perf_counter() - start)
        if k >= run.tasks - window:
            after.append(accuracy(posterior, fresh))
        if k == window:
            peak = _peak()
    return {
        "before": statistics.mean(before),
        "after": statistics.mean(after),
        "teacher": accuracy(posterior, teacher.examples(5000)),
        "first": statistics.mean(accuracy(posterior, data) for data in first),
        "sound": float(is_sound(posterior)),
        "slower": statistics.median(seconds[-window:]) / statistics.median(seconds[1 : window + 1]),
        "growth": _peak() - peak,
    }


def is_sound(posterior: ncl.OnlinePosterior) -> bool:
    """Whether every mean is finite, and every factor finite and positive definite."""
    for state in posterior.blocks.values():
        for factor in (state.precision.input, state.precision.output):
            if not bool(factor.isfinite().all()) or float(torch.linalg.eigvalsh(factor)[0]) <= 0:
                return False
    return all(bool(value.isfinite().all()) for value in posterior.mean().values())


def _peak() -> float:
    """The process's peak of resident memory, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def contestants(
    rules: Iterable[str] = RULES,
    retentions: Iterable[float] = RETENTIONS,
    engines: Iterable[type[Engine]] = (ncl.LaplaceNCL, ncl.VariationalNCL),
    steps: Iterable[str] = ("paper", "own"),
) -> list[Engine]:
    """Plain training, and each engine with the paper's steps or its own, each rule and each retention."""
    chosen: list[Engine] = [PlainTraining(steps=STEPS)]
    for kind, whose, retention, rule in itertools.product(engines, steps, retentions, rules):
        given = PAPER if whose == "paper" else {}
        chosen.append(kind(**given, steps=STEPS, kronecker_sum=rule, retention=retention))
    return chosen


def run(tasks: int, seeds: int, drift: float, learners: list[Engine], jobs: int = 1) -> str:
    """The table of a soak, each number a mean over the seeds."""
    runs = [Run(engine, tasks, seed, drift) for seed in range(seeds) for engine in learners]
    found: dict[Engine, list[dict[str, float]]] = {engine: [] for engine in learners}
    # A process each, from one that has computed nothing: the peak of one is then not that of another.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.benchmarks.soak"])
    with context.Pool(jobs, maxtasksperchild=1) as pool:
        for done, results in zip(runs, pool.imap(soak, runs), strict=True):
            found[done.engine].append(results)
            print(f"{_label(done.engine)}, seed {done.seed}: {results}", file=sys.stderr, flush=True)
    rows = [(*_label(engine), *_cells(found[engine])) for engine in learners]
    stream = f"a teacher who drifts by {drift:g} a task" if drift else "one teacher"
    title = f"Soak: {tasks} tasks of {stream}, {INPUTS}-{UNITS}-{UNITS}-2, {STEPS} steps each; seeds 0 to {seeds - 1}"
    return table(title, HEADER, rows)


def _label(engine: Engine) -> tuple[str, str, str, str]:
    if isinstance(engine, PlainTraining):
        return "plain training", "", "", ""
    whose = "own" if engine.stiffness else "paper"
    return type(engine).__name__, whose, ncl.SumRule(engine.kronecker_sum).value, f"{engine.retention:g}"


def _cells(results: list[dict[str, float]]) -> tuple[str, ...]:
    def shown(name: str) -> str:
        values = [100 * result[name] for result in results]
        spread = f" ± {statistics.stdev(values) / len(values) ** 0.5:.1f}" if len(values) > 1 else ""
        return f"{statistics.mean(values):.1f}{spread}"

    return (
        *(shown(name) for name in ("before", "after", "teacher", "first")),
        "yes" if all(result["sound"] for result in results) else "no",
        f"{statistics.median(result['slower'] for result in results):.2f}",
        f"{max(result['growth'] for result in results):.0f} MiB",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--drift", type=float, default=0.0, help="what share of the teacher's weights changes a task")
    parser.add_argument("--rules", nargs="+", default=RULES)
    parser.add_argument("--retentions", nargs="+", type=float, default=RETENTIONS)
    parser.add_argument("--engines", nargs="+", default=("LaplaceNCL", "VariationalNCL"))
    parser.add_argument("--steps", nargs="+", choices=("paper", "own"), default=("paper", "own"))
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    learners = contestants(given.rules, given.retentions, [getattr(ncl, name) for name in given.engines], given.steps)
    print(run(given.tasks, given.seeds, given.drift, learners, given.jobs))


if __name__ == "__main__":
    main()
