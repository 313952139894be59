"""Engines that decide themselves, against the best of a grid of prior scales for each set, scenario and engine.

``python -m tests.benchmarks.defaults --out results`` learns every set in every way that the folder has no result of
yet, one line of ``results/runs.jsonl`` each, and prints the table; ``--ways auto`` and ``--ways grid`` are its halves,
and ``--sets``, ``--engines`` and ``--seeds`` choose among the rest. ``--structures auto 32`` also holds factors in
blocks. The grid is that of the paper's steps, with N(0, s^2) for all weights, s of `SCALES`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyro.distributions as dist
import torch
from torch import nn

import nclbayes as ncl
from nclbayes.analysis.evaluation import Metric, among_seen
from nclbayes.engines import PAPER
from nclbayes.errors import NCLError
from nclbayes.experiments import find_setup
from nclbayes.nn import Likelihood
from tests.benchmarks.timing import table

SCALES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
ENGINES = {"laplace": ncl.LaplaceNCL, "variational": ncl.VariationalNCL}
SAMPLES = 32


@dataclass(frozen=True)
class Stream:
    """A sequence of tasks, and what learns it.

    Attributes:
        tasks: Makes them from a seed.
        network: Makes a network for them.
        likelihood: What its output means.
        settings: What the engines are told: no more than how long to train, and on how many examples at a time.
        metric: What counts as right; None where there are classes.
        has_accuracy: Whether that is what counts; otherwise the loss does.
        model: Further arguments of the model.
    """

    tasks: Callable[[int], list[ncl.Task]]
    network: Callable[[list[ncl.Task]], nn.Module]
    likelihood: Likelihood
    settings: dict[str, Any]
    metric: Metric | None = None
    has_accuracy: bool = True
    model: dict[str, Any] = field(default_factory=dict)


def of_setup(
    name: str, scenario: str = "", units: int | None = None, count: int | None = None, **settings: Any
) -> Stream:
    """A set of the experiments, without anything that was tuned for it."""
    setup = find_setup(name)
    if scenario == "class":
        # The softmax goes over the classes seen so far.
        setup = replace(setup, tasks=partial(setup.tasks, active="seen"))
    told = {k: v for k, v in setup.settings.items() if k in ("steps", "batch_size", "lr", "fisher", "fisher_size")}
    return Stream(
        lambda seed: setup.make_tasks(scenario, seed, None, count),
        lambda tasks: setup.network(tasks, scenario, units or setup.units),
        setup.likelihood,
        {**told, **settings},
        setup.metric,
        model={"inputs": setup.inputs, "weight": setup.weight},
    )


def tabular(load: Callable[[], tuple[torch.Tensor, torch.Tensor]], by: int, parts: int, classes: int) -> Stream:
    """A table of scikit-learn's, dealt to tasks by the quantiles of one of its columns; a fifth is for tests."""

    def tasks(seed: int) -> list[ncl.Task]:
        x, y = load()
        x = (x - x.mean(0)) / x.std(0)
        found, draw = [], torch.Generator().manual_seed(seed)
        for k, index in enumerate(x[:, by].argsort().tensor_split(parts)):
            index = index[torch.randperm(len(index), generator=draw)]
            test, train = index.split([len(index) // 5, len(index) - len(index) // 5])
            found.append(ncl.Task((x[train], y[train]), (x[test], y[test]), name=f"part {k}"))
        return found

    def network(tasks: list[ncl.Task]) -> nn.Module:
        inputs = tasks[0].train[0].shape[1]
        return nn.Sequential(
            nn.Linear(inputs, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, classes or 1)
        )

    likelihood = ncl.Categorical() if classes else ncl.Normal(0.5)
    settings = {"steps": 500, "batch_size": 64, "lr": 0.05 if classes else 0.01}
    return Stream(tasks, network, likelihood, settings, None if classes else _squared, has_accuracy=bool(classes))


def _squared(predicted: Any, batch: tuple[Any, ...]) -> torch.Tensor:
    return -(predicted.mean - batch[-1]).square().mean(-1)


def _diabetes() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True)
    return torch.tensor(x, dtype=torch.float32), torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)[:, None]


def _friedman() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import make_friedman1

    x, y = make_friedman1(2000, random_state=0, noise=1.0)
    return torch.tensor(x, dtype=torch.float32), torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)[:, None]


def _cancer() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


STREAMS: dict[str, Callable[[], Stream]] = {
    **{f"split-digits/{s}": partial(of_setup, "split-digits", s) for s in ("task", "domain", "class")},
    **{f"split-mnist/{s}": partial(of_setup, "split-mnist", s) for s in ("task", "domain", "class")},
    "rotated-mnist": partial(of_setup, "rotated-mnist", count=5),
    "permuted-mnist": partial(of_setup, "permuted-mnist", count=10, fisher_size=10_000),
    "permuted-mnist/50": partial(of_setup, "permuted-mnist", count=50, fisher_size=10_000),
    "breast-cancer": partial(tabular, _cancer, 1, 5, 2),
    "diabetes": partial(tabular, _diabetes, 2, 4, 0),
    "friedman": partial(tabular, _friedman, 3, 5, 0),
    "stroke-mnist": partial(of_setup, "stroke-mnist", steps=500),
    "stimulus-response": partial(of_setup, "stimulus-response", units=64, steps=2000),
    "split-cifar100/domain": partial(of_setup, "split-cifar100", "domain", units=400, steps=1000),
}


@dataclass(frozen=True)
class Run:
    """One way to learn one stream.

    Attributes:
        stream: Its name.
        engine: The engine's name.
        way: "auto", or a prior scale.
        seed: Decides the tasks, the network's start and all draws.
        structure: What is held of the factors: "auto", "dense", "diagonal", or the width of blocks.
    """

    stream: str
    engine: str
    way: str
    seed: int
    structure: str = "auto"

    @property
    def subject(self) -> str:
        """What is learnt, and what is held of it."""
        return self.stream if self.structure == "auto" else f"{self.stream}, structure {self.structure}"

    def learn(self, folder: Path | None = None) -> dict[str, Any]:
        """Learn it; what came out, in plain values. In a folder the same call goes on after the last task learnt."""
        stream = STREAMS[self.stream]()
        tasks = stream.tasks(self.seed)
        torch.manual_seed(self.seed)
        net = stream.network(tasks)
        is_auto = self.way == "auto"
        prior = ncl.priors.scaled(1.0) if is_auto else dist.Normal(0.0, float(self.way))
        model = ncl.BayesianNetwork(net, stream.likelihood, prior=prior, **stream.model)
        # A kind of Fisher is told to the grid alone.
        told = {k: v for k, v in stream.settings.items() if k != "fisher"} if is_auto else {**PAPER, **stream.settings}
        engine = ENGINES[self.engine](**told)
        structure: Any = int(self.structure) if self.structure.isdecimal() else self.structure
        generator = torch.Generator().manual_seed(self.seed)
        posterior = ncl.OnlinePosterior(model, engine, generator=generator, structure=structure)
        found: dict[str, Any] = {"seconds": [], "steps": [], "stiffness": [], "lr": []}
        parts = (self.subject, *astuple(self)[1:4])
        kept = None if folder is None else folder / "-".join(map(str, parts)).replace("/", "-")
        if kept is not None and (kept / "found.json").exists():
            posterior = ncl.OnlinePosterior.load(kept / "posterior.ncl", model)
            # The file of the posterior may be one task ahead.
            found = json.loads((kept / "found.json").read_text())
            for values in found.values():
                values += [None] * (len(posterior.tasks) - len(values))
        try:
            for task in tasks[len(posterior.tasks) :]:
                report = posterior.update(task, progress=False)
                for name, values in found.items():
                    values.append(getattr(report, name))
                if kept is not None:
                    kept.mkdir(exist_ok=True)
                    posterior.save(kept / "posterior.ncl")
                    (kept / "found.json").write_text(json.dumps(found))
        except NCLError as error:
            return {"failed": f"{type(error).__name__}: {error}"}
        found["seconds"] = sum(filter(None, found["seconds"]))
        seen = [among_seen(task, tasks[-1]) for task in tasks]
        for name, samples in (("mean", None), ("samples", SAMPLES)):
            scores = ncl.evaluate(posterior, seen, num_samples=samples, metric=stream.metric)
            for measure in ("accuracy", "loss", "calibration_error"):
                found[f"{name} {measure}"] = statistics.fmean(getattr(score, measure) for score in scores)
            found[f"{name} each"] = [score.accuracy if stream.has_accuracy else score.loss for score in scores]
        return found


def learnt(out: Path, runs: Iterable[Run]) -> dict[Run, dict[str, Any]]:
    """The results of all runs, those of the folder and, where it has none, new ones."""
    path, found = out / "runs.jsonl", {}
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line)
        found[Run(**entry["run"])] = entry["result"]
    for run in runs:
        if run not in found:
            found[run] = run.learn(out)
            with path.open("a") as file:
                file.write(json.dumps({"run": run.__dict__, "result": found[run]}) + "\n")
            print(
                f"{run.subject} {run.engine} {run.way} {run.seed}: {_said(run, found[run])}",
                file=sys.stderr,
                flush=True,
            )
    return found


def _value(run: Run, result: dict[str, Any], how: str = "mean") -> float:
    """What counts, the larger the better."""
    if "failed" in result:
        return -float("inf")
    return 100 * result[f"{how} accuracy"] if STREAMS[run.stream]().has_accuracy else -result[f"{how} loss"]


def _said(run: Run, result: dict[str, Any]) -> str:
    if "failed" in result:
        return str(result["failed"])
    return f"{_value(run, result):.2f}, samples {_value(run, result, 'samples'):.2f}, {result['seconds']:.0f} s"


def summary(found: dict[Run, dict[str, Any]]) -> str:
    """Each stream and engine: on its own, with samples, and the best prior scale of the grid."""
    rows: list[tuple[object, ...]] = []
    for stream, engine in dict.fromkeys((run.subject, run.engine) for run in found):
        own = {run: result for run, result in found.items() if (run.subject, run.engine) == (stream, engine)}
        by_way: dict[str, list[float]] = {}
        for run, result in own.items():
            by_way.setdefault(run.way, []).append(_value(run, result))
        means = {way: statistics.fmean(values) for way, values in by_way.items()}
        samples = [_value(run, result, "samples") for run, result in own.items() if run.way == "auto"]
        grid = {way: value for way, value in means.items() if way != "auto"}
        best = max(grid, key=lambda way: grid[way], default="")
        rows.append(
            (
                *(stream, engine, f"{means['auto']:.2f}" if "auto" in means else ""),
                f"{statistics.fmean(samples):.2f}" if samples else "",
                f"{grid[best]:.2f}" if best else "",
                *(best, str(max(len(values) for values in by_way.values()))),
            )
        )
    return table(
        "Engines that decide themselves",
        ("stream", "engine", "auto", "and 32 samples", "best of the grid", "its scale", "seeds"),
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", choices=STREAMS, default=list(STREAMS))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", default=["auto", "grid"], help="auto, grid, or single prior scales")
    parser.add_argument("--structures", nargs="+", default=["auto"], help="auto, dense, diagonal, or widths of blocks")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    ways = [way for each in given.ways for way in (map(str, SCALES) if each == "grid" else (each,))]
    chosen = (
        Run(stream, engine, way, seed, structure)
        for way in ways
        for stream in given.sets
        for engine in given.engines
        for seed in given.seeds
        for structure in given.structures
    )
    print(summary(learnt(given.out, chosen)))


if __name__ == "__main__":
    main()
