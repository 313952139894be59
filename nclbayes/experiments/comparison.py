"""Several methods on one task set, over several seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from nclbayes.analysis.record import Record
from nclbayes.errors import NCLError, NonFiniteError
from nclbayes.experiments.config import RunConfig
from nclbayes.experiments.elsewhere import Failure, name_of, run_elsewhere
from nclbayes.experiments.runs import run
from nclbayes.workers import Workers

DIVERGED = 3
"""The exit code of a run whose learning diverged."""


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
    cluster: str | None = None,
    progress: bool | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, list[Record]]:
    """Run every configuration; those that are done already are read. A run that fails does not stop the others.

    Args:
        configs: What to run, at most one for each method and seed.
        out: The folder; each run has one of its own in it.
        jobs: How many to run at a time, each in a process of its own.
        cluster: Run them on the cluster at this address, such as ``dask://10.0.0.5:8786``, whose workers see the
            same folders.
        progress: Whether to show bars (with one job only).
        say: Called with a line now and then.

    Returns:
        For each method its records, in the order of the configurations.

    Raises:
        ComparisonError: If runs fail, once all others are done.
        SettingError: If the address is none, or a package is missing.
        UnreachableError: If there is no such cluster, or it has no workers.

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
    done = run_all(runs, jobs=jobs, cluster=cluster, progress=progress, say=say)
    records: dict[str, list[Record]] = {}
    for config, record in zip(configs, done, strict=True):
        records.setdefault(config.method, []).append(record)
    return records


def run_all(
    runs: Sequence[tuple[RunConfig, Path]],
    *,
    jobs: int = 1,
    cluster: str | None = None,
    progress: bool | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Record]:
    """Run each configuration in its folder; those that are done already are read.

    Args:
        runs: Configurations, each with a folder of its own.
        jobs: How many to run at a time, each in a process of its own.
        cluster: Run them on the cluster at this address, such as ``dask://10.0.0.5:8786``, whose workers see the
            same folders.
        progress: Whether to show bars (with one job only).
        say: Called with a line now and then.

    Returns:
        Their records, in this order.

    Raises:
        ComparisonError: If runs fail, once all others are done.
        SettingError: If the address is none, or a package is missing.
        UnreachableError: If there is no such cluster, or it has no workers.

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
    workers = Workers(jobs, cluster)
    failures = run_elsewhere(runs, workers, say) if workers.are_others else {}
    done: list[tuple[RunConfig, Record]] = []
    first: NCLError | None = None
    for config, folder in runs:
        if folder in failures:
            continue
        say(name_of(config))
        try:
            done.append((config, run(config, folder, progress=progress, say=say)))
        except NCLError as error:
            failures[folder] = Failure(name_of(config), str(error), isinstance(error, NonFiniteError))
            first = first or error
            say(str(failures[folder]))
    if first is not None and not done:
        raise first
    if failures:
        raise ComparisonError(failures.values(), done)
    return [record for _, record in done]
