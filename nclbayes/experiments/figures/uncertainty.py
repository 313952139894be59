"""What predictions know of what they do not know: each task when it is learnt and in the end, and foreign inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nclbayes.analysis.measures import mean_and_error
from nclbayes.analysis.uncertainty import Detection, Guesses, guesses, reliability, risk_coverage
from nclbayes.data.task import Task
from nclbayes.experiments.config import RunConfig
from nclbayes.experiments.figures.recipe import Recipe, Results, Row, Settings, Statement, Workplace
from nclbayes.experiments.figures.uncertainty_pictures import picture
from nclbayes.experiments.runs import reopen_each
from nclbayes.posterior import OnlinePosterior

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WAYS = ("mean", "samples", "linearized", "last-layer")
LEARNT, END = "when learnt", "in the end"
MEASURES = ("accuracy", "loss", "brier", "calibration error", "selective risk")
# How to predict after each engine, as the guide has it.
_USUAL = {"laplace-ncl": "linearized", "variational-ncl": "samples"}
# How many points of a risk-coverage curve are kept.
_POINTS = 50


def permuted(x: Tensor) -> Tensor:
    """Images whose pixels are in another order, the same one for all.

    Args:
        x: [N, ...].

    Returns:
        Of the same shape.
    """
    order = torch.randperm(x[0].numel(), generator=torch.Generator().manual_seed(0))
    return x.flatten(1)[:, order].view_as(x)


def blank(x: Tensor) -> Tensor:
    """As many images of one grey each, from the darkest to the brightest pixel there is.

    Args:
        x: [N, ...].

    Returns:
        Of the same shape.
    """
    greys = torch.linspace(float(x.min()), float(x.max()), len(x))
    return greys.view(-1, *[1] * (x.ndim - 1)).expand_as(x).clone()


FOREIGN: dict[str, Callable[[Tensor], Tensor]] = {"permuted pixels": permuted, "blank images": blank}
TO_COME = "tasks to come"


@dataclass(frozen=True)
class _Asked:
    """A learner, asked in one way.

    Attributes:
        learner: It.
        way: How it predicts.
        samples: How many samples, if it takes some.
        tasks: All tasks, cut to what is asked.
        learnt: How many of them it has learnt.
    """

    learner: OnlinePosterior
    way: str
    samples: int
    tasks: Sequence[Task]
    learnt: int

    def of(self, task: Task) -> Guesses:
        """What it predicts for the test data of a task."""
        count = self.samples if self.way == "samples" else None
        return guesses(self.learner, task, method=self.way, num_samples=count)

    def own(self, j: int) -> Guesses:
        """What it predicts for a task."""
        return self.of(self.tasks[j])

    def foreign(self, j: int) -> Iterator[tuple[str, Guesses]]:
        """What it predicts for inputs that are not of the tasks that it has learnt, asked as if they were of one."""
        task = self.tasks[j]
        later = self.tasks[self.learnt :]
        if later:
            yield TO_COME, _together([self.of(_in_place_of(task, other.test[0], other.test[1])) for other in later])  # type: ignore[index]
        x, y = task.test  # type: ignore[misc]
        for name, change in FOREIGN.items():
            yield name, self.of(_in_place_of(task, change(x), y))


def _in_place_of(task: Task, x: Tensor, y: Tensor) -> Task:
    return Task(task.train, (x, torch.zeros_like(y)), name=task.name, context=task.context)


def _together(found: Sequence[Guesses]) -> Guesses:
    return Guesses(torch.cat([each.probs for each in found]), torch.cat([each.target for each in found]))


def measures(found: Guesses) -> dict[str, float]:
    """What is told of predictions.

    Args:
        found: The predictions.

    Returns:
        By the names of `MEASURES`; the calibration error is that over bins of equally many examples.
    """
    values = (found.accuracy, found.loss, found.brier, found.adaptive_calibration_error, found.selective_risk)
    return dict(zip(MEASURES, values, strict=True))


def _compute(settings: Settings, place: Workplace) -> Results:
    runs = [
        (_config(method, seed, settings, place), place.out / "runs" / method / f"seed-{seed}")
        for method in settings["methods"]
        for seed in range(settings["seeds"])
    ]
    place.run_all(runs)
    tables: dict[str, list[Row]] = {"measures": [], "foreign": [], "reliability": [], "risk": []}
    for config, folder in runs:
        _, tasks, learners = reopen_each(folder)
        tasks = [_cut(task, settings["test_size"]) for task in tasks]
        for way in settings["ways"]:
            place.say(f"{config.method}, seed {config.seed}, by {way}")
            asked = [_Asked(each, way, settings["samples"], tasks, k + 1) for k, each in enumerate(learners)]
            where = {"method": config.method, "way": way, "seed": config.seed}
            _ask(asked, where, tables)
    return Results(tables, _statements(tables), {"set": settings["set"], "scenario": settings["scenario"]})


def _config(method: str, seed: int, settings: Settings, place: Workplace) -> RunConfig:
    steps = {} if settings["steps"] is None else {"steps": settings["steps"]}
    rest = {"tasks": settings["tasks"], "device": place.device, "keep_each": True}
    return RunConfig.of(settings["set"], method, settings["scenario"], seed, settings=steps, **rest)


def _cut(task: Task, size: int | None) -> Task:
    """A task with so many of its test examples."""
    x, y = task.test  # type: ignore[misc]
    return Task(task.train, (x[:size], y[:size]), name=task.name, context=task.context)


def _ask(asked: Sequence[_Asked], where: Row, tables: Mapping[str, list[Row]]) -> None:
    """Ask each learner for the task that it has just learnt, and the last one for all."""
    last = len(asked) - 1
    pooled: dict[str, list[Guesses]] = {LEARNT: [], END: []}
    for j in range(len(asked)):
        for when, learner in ((LEARNT, asked[j]), (END, asked[last])):
            own = learner.own(j)
            pooled[when].append(own)
            row = {**where, "task": learner.tasks[j].name, "number": j + 1, "when": when}
            tables["measures"].append({**row, **measures(own)})
            for name, other in learner.foreign(j):
                found = Detection.of(own, other)
                told = {"auroc": found.auroc, "false positives": found.false_positive_rate}
                tables["foreign"].append({**row, "foreign": name, **told})
    for when, each in pooled.items():
        together = _together(each)
        bins = reliability(together)
        for confidence, accuracy, count in zip(bins.confidence, bins.accuracy, bins.counts, strict=True):
            values = {"confidence": confidence, "accuracy": accuracy, "examples": count}
            tables["reliability"].append({**where, "when": when, **values})
        shares, risks = risk_coverage(together)
        for k in torch.linspace(0, len(shares) - 1, min(_POINTS, len(shares))).long().tolist():
            tables["risk"].append({**where, "when": when, "coverage": float(shares[k]), "risk": float(risks[k])})


def average(rows: Sequence[Row], measure: str, **where: str) -> float:
    """The mean of a measure over some rows.

    Args:
        rows: Rows of a table.
        measure: A column.
        **where: What the rows must have.

    Returns:
        The mean; NaN without such rows.
    """
    return mean_and_error(row[measure] for row in rows if all(row[k] == v for k, v in where.items()))[0]


def _statements(tables: Mapping[str, Sequence[Row]]) -> list[Statement]:
    """What one hopes of uncertain weights, by the way that suits each engine: each may fail."""
    found, rows, foreign = list[Statement](), tables["measures"], tables["foreign"]
    for method, way in _USUAL.items():
        if not any((row["method"], row["way"]) == (method, way) for row in rows):
            continue
        for measure in ("loss", "calibration error", "selective risk"):
            plain = average(rows, measure, method=method, way="mean", when=END)
            value = average(rows, measure, method=method, way=way, when=END)
            claim = f"{method}: in the end the {measure} is lower by {way} than by the mean"
            found.append(Statement(claim, value < plain, f"{value:.4f} against {plain:.4f}"))
        for name in dict.fromkeys(row["foreign"] for row in foreign):
            plain = average(foreign, "auroc", method=method, way="mean", foreign=name)
            value = average(foreign, "auroc", method=method, way=way, foreign=name)
            claim = f"{method}: {name} are told apart better by {way} than by the mean"
            found.append(Statement(claim, value > plain, f"AUROC {value:.3f} against {plain:.3f}"))
    return found


def _draw(results: Results) -> Mapping[str, Figure]:
    return {"uncertainty": picture(results.tables, END)}


_ENGINES = ["laplace-ncl", "variational-ncl"]
RECIPE = Recipe(
    "uncertainty",
    "calibration, selective prediction and foreign inputs, when a task is learnt and in the end, by each way",
    {
        scale: {
            "set": name,
            "scenario": "domain",
            "methods": list(_ENGINES),
            "ways": list(WAYS),
            "samples": samples,
            "steps": steps,
            "tasks": tasks,
            "test_size": size,
            "seeds": seeds,
        }
        for scale, name, samples, steps, tasks, size, seeds in (
            ("quick", "split-digits", 8, 100, 3, 100, 1),
            ("laptop", "split-mnist", 32, 300, 5, 500, 1),
            ("paper", "split-mnist", 32, 2000, 5, 10_000, 5),
        )
    },
    _compute,
    _draw,
)
