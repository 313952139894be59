"""The picture of the figure about uncertainty: a row of panels for each engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from nclbayes.analysis.drawing import LINES, MARKERS, PALETTE
from nclbayes.analysis.measures import mean_and_error
from nclbayes.experiments.figures.panels import letter, panels
from nclbayes.experiments.figures.recipe import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Look = Mapping[str, Any]
# Below this share of the examples no error rate is drawn.
_FEW = 0.05


def picture(tables: Mapping[str, Sequence[Row]], end: str) -> Figure:
    """For each engine: reliability, risk against coverage, calibration over time, foreign inputs.

    Args:
        tables: The figure's tables.
        end: What the moment after the last task is called.

    Returns:
        The figure.
    """
    methods = _each(tables["measures"], "method")
    ways = _each(tables["measures"], "way")
    looks = {
        way: {
            "color": PALETTE[k % len(PALETTE)],
            "linestyle": LINES[k % len(LINES)],
            "marker": MARKERS[k % len(MARKERS)],
        }
        for k, way in enumerate(ways)
    }
    with panels(len(methods), 4, 24.0, 5.6 * len(methods) + 0.8) as (figure, axes):
        for i, method in enumerate(methods):
            own = {name: [row for row in rows if row["method"] == method] for name, rows in tables.items()}
            _reliability(axes[i, 0], [row for row in own["reliability"] if row["when"] == end], looks)
            _risk(axes[i, 1], [row for row in own["risk"] if row["when"] == end], looks)
            _over_time(axes[i, 2], own["measures"], looks)
            _foreign(axes[i, 3], own["foreign"], looks)
            axes[i, 0].set_ylabel(f"{method}\naccuracy")
            for k in range(4):
                letter(axes[i, k], "ABCDEFGHIJKL"[4 * i + k])
        titles = (
            "reliability in the end",
            "risk and coverage in the end",
            "calibration of each task",
            "foreign inputs",
        )
        for panel, title in zip(axes[0], titles, strict=True):
            panel.set_title(title)
        handles = [axes[0, 0].plot([], [], label=way, markersize=4, **look)[0] for way, look in looks.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(ways), fontsize=7)
    return figure


def _each(rows: Sequence[Row], column: str) -> list[str]:
    return list(dict.fromkeys(row[column] for row in rows))


def _reliability(axes: Axes, rows: Sequence[Row], looks: Mapping[str, Look]) -> None:
    """Confidence against accuracy; a larger point has more examples. The first seed only, as bins differ."""
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=0.8, zorder=0)
    first = min(row["seed"] for row in rows)
    most = max(row["examples"] for row in rows)
    for way, look in looks.items():
        own = [row for row in rows if row["way"] == way and row["seed"] == first]
        x, y = [row["confidence"] for row in own], [row["accuracy"] for row in own]
        axes.plot(x, y, color=look["color"], linestyle=look["linestyle"], linewidth=0.9)
        sizes = [4 + 36 * row["examples"] / most for row in own]
        axes.scatter(x, y, s=sizes, color=look["color"], marker=look["marker"], linewidths=0)
    least = min(row["confidence"] for row in rows)
    axes.set(xlabel="confidence", xlim=(least - 0.03, 1.03), ylim=(-0.03, 1.03))


def _risk(axes: Axes, rows: Sequence[Row], looks: Mapping[str, Look]) -> None:
    """The error rate of the surest share of examples, the mean over seeds; of the first few it is all or nothing."""
    rows = [row for row in rows if row["coverage"] >= _FEW]
    for way, look in looks.items():
        own = sorted((row for row in rows if row["way"] == way), key=lambda row: row["coverage"])
        points = [(x, mean_and_error(row["risk"] for row in at)[0]) for x, at in groupby(own, lambda r: r["coverage"])]
        x, y = zip(*points, strict=True)
        axes.plot(x, [100 * value for value in y], color=look["color"], linestyle=look["linestyle"])
    axes.set(xlabel="share answered", ylabel="errors among them (%)", xlim=(0, 1.02))
    axes.set_ylim(bottom=0)


def _over_time(axes: Axes, rows: Sequence[Row], looks: Mapping[str, Look]) -> None:
    """The calibration error of each task when it was learnt (open) and in the end (filled)."""
    first, last = _each(rows, "when")
    for k, (way, look) in enumerate(looks.items()):
        own = [row for row in rows if row["way"] == way]
        numbers = sorted({row["number"] for row in own})
        shift = 0.16 * (k - (len(looks) - 1) / 2)
        for when, face in ((first, "white"), (last, look["color"])):
            values = [
                100 * mean_and_error(r["calibration error"] for r in own if (r["number"], r["when"]) == (n, when))[0]
                for n in numbers
            ]
            style = {"markerfacecolor": face, "color": look["color"], "marker": look["marker"], "linestyle": ""}
            axes.plot([n + shift for n in numbers], values, markersize=4, **style)
    axes.set(xlabel="task (open: when learnt)", ylabel="calibration error (%)")
    axes.set_xticks(sorted({row["number"] for row in rows}))
    axes.set_ylim(bottom=0)


def _foreign(axes: Axes, rows: Sequence[Row], looks: Mapping[str, Look]) -> None:
    """How well each kind of foreign input is told apart, the mean over tasks and moments."""
    kinds = _each(rows, "foreign")
    width = 0.8 / len(looks)
    for k, (way, look) in enumerate(looks.items()):
        heights = [
            mean_and_error(row["auroc"] for row in rows if (row["way"], row["foreign"]) == (way, kind))[0]
            for kind in kinds
        ]
        places = [i + width * (k - (len(looks) - 1) / 2) for i in range(len(kinds))]
        axes.bar(places, heights, width=0.9 * width, color=look["color"])
    axes.axhline(0.5, color="0.4", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(kinds)), [kind.replace(" ", "\n", 1) for kind in kinds])
    axes.set(ylabel="AUROC", ylim=(0, 1.02))
