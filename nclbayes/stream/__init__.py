"""Streams: learning without being told where a task ends."""

from nclbayes.stream.detection import ChangeTest
from nclbayes.stream.events import Changed, Consolidated, Judged, Opened, Reason
from nclbayes.stream.settings import StreamSettings
from nclbayes.stream.stream import Stream

__all__ = [
    "ChangeTest",
    "Changed",
    "Consolidated",
    "Judged",
    "Opened",
    "Reason",
    "Stream",
    "StreamSettings",
]
