"""Figures of several panels: their size, the letters that name them, and curves that more than one figure has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nclbayes.analysis.drawing import LINES, PALETTE, own_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FULL_WIDTH = 17.0
"""The width of a page's text in cm."""


@contextmanager
def empty_figure(width: float, height: float) -> Iterator[Figure]:
    """A figure in our style, to be divided as one likes; laid out once before the settings are given back.

    Args:
        width: Of the figure, in cm.
        height: Of the figure, in cm.

    Yields:
        The figure.
    """
    with own_style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width / 2.54, height / 2.54), layout="constrained")
        yield figure
        figure.draw_without_rendering()


@contextmanager
def panels(rows: int, columns: int, width: float, height: float, **settings: Any) -> Iterator[tuple[Figure, Any]]:
    """A figure of a grid of panels.

    Args:
        rows: How many rows.
        columns: How many columns.
        width: Of the figure, in cm.
        height: Of the figure, in cm.
        **settings: Those of ``Figure.subplots``, such as ``sharex``.

    Yields:
        The figure and its axes, an array [rows, columns].
    """
    with empty_figure(width, height) as figure:
        yield figure, figure.subplots(rows, columns, squeeze=False, **settings)


def letter(axes: Axes, text: str, left: float = 0.9) -> None:
    """Write a panel's letter above its top left corner.

    Args:
        axes: The panel.
        text: The letter.
        left: How far left of the axes, in cm.
    """
    offset = (-left * 72 / 2.54, 5)
    axes.annotate(
        text, (0, 1), offset, xycoords="axes fraction", textcoords="offset points", weight="bold", va="bottom"
    )


def loss_axis(axes: Axes, values: Sequence[float]) -> None:
    """Show losses on a logarithmic axis where they differ by much, and tasks as whole numbers.

    Args:
        axes: The panel.
        values: The losses that it shows.
    """
    from matplotlib.ticker import MaxNLocator

    if min(values) > 0 and max(values) > 5 * min(values):
        axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def loss_by_task(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """The loss on each task from when it was learnt on, averaged over seeds.

    Args:
        axes: The panel.
        rows: Each with the ``number`` of a ``task``, how many ``tasks learnt``, and the ``loss`` then.
    """
    for number in sorted({row["number"] for row in rows}):
        own = [row for row in rows if row["number"] == number]
        times = sorted({row["tasks learnt"] for row in own})
        losses = [[row["loss"] for row in own if row["tasks learnt"] == time] for time in times]
        turn, colour = divmod(number - 1, len(PALETTE))
        look: dict[str, Any] = {
            "color": PALETTE[colour],
            "linestyle": LINES[turn % len(LINES)],
            "marker": "o",
            "markersize": 2.5,
        }
        axes.plot(times, [sum(v) / len(v) for v in losses], label=own[0]["task"].split(" ", 1)[-1], **look)
    loss_axis(axes, [row["loss"] for row in rows])
    axes.set_xlabel("tasks learnt")
