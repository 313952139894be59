"""The paper's comparison on feedforward networks: all methods in three scenarios, beside the published numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nclbayes.analysis.drawing import PALETTE
from nclbayes.analysis.measures import mean_and_error
from nclbayes.analysis.record import Record
from nclbayes.experiments.benchmarks.published import PUBLISHED, SCENARIOS
from nclbayes.experiments.comparison import run_folder
from nclbayes.experiments.config import RunConfig
from nclbayes.experiments.figures.panels import panels
from nclbayes.experiments.figures.recipe import Recipe, Results, Row, Settings, Statement, Workplace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_UNIT = " (unit prior)"
# The continual methods that the paper sets NCL against.
_REGULARISED = ("si", "ewc", "kfac", "owm")


def _compute(settings: Settings, place: Workplace) -> Results:
    cells = list(product(settings["sets"], settings["scenarios"], settings["methods"]))
    # All at once: with jobs, no core waits for the last seed of a cell.
    runs = [run for cell in cells for run in _runs(*cell, settings, place)]
    records = place.run_all(runs)
    seeds = settings["seeds"]
    rows = [_row(*cell, records[i * seeds : (i + 1) * seeds]) for i, cell in enumerate(cells)]
    return Results({"accuracy": rows}, _statements(rows), {"seeds": list(range(seeds))})


def _runs(name: str, scenario: str, label: str, settings: Settings, place: Workplace) -> list[tuple[RunConfig, Path]]:
    """One method in one scenario: a run for each seed, with its folder."""
    folder = place.out / "runs" / name / scenario / re.sub(r"\W+", "-", label).strip("-")
    configs = [
        RunConfig.of(
            name,
            label.removesuffix(_UNIT),
            scenario,
            seed,
            prior_scale=1.0 if label.endswith(_UNIT) else None,
            settings={} if settings["steps"] is None else {"steps": settings["steps"]},
            size=settings["size"],
            paper=True,
            device=place.device,
        )
        for seed in range(settings["seeds"])
    ]
    return [(config, run_folder(folder, config)) for config in configs]


def _row(name: str, scenario: str, label: str, records: Sequence[Record]) -> Row:
    """One method in one scenario, over the seeds."""
    found = [100 * record.average_accuracy for record in records]
    mean, error, _ = mean_and_error(found)
    published = PUBLISHED.get(name, {}).get(label)
    expected, expected_error = published[SCENARIOS.index(scenario)] if published else (math.nan, math.nan)
    return {
        "set": name,
        "scenario": scenario,
        "method": label,
        "accuracy": mean,
        "standard error": None if math.isnan(error) else error,
        "seeds": len(found),
        "published": None if math.isnan(expected) else expected,
        "published error": None if math.isnan(expected) else expected_error,
        "minutes": sum(sum(record.seconds) for record in records) / 60 / len(records),
    }


def _statements(rows: Sequence[Row]) -> list[Statement]:
    """Each cell is as published: within 3 points or 3 standard errors, or better."""
    found = []
    for row in rows:
        if row["published"] is not None:
            errors = math.hypot(row["standard error"] or 0.0, row["published error"])
            holds = row["accuracy"] >= row["published"] - max(3.0, 3 * errors)
            close = abs(row["accuracy"] - row["published"]) <= max(3.0, 3 * errors)
            word = "as published" if close else "better" if holds else "lower"
            own = "" if row["standard error"] is None else f" +- {row['standard error']:.2f}"
            detail = f"{row['accuracy']:.2f}{own}, published {row['published']:.2f}: {word}"
            found.append(Statement(f"{row['set']}, {row['scenario']}, {row['method']}", holds, detail))
    return found + _order(rows)


def _order(rows: Sequence[Row]) -> list[Statement]:
    """Who is best, where the paper says so: NCL, or with one head over all classes NCL and OWM."""
    found = []
    for name, scenario in dict.fromkeys((row["set"], row["scenario"]) for row in rows if row["published"] is not None):
        here = {r["method"]: r["accuracy"] for r in rows if (r["set"], r["scenario"]) == (name, scenario)}
        best = ("laplace-ncl", "owm") if scenario == "class" else ("laplace-ncl",)
        others = [m for m in here if m in _REGULARISED and m not in best]
        if others and all(method in here for method in best):
            least, most = min(best, key=here.__getitem__), max(others, key=here.__getitem__)
            claim = f"{name}, {scenario}: {' and '.join(best)} ahead of {', '.join(others)}"
            detail = f"{least} {here[least]:.2f}, {most} {here[most]:.2f}"
            found.append(Statement(claim, here[least] > here[most], detail))
    return found


def _draw(results: Results) -> Mapping[str, Figure]:
    """A panel for each set and scenario: a bar for each method, the published mean a line across it."""
    rows = results.tables["accuracy"]
    sets = list(dict.fromkeys(row["set"] for row in rows))
    scenarios = list(dict.fromkeys(row["scenario"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    with panels(len(sets), len(scenarios), 4.8 * len(scenarios) + 2.6, 6.0 * len(sets)) as (figure, axes):
        for i, name in enumerate(sets):
            for j, scenario in enumerate(scenarios):
                shown = {row["method"]: row for row in rows if (row["set"], row["scenario"]) == (name, scenario)}
                _panel(axes[i, j], shown, methods)
                axes[i, j].set_title(f"{name}, {scenario}")
                if j > 0:
                    axes[i, j].set_yticklabels([])
        if any(row["published"] is not None for row in rows):
            (line,) = axes[0, 0].plot([], [], color="black", linestyle="", marker="|", markersize=12)
            figure.legend([line], ["published mean"], loc="outside lower center", fontsize=7)
    return {"accuracy": figure}


def _panel(axes: Any, shown: Mapping[str, Row], methods: Sequence[str]) -> None:
    values = [shown[method]["accuracy"] for method in methods]
    errors = [shown[method]["standard error"] or 0.0 for method in methods]
    colours = [PALETTE[0] if "ncl" in m else "0.75" if m in ("none", "joint") else PALETTE[4] for m in methods]
    axes.barh(range(len(methods)), values, xerr=errors, color=colours, height=0.7)
    for y, method in enumerate(methods):
        if shown[method]["published"] is not None:
            axes.vlines(shown[method]["published"], y - 0.42, y + 0.42, color="black", linewidth=1.2)
    lowest = min([*values, *(shown[m]["published"] or 100.0 for m in methods)])
    axes.set_xlim(max(0.0, lowest - 0.15 * (100 - lowest) - 2), 101)
    axes.set_yticks(range(len(methods)), methods)
    axes.invert_yaxis()
    axes.set_xlabel("accuracy after all tasks (%)")


_ALL = tuple(PUBLISHED["split-mnist"])
RECIPE = Recipe(
    "feedforward",
    "split MNIST and split CIFAR-100 in three scenarios: every method beside the published table",
    {
        "quick": {
            "sets": ["split-digits"],
            "scenarios": ["domain"],
            "methods": ["none", "ewc", "owm", "laplace-ncl"],
            "seeds": 1,
            "steps": 20,
            "size": None,
        },
        "laptop": {
            "sets": ["split-mnist"],
            "scenarios": list(SCENARIOS),
            "methods": list(_ALL),
            "seeds": 3,
            "steps": None,
            "size": None,
        },
        "paper": {
            "sets": ["split-mnist", "split-cifar100"],
            "scenarios": list(SCENARIOS),
            "methods": [*_ALL, "dowm", "gpm", "vcl", "diagonal-ncl", "variational-ncl", "replay"],
            "seeds": 20,
            "steps": None,
            "size": None,
        },
    },
    _compute,
    _draw,
)
