"""Processes that are there at once: they are forked from one that has imported everything and done nothing else."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["nclbayes", "pytest"])


def heed_interrupts() -> None:
    """Let Ctrl-C interrupt this process, also where a shell has started the tests in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def run_apart(function: Callable[..., object], *arguments: Any) -> int:
    """The exit code of a process that calls a function of a module; minus the signal's number if it was killed."""
    process = CONTEXT.Process(target=function, args=arguments)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode
