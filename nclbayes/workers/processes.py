"""Calls in the processes of this machine: joblib's."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from typing import Any

from joblib import Parallel, delayed
from joblib.externals.loky.backend import resource_tracker

from nclbayes.interrupts import kept_from_children
from nclbayes.workers.place import Answer

Call = tuple[int, tuple[Any, ...]]

# So often a call may be under way when a process dies; from then on it is made alone, to see whether it is to blame.
_DEATHS_IN_COMPANY = 2
# So many seconds a process waits for another call before it ends, also if nobody is left to make one.
_IDLE = 30


def in_processes(
    function: Callable[..., Any], calls: Iterable[tuple[Any, ...]], jobs: int
) -> Generator[Answer, None, None]:
    """Make calls, each in a process of its own.

    When a process dies, joblib ends the others too, and does not tell which call was to blame: all that were under way
    are made again.

    Args:
        function: A function of a module.
        calls: The arguments of each.
        jobs: How many at a time, at least 2.

    Yields:
        The answers, in the order in which they come in.
    """
    source, deaths = enumerate(calls), Counter[int]()
    again: list[Call] = []
    alone: list[Call] = []
    while True:
        queue = _Queue(again, source)
        again = []
        try:
            with closing(_outputs(function, queue, jobs)) as outputs:
                for index, value in outputs:
                    del queue.under_way[index]
                    yield Answer(index, value)
            break
        except BrokenProcessPool:
            for index, call in queue.unanswered():
                deaths[index] += 1
                (again if deaths[index] <= _DEATHS_IN_COMPANY else alone).append((index, call))
    for each in alone:
        try:
            with closing(_outputs(function, _Queue([each], iter(())), jobs)) as outputs:
                for index, value in outputs:
                    yield Answer(index, value)
        except BrokenProcessPool as error:
            yield Answer(each[0], death=_first_sentence(error))


class _Queue:
    """Calls on their way to processes; they are taken in the threads of joblib.

    Args:
        again: Calls to make first.
        source: Calls to make then.
    """

    def __init__(self, again: list[Call], source: Iterator[Call]) -> None:
        self._again, self._source = list(again), source
        self._lock, self._closed = threading.Lock(), False
        self.under_way: dict[int, tuple[Any, ...]] = {}

    def __iter__(self) -> Iterator[Call]:
        while True:
            with self._lock:
                call = None if self._closed else self._again.pop(0) if self._again else next(self._source, None)
                if call is None:
                    return
                self.under_way[call[0]] = call[1]
            yield call

    def unanswered(self) -> list[Call]:
        """What was taken or should be taken again; from now on nothing is."""
        with self._lock:
            self._closed = True
            return [*self.under_way.items(), *self._again]


def _outputs(function: Callable[..., Any], queue: _Queue, jobs: int) -> Generator[tuple[int, Any], None, None]:
    parallel = Parallel(
        n_jobs=jobs,
        backend="loky",
        batch_size=1,
        pre_dispatch="n_jobs",
        return_as="generator_unordered",
        idle_worker_timeout=_IDLE,
    )
    # It would be started with the first process, and let Ctrl-C through when it is.
    resource_tracker.ensure_running()
    with warnings.catch_warnings(), ExitStack() as end:
        # A process that has grown is replaced by a new one, which is no news; nor is it that interrupted calls end.
        warnings.filterwarnings("ignore", "A worker stopped while some jobs were given to the executor")
        warnings.filterwarnings("ignore", ".*still being processed by the workers have been cancelled")
        warnings.filterwarnings("ignore", ".*tasks have been successfully executed +but not used")
        with kept_from_children():
            # Ctrl-C that came meanwhile is raised at the end of this block; they are closed then too.
            called = (delayed(_called)(index, function, call) for index, call in queue)
            outputs = end.enter_context(closing(parallel(called)))
        yield from outputs


def _called(index: int, function: Callable[..., Any], call: tuple[Any, ...]) -> tuple[int, Any]:
    return index, function(*call)


def _first_sentence(error: BaseException) -> str:
    """What joblib says of a dead process, without its advice."""
    return str(error).strip().partition(".")[0].partition("\n")[0]
