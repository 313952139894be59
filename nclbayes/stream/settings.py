"""What a stream is told, checked in one place."""

from __future__ import annotations

from dataclasses import dataclass

from nclbayes.data.checking import number, whole_number

# Odds are suspected before they are told.
_FEWEST_BATCHES = 50.0


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """The settings of a stream.

    Attributes:
        segment_size: About how many examples a segment has. An engine scales its steps to it, where it asks for the
            size of a task; what is added to the posterior in the end is scaled to the examples that came. In the first
            eighth of it no end is looked for.
        window: How many batches are held at most, the present one included. A batch that may be the first of a new
            segment is not learnt until that is clear, or so many are held.
        false_alarm_every: In a stream that does not change, how many batches it takes on average, at least, until a
            change is told nevertheless; None: no changes are looked for.
        longest: A segment of so many examples is consolidated, and learning goes on in a new one; None: never.
        fisher_every: One batch in so many is added to the segment's Fisher; more of the first ones.

    Example:
        >>> from nclbayes.stream import StreamSettings
        >>> StreamSettings(window=1).false_alarm_every
        10000.0
    """

    segment_size: int = 10_000
    window: int = 8
    false_alarm_every: float | None = 10_000.0
    longest: int | None = None
    fisher_every: int = 16

    def __post_init__(self) -> None:
        for name in ("segment_size", "window", "longest", "fisher_every"):
            value = getattr(self, name)
            if value is not None or name != "longest":
                object.__setattr__(self, name, whole_number(name, value))
        if self.false_alarm_every is not None:
            what = f"at least {_FEWEST_BATCHES:.0f}, or None"
            every = number("false_alarm_every", self.false_alarm_every, lambda v: v >= _FEWEST_BATCHES, what)
            object.__setattr__(self, "false_alarm_every", float(every))
