"""The pictures of latent dynamics: trajectories in the space of two factors, and their stability over tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from nclbayes.analysis.drawing import PALETTE, percent_ticks
from nclbayes.analysis.measures import mean_and_error
from nclbayes.experiments.figures.panels import FULL_WIDTH, letter, panels
from nclbayes.experiments.figures.recipe import Results, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METHODS = {"laplace-ncl": "NCL", "dowm": "DOWM", "replay": "replay"}
"""How the methods are called in the pictures."""

_LOOKS: dict[str, dict[str, Any]] = {
    "laplace-ncl": {"color": PALETTE[0], "marker": "o", "linestyle": "-"},
    "dowm": {"color": PALETTE[2], "marker": "^", "linestyle": "-."},
    "replay": {"color": PALETTE[1], "marker": "s", "linestyle": "--"},
}
_DIGITS = (PALETTE[0], PALETTE[1])


def digits(name: str) -> list[str]:
    """The digits of a task.

    Args:
        name: The task's name, such as "stroke_mnist 4/5 plain".

    Returns:
        Such as ["4", "5"].
    """
    return name.split()[1].split("/")


def values(rows: Sequence[Row], what: str, method: str, **wanted: Sequence[int]) -> list[float]:
    """A column of the rows of a method.

    Args:
        rows: The table.
        what: The column.
        method: The method.
        **wanted: Which values other columns may have.

    Returns:
        The values.
    """
    mine = [row for row in rows if row["method"] == method]
    return [row[what] for row in mine if all(row[key] in allowed for key, allowed in wanted.items())]


def draw(results: Results) -> dict[str, Figure]:
    """The trajectories of each shown task, and how similarity and accuracy go on after a task was learnt.

    Args:
        results: Those of the recipe.

    Returns:
        A picture "trajectories-..." for each shown task, and "stability".
    """
    names = {row["number"]: row["task"] for row in results.tables["r2"]}
    pictures = {
        f"trajectories-{number}-{'-'.join(digits(names[number]))}": _trajectory_picture(number, results)
        for number in results.facts["shown"]
    }
    return {**pictures, "stability": _stability_picture(results.tables["r2"])}


def _trajectory_picture(number: int, results: Results) -> Figure:
    """A row for each method, a column for each time; all panels of a row share their space."""
    rows = [row for row in results.tables["trajectories"] if row["number"] == number]
    ends = [row for row in results.tables["endpoints"] if row["number"] == number]
    found = {(row["method"], row["number"], row["after"]): row for row in results.tables["r2"] if row["seed"] == 0}
    times, names = (list(dict.fromkeys(row[key] for row in rows)) for key in ("after", "digit"))
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
            line[0].set(**_limits(*([r for r in part if r["method"] == method] for part in (rows, ends))))
            line[0].set_ylabel(f"{name}\nfactor 2", linespacing=1.5)
        for panel in axes[-1]:
            panel.set_xlabel("factor 1")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        handles = [handle for handle, label in zip(handles, labels, strict=True) if label in names]
        figure.legend(handles, [f"digit {digit}" for digit in names], loc="outside lower center", ncols=len(names))
    return figure


def _limits(rows: Sequence[Row], ends: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """Limits that hold all mean trajectories and nearly all ends: single trials that go far would hide the others."""
    limits = {}
    for axis, factor in (("xlim", "factor 1"), ("ylim", "factor 2")):
        low, high = torch.tensor([row[factor] for row in ends]).quantile(torch.tensor([0.02, 0.98])).tolist()
        means = [row[factor] for row in rows if row["example"] == "mean"]
        low, high = min(low, *means), max(high, *means)
        limits[axis] = (low - 0.08 * (high - low), high + 0.08 * (high - low))
    return limits


def _when(after: int, number: int) -> str:
    if after <= number:
        return "just learnt" if after == number else "before learning"
    return f"{after - number} task{'s' if after > number + 1 else ''} later"


def _trajectory_panel(panel: Axes, rows: Sequence[Row], ends: Sequence[Row]) -> None:
    """The mean trajectory of each digit, a dot at its end, thin ones of single examples, and where all examples end."""
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
        if example == "mean":
            end: dict[str, Any] = {"marker": "o", "markersize": 5, "markeredgecolor": "white", "zorder": 4}
            panel.plot(points[0][-1], points[1][-1], color=colours[digit], **end)
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
        found = [mean_and_error(scale * v for v in values(rows, what, method, since=[since])) for since in times]
        errors = [0.0 if count < 2 else error for _, error, count in found]
        # Beside each other, error bars can be told apart.
        places = [since + 0.08 * (k - 1) for since in times]
        panel.errorbar(places, [mean for mean, *_ in found], errors, label=name, elinewidth=0.8, **_LOOKS[method])
    panel.axvline(-0.5, color="0.7", linewidth=0.6, linestyle=":")
    step = 1 if len(times) < 9 else 2
    panel.set_xticks([-1, *times[1::step]], ["before", *map(str, times[1::step])])
    panel.set_xlabel("tasks learnt since the task")
    panel.grid(axis="y")
