"""Several methods on one task set, over several seeds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from nclbayes.analysis.record import Record
from nclbayes.errors import NCLError
from nclbayes.experiments.runs import RunConfig, claim_folder, run


class ComparisonError(NCLError):
    """A run of a comparison failed; the message names it and shows what it said."""


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
    """Run every configuration; those that are done already are read.

    Args:
        configs: What to run, at most one for each method and seed.
        out: The folder; each run has one of its own in it.
        jobs: How many to run at a time, each in a process of its own.
        progress: Whether to show bars (with one job only).
        say: Called with a line now and then.

    Returns:
        For each method its records, in the order of the configurations.

    Raises:
        ComparisonError: If a run fails in a process of its own.
        FileError: If a run's folder holds one of another configuration.

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
        ComparisonError: If a run fails in a process of its own.
        FileError: If a folder holds a run of another configuration.

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
    if jobs > 1:
        _run_in_processes(runs, jobs, say)
    records = []
    for config, folder in runs:
        say(f"{config.method}, seed {config.seed}")
        records.append(run(config, folder, progress=progress, say=say))
    return records


def _run_in_processes(runs: Sequence[tuple[RunConfig, Path]], jobs: int, say: Callable[[str], None]) -> None:
    """Run each configuration by the command line, each process with its share of the cores."""
    environment = dict(os.environ, OMP_NUM_THREADS=str(max(1, (os.cpu_count() or 1) // jobs)))
    waiting = list(runs)
    running: dict[subprocess.Popen[bytes], tuple[RunConfig, Path]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                config, folder = waiting.pop(0)
                claim_folder(folder, config)
                arguments = ["run", "--config", str(folder / "config.json"), "--out", str(folder), "--quiet"]
                command = [sys.executable, "-m", "nclbayes", *arguments]
                with (folder / "log.txt").open("w") as log:
                    running[subprocess.Popen(command, stdout=log, stderr=log, env=environment)] = (config, folder)
            time.sleep(0.1)
            for process in [p for p in running if p.poll() is not None]:
                config, folder = running.pop(process)
                if process.returncode != 0:
                    said = (folder / "log.txt").read_text().strip() or f"exit code {process.returncode}"
                    raise ComparisonError(f"{config.method} with seed {config.seed} failed: {said}")
                record = Record.load(folder / "record.json")
                say(f"{config.method}, seed {config.seed}: average accuracy {record.average_accuracy:.1%}")
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
