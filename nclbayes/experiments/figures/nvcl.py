"""Natural variational NCL: on the recurrent tasks as in the paper, and beside Laplace-NCL on split images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nclbayes.analysis.drawing import PALETTE
from nclbayes.analysis.evaluation import evaluate
from nclbayes.analysis.measures import mean_and_error
from nclbayes.data.task import Task
from nclbayes.experiments.comparison import run_folder
from nclbayes.experiments.config import RunConfig
from nclbayes.experiments.figures.panels import letter, loss_by_task, panels
from nclbayes.experiments.figures.recipe import Recipe, Results, Row, Settings, Statement, Workplace
from nclbayes.experiments.figures.scores import least_losses, score_rows
from nclbayes.experiments.runs import reopen
from nclbayes.experiments.setups import find_setup
from nclbayes.posterior import OnlinePosterior

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENGINES = ("laplace-ncl", "variational-ncl")


def _compute(settings: Settings, place: Workplace) -> Results:
    runs = [
        _run(part, method, seed, place)
        for part in settings["parts"]
        for method in part["methods"]
        for seed in range(settings["seeds"])
    ]
    records = place.run_all(runs)
    rows: list[Row] = []
    curves: list[Row] = []
    for (config, folder), record in zip(runs, records, strict=True):
        place.say(f"predictions of {config.method} on {config.set} {config.scenario}")
        where = {"set": config.set, "scenario": config.scenario, "method": config.method, "seed": config.seed}
        _, tasks, learner = reopen(folder)
        floors = least_losses(tasks) if config.set == "stimulus-response" else [0.0] * len(tasks)
        rows += [{**where, **row} for row in _predictions(config, tasks, learner, floors, settings["samples"])]
        curves += [{**where, **row} for row in score_rows(record, floors)]
    return Results({"summary": rows, "losses": curves}, _statements(rows))


def _run(part: Settings, method: str, seed: int, place: Workplace) -> tuple[RunConfig, Path]:
    rest = {"units": part["units"], "tasks": part["tasks"], "device": place.device}
    config = RunConfig.of(part["set"], method, part["scenario"], seed, settings=part["settings"], paper=True, **rest)
    return config, run_folder(place.out / "runs" / f"{config.set}-{config.scenario or 'run'}", config)


def _predictions(
    config: RunConfig, tasks: Sequence[Task], learner: OnlinePosterior, floors: Sequence[float], samples: int
) -> list[Row]:
    """Predictions at the mean, and with samples of the weights, after all tasks; losses above their floors."""
    found: list[Row] = []
    for count in (None, samples):
        generator = torch.Generator().manual_seed(config.seed)
        scores = evaluate(learner, tasks, num_samples=count, metric=find_setup(config.set).metric, generator=generator)
        losses = [score.loss - floor for score, floor in zip(scores, floors, strict=True)]
        found.append(
            {
                "predictions": "mean" if count is None else f"{count} samples",
                "average accuracy": sum(score.accuracy for score in scores) / len(scores),
                "average loss": sum(losses) / len(losses),
            }
        )
    return found


def _statements(rows: Sequence[Row]) -> list[Statement]:
    """Where both engines ran: the variational one is as good as Laplace, each with the better of its predictions."""
    found = []
    for place in dict.fromkeys((row["set"], row["scenario"]) for row in rows):
        here = [row for row in rows if (row["set"], row["scenario"]) == place]
        if {row["method"] for row in here} == set(ENGINES):
            best = {m: max(_average([r for r in here if r["method"] == m], p)[0] for p in _ways(here)) for m in ENGINES}
            claim = f"{' '.join(place).strip()}: variational NCL is within two points of Laplace-NCL, or better"
            laplace, variational = (100 * best[method] for method in ENGINES)
            found.append(Statement(claim, variational >= laplace - 2, f"{variational:.1f} % against {laplace:.1f} %"))
    return found


def _ways(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["predictions"] for row in rows))


def _average(rows: Sequence[Row], predictions: str) -> tuple[float, float]:
    values = [row["average accuracy"] for row in rows if row["predictions"] == predictions]
    mean, error, _ = mean_and_error(values)
    return mean, 0.0 if error != error else error


def _draw(results: Results) -> Mapping[str, Figure]:
    rows, curves = results.tables["summary"], results.tables["losses"]
    places = list(dict.fromkeys((row["set"], row["scenario"]) for row in rows))
    with panels(1, len(places) + 1, 5.5 * (len(places) + 1), 6.0) as (figure, (axes,)):
        for panel, place in zip(axes, places, strict=False):
            here = [row for row in rows if (row["set"], row["scenario"]) == place]
            methods = list(dict.fromkeys(row["method"] for row in here))
            for k, way in enumerate(_ways(here)):
                found = [_average([r for r in here if r["method"] == m], way) for m in methods]
                x = [i + 0.36 * (k - 0.5) for i in range(len(methods))]
                heights, errors = ([100 * v[i] for v in found] for i in (0, 1))
                panel.bar(x, heights, yerr=errors, width=0.34, color=PALETTE[k], label=way)
            panel.set_xticks(range(len(methods)), [m.replace("-", "\n") for m in methods])
            panel.set_title(" ".join(place).strip())
            panel.set_ylim(0, 118)
            panel.set_yticks(range(0, 101, 20))
        axes[0].set_ylabel("accuracy after all tasks (%)")
        axes[0].legend(fontsize=7, ncols=2, loc="upper center")
        first = [row for row in curves if row["method"] == ENGINES[1] and row["set"] == curves[0]["set"]]
        loss_by_task(axes[-1], first)
        axes[-1].set(ylabel="loss of variational NCL", title=curves[0]["set"])
        axes[-1].legend(fontsize=6)
        for name, panel in zip("ABCDEFGH", axes, strict=False):
            letter(panel, name)
    return {"nvcl": figure}


def _part(name: str, scenario: str | None, methods: Sequence[str], **rest: object) -> dict[str, object]:
    part = {"set": name, "scenario": scenario, "methods": list(methods)}
    return {**part, "settings": {}, "units": None, "tasks": None, **rest}


_SCENARIOS = ("task", "domain", "class")
RECIPE = Recipe(
    "nvcl",
    "natural variational NCL: stimulus-response tasks, and beside Laplace-NCL on split images",
    {
        "quick": {
            "parts": [
                _part("stimulus-response", None, ENGINES[1:], settings={"steps": 3}, units=10, tasks=2),
                _part("split-digits", "domain", ENGINES, settings={"steps": 10}),
            ],
            "seeds": 1,
            "samples": 4,
        },
        "laptop": {
            "parts": [
                _part("stimulus-response", None, ENGINES[1:], settings={"steps": 1500, "lr": 2e-4}, units=64),
                *(_part("split-mnist", scenario, ENGINES, settings={"steps": 1000}) for scenario in _SCENARIOS),
            ],
            "seeds": 1,
            "samples": 16,
        },
        "paper": {
            "parts": [
                _part("stimulus-response", None, ENGINES[1:]),
                *(_part("split-mnist", scenario, ENGINES) for scenario in _SCENARIOS),
            ],
            "seeds": 5,
            "samples": 32,
        },
    },
    _compute,
    _draw,
)
