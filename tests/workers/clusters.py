"""A cluster of Dask on this machine: a scheduler and some workers, each a process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple


class Cluster(NamedTuple):
    """Its address, and its processes."""

    address: str
    scheduler: subprocess.Popen[bytes]
    workers: list[subprocess.Popen[bytes]]


def _start(log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """A command of Dask, in a session of its own: Ctrl-C in a terminal does not reach another machine either."""
    command = [sys.executable, "-m", "dask", *arguments, "--no-dashboard"]
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)


def wait_until(condition: object, seconds: float = 120.0) -> None:
    """Wait until a function returns something true."""
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)


@contextmanager
def cluster(folder: Path, workers: int = 2) -> Iterator[Cluster]:
    """A scheduler and workers of one thread each, without nannies, on ports that are free."""
    file = folder / "scheduler.json"
    host = ("--host", "127.0.0.1")
    scheduler = _start(folder / "scheduler.log", "scheduler", *host, "--port", "0", "--scheduler-file", str(file))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        wait_until(lambda: file.exists() and file.read_text().endswith("}"))
        address = json.loads(file.read_text())["address"]
        for k in range(workers):
            options = ("--nthreads", "1", "--no-nanny", "--local-directory", str(folder / f"worker-{k}"))
            processes.append(_start(folder / f"worker-{k}.log", "worker", address, *host, *options))
        yield Cluster(address.replace("tcp", "dask", 1), scheduler, processes)
    finally:
        for process in [*processes, scheduler]:
            process.kill()
        for process in [*processes, scheduler]:
            process.wait()
