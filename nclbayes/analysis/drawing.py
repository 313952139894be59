"""What all pictures share: style, panels, axes, legends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from nclbayes.analysis.names import plain
from nclbayes.analysis.record import Record
from nclbayes.errors import SettingError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""The colours of Okabe and Ito that show on white; black is kept for averages."""

MARKERS = "os^Dv"
LINES = ("-", "--", "-.", ":")
WIDTH, HEIGHT = 9.0, 6.0
CHARACTER, LINE = 0.17, 0.43  # cm: how much a letter of 8 points takes, and a line of a legend
LONGEST = 24
BLOCKS = 100
STYLE: dict[str, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "grid.color": "0.9",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "pdf.fonttype": 42,
    "svg.hashsalt": "nclbayes",
}


@contextmanager
def own_style() -> Iterator[None]:
    """Our settings on top of matplotlib's own defaults; the reader's fonts are kept, for scripts that need them."""
    try:
        import matplotlib
        from matplotlib import style
    except ImportError as error:
        raise SettingError("Pictures need matplotlib: pip install 'nclbayes[experiments]'") from error
    fonts = {key: matplotlib.rcParams[key] for key in ("font.family", "font.sans-serif", "font.serif")}
    with style.context(["default", {**fonts, **STYLE}]):
        yield


@contextmanager
def one_panel(width: float, height: float) -> Iterator[tuple[Figure, Axes]]:
    """A figure of one panel, in cm; laid out once before the settings are given back."""
    with own_style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width / 2.54, height / 2.54), layout="constrained")
        yield figure, figure.subplots()
        figure.draw_without_rendering()


def rows_and_count(record: Record) -> tuple[list[list[float]], int]:
    """The accuracies of a record that has some, and how many tasks were learnt."""
    if not record.scores:
        raise SettingError("The record has no row yet: learn a task and add its scores.")
    return record.matrix(), len(record.scores)


def running_averages(record: Record) -> list[float]:
    """The average accuracy over the tasks learnt so far, after each task."""
    return [sum(row[: i + 1]) / (i + 1) for i, row in enumerate(record.matrix())]


def block_means(losses: Sequence[float]) -> tuple[list[float], list[float]]:
    """The mean step and mean loss of up to a hundred blocks of steps; steps count from 1."""
    n, blocks = len(losses), min(len(losses), BLOCKS)
    edges = [n * b // blocks for b in range(blocks + 1)]
    pairs = list(pairwise(edges))
    return [(a + 1 + b) / 2 for a, b in pairs], [sum(losses[a:b]) / (b - a) for a, b in pairs]


def spread_out(places: Sequence[float], gap: float, end: float) -> list[float]:
    """The places, in order, moved apart until each two are `gap` apart; none beyond the end where there is room."""
    moved = list(places)
    for i in range(1, len(moved)):
        moved[i] = max(moved[i], moved[i - 1] + gap)
    limit = max(end, gap * len(moved)) - gap / 2
    for i in reversed(range(len(moved))):
        moved[i] = min(moved[i], limit)
        limit = moved[i] - gap
    return moved


def short_names(names: Sequence[str]) -> list[str]:
    """Names on one line; long ones lose their end or, where that makes two alike, their middle, or are numbered."""
    lines, half = [plain(" ".join(name.split())) for name in names], (LONGEST - 1) // 2
    for head, tail in ((LONGEST - 1, 0), (half, half)):
        short = [n if len(n) <= LONGEST else f"{n[:head]}…{n[len(n) - tail :]}" for n in lines]
        if len(set(short)) == len(short):
            return short
    return [f"{i}. {name}" for i, name in enumerate(short, start=1)]


def line_look(k: int) -> dict[str, Any]:
    """Colour, marker and line of the k-th curve; a second round of the colours has hollow markers."""
    colour = PALETTE[k % len(PALETTE)]
    inside = "white" if k // len(PALETTE) % 2 else colour
    marker, line = MARKERS[k % len(MARKERS)], LINES[k % len(LINES)]
    return {"color": colour, "marker": marker, "markerfacecolor": inside, "linestyle": line}


def percent_limits(values: Iterable[float]) -> tuple[float, float]:
    """Limits of an axis of percentages: ten points at least, so that small differences look small."""
    finite = [value for value in values if math.isfinite(value)] or [0.0, 100.0]
    low, high = min(finite), max(finite)
    lack, pad = max(10 - (high - low), 0) / 2, 0.04 * max(high - low, 10)
    bottom, top = low - lack - pad, high + lack + pad
    return (max(bottom, -pad) if low >= 0 else bottom), (min(top, 100 + pad) if high <= 100 else top)


def accuracy_axis(axes: Axes, title: str, values: Iterable[float]) -> None:
    """A vertical axis of percentages."""
    axes.set_ylim(percent_limits(values))
    percent_ticks(axes.yaxis)
    axes.set_ylabel(title)
    axes.grid(axis="y")


def tasks_learnt_axis(axes: Axes, learnt: int) -> None:
    """A horizontal axis that counts tasks."""
    step = 5 * math.ceil(learnt / 40)
    axes.set_xticks(range(1, learnt + 1) if learnt <= 10 else [1, *range(step, learnt + 1, step)])
    axes.set_xlim(0.7, learnt + 0.3)
    axes.set_xlabel("tasks learnt")


def percent_ticks(axis: Axis) -> None:
    """Ticks written as percentages."""
    set_ticks(axis, "{x:g}%")


def set_ticks(axis: Axis, form: str, whole: bool = False) -> None:
    """Few ticks, written in a form."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    most, least = (4, 1) if whole else (6, 3)
    axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 2.5, 5, 10], integer=whole, min_n_ticks=least))
    axis.set_major_formatter(StrMethodFormatter(form))


def legend_width(labels: Sequence[str]) -> float:
    """How wide a legend is, in cm."""
    return 1.4 + CHARACTER * max(map(len, labels))


def add_legend(figure: Figure, lines: Sequence[Artist], labels: Sequence[str]) -> None:
    """A legend beside the panel, with names as they are: no formulas, and no special meaning of an underscore."""
    legend = figure.legend(lines, [str(i) for i in range(len(lines))], loc="outside right upper", handlelength=2.8)
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set(text=label, parse_math=False)


def readable_on(rgba: Any) -> str:
    """Black or white, whichever contrasts more with a colour (relative luminance as WCAG defines it)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in map(float, rgba[:3])]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "black" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "white"
