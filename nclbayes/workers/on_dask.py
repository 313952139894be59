"""Calls on a cluster of Dask, by joblib's backend for it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from contextlib import closing
from typing import Any

from distributed import Client
from joblib import Parallel, delayed
from joblib._dask import DaskDistributedBackend

from nclbayes.errors import UnreachableError
from nclbayes.workers.place import Answer

# Seconds.
_PATIENCE = 10.0


def on_dask(
    function: Callable[..., Any], calls: Iterable[tuple[Any, ...]], address: str, ahead: bool
) -> Generator[Answer, None, None]:
    """Make calls on a cluster, which makes those of a dead worker again elsewhere.

    Args:
        function: A function of a module that the workers have too.
        calls: The arguments of each.
        address: Of the scheduler.
        ahead: Whether the cluster gets all of them at once.

    Yields:
        The answers, in the order in which they come in.

    Raises:
        UnreachableError: If there is no scheduler, or it has no workers.
    """
    try:
        client = Client(address, set_as_default=False, timeout=_PATIENCE)
    except OSError as error:
        raise UnreachableError(
            f"There is no scheduler of Dask at {address}: start one with `dask scheduler`, and give the address that "
            "it shows, with dask:// in place of tcp://."
        ) from error
    with client:
        parallel = Parallel(
            backend=_Backend(client=client, wait_for_workers_timeout=_PATIENCE),
            batch_size=1,
            pre_dispatch="all" if ahead else "n_jobs",
            return_as="generator_unordered",
        )
        try:
            outputs = parallel(delayed(_called)(index, function, call) for index, call in enumerate(calls))
        except TimeoutError as error:
            raise UnreachableError(
                f"The scheduler of Dask at {address} has no workers: start some with `dask worker {address}`."
            ) from error
        with closing(outputs):
            yield from outputs


class _Backend(DaskDistributedBackend):
    """Leaves no call to this process, and answers for one that the cluster has given up."""

    def effective_n_jobs(self, n_jobs: int) -> int:
        # Of one call at a time joblib would say that it can as well be made here.
        return max(2, super().effective_n_jobs(n_jobs))

    def submit(self, func: Any, callback: Any = None) -> Any:
        future = super().submit(func, callback)
        ((_, (index, *_), _),) = func.items

        # Joblib would wait for it for ever.
        def give_up(done: Future[Any]) -> None:
            error = done.exception()
            if error is not None:
                callback([Answer(index, death=f"{type(error).__name__}: {error}")])

        future.add_done_callback(give_up)
        return future


def _called(index: int, function: Callable[..., Any], call: tuple[Any, ...]) -> Answer:
    return Answer(index, function(*call))
