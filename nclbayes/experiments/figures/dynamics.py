"""The paper's figures of latent dynamics: does a recurrent network keep responding to a task as when it learnt it?

A network learns the tasks of stroke MNIST one after the other, by NCL, by DOWM (alpha = 0.001) and with replay. After
each task it is shown the same test examples of every task, 50 of each digit, with the same input noise. For each task a
factor analysis model is fitted to the responses right after that task was learnt; responses at other times are
projected into its two-dimensional space. The similarity with the responses right after learning, r^2, is measured on
all units.

The paper does not define its r^2. Here it is the squared correlation over all units, steps and examples, after each
unit's mean has been taken out; the table has a stricter measure too, the explained variance, which also counts changes
of scale and of the means. "Early tasks" are those of the first half.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nclbayes.analysis.drawing import PALETTE, percent_ticks
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
from nclbayes.experiments.figures.dynamics_networks import Followed, Trials, follow
from nclbayes.experiments.figures.panels import FULL_WIDTH, letter, panels
from nclbayes.experiments.figures.recipe import Recipe, Results, Row, Settings, Statement, Workplace
from nclbayes.experiments.runs import RunConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METHODS = {"laplace-ncl": "NCL", "dowm": "DOWM", "replay": "replay"}
STABLE = 0.8
"""An r^2 from which on a representation is called stable."""

_POINTS = 16  # of a trajectory, from the first step to the last
_SINGLE = 3  # trajectories of single examples that are drawn of each digit
_LOOKS: dict[str, dict[str, Any]] = {
    "laplace-ncl": {"color": PALETTE[0], "marker": "o", "linestyle": "-"},
    "dowm": {"color": PALETTE[2], "marker": "^", "linestyle": "-."},
    "replay": {"color": PALETTE[1], "marker": "s", "linestyle": "--"},
}
_DIGITS = (PALETTE[0], PALETTE[1])


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
        RunConfig.of("stroke-mnist", method, seed=seed, device=place.device, **given)
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
                    trajectories += _trajectories(key, _digits(task.name), latent, trials)
                    endpoints += _endpoints(key, _digits(task.name), latent, trials)
    tables = {"r2": r2, "trajectories": trajectories, "endpoints": endpoints}
    return Results(tables, _statements(r2), {"shown": list(settings["shown"])})


def draw(results: Results) -> dict[str, Figure]:
    """The trajectories of each shown task, and how similarity and accuracy go on after a task was learnt.

    Args:
        results: Those of :func:`compute`.

    Returns:
        A picture "trajectories-..." for each shown task, and "stability".
    """
    names = {row["number"]: row["task"] for row in results.tables["r2"]}
    pictures = {
        f"trajectories-{'-'.join(_digits(names[number]))}": _trajectory_picture(number, results)
        for number in results.facts["shown"]
    }
    return {**pictures, "stability": _stability_picture(results.tables["r2"])}


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
                "accuracy": run.accuracy(after, task),
            }
        )
    return rows


def _trajectories(key: Row, digits: Sequence[str], latent: Tensor, trials: Trials) -> list[Row]:
    """The mean trajectory of each digit over relative time, and some of single examples."""
    paths = in_relative_time(latent, trials.lengths, _POINTS)
    rows: list[Row] = []
    for label, digit in enumerate(digits):
        own = paths[trials.labels == label]
        lines = {"mean": own.mean(0), **{str(i): own[i] for i in range(min(_SINGLE, len(own)))}}
        for example, line in lines.items():
            for point, (first, second) in enumerate(line.tolist()):
                time = point / (_POINTS - 1)
                place = {"time": time, "factor 1": first, "factor 2": second}
                rows.append({**key, "digit": digit, "example": example, **place})
    return rows


def _endpoints(key: Row, digits: Sequence[str], latent: Tensor, trials: Trials) -> list[Row]:
    ends = _last(latent, trials.lengths).tolist()
    return [
        {**key, "digit": digits[label], "factor 1": first, "factor 2": second}
        for label, (first, second) in zip(trials.labels.tolist(), ends, strict=True)
    ]


def _last(latent: Tensor, lengths: Tensor) -> Tensor:
    """Where each trajectory ends, [examples, factors]."""
    return latent[torch.arange(len(latent), device=latent.device), lengths - 1]


def _times(number: int, tasks: int) -> list[int]:
    """The times at which a task's trajectories are shown: before it, right after it, and up to three later ones."""
    later = [number + round(part * (tasks - number) / 3) for part in range(4)]
    return sorted({number - 1, *later})


def _digits(name: str) -> list[str]:
    """The digits in the name of a task, such as "stroke_mnist 4/5 plain"."""
    return name.split()[1].split("/")


def _statements(rows: Sequence[Row]) -> list[Statement]:
    tasks = max(row["number"] for row in rows)
    early = {method: _mean(rows, "r2", method, number=range(1, tasks // 2 + 1), after=[tasks]) for method in METHODS}
    apart = {method: _mean(rows, "separation", method, number=range(3, tasks + 1), since=[0]) for method in METHODS}
    values = ", ".join(f"{METHODS[method]} {value:.3f}" for method, value in early.items())
    detail = f"mean r2 of the early tasks after all {tasks} tasks: {values}"
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
        before, later = (_mean(rows, "r2", method, since=[since]) for since in (-1, 1))
        found.append(
            Statement(
                f"{METHODS[method]}: responses to a task change while it is learnt, and less thereafter",
                before < later,
                f"mean r2 with the responses right after learning: one task before {before:.3f}, one after {later:.3f}",
            )
        )
        before, learnt = (_mean(rows, "separation", method, since=[since]) for since in (-1, 0))
        found.append(
            Statement(
                f"{METHODS[method]}: trajectories of the two digits part only once their task is learnt",
                before < learnt,
                f"mean separation at the end of a trial: {before:.2f} before learning, {learnt:.2f} after",
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
    return mean_and_error(_values(rows, what, method, **wanted))[0]


def _values(rows: Sequence[Row], what: str, method: str, **wanted: Sequence[int]) -> list[float]:
    mine = [row for row in rows if row["method"] == method]
    return [row[what] for row in mine if all(row[key] in values for key, values in wanted.items())]


def _trajectory_picture(number: int, results: Results) -> Figure:
    """A row for each method, a column for each time; all panels of a row share their space."""
    rows = [row for row in results.tables["trajectories"] if row["number"] == number]
    ends = [row for row in results.tables["endpoints"] if row["number"] == number]
    found = {(row["method"], row["number"], row["after"]): row for row in results.tables["r2"] if row["seed"] == 0}
    times, digits = (list(dict.fromkeys(row[key] for row in rows)) for key in ("after", "digit"))
    width = min(FULL_WIDTH, 2.5 + 3.2 * len(times))
    with panels(len(METHODS), len(times), width, 11.0, sharex="row", sharey="row") as (figure, axes):
        for line, (method, name) in zip(axes, METHODS.items(), strict=True):
            for panel, after in zip(line, times, strict=True):
                key = {"method": method, "after": after}
                _trajectory_panel(panel, *([r for r in part if key.items() <= r.items()] for part in (rows, ends)))
                title = f"$r^2$ = {found[method, number, after]['r2']:.2f}"
                panel.set_title(f"{_when(after, number)}\n{title}" if method == next(iter(METHODS)) else title)
                if after == number:
                    panel.spines[:].set(visible=True, linewidth=1.4)
            line[0].set_ylabel(f"{name}\nfactor 2", linespacing=1.5)
        for panel in axes[-1]:
            panel.set_xlabel("factor 1")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        handles = [handle for handle, label in zip(handles, labels, strict=True) if label in digits]
        figure.legend(handles, [f"digit {digit}" for digit in digits], loc="outside lower center", ncols=len(digits))
    return figure


def _when(after: int, number: int) -> str:
    if after <= number:
        return "just learnt" if after == number else "before learning"
    return f"{after - number} task{'s' if after > number + 1 else ''} later"


def _trajectory_panel(panel: Axes, rows: Sequence[Row], ends: Sequence[Row]) -> None:
    """The mean trajectory of each digit, thin ones of single examples, and where all examples end."""
    paths: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        paths.setdefault((row["digit"], row["example"]), []).append(row)
    colours = dict(zip(dict.fromkeys(row["digit"] for row in rows), _DIGITS, strict=True))
    for digit, colour in colours.items():
        last = [row for row in ends if row["digit"] == digit]
        look = {"color": colour, "markersize": 2, "markeredgewidth": 0, "alpha": 0.5}
        panel.plot([row["factor 1"] for row in last], [row["factor 2"] for row in last], "o", **look)
    for (digit, example), path in paths.items():
        look = {"linewidth": 2.0, "label": digit} if example == "mean" else {"linewidth": 0.4, "alpha": 0.6}
        order = 3 if example == "mean" else 1
        points = [row["factor 1"] for row in path], [row["factor 2"] for row in path]
        panel.plot(*points, color=colours[digit], zorder=order, **look)
    panel.set(xticks=[], yticks=[])


def _stability_picture(rows: Sequence[Row]) -> Figure:
    """Similarity and accuracy over the tasks learnt since, averaged over tasks and seeds."""
    with panels(1, 2, 15.0, 6.5) as (figure, axes):
        _since_panel(axes[0, 0], rows, "r2", 1)
        axes[0, 0].set(ylabel=r"similarity of the responses, $r^2$", ylim=(0, 1.04))
        _since_panel(axes[0, 1], rows, "accuracy", 100)
        axes[0, 1].set_ylabel("accuracy on the task")
        percent_ticks(axes[0, 1].yaxis)
        for panel, text in zip(axes[0], "AB", strict=True):
            letter(panel, text, left=1.2)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def _since_panel(panel: Axes, rows: Sequence[Row], what: str, scale: float) -> None:
    """One measure of each method from just before a task is learnt, with standard errors."""
    times = range(-1, max(row["since"] for row in rows) + 1)
    for k, (method, name) in enumerate(METHODS.items()):
        found = [mean_and_error(scale * v for v in _values(rows, what, method, since=[since])) for since in times]
        errors = [0.0 if count < 2 else error for _, error, count in found]
        # Beside each other, error bars can be told apart.
        places = [since + 0.08 * (k - 1) for since in times]
        panel.errorbar(places, [mean for mean, *_ in found], errors, label=name, elinewidth=0.8, **_LOOKS[method])
    panel.axvline(-0.5, color="0.7", linewidth=0.6, linestyle=":")
    step = 1 if len(times) < 9 else 2
    panel.set_xticks([-1, *times[1::step]], ["before", *map(str, times[1::step])])
    panel.set_xlabel("tasks learnt since the task")
    panel.grid(axis="y")
