"""What a stream has decided, when, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Reason(str, Enum):
    """Why a segment ended.

    Attributes:
        CHANGE: The predictive found a change.
        LENGTH: It had as many examples as `longest` says.
        ASKED: `consolidate` was called.

    Example:
        >>> from nclbayes.stream import Reason
        >>> Reason("change").name
        'CHANGE'
    """

    CHANGE = "change"
    LENGTH = "length"
    ASKED = "asked"


@dataclass(frozen=True)
class Opened:
    """A segment was begun.

    Attributes:
        batch: With which batch of the stream, counted from 1.
        segment: Its name.

    Example:
        >>> from nclbayes.stream import Opened
        >>> Opened(batch=1, segment="segment 1")
        Opened(batch=1, segment='segment 1')
    """

    batch: int
    segment: str


@dataclass(frozen=True)
class Changed:
    """A change was told.

    Attributes:
        batch: At which batch of the stream.
        first: The first batch of the new segment: those from there on were not learnt before.
        odds: The odds that were gathered for it, in batches.
        p: How often a batch of the old segment would have scored so low as the last one.
        score: The last batch's mean log predictive probability.
        expected: What the old segment led one to expect.

    Example:
        >>> from nclbayes.stream import Changed
        >>> Changed(batch=63, first=61, odds=2e4, p=1e-3, score=-2.3, expected=-0.4).first
        61
    """

    batch: int
    first: int
    odds: float
    p: float
    score: float
    expected: float


@dataclass(frozen=True)
class Consolidated:
    """A segment has become part of the posterior.

    Attributes:
        batch: The last batch of the stream that belongs to it.
        segment: Its name.
        batches: How many it had.
        examples: How many examples.
        reason: Why it ended.

    Example:
        >>> from nclbayes.stream import Consolidated, Reason
        >>> Consolidated(batch=60, segment="segment 1", batches=60, examples=960, reason=Reason.CHANGE).examples
        960
    """

    batch: int
    segment: str
    batches: int
    examples: int
    reason: Reason


Event = Opened | Changed | Consolidated


class Judged(NamedTuple):
    """What was found of a batch before it was learnt.

    Attributes:
        batch: Which batch of the stream, counted from 1.
        score: Its mean log predictive probability.
        expected: What the open segment led one to expect.
        odds: The odds that were gathered for a change, in batches.

    Example:
        >>> from nclbayes.stream import Judged
        >>> Judged(batch=62, score=-2.2, expected=-0.4, odds=450.0).odds
        450.0
    """

    batch: int
    score: float
    expected: float
    odds: float
