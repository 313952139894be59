"""Functions for workers to call."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def square(number: int) -> int:
    return number * number


def fail(number: int) -> int:
    raise ZeroDivisionError(f"division by {number}")


def whose() -> int:
    time.sleep(0.5)
    return os.getpid()


def die(folder: Path, number: int, times: int) -> int:
    """Be killed in the midst of the call as often as asked for; then return the number."""
    mark = folder / str(number)
    tried = len(mark.read_text()) if mark.exists() else 0
    mark.write_text("x" * (tried + 1))
    time.sleep(0.2)
    if tried < times:
        os.kill(os.getpid(), signal.SIGKILL)
    return number
