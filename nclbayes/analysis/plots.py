"""Pictures of what was learnt and what was kept, drawn from records.

Each function returns a ``matplotlib.figure.Figure``; :func:`save` writes it. A panel is 9 x 6 cm with text of 8 points,
and grows where there are many tasks or long names. The settings of matplotlib are left as they were.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from nclbayes.analysis.record import Record
from nclbayes.errors import SettingError
from nclbayes.storage import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure
from nclbayes.analysis.drawing import (
    CHARACTER,
    HEIGHT,
    LINE,
    WIDTH,
    accuracy_axis,
    add_legend,
    block_means,
    legend_width,
    line_look,
    one_panel,
    own_style,
    percent_limits,
    percent_ticks,
    readable_on,
    rows_and_count,
    running_averages,
    set_ticks,
    short_names,
    spread_out,
    tasks_learnt_axis,
)
from nclbayes.analysis.measures import MEASURES, check_runs, mean_and_error, values_of


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
    matrix, learnt = rows_and_count(record)
    percent = [[100 * value for value in row] for row in matrix]
    names = short_names(record.tasks[:learnt])
    width = WIDTH + legend_width(["average", *names])
    with one_panel(width, max(HEIGHT, 0.4 + LINE * (learnt + 1))) as (figure, axes):
        lines = [
            axes.plot(
                range(j + 1, learnt + 1), [percent[i][j] for i in range(j, learnt)], label=names[j], **line_look(j)
            )
            for j in range(learnt)
        ]
        averages = [100 * value for value in running_averages(record)]
        # Below the tasks' lines: thin ones on a thick one show both.
        look: dict[str, Any] = {"color": "black", "linewidth": 2.4, "marker": "o", "markersize": 5.5, "zorder": 1.5}
        lines.append(axes.plot(range(1, learnt + 1), averages, label="average", **look))
        tasks_learnt_axis(axes, learnt)
        accuracy_axis(axes, "accuracy", [*chain.from_iterable(percent), *averages])
        add_legend(figure, [lines[-1][0], *(line for (line,) in lines[:-1])], ["average", *names])
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
    matrix, learnt = rows_and_count(record)
    columns = max(len(row) for row in record.scores)
    percent = [[100 * value for value in row[:columns]] for row in matrix]
    names = short_names(record.tasks[:columns])
    # Whole percentages let the maps of many tasks stay narrow.
    cell, decimals = (1.0, 1) if columns <= 8 else (0.66, 0)
    longest = max(len(name) for name in names) * CHARACTER
    slanted = longest > cell
    # One or two cells are drawn larger: the titles of the axes must find room beside them.
    width = 1.3 + longest + max(2.8, cell * columns)
    height = 1.3 + (0.7 * longest if slanted else 0.3) + max(2.4, cell * learnt)
    with one_panel(width, height) as (figure, axes):
        mesh = axes.pcolormesh(percent, cmap="Blues", vmin=0, vmax=100, edgecolors="white", linewidth=1)
        for i, row in enumerate(record.scores):
            for j in range(len(row)):
                value = percent[i][j]
                text, colour = ("NaN", "black") if math.isnan(value) else (f"{value:.{decimals}f}", None)
                colour = colour or readable_on(mesh.cmap(value / 100))
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
    measure, names = MEASURES[what], short_names(list(runs))
    values = [values_of(records, what) for records in runs.values()]
    written = [measure.write(row, with_unit=True) if any(map(math.isfinite, row)) else "no value" for row in values]
    width = 6.0 + CHARACTER * (max(map(len, names)) + max(map(len, written)))
    with one_panel(width, 1.8 + 0.85 * len(runs)) as (figure, axes):
        for k, row in enumerate(values):
            mean, error, count = mean_and_error(measure.scale * value for value in row)
            if count > 1:
                axes.errorbar([mean], [k], xerr=[error], fmt="none", ecolor="0.2", elinewidth=0.9, capsize=3)
                seeds = [measure.scale * value for value in row]
                axes.plot(seeds, [k + 0.28] * len(seeds), "o", color="0.45", markersize=2.5, markeredgewidth=0)
            axes.plot(
                [mean], [k], label=names[k], **{**line_look(k), "linestyle": "none", "markersize": 5, "zorder": 3}
            )
            axes.text(1.03, k, written[k], transform=axes.get_yaxis_transform(), va="center")
        axes.set_yticks(range(len(runs)), names, parse_math=False)
        axes.set_ylim(len(runs) - 0.4, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        if measure.unit == "%":
            axes.set_xlim(percent_limits([100 * value for row in values for value in row]))
            percent_ticks(axes.xaxis)
            axes.set_xlabel(measure.title)
        else:
            axes.margins(x=0.08)
            set_ticks(axes.xaxis, "{x:g}")
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
    names = short_names(list(runs))
    shown: list[float] = []
    with one_panel(WIDTH + legend_width(names), max(HEIGHT, 0.4 + LINE * len(names))) as (figure, axes):
        lines = []
        for k, records in enumerate(runs.values()):
            averages = [running_averages(record) for record in records]
            x = range(1, max(map(len, averages)) + 1)
            points = [mean_and_error(100 * row[i - 1] for row in averages if len(row) >= i) for i in x]
            mean = [point[0] for point in points]
            low, high = [m - e for m, e, _ in points], [m + e for m, e, _ in points]
            if any(map(math.isfinite, low)):
                axes.fill_between(x, low, high, color=line_look(k)["color"], alpha=0.2, linewidth=0)
            lines += axes.plot(x, mean, label=names[k], **line_look(k))
            shown += mean + low + high
        tasks_learnt_axis(axes, longest)
        accuracy_axis(axes, "average accuracy", shown)
        add_legend(figure, lines, names)
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
    names, total = short_names([record.tasks[k] for k, _ in kept]), sum(len(losses) for _, losses in kept)
    room, longest = WIDTH - 2, CHARACTER * max(map(len, names))
    least = room * min(len(losses) for _, losses in kept) / total
    upright = longest > least
    room = max(room, LINE * len(kept)) if upright else room
    with one_panel(room + 2, HEIGHT + (longest if upright else 0.3)) as (figure, axes):
        start, middles = 0, list[float]()
        shown: list[float] = []
        for k, losses in kept:
            x, y = block_means(losses)
            axes.plot([start + step for step in x], y, color=line_look(k)["color"], label=record.tasks[k])
            if len(x) == 1:
                axes.lines[-1].set_marker("o")
            if start:
                axes.axvline(start + 0.5, color="0.6", linewidth=0.6, zorder=0)
            middles.append(start + (len(losses) + 1) / 2)
            shown += [value for value in y if math.isfinite(value)]
            start += len(losses)
        gap = total * LINE / room if upright else 0.0
        for name, middle in zip(names, spread_out(middles, gap, total), strict=True):
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
        set_ticks(axes.xaxis, "{x:,.0f}", whole=True)
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
        with replacing(file) as stream:
            write_to(figure, stream, file.suffix[1:].lower())
    return files


def write_to(figure: Figure, place: IO[bytes], form: str) -> None:
    """Write a picture in a given format, without the date: drawn again, it gives the same bytes.

    Args:
        figure: The picture.
        place: An open file.
        form: "png" (200 dots an inch), "pdf", "svg" or another that matplotlib knows.
    """
    undated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(form)
    with own_style():
        figure.savefig(place, format=form, dpi=200, metadata=undated)
