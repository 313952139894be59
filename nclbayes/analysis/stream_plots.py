"""The evidence by which a stream finds where a task ends, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nclbayes.analysis.drawing import PALETTE, own_style
from nclbayes.errors import SettingError
from nclbayes.stream import Changed, Judged

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Odds below this are drawn as this: a batch that looks like all others.
_LEAST = 0.1


def evidence(
    judged: Sequence[Judged], changes: Sequence[Changed], every: float | None, boundaries: Sequence[int] = ()
) -> Figure:
    """What batches scored before they were learnt, and the odds of a change that come of it.

    Args:
        judged: What was found of each batch, as :attr:`Stream.judged <nclbayes.Stream.judged>` has it.
        changes: The changes that were told, among :attr:`Stream.events <nclbayes.Stream.events>`.
        every: At which odds they were told: the stream's setting `false_alarm_every`.
        boundaries: Where tasks really begin, if that is known.

    Returns:
        The picture: scores above, odds below, told changes as lines, true boundaries as ticks at the top.

    Raises:
        SettingError: If nothing was judged, or matplotlib is missing.

    Example:
        >>> from nclbayes.analysis.stream_plots import evidence
        >>> from nclbayes.stream import Judged
        >>> judged = [Judged(1, -0.4, -0.4, 0.5), Judged(2, -2.0, -0.4, 30.0)]
        >>> figure = evidence(judged, [], 10_000.0)
        >>> [axes.get_ylabel() for axes in figure.axes]
        ['log probability', 'odds of a change']
    """
    if not judged:
        raise SettingError("Nothing was judged: a stream judges batches unless `false_alarm_every` is None.")
    with own_style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(14 / 2.54, 8 / 2.54), layout="constrained")
        scores, odds = figure.subplots(2, sharex=True)
        draw_scores(scores, judged, changes, boundaries)
        draw_odds(odds, judged, changes, every, boundaries)
        scores.legend(fontsize=7, loc="lower right")
        figure.draw_without_rendering()
    return figure


def draw_scores(
    axes: Axes, judged: Sequence[Judged], changes: Sequence[Changed], boundaries: Sequence[int] = ()
) -> None:
    """The scores of batches, and what was expected of them.

    Args:
        axes: Where to.
        judged: What was found of each batch.
        changes: The changes that were told.
        boundaries: Where tasks really begin.
    """
    batches = [each.batch for each in judged]
    axes.plot(
        batches, [each.score for each in judged], ".", markersize=2, color=PALETTE[0], label="before it is learnt"
    )
    axes.plot(batches, [each.expected for each in judged], color=PALETTE[1], label="expected")
    axes.set_ylabel("log probability")
    _mark(axes, batches, changes, boundaries)


def draw_odds(
    axes: Axes,
    judged: Sequence[Judged],
    changes: Sequence[Changed],
    every: float | None,
    boundaries: Sequence[int] = (),
) -> None:
    """The odds of a change, and where they were high enough to tell one.

    Args:
        axes: Where to.
        judged: What was found of each batch.
        changes: The changes that were told.
        every: At which odds they were told.
        boundaries: Where tasks really begin.
    """
    batches = [each.batch for each in judged]
    axes.plot(batches, [max(_LEAST, each.odds) for each in judged], color=PALETTE[0])
    if every is not None:
        axes.axhline(every, color="0.3", linestyle=":", linewidth=0.8)
    axes.set(yscale="log", ylabel="odds of a change", xlabel="batch of the stream")
    _mark(axes, batches, changes, boundaries)


def _mark(axes: Axes, batches: Sequence[int], changes: Sequence[Changed], boundaries: Sequence[int]) -> None:
    first, last = batches[0], batches[-1]
    for change in changes:
        if first <= change.batch <= last:
            axes.axvline(change.batch, color=PALETTE[3], linewidth=0.8)
    inside = [boundary for boundary in boundaries if first <= boundary <= last]
    if inside:
        # Nothing at all, unclipped, would be taken for something at the corner of the figure.
        axes.plot(inside, [1.0] * len(inside), "v", color="black", transform=axes.get_xaxis_transform(), clip_on=False)
