"""The bar that shows how far a task is."""

from __future__ import annotations

from types import TracebackType

from tqdm import tqdm


class ProgressBar:
    """A bar, or nothing at all: even a bar that is not shown takes a lock that all bars share.

    Args:
        total: How many steps there are.
        done: How many have been taken already.
        name: What is written before the bar.
        shown: Whether it is shown.
    """

    def __init__(self, total: int, done: int, name: str, shown: bool) -> None:
        self._bar = tqdm(total=total, initial=done, desc=name, leave=False) if shown else None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, **facts: str) -> None:
        """One step further.

        Args:
            **facts: What is written behind the bar.
        """
        if self._bar is not None:
            self._bar.set_postfix(facts, refresh=False)
            self._bar.update()
