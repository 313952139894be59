"""Runs in other processes: those of this machine, or of a cluster that sees the same folders."""

from __future__ import annotations

import os
import platform
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from nclbayes.analysis.record import Record
from nclbayes.engines.loop import Progress
from nclbayes.errors import FileError, NCLError, NonFiniteError
from nclbayes.experiments.config import RunConfig
from nclbayes.experiments.runs import claim_folder, run
from nclbayes.storage.locking import sole_use
from nclbayes.workers import Workers

Pair = tuple[RunConfig, Path]

# Seconds that a run waits for a folder: the worker that had it before may be about to end.
_PATIENCE = 30.0
# How often, in seconds, a run looks whether it is to stop.
_GLANCE = 1.0
_LOG, _STOP = "log.txt", "stop"


@dataclass(frozen=True)
class Failure:
    """A run that failed.

    Attributes:
        name: The run's name.
        said: What it said.
        is_divergence: Whether learning diverged.
    """

    name: str
    said: str
    is_divergence: bool = False

    def __str__(self) -> str:
        return f"{self.name} failed: {self.said}"


class Stopped(Exception):
    """The comparison that a run on a cluster belongs to was interrupted."""


def name_of(config: RunConfig) -> str:
    """What a run is called in messages.

    Args:
        config: The run.

    Returns:
        Task set, scenario, method and seed.
    """
    return " ".join((config.set, config.scenario, config.method)).replace("  ", " ") + f", seed {config.seed}"


def run_elsewhere(runs: Sequence[Pair], workers: Workers, say: Callable[[str], None]) -> dict[Path, Failure]:
    """Run each configuration in its folder, in other processes. A run whose worker dies goes on with another worker.

    Args:
        runs: Configurations, each with a folder of its own.
        workers: Where to run them.
        say: Called with a line after each.

    Returns:
        What failed, by folder.
    """
    failures: dict[Path, Failure] = {}
    claimed: list[Pair] = []
    for config, folder in runs:
        try:
            with sole_use(folder):
                claim_folder(folder, config)
                for name in (_LOG, _STOP):
                    (folder / name).unlink(missing_ok=True)
            claimed.append((config, folder))
        except NCLError as error:
            failures[folder] = Failure(name_of(config), str(error))
    calls = [(config, folder.resolve()) for config, folder in claimed]
    with _stopping([folder for _, folder in claimed], workers) as left:
        with closing(workers.answers(_run_here, calls, ahead=True)) as answers:
            for answer in answers:
                config, folder = claimed[answer.index]
                left.remove(folder)
                failure = answer.value
                if answer.death:
                    failure = Failure(name_of(config), f"its worker died each time that it was tried ({answer.death})")
                if failure is None:
                    accuracy = Record.load(folder / "record.json").average_accuracy
                    say(f"{name_of(config)}: average accuracy {accuracy:.1%}")
                else:
                    failures[folder] = failure
                    say(str(failure))
    return failures


@contextmanager
def _stopping(folders: list[Path], workers: Workers) -> Iterator[list[Path]]:
    """Ctrl-C does not reach the workers of a cluster: a file in each folder tells the runs that are left to stop."""
    left = list(folders)
    try:
        yield left
    except BaseException:
        if workers.cluster is not None:
            for folder in left:
                (folder / _STOP).touch()
            deadline = time.monotonic() + 10 * _GLANCE
            for folder in left:
                with suppress(NCLError), sole_use(folder, patience=max(0.0, deadline - time.monotonic())):
                    (folder / _STOP).unlink(missing_ok=True)
        raise


def _run_here(config: RunConfig, folder: Path) -> Failure | None:
    """What a worker does: a run that says in its folder how it goes."""
    if not (folder / "config.json").exists():
        said = f"its worker does not see '{folder}': the workers of a cluster need the same folders at the same paths"
        return Failure(name_of(config), said)
    try:
        with (folder / _LOG).open("a", buffering=1) as log:
            try:
                # A worker that died before may not be quite dead.
                with sole_use(folder, patience=_PATIENCE):
                    pass
                run(
                    config,
                    folder,
                    progress=False,
                    say=lambda text: print(text, file=log),
                    callbacks=[_Glance(folder, log)],
                )
            except NCLError as error:
                print(f"error: {error}", file=log)
                return Failure(name_of(config), str(error), isinstance(error, NonFiniteError))
            except Stopped:
                return Failure(name_of(config), "it was stopped")
            except Exception as error:
                traceback.print_exc(file=log)
                return Failure(name_of(config), f"{type(error).__name__}: {error} (more is in '{folder / _LOG}')")
    except OSError as error:
        return Failure(name_of(config), str(FileError(f"Could not write to '{folder}': {error.strerror}.")))
    return None


class _Glance:
    """Says with which step a worker begins, and looks now and then whether the run is to stop.

    Args:
        folder: The run's folder.
        log: Where to say it.
    """

    def __init__(self, folder: Path, log: TextIO) -> None:
        self._folder, self._log, self._last = folder, log, 0.0

    def __call__(self, progress: Progress) -> None:
        if not self._last:
            print(f"process {os.getpid()} on {platform.node()} begins with step {progress.step}", file=self._log)
        if time.monotonic() - self._last > _GLANCE:
            self._last = time.monotonic()
            if (self._folder / _STOP).exists():
                raise Stopped
