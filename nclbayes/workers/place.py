"""Where calls are made, and what comes back."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any

from nclbayes.errors import SettingError

_ADDRESS = re.compile(r"dask://(\[[0-9a-fA-F:.]+\]|[\w.-]+):(\d{1,5})")


@dataclass(frozen=True)
class Answer:
    """What came of a call.

    Attributes:
        index: Which call it was, in the order in which they were given.
        value: What it returned.
        death: Why there is no value: its worker died, each time that it was tried. Else empty.
    """

    index: int
    value: Any = None
    death: str = ""


@dataclass(frozen=True)
class Workers:
    """Where calls are made.

    Attributes:
        jobs: How many at a time, each in a process of this machine.
        cluster: The address of a cluster that makes them instead, such as ``dask://10.0.0.5:8786``: as many at a time
            as its workers have threads.

    Raises:
        SettingError: If the address is none, or both are asked for.
    """

    jobs: int = 1
    cluster: str | None = None

    def __post_init__(self) -> None:
        if self.cluster is None:
            return
        kind = self.cluster.partition("://")[0]
        if kind == "ray":
            raise SettingError(
                f"A cluster of Ray ('{self.cluster}') is not supported; one of Dask is: dask://HOST:PORT."
            )
        if _ADDRESS.fullmatch(self.cluster) is None:
            hint = " In place of tcp:// write dask://." if kind in ("tcp", "tls") else ""
            raise SettingError(
                f"A cluster is given as dask://HOST:PORT, the address of its scheduler, not '{self.cluster}'.{hint}"
            )
        if self.jobs != 1:
            raise SettingError("A cluster makes as many calls at a time as its workers have threads: leave out jobs.")

    @property
    def are_others(self) -> bool:
        """Whether calls are made in other processes than this one."""
        return self.jobs > 1 or self.cluster is not None

    def answers(
        self, function: Callable[..., Any], calls: Iterable[tuple[Any, ...]], *, ahead: bool = False
    ) -> Generator[Answer, None, None]:
        """Make calls elsewhere. One whose worker dies is made again by another worker.

        Close the iterator if not all answers are wanted: calls under way are ended then (on a cluster, those that have
        begun are not, and nobody waits for them).

        Args:
            function: A function of a module.
            calls: The arguments of each; they are taken one by one while answers come in, in another thread too.
            ahead: Whether a cluster may have all of them at once: workers that join it later take their share.

        Returns:
            The answers, in the order in which they come in.

        Raises:
            SettingError: If a package is missing.
            UnreachableError: If there is no such cluster, or it has no workers.
        """
        try:
            if self.cluster is None:
                from nclbayes.workers.processes import in_processes

                return in_processes(function, calls, self.jobs)
            from nclbayes.workers.on_dask import on_dask
        except ImportError as error:
            extra = "experiments" if self.cluster is None else "cluster"
            raise SettingError(f"Other processes need {error.name}: pip install 'nclbayes[{extra}]'") from error
        return on_dask(function, calls, self.cluster.replace("dask", "tcp", 1), ahead)
