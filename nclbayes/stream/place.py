"""How far a stream is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from nclbayes.stream.detection import ChangeTest
from nclbayes.stream.events import Event, Judged
from nclbayes.stream.segment import Batch

# So many events, and what was found of so many batches, are kept.
MOST_EVENTS, _JUDGED = 1000, 2000


@dataclass(frozen=True)
class Place:
    """How far a stream is; it is never changed, only replaced.

    Attributes:
        batches: How many batches were observed.
        segments: How many segments were opened.
        test: The test for a change.
        held: Batches that may belong to a new segment, and are not learnt yet.
        events: What was decided, the latest thousand.
        judged: What was found of the latest two thousand batches.
    """

    batches: int = 0
    segments: int = 0
    test: ChangeTest = field(default_factory=ChangeTest)
    held: tuple[Batch, ...] = ()
    events: tuple[Event, ...] = ()
    judged: tuple[Judged, ...] = ()

    def noting(self, event: Event) -> Place:
        """The place with one more event.

        Args:
            event: The event.

        Returns:
            The new place.
        """
        return replace(self, events=(*self.events, event)[-MOST_EVENTS:])

    def finding(self, judged: Judged) -> Place:
        """The place with what was found of one more batch.

        Args:
            judged: That.

        Returns:
            The new place.
        """
        return replace(self, judged=(*self.judged, judged)[-_JUDGED:])
