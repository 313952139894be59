"""Pictures of what was learnt and what was kept, drawn from records.

Each function returns a ``matplotlib.figure.Figure``; :func:`save` writes it. A panel is 9 x 6 cm with text of 8 points,
and grows where there are many tasks or long names. The settings of matplotlib are left as they were.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from nclbayes.analysis.record import Record
from nclbayes.errors import SettingError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""The colours of Okabe and Ito that show on white; black is kept for averages."""

_MARKERS = "os^Dv"
_LINES = ("-", "--", "-.", ":")
_WIDTH, _HEIGHT = 9.0, 6.0
_CHARACTER, _LINE = 0.17, 0.43  # cm: how much a letter of 8 points takes, and a line of a legend
_LONGEST = 24
_BLOCKS = 100
_STYLE: dict[str, Any] = {
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


@dataclass(frozen=True)
class Measure:
    """How a number of :meth:`~nclbayes.Record.summary` is shown.

    Attributes:
        title: What it is called.
        unit: Its unit.
        scale: By how much it is multiplied to have that unit.
        decimals: How many are written.
    """

    title: str
    unit: str
    scale: float
    decimals: int

    def write(self, values: Sequence[float], with_unit: bool = False) -> str:
        """The mean and its standard error; where some values are not finite, how many are.

        Args:
            values: As in the summaries, one a seed.
            with_unit: Write the unit too.

        Returns:
            Text such as ``"97.3 ± 0.2"``; a dash if no value is finite.

        Example:
            >>> from nclbayes.analysis.plots import MEASURES
            >>> MEASURES["average accuracy"].write([0.96, 0.98, float("nan")])
            '97.0 ± 1.0 (2 of 3)'
        """
        mean, error, count = mean_and_error(values)
        if not count:
            return "-"
        text = self._number(mean) + ("" if math.isnan(error) else f" ± {self._number(error)}")
        text += f" {self.unit}" if with_unit else ""
        return text if count == len(values) else f"{text} ({count} of {len(values)})"

    def _number(self, value: float) -> str:
        value *= self.scale
        if abs(value) >= 1e5:
            return f"{value:.3g}"
        return f"{round(value, self.decimals) + 0.0:.{self.decimals}f}"


MEASURES = {
    "average accuracy": Measure("average accuracy", "%", 100, 1),
    "forgetting": Measure("forgetting", "%", 100, 1),
    "backward transfer": Measure("backward transfer", "%", 100, 1),
    "forward transfer": Measure("forward transfer", "%", 100, 1),
    "average loss": Measure("loss", "nats", 1, 3),
    "calibration error": Measure("calibration error", "%", 100, 1),
    "seconds": Measure("learning time", "minutes", 1 / 60, 2),
}
"""How each number of a record's summary is shown."""


def mean_and_error(values: Iterable[float]) -> tuple[float, float, int]:
    """The mean of the finite values, its standard error, and how many there are.

    Args:
        values: One a seed.

    Returns:
        ``(mean, s / sqrt(n), n)`` with s the standard deviation (n - 1 in its denominator); the error is NaN for fewer
        than two values, the mean for none.

    Example:
        >>> from nclbayes.analysis.plots import mean_and_error
        >>> mean_and_error([1.0, 3.0, float("nan")])
        (2.0, 1.0, 2)
    """
    finite = [value for value in values if math.isfinite(value)]
    n = len(finite)
    mean = sum(finite) / n if n else math.nan
    error = math.sqrt(sum((value - mean) ** 2 for value in finite) / (n - 1) / n) if n > 1 else math.nan
    return mean, error, n


def values_of(records: Iterable[Record], what: str) -> list[float]:
    """One number of each record.

    Args:
        records: The records.
        what: A name in :meth:`~nclbayes.Record.summary`.

    Returns:
        The numbers; NaN for a record with no row yet.
    """
    return [record.summary()[what] if record.scores else math.nan for record in records]


def accuracy_over_tasks(record: Record) -> Figure:
    """The accuracy on each task from its own learning on, and their average in black.

    Args:
        record: The run.

    Returns:
        The picture.

    Raises:
        SettingError: If no task has been learnt, or matplotlib is missing.

    Example:
        >>> from nclbayes import Record, Score
        >>> from nclbayes.analysis import plots
        >>> record = Record(["a"])
        >>> record.add([Score(0.9, 0.3, 0.1, 100)])
        >>> figure = plots.accuracy_over_tasks(record)
        >>> [line.get_ydata().tolist() for line in figure.axes[0].lines]
        [[90.0], [90.0]]
    """
    matrix, learnt = _learnt(record)
    percent = [[100 * value for value in row] for row in matrix]
    names = _labels(record.tasks[:learnt])
    width = _WIDTH + _legend_width(["average", *names])
    with _panel(width, max(_HEIGHT, 0.4 + _LINE * (learnt + 1))) as (figure, axes):
        lines = [
            axes.plot(range(j + 1, learnt + 1), [percent[i][j] for i in range(j, learnt)], label=names[j], **_look(j))
            for j in range(learnt)
        ]
        averages = [100 * value for value in _averages(record)]
        # Below the tasks' lines: thin ones on a thick one show both.
        look: dict[str, Any] = {"color": "black", "linewidth": 2.4, "marker": "o", "markersize": 5.5, "zorder": 1.5}
        lines.append(axes.plot(range(1, learnt + 1), averages, label="average", **look))
        _tasks_learnt_axis(axes, learnt)
        _accuracy_axis(axes, "accuracy", [*chain.from_iterable(percent), *averages])
        _legend(figure, [lines[-1][0], *(line for (line,) in lines[:-1])], ["average", *names])
    return figure


def accuracy_matrix(record: Record) -> Figure:
    """The accuracies R[i, j], after task i on task j, as a map with the percentages in its cells.

    The colours always run from 0 to 100 %, so that two maps can be compared. Cells without a score stay empty.

    Args:
        record: The run.

    Returns:
        The picture.

    Raises:
        SettingError: If no task has been learnt, or matplotlib is missing.
    """
    matrix, learnt = _learnt(record)
    columns = max(len(row) for row in record.scores)
    percent = [[100 * value for value in row[:columns]] for row in matrix]
    names = _labels(record.tasks[:columns])
    # Whole percentages let the maps of many tasks stay narrow.
    cell, decimals = (1.0, 1) if columns <= 8 else (0.66, 0)
    longest = max(len(name) for name in names) * _CHARACTER
    slanted = longest > cell
    # One or two cells are drawn larger: the titles of the axes must find room beside them.
    width = 1.3 + longest + max(2.8, cell * columns)
    height = 1.3 + (0.7 * longest if slanted else 0.3) + max(2.4, cell * learnt)
    with _panel(width, height) as (figure, axes):
        mesh = axes.pcolormesh(percent, cmap="Blues", vmin=0, vmax=100, edgecolors="white", linewidth=1)
        for i, row in enumerate(record.scores):
            for j in range(len(row)):
                value = percent[i][j]
                text, colour = ("NaN", "black") if math.isnan(value) else (f"{value:.{decimals}f}", None)
                colour = colour or _readable_on(mesh.cmap(value / 100))
                axes.text(j + 0.5, i + 0.5, text, ha="center", va="center", color=colour)
        turned: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if slanted else {}
        axes.set_xticks([j + 0.5 for j in range(columns)], names, parse_math=False, **turned)
        axes.set_yticks([i + 0.5 for i in range(learnt)], names[:learnt], parse_math=False)
        axes.set(xlabel="accuracy (%) on", ylabel="after learning", aspect="equal")
        axes.invert_yaxis()
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    return figure


def compare_methods(runs: Mapping[str, Sequence[Record]], what: str = "average accuracy") -> Figure:
    """One number of each method: the mean over its records, the standard error as a bar, each seed as a small dot.

    Values that are not finite are left out of the mean, and the label at the right says how many remain.

    Args:
        runs: The records of each method, one a seed; shown in this order.
        what: A name in :meth:`~nclbayes.Record.summary`.

    Returns:
        The picture.

    Raises:
        SettingError: If there is no such number, a method has no records, or matplotlib is missing.

    Example:
        >>> from nclbayes import Record, Score
        >>> from nclbayes.analysis import plots
        >>> record = Record(["a"])
        >>> record.add([Score(0.9, 0.3, 0.1, 100)])
        >>> figure = plots.compare_methods({"ncl": [record]})
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['90.0 %']
    """
    check_runs(runs)
    if what not in MEASURES:
        raise SettingError(f"There is no '{what}' to compare: choose one of {', '.join(map(repr, MEASURES))}.")
    measure, names = MEASURES[what], _labels(list(runs))
    values = [values_of(records, what) for records in runs.values()]
    written = [measure.write(row, with_unit=True) if any(map(math.isfinite, row)) else "no value" for row in values]
    width = 6.0 + _CHARACTER * (max(map(len, names)) + max(map(len, written)))
    with _panel(width, 1.8 + 0.85 * len(runs)) as (figure, axes):
        for k, row in enumerate(values):
            mean, error, count = mean_and_error(measure.scale * value for value in row)
            if count > 1:
                axes.errorbar([mean], [k], xerr=[error], fmt="none", ecolor="0.2", elinewidth=0.9, capsize=3)
                seeds = [measure.scale * value for value in row]
                axes.plot(seeds, [k + 0.28] * len(seeds), "o", color="0.45", markersize=2.5, markeredgewidth=0)
            axes.plot([mean], [k], label=names[k], **{**_look(k), "linestyle": "none", "markersize": 5, "zorder": 3})
            axes.text(1.03, k, written[k], transform=axes.get_yaxis_transform(), va="center")
        axes.set_yticks(range(len(runs)), names, parse_math=False)
        axes.set_ylim(len(runs) - 0.4, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        if measure.unit == "%":
            axes.set_xlim(_limits([100 * value for row in values for value in row]))
            _percentages(axes.xaxis)
            axes.set_xlabel(measure.title)
        else:
            axes.margins(x=0.08)
            _ticks(axes.xaxis, "{x:g}")
            axes.set_xlabel(f"{measure.title} ({measure.unit})")
    return figure


def accuracy_by_method(runs: Mapping[str, Sequence[Record]]) -> Figure:
    """The average accuracy over the tasks learnt so far: the mean over records, with a band of its standard error.

    Where records are of different lengths, each point is the mean over those that reach it.

    Args:
        runs: The records of each method, one a seed.

    Returns:
        The picture.

    Raises:
        SettingError: If a method has no records, no task has been learnt, or matplotlib is missing.
    """
    check_runs(runs)
    longest = max(len(record.scores) for records in runs.values() for record in records)
    if not longest:
        raise SettingError("No record has a row yet: learn a task and add its scores.")
    names = _labels(list(runs))
    shown: list[float] = []
    with _panel(_WIDTH + _legend_width(names), max(_HEIGHT, 0.4 + _LINE * len(names))) as (figure, axes):
        lines = []
        for k, records in enumerate(runs.values()):
            averages = [_averages(record) for record in records]
            x = range(1, max(map(len, averages)) + 1)
            points = [mean_and_error(100 * row[i - 1] for row in averages if len(row) >= i) for i in x]
            mean = [point[0] for point in points]
            low, high = [m - e for m, e, _ in points], [m + e for m, e, _ in points]
            if any(map(math.isfinite, low)):
                axes.fill_between(x, low, high, color=_look(k)["color"], alpha=0.2, linewidth=0)
            lines += axes.plot(x, mean, label=names[k], **_look(k))
            shown += mean + low + high
        _tasks_learnt_axis(axes, longest)
        _accuracy_axis(axes, "average accuracy", shown)
        _legend(figure, lines, names)
    return figure


def loss_curves(record: Record) -> Figure:
    """The training loss over the steps, one task after the other.

    Each point is the mean over a hundredth of the task's steps. The axis is logarithmic where the losses are positive
    and span more than a factor of a hundred. Tasks whose losses were not kept are left out.

    Args:
        record: The run.

    Returns:
        The picture.

    Raises:
        SettingError: If the record has no losses, or matplotlib is missing.
    """
    kept = [(k, losses) for k, losses in enumerate(record.losses) if losses]
    if not kept:
        raise SettingError("The record has no training losses: pass `losses` to `Record.add`.")
    names, total = _labels([record.tasks[k] for k, _ in kept]), sum(len(losses) for _, losses in kept)
    room, longest = _WIDTH - 2, _CHARACTER * max(map(len, names))
    least = room * min(len(losses) for _, losses in kept) / total
    upright = longest > least
    room = max(room, _LINE * len(kept)) if upright else room
    with _panel(room + 2, _HEIGHT + (longest if upright else 0.3)) as (figure, axes):
        start, middles = 0, list[float]()
        shown: list[float] = []
        for k, losses in kept:
            x, y = _block_means(losses)
            axes.plot([start + step for step in x], y, color=_look(k)["color"], label=record.tasks[k])
            if len(x) == 1:
                axes.lines[-1].set_marker("o")
            if start:
                axes.axvline(start + 0.5, color="0.6", linewidth=0.6, zorder=0)
            middles.append(start + (len(losses) + 1) / 2)
            shown += [value for value in y if math.isfinite(value)]
            start += len(losses)
        gap = total * _LINE / room if upright else 0.0
        for name, middle in zip(names, _spread(middles, gap, total), strict=True):
            turned: dict[str, Any] = {"rotation": 90} if upright else {}
            place = axes.get_xaxis_transform()
            axes.text(middle, 1.03, name, transform=place, ha="center", va="bottom", parse_math=False, **turned)
        if shown and min(shown) > 0 and max(shown) > 100 * min(shown):
            axes.set_yscale("log")
            # The usual powers of ten have exponents too small to read.
            axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlim(0.5, total + 0.5)
        axes.grid(axis="y")
        axes.set(xlabel="training step", ylabel="training loss (nats)")
        _ticks(axes.xaxis, "{x:,.0f}", whole=True)
    return figure


def save(figure: Figure, path: str | os.PathLike[str]) -> list[Path]:
    """Write a picture; the folder is made if it is not there.

    Args:
        figure: The picture.
        path: Its file. With a suffix, that says the format; without, a PNG (200 dots an inch) and a PDF are written.

    Returns:
        The files.

    Raises:
        SettingError: If there is no such format.
    """
    target = Path(path)
    known = figure.canvas.get_supported_filetypes()
    if target.suffix and target.suffix[1:].lower() not in known:
        raise SettingError(
            f"'{target.name}' ends in '{target.suffix}', which is no picture format: use one of {', '.join(known)}, "
            "or a name without a dot."
        )
    files = [target] if target.suffix else [target.with_suffix(".png"), target.with_suffix(".pdf")]
    target.parent.mkdir(parents=True, exist_ok=True)
    for file in files:
        temporary = file.with_name(file.name + ".part")
        write_to(figure, temporary, file.suffix[1:].lower())
        temporary.replace(file)
    return files


def write_to(figure: Figure, place: Path | IO[bytes], form: str) -> None:
    """Write a picture in a given format, without the date: drawn again, it gives the same bytes.

    Args:
        figure: The picture.
        place: A file's path, or an open file.
        form: "png" (200 dots an inch), "pdf", "svg" or another that matplotlib knows.
    """
    undated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(form)
    with _style():
        figure.savefig(place, format=form, dpi=200, metadata=undated)


def check_runs(runs: Mapping[str, Sequence[Record]]) -> None:
    """Refuse runs with no method, or a method with no records.

    Args:
        runs: The records of each method.

    Raises:
        SettingError: If there is nothing to show.
    """
    if not runs:
        raise SettingError("There are no runs to show: give each method's records, {'method': [record, ...]}.")
    for name, records in runs.items():
        if not records:
            raise SettingError(f"Method '{name}' has no records: give at least one, or leave the method out.")


@contextmanager
def _style() -> Iterator[None]:
    """Our settings on top of matplotlib's own defaults; the reader's fonts are kept, for scripts that need them."""
    try:
        import matplotlib
        from matplotlib import style
    except ImportError as error:
        raise SettingError("Pictures need matplotlib: pip install 'nclbayes[experiments]'") from error
    fonts = {key: matplotlib.rcParams[key] for key in ("font.family", "font.sans-serif", "font.serif")}
    with style.context(["default", {**fonts, **_STYLE}]):
        yield


@contextmanager
def _panel(width: float, height: float) -> Iterator[tuple[Figure, Axes]]:
    """A figure of one panel, in cm; laid out once before the settings are given back."""
    with _style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width / 2.54, height / 2.54), layout="constrained")
        yield figure, figure.subplots()
        figure.draw_without_rendering()


def _learnt(record: Record) -> tuple[list[list[float]], int]:
    if not record.scores:
        raise SettingError("The record has no row yet: learn a task and add its scores.")
    return record.matrix(), len(record.scores)


def _averages(record: Record) -> list[float]:
    """The average accuracy over the tasks learnt so far, after each task."""
    return [sum(row[: i + 1]) / (i + 1) for i, row in enumerate(record.matrix())]


def _block_means(losses: Sequence[float]) -> tuple[list[float], list[float]]:
    """The mean step and mean loss of up to a hundred blocks of steps; steps count from 1."""
    n, blocks = len(losses), min(len(losses), _BLOCKS)
    edges = [n * b // blocks for b in range(blocks + 1)]
    pairs = list(pairwise(edges))
    return [(a + 1 + b) / 2 for a, b in pairs], [sum(losses[a:b]) / (b - a) for a, b in pairs]


def _spread(places: Sequence[float], gap: float, end: float) -> list[float]:
    """The places, in order, moved apart until each two are `gap` apart; none beyond the end where there is room."""
    moved = list(places)
    for i in range(1, len(moved)):
        moved[i] = max(moved[i], moved[i - 1] + gap)
    limit = max(end, gap * len(moved)) - gap / 2
    for i in reversed(range(len(moved))):
        moved[i] = min(moved[i], limit)
        limit = moved[i] - gap
    return moved


def _labels(names: Sequence[str]) -> list[str]:
    """Names on one line each, long ones shortened in their middle; numbered where that makes two alike."""
    half = (_LONGEST - 1) // 2
    lines = [" ".join(name.split()) for name in names]
    short = [line if len(line) <= _LONGEST else f"{line[:half]}…{line[-half:]}" for line in lines]
    return short if len(set(short)) == len(short) else [f"{i}. {name}" for i, name in enumerate(short, start=1)]


def _look(k: int) -> dict[str, Any]:
    """Colour, marker and line of the k-th curve; a second round of the colours has hollow markers."""
    colour = PALETTE[k % len(PALETTE)]
    inside = "white" if k // len(PALETTE) % 2 else colour
    marker, line = _MARKERS[k % len(_MARKERS)], _LINES[k % len(_LINES)]
    return {"color": colour, "marker": marker, "markerfacecolor": inside, "linestyle": line}


def _limits(values: Iterable[float]) -> tuple[float, float]:
    """Limits of an axis of percentages: ten points at least, so that small differences look small."""
    finite = [value for value in values if math.isfinite(value)] or [0.0, 100.0]
    low, high = min(finite), max(finite)
    lack, pad = max(10 - (high - low), 0) / 2, 0.04 * max(high - low, 10)
    bottom, top = low - lack - pad, high + lack + pad
    return (max(bottom, -pad) if low >= 0 else bottom), (min(top, 100 + pad) if high <= 100 else top)


def _accuracy_axis(axes: Axes, title: str, values: Iterable[float]) -> None:
    axes.set_ylim(_limits(values))
    _percentages(axes.yaxis)
    axes.set_ylabel(title)
    axes.grid(axis="y")


def _tasks_learnt_axis(axes: Axes, learnt: int) -> None:
    step = 5 * math.ceil(learnt / 40)
    axes.set_xticks(range(1, learnt + 1) if learnt <= 10 else [1, *range(step, learnt + 1, step)])
    axes.set_xlim(0.7, learnt + 0.3)
    axes.set_xlabel("tasks learnt")


def _percentages(axis: Axis) -> None:
    _ticks(axis, "{x:g}%")


def _ticks(axis: Axis, form: str, whole: bool = False) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    most, least = (4, 1) if whole else (6, 3)
    axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 2.5, 5, 10], integer=whole, min_n_ticks=least))
    axis.set_major_formatter(StrMethodFormatter(form))


def _legend_width(labels: Sequence[str]) -> float:
    return 1.4 + _CHARACTER * max(map(len, labels))


def _legend(figure: Figure, lines: Sequence[Artist], labels: Sequence[str]) -> None:
    """A legend beside the panel, with names as they are: no formulas, and no special meaning of an underscore."""
    legend = figure.legend(lines, [str(i) for i in range(len(lines))], loc="outside right upper", handlelength=2.8)
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set(text=label, parse_math=False)


def _readable_on(rgba: Any) -> str:
    """Black or white, whichever contrasts more with a colour (relative luminance as WCAG defines it)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in map(float, rgba[:3])]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "black" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "white"
