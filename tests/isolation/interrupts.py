"""An interrupt at a chosen line of whatever Python runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class InterruptAt:
    """A context in which the n-th line that is run, in any file, raises KeyboardInterrupt.

    Args:
        line: n; with 0 nothing is raised and lines are only counted.
        within: Count only lines of files whose path has this in it.
    """

    def __init__(self, line: int, within: str = "") -> None:
        self._line, self._within = line, within
        self.lines = 0
        self.where = ""

    def __enter__(self) -> InterruptAt:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        sys.settrace(self._before)
        return kind is KeyboardInterrupt

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if self.where or self._within not in frame.f_code.co_filename:
            # Frames further in may count.
            return None if self.where else self._skip
        if event == "line":
            self.lines += 1
            if self.lines == self._line:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
                raise KeyboardInterrupt
        return self._trace

    def _skip(self, frame: FrameType, event: str, argument: Any) -> None:
        return None
