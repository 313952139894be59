"""The paper's figures of latent dynamics: does a recurrent network keep responding to a task as when it learnt it?

A network learns the tasks of stroke MNIST one after the other, by NCL, by DOWM (alpha = 0.001) and with replay. After
each task it is shown the same test examples of every task, 50 of each digit, with the same input noise. For each task a
factor analysis model is fitted to the responses right after that task was learnt; responses at other times are
projected into its two-dimensional space. The similarity with the responses right after learning, r^2, is measured on
all units.

The paper does not define its r^2. Here it is the squared correlation over all units, steps and examples, after each
unit's mean has been taken out; the table has a stricter measure too, the explained variance, which also counts changes
of scale and of the means. "Early tasks" are those of the first half. How far two digits are apart is measured where
trials end, in the space of the two factors; these follow what varies most, which need not be what tells the digits
apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nclbayes.analysis.dynamics import (
    LatentSpace,
    explained_variance,
    in_relative_time,
    r_squared,
    separation,
    unit_r_squared,
    valid_rows,
)
from nclbayes.analysis.measures import mean_and_error
from nclbayes.errors import SettingError
from nclbayes.experiments.config import RunConfig
from nclbayes.experiments.figures.dynamics_networks import Followed, Trials, follow
from nclbayes.experiments.figures.dynamics_pictures import METHODS, digits, draw, values
from nclbayes.experiments.figures.recipe import Recipe, Results, Row, Settings, Statement, Workplace

STABLE = 0.8
"""An r^2 from which on a representation is called stable."""

PARTED = 1.5
"""How many times farther apart digits must be than before, for their trajectories to have parted."""

_POINTS = 25  # of a trajectory, from the first step to the last
_SINGLE = 3  # trajectories of single examples that are kept of each digit


def compute(settings: Settings, place: Workplace) -> Results:
    """Learn the tasks by each method, and compare the responses at all times.

    Args:
        settings: So many ``tasks`` of so many ``steps``; ``examples`` of each digit that the networks are shown; the
            numbers ``shown`` of the tasks whose trajectories are drawn, counted from 1; so many ``seeds``; ``size``,
            the number of training digits a task (None: all); ``changes`` of the methods' settings.
        place: Where the networks are kept.

    Returns:
        The table "r2" of all tasks at all times; of the shown tasks and the first seed, the tables "trajectories" and
        "endpoints".

    Raises:
        SettingError: If a shown task is not among those learnt.
        DataError: If the data are not here and cannot be downloaded.
    """
    for number in settings["shown"]:
        if not 1 <= number <= settings["tasks"]:
            raise SettingError(f"Task {number} cannot be shown: {settings['tasks']} tasks are learnt.")
    changes = {"steps": settings["steps"], **settings["changes"]}
    given: dict[str, Any] = {"settings": changes, "size": settings["size"], "tasks": settings["tasks"]}
    configs = [
        RunConfig.of("stroke-mnist", method, seed=seed, device=place.device, keep_each=True, paper=True, **given)
        for seed in range(settings["seeds"])
        for method in METHODS
    ]
    r2: list[Row] = []
    trajectories: list[Row] = []
    endpoints: list[Row] = []
    for run in follow(configs, place):
        place.say(f"the responses of {run.config.method}, seed {run.config.seed}")
        for number, task in enumerate(run.tasks, start=1):
            trials = Trials.of(task, settings["examples"])
            states = [run.states(after, trials) for after in range(len(run.weights))]
            space = LatentSpace.fit(valid_rows(states[number], trials.lengths))
            r2 += _similarities(run, number, trials, states, space)
            if number in settings["shown"] and run.config.seed == 0:
                for after in _times(number, settings["tasks"]):
                    key = {"method": run.config.method, "number": number, "after": after}
                    latent = space.project(states[after])
                    trajectories += _trajectories(key, digits(task.name), latent, trials)
                    endpoints += _endpoints(key, digits(task.name), latent, trials)
    tables = {"r2": r2, "trajectories": trajectories, "endpoints": endpoints}
    return Results(tables, _statements(r2, settings["shown"]), {"shown": list(settings["shown"])})


_SETTINGS: dict[str, Any] = {"shown": [2, 3], "changes": {}}
RECIPE = Recipe(
    name="dynamics",
    summary="latent dynamics on stroke MNIST: do representations stay as they were learnt? NCL, DOWM and replay",
    scales={
        "quick": {
            **{"tasks": 4, "steps": 10, "examples": 20, "seeds": 1, "size": 300},
            **_SETTINGS,
            "changes": {"batch_size": 64, "fisher_size": 128},
        },
        "laptop": {**{"tasks": 6, "steps": 700, "examples": 50, "seeds": 1, "size": None}, **_SETTINGS},
        "paper": {**{"tasks": 15, "steps": 3906, "examples": 50, "seeds": 3, "size": None}, **_SETTINGS},
    },
    compute=compute,
    draw=draw,
)


def _similarities(
    run: Followed, number: int, trials: Trials, states: Sequence[Tensor], space: LatentSpace
) -> list[Row]:
    """One task at all times: its responses against those right after it was learnt."""
    task = run.tasks[number - 1]
    reference = valid_rows(states[number], trials.lengths)
    rows: list[Row] = []
    for after, found in enumerate(states):
        activity = valid_rows(found, trials.lengths)
        rows.append(
            {
                "method": run.config.method,
                "seed": run.config.seed,
                "task": task.name,
                "number": number,
                "after": after,
                "since": after - number,
                "r2": r_squared(reference, activity),
                "explained variance": explained_variance(reference, activity),
                "median r2 of units": float(unit_r_squared(reference, activity).nanmedian()),
                "separation": separation(_last(space.project(found), trials.lengths), trials.labels),
                "accuracy": run.accuracies[after][number - 1],
            }
        )
    return rows


def _trajectories(key: Row, pair: Sequence[str], latent: Tensor, trials: Trials) -> list[Row]:
    """The mean trajectory of each digit over relative time, and some of single examples."""
    paths = in_relative_time(latent, trials.lengths, _POINTS)
    rows: list[Row] = []
    for label, digit in enumerate(pair):
        own = paths[trials.labels == label]
        lines = {"mean": own.mean(0), **{str(i): own[i] for i in range(min(_SINGLE, len(own)))}}
        for example, line in lines.items():
            for point, (first, second) in enumerate(line.tolist()):
                time = point / (_POINTS - 1)
                place = {"time": time, "factor 1": first, "factor 2": second}
                rows.append({**key, "digit": digit, "example": example, **place})
    return rows


def _endpoints(key: Row, pair: Sequence[str], latent: Tensor, trials: Trials) -> list[Row]:
    ends = _last(latent, trials.lengths).tolist()
    return [
        {**key, "digit": pair[label], "factor 1": first, "factor 2": second}
        for label, (first, second) in zip(trials.labels.tolist(), ends, strict=True)
    ]


def _last(latent: Tensor, lengths: Tensor) -> Tensor:
    """Where each trajectory ends, [examples, factors]."""
    return latent[torch.arange(len(latent), device=latent.device), lengths - 1]


def _times(number: int, tasks: int) -> list[int]:
    """The times at which a task's trajectories are shown: before it, right after it, and up to three later ones."""
    later = [number + round(part * (tasks - number) / 3) for part in range(4)]
    return sorted({number - 1, *later})


def _statements(rows: Sequence[Row], shown: Sequence[int]) -> list[Statement]:
    """What the paper says: of all tasks, and in its captions of those that it shows."""
    tasks = max(row["number"] for row in rows)
    early = {method: _mean(rows, "r2", method, number=range(1, tasks // 2 + 1), after=[tasks]) for method in METHODS}
    apart = {method: _mean(rows, "separation", method, number=range(3, tasks + 1), since=[0]) for method in METHODS}
    written = ", ".join(f"{METHODS[method]} {value:.3f}" for method, value in early.items())
    detail = f"mean r2 of the early tasks after all {tasks} tasks: {written}"
    found = [
        Statement(f"{METHODS[method]} keeps the representations of early tasks", early[method] >= STABLE, detail)
        for method in ("laplace-ncl", "dowm")
    ]
    least = min(early["laplace-ncl"], early["dowm"])
    found.append(
        Statement("replay's representations drift more than NCL's and DOWM's", early["replay"] < least, detail)
    )
    more = early["dowm"] > early["laplace-ncl"]
    found.append(Statement("DOWM's representations of early tasks drift less than NCL's", more, detail))
    for method in ("laplace-ncl", "dowm"):
        # Before the first task the network is untrained, and after the last one there is none.
        between = range(2, tasks)
        before, later = (_mean(rows, "r2", method, number=between, since=[since]) for since in (-1, 1))
        found.append(
            Statement(
                f"{METHODS[method]}: responses to a task change while it is learnt, and less thereafter",
                before < later,
                f"mean r2 with the responses right after learning: one task before {before:.3f}, one after {later:.3f}",
            )
        )
    names = {row["number"]: " vs ".join(digits(row["task"])) for row in rows}
    for number in shown:
        before, learnt = (_mean(rows, "separation", "laplace-ncl", number=[number], since=[at]) for at in (-1, 0))
        found.append(
            Statement(
                f"NCL, task {number}, {names[number]}: the trajectories of the two digits part once the task is learnt",
                learnt >= PARTED * before,
                f"separation at the end of a trial, in the two factors: {before:.2f} before, {learnt:.2f} after",
            )
        )
    found.append(
        Statement(
            "DOWM separates the digits of later tasks less well than NCL",
            apart["dowm"] < apart["laplace-ncl"],
            f"mean separation right after learning, from task 3 on: DOWM {apart['dowm']:.2f}, "
            f"NCL {apart['laplace-ncl']:.2f}",
        )
    )
    return found


def _mean(rows: Sequence[Row], what: str, method: str, **wanted: Sequence[int]) -> float:
    """The mean over the rows of a method whose columns have one of the wanted values."""
    return mean_and_error(values(rows, what, method, **wanted))[0]
