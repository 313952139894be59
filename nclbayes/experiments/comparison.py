"""Several methods on one task set, over several seeds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nclbayes.analysis.record import Record
from nclbayes.errors import NCLError, NonFiniteError
from nclbayes.experiments.config import RunConfig
from nclbayes.experiments.runs import claim_folder, run
from nclbayes.storage.locking import sole_use

DIVERGED = 3
"""The exit code of a run whose learning diverged."""


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
    is_divergence: bool

    def __str__(self) -> str:
        return f"{self.name} failed: {self.said}"


class ComparisonError(NCLError):
    """Some runs of a comparison failed; the message names them and shows what they said.

    Args:
        failures: What failed.
        done: The configurations and records of the other runs.

    Attributes:
        done: The same.
        is_divergence: Whether all of them failed because learning diverged, which is a result too.
    """

    def __init__(self, failures: Iterable[Failure], done: Sequence[tuple[RunConfig, Record]]) -> None:
        failures = list(failures)
        names: dict[str, list[str]] = {}
        for failure in failures:
            names.setdefault(failure.said, []).append(failure.name)
        super().__init__("; ".join(f"{' and '.join(who)} failed: {said}" for said, who in names.items()))
        self.done = list(done)
        self.is_divergence = all(failure.is_divergence for failure in failures)


def run_folder(out: Path, config: RunConfig) -> Path:
    """Where a comparison keeps a run.

    Args:
        out: The comparison's folder.
        config: The run.

    Returns:
        A folder for its method and seed.
    """
    return out / config.method / f"seed-{config.seed}"


def compare(
    configs: Sequence[RunConfig],
    out: Path,
    *,
    jobs: int = 1,
    progress: bool | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, list[Record]]:
    """Run every configuration; those that are done already are read. A run that fails does not stop the others.

    Args:
        configs: What to run, at most one for each method and seed.
        out: The folder; each run has one of its own in it.
        jobs: How many to run at a time, each in a process of its own.
        progress: Whether to show bars (with one job only).
        say: Called with a line now and then.

    Returns:
        For each method its records, in the order of the configurations.

    Raises:
        ComparisonError: If runs fail, once all others are done.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from nclbayes.experiments import RunConfig, compare
        >>> methods = ("none", "owm")
        >>> configs = [RunConfig.of("split-digits", m, tasks=1, settings={"steps": 5}) for m in methods]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     records = compare(configs, Path(folder), progress=False)
        >>> {method: len(found) for method, found in records.items()}
        {'none': 1, 'owm': 1}
    """
    runs = [(config, run_folder(out, config)) for config in configs]
    records: dict[str, list[Record]] = {}
    for config, record in zip(configs, run_all(runs, jobs=jobs, progress=progress, say=say), strict=True):
        records.setdefault(config.method, []).append(record)
    return records


def run_all(
    runs: Sequence[tuple[RunConfig, Path]],
    *,
    jobs: int = 1,
    progress: bool | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Record]:
    """Run each configuration in its folder; those that are done already are read.

    Args:
        runs: Configurations, each with a folder of its own.
        jobs: How many to run at a time, each in a process of its own.
        progress: Whether to show bars (with one job only).
        say: Called with a line now and then.

    Returns:
        Their records, in this order.

    Raises:
        ComparisonError: If runs fail, once all others are done.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from nclbayes.experiments import RunConfig, run_all
        >>> config = RunConfig.of("split-digits", "none", tasks=1, settings={"steps": 5})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     records = run_all([(config, Path(folder))], progress=False)
        >>> len(records)
        1
    """
    failures = _run_in_processes(runs, jobs, say) if jobs > 1 else {}
    done: list[tuple[RunConfig, Record]] = []
    first: NCLError | None = None
    for config, folder in runs:
        if folder in failures:
            continue
        say(_name(config))
        try:
            done.append((config, run(config, folder, progress=progress, say=say)))
        except NCLError as error:
            failures[folder] = Failure(_name(config), str(error), isinstance(error, NonFiniteError))
            first = first or error
            say(str(failures[folder]))
    if first is not None and not done:
        raise first
    if failures:
        raise ComparisonError(failures.values(), done)
    return [record for _, record in done]


def _name(config: RunConfig) -> str:
    return " ".join((config.set, config.scenario, config.method)).replace("  ", " ") + f", seed {config.seed}"


def _run_in_processes(
    runs: Sequence[tuple[RunConfig, Path]], jobs: int, say: Callable[[str], None]
) -> dict[Path, Failure]:
    """Run each by the command line, each process with its share of the cores; returns what failed, by folder."""
    environment = dict(os.environ, OMP_NUM_THREADS=str(max(1, (os.cpu_count() or 1) // jobs)))
    waiting = list(runs)
    running: dict[subprocess.Popen[bytes], tuple[RunConfig, Path]] = {}
    failures: dict[Path, Failure] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                config, folder = waiting.pop(0)
                try:
                    with sole_use(folder):
                        claim_folder(folder, config)
                except NCLError as error:
                    failures[folder] = Failure(_name(config), str(error), False)
                    continue
                arguments = ["run", "--config", str(folder / "config.json"), "--out", str(folder), "--quiet"]
                command = [sys.executable, "-m", "nclbayes", *arguments]
                (folder / "log.txt").unlink(missing_ok=True)
                with (folder / "log.txt").open("x") as log:
                    running[subprocess.Popen(command, stdout=log, stderr=log, env=environment)] = (config, folder)
            time.sleep(0.1)
            for process in [p for p in running if p.poll() is not None]:
                config, folder = running.pop(process)
                if process.returncode == 0:
                    accuracy = Record.load(folder / "record.json").average_accuracy
                    say(f"{_name(config)}: average accuracy {accuracy:.1%}")
                else:
                    said = (folder / "log.txt").read_text().strip() or f"exit code {process.returncode}"
                    said = said.removeprefix("nclbayes: error: ")
                    failures[folder] = Failure(_name(config), said, process.returncode == DIVERGED)
                    say(str(failures[folder]))
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
    return failures
