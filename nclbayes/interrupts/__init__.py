"""Ctrl-C where an exception would not do: while the command line imports, when it is done, in its child processes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

INTERRUPTED = 130
"""The exit code of a command that was interrupted."""


def leave_quietly() -> None:
    """Let Ctrl-C end this process in one line, if the process is our command line; otherwise do nothing.

    An exception would not do: it is raised in the midst of other packages' imports, which swallow or rename it.
    """
    if _is_command_line() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


@contextmanager
def raised() -> Iterator[None]:
    """While a command runs, Ctrl-C is a ``KeyboardInterrupt`` again, which it can tidy up after."""
    if signal.getsignal(signal.SIGINT) is not _leave:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _leave)


@contextmanager
def deferred() -> Iterator[None]:
    """Put Ctrl-C off to the end of something short that would not survive it."""
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Start processes that never see Ctrl-C, from before their first line on; meanwhile it is deferred here."""
    if sys.platform == "win32":
        yield
        return
    from multiprocessing import resource_tracker

    # It would be started with the first process, and let the signal through when it is.
    resource_tracker.ensure_running()
    with deferred():
        # Processes inherit what is blocked; other threads of this one may still be handed the signal.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _is_command_line() -> bool:
    # Python's own options stand before the program, and the program's arguments behind it, in both lists. (While
    # `python -m nclbayes` imports this package, argv[0] is still "-m".)
    program = [*sys.orig_argv[-len(sys.argv) :][:1], *sys.argv[:1]]
    names = [os.path.basename(path).removesuffix(".exe") for path in program]
    return names in (["nclbayes", name] for name in ("nclbayes", "-m", "__main__.py"))


def _leave(number: int, frame: FrameType | None) -> None:
    # Nothing has begun or all is done: what was printed is all there is to keep.
    with suppress(Exception):
        sys.stdout.flush()
    os.write(2, b"nclbayes: interrupted.\n")
    os._exit(INTERRUPTED)
