"""The ledger: what came of each cell beside what was published, with the command that makes it again."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from nclbayes.analysis.measures import mean_and_error
from nclbayes.analysis.record import Record
from nclbayes.errors import FileError
from nclbayes.experiments.benchmarks.cells import CELLS, MISSING, Cell
from nclbayes.experiments.benchmarks.published import SOURCES, Published
from nclbayes.experiments.comparison import run_all
from nclbayes.experiments.config import RunConfig
from nclbayes.storage import read_document, write_document, write_text

_FORMAT = 1
# In points: two means are alike within this, or within three standard errors of their difference.
_CLOSE = 3.0


@dataclass(frozen=True)
class Result:
    """What came of a cell.

    Attributes:
        cell: The cell's name.
        accuracy: The average test accuracy after the last task in percent, the mean over the seeds.
        error: Its standard error; None with one seed.
        seeds: The seeds.
        minutes: How long one run learnt, the mean; None where that was not kept.
        command: What makes it again.
        settings: What the cell's settings were, as :func:`fingerprint` has them.
        note: Anything else that a reader must know.

    Example:
        >>> from nclbayes.experiments.benchmarks import Result
        >>> str(Result("permuted-mnist-10-ewc", 93.04, 0.21, (0, 1, 2)))
        '93.0 ± 0.2'
    """

    cell: str
    accuracy: float
    error: float | None
    seeds: tuple[int, ...]
    minutes: float | None = None
    command: str = ""
    settings: str = ""
    note: str = ""

    def __str__(self) -> str:
        """The accuracy and its error."""
        return f"{self.accuracy:.1f}" + ("" if self.error is None else f" ± {self.error:.1f}")

    @property
    def is_current(self) -> bool:
        """Whether the cell still has the settings that this came of."""
        return self.cell in CELLS and fingerprint(CELLS[self.cell]) == self.settings


@dataclass(frozen=True)
class Ledger:
    """Results of cells, one a cell.

    Attributes:
        results: The results.

    Example:
        >>> from nclbayes.experiments.benchmarks import Ledger, Result
        >>> old = Ledger((Result("permuted-mnist-10-ewc", 93.0, None, (0,)),))
        >>> [result.seeds for result in old.extended([Result("permuted-mnist-10-ewc", 93.1, 0.1, (0, 1))]).results]
        [(0, 1)]
    """

    results: tuple[Result, ...] = ()

    def extended(self, results: Iterable[Result]) -> Ledger:
        """This ledger with further results; of a cell that it has, the new one counts.

        Args:
            results: The results.

        Returns:
            Another ledger, in the order of the cells.
        """
        by_cell = {result.cell: result for result in (*self.results, *results)}
        order = {name: k for k, name in enumerate(CELLS)}
        return Ledger(tuple(sorted(by_cell.values(), key=lambda result: order.get(result.cell, len(order)))))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the results as JSON.

        Args:
            path: The file.
        """
        write_document(path, asdict(self), _FORMAT)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Ledger:
        """Read results.

        Args:
            path: The file.

        Returns:
            The ledger.

        Raises:
            FileError: If it is none.
        """
        return read_document(path, cls, "a ledger of benchmarks", _FORMAT)


def fingerprint(cell: Cell) -> str:
    """A short text that changes with whatever decides the runs of a cell, but for seed and device.

    Args:
        cell: The cell.

    Returns:
        Twelve hexadecimal digits.
    """
    config = cell.config(0)
    # What a later version adds, and leaves off by default, changes nothing.
    usual = asdict(RunConfig(config.set, config.method, config.scenario))
    facts = {name: value for name, value in asdict(config).items() if value != usual[name]}
    facts |= {"set": config.set, "method": config.method, "scenario": config.scenario}
    for name in ("seed", "device", "features"):
        facts.pop(name, None)
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def run_cells(
    cells: Sequence[Cell],
    seeds: Sequence[int],
    out: Path,
    *,
    device: str = "cpu",
    jobs: int = 1,
    cluster: str | None = None,
    progress: bool | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Result]:
    """Run cells; runs that are done are read, and those that were stopped go on.

    Args:
        cells: What to run.
        seeds: A run of each cell for each of them.
        out: The folder; each run has one of its own in it, ``CELL/seed-SEED``.
        device: Where to compute.
        jobs: How many runs at a time, each in a process of its own.
        cluster: The address of a cluster that makes them instead.
        progress: Whether to show bars (with one job only).
        say: Called with a line now and then.

    Returns:
        Their results, over all seeds of which the folder holds a run.

    Raises:
        ComparisonError: If runs fail, once all others are done.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from nclbayes.experiments.benchmarks import Cell, run_cells
        >>> cell = Cell("split-digits-domain-none", "none", "split-digits", "domain", 2, {"steps": 5})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     (result,) = run_cells([cell], [0], Path(folder), progress=False)
        >>> result.seeds
        (0,)
    """
    runs = [(cell.config(seed, device), _folder(out, cell, seed)) for cell in cells for seed in seeds]
    run_all(runs, jobs=jobs, cluster=cluster, progress=progress, say=say)
    return collect(out, cells)


def collect(out: Path, cells: Iterable[Cell] = tuple(CELLS.values())) -> list[Result]:
    """The results of the runs in a folder.

    Args:
        out: The folder.
        cells: The cells to look for.

    Returns:
        One for each cell of which a run is complete, over all seeds of complete runs. Runs of other settings than the
        cell has now are left out.
    """
    return [result for cell in cells if (result := _result(out, cell)) is not None]


def _folder(out: Path, cell: Cell, seed: int) -> Path:
    return out / cell.name / f"seed-{seed}"


def _result(out: Path, cell: Cell) -> Result | None:
    found: dict[int, Record] = {}
    for path in sorted((out / cell.name).glob("seed-*/record.json")):
        config, record = RunConfig.load(path.parent / "config.json"), Record.load(path)
        wanted = replace(cell.config(config.seed, config.device), features=config.features)
        if record.is_complete and config == wanted:
            found[config.seed] = record
    if not found:
        return None
    seeds = tuple(sorted(found))
    mean, error, _ = mean_and_error(100 * found[seed].average_accuracy for seed in seeds)
    seconds = [sum(found[seed].seconds) for seed in seeds]
    minutes = sum(seconds) / 60 / len(seconds)
    return Result(
        cell.name,
        mean,
        None if math.isnan(error) else error,
        seeds,
        minutes if math.isfinite(minutes) else None,
        command_of(cell, seeds),
        fingerprint(cell),
    )


def command_of(cell: Cell, seeds: Sequence[int] = (0, 1, 2)) -> str:
    """The command that runs a cell.

    Args:
        cell: The cell.
        seeds: The seeds.

    Returns:
        The command.
    """
    return f"nclbayes bench {cell.name} --seeds {_shown(seeds)}"


def _shown(seeds: Sequence[int]) -> str:
    """Seeds as the command line takes them."""
    first, last = min(seeds), max(seeds)
    if len(seeds) > 1 and list(seeds) == list(range(first, last + 1)):
        return f"{first}-{last}"
    return ",".join(map(str, seeds))


def verdict(result: Result, published: Published) -> str:
    """Whether a result is as published.

    Two means are alike within three points, or within three standard errors of their difference.

    Args:
        result: The result.
        published: What was published.

    Returns:
        "reproduced", "above" or "below"; where the settings differ that is said first, as no two numbers of different
        settings reproduce each other.

    Example:
        >>> from nclbayes.experiments.benchmarks import Result, verdict
        >>> from nclbayes.experiments.benchmarks.published import KAO, Published
        >>> verdict(Result("x", 90.0, 0.5, (0, 1)), Published(92.0, KAO, 0.5))
        'reproduced'
        >>> verdict(Result("x", 90.0, 0.5, (0, 1)), Published(80.0, KAO, differs="wider layers there"))
        'differs in setting (above): wider layers there'
    """
    gap = result.accuracy - published.accuracy
    room = max(_CLOSE, 3 * math.hypot(result.error or 0.0, published.error or 0.0))
    if published.at_least:
        word = "reproduced" if gap >= 0 else "below"
    else:
        word = "reproduced" if abs(gap) <= room else "above" if gap > 0 else "below"
    if not published.differs:
        return word
    alike = "as published" if word == "reproduced" else word
    return f"differs in setting ({alike}): {published.differs}"


def tables(ledger: Ledger, cells: Iterable[Cell] = tuple(CELLS.values())) -> str:
    """The ledger as Markdown: a table for each benchmark, then the sources.

    Args:
        ledger: The results.
        cells: The cells to show; those without a result stand below the table.

    Returns:
        The text.
    """
    found = {result.cell: result for result in ledger.results}
    by_family: dict[str, list[Cell]] = {}
    for cell in cells:
        by_family.setdefault(cell.family, []).append(cell)
    parts = []
    for family, own in by_family.items():
        rows, left = list[str](), list[str]()
        for cell in own:
            result = found.get(cell.name)
            if result is not None and result.is_current:
                rows.append(_row(cell, result))
            else:
                left.append(_not_run(cell, is_stale=result is not None))
        part = [f"**{family}**"] + (["\n".join((*_HEADER, *rows))] if rows else [])
        part += [f"Not run: {'; '.join(left)}. `nclbayes bench '{family}-*'` runs all."] if left else []
        parts.append("\n\n".join(part))
    numbers = {source: k + 1 for k, source in enumerate(SOURCES)}
    cited = {p.source for own in by_family.values() for cell in own for p in cell.published}
    if cited:
        parts.append("\n".join(["Sources:", "", *(f"{numbers[s]}. {s}" for s in SOURCES if s in cited)]))
    return "\n\n".join(parts) + "\n"


_HEADER = (
    "| Method | Setting | Published | Ours | Seeds | Minutes | Verdict | Command |",
    "| --- | --- | --- | --- | --- | --- | --- | --- |",
)


def _row(cell: Cell, result: Result) -> str:
    minutes = "" if result.minutes is None else f"{result.minutes:.1f}"
    words = "; ".join(verdict(result, each) for each in cell.published) or "nothing to compare with"
    if result.note:
        words += f" ({result.note})"
    known = _known(cell) or "none found"
    return _line(cell.label, cell.setting, known, str(result), _shown(result.seeds), minutes, words, result.command)


def _not_run(cell: Cell, is_stale: bool) -> str:
    """A cell without a result."""
    about = ["run with other settings than today's"] if is_stale else []
    known = _known(cell)
    about += [f"published: {known}"] if known else []
    return cell.label + (f" ({'; '.join(about)})" if about else "")


def _known(cell: Cell) -> str:
    """What was published."""
    return "; ".join(f"{p} ({p.source.short}, {p.source.checked.value})" for p in cell.published)


def _line(*cells: str) -> str:
    *rest, command = cells
    return "| " + " | ".join((*rest, f"`{command}`")) + " |"


def write_ledger(out: Path, results: Iterable[Result]) -> Ledger:
    """Write ``ledger.json`` and ``ledger.md`` into a folder, with what its ledger has of other cells.

    Args:
        out: The folder.
        results: New results.

    Returns:
        The whole ledger.

    Raises:
        FileError: If they cannot be written.
    """
    path = out / "ledger.json"
    ledger = (Ledger.load(path) if path.exists() else Ledger()).extended(results)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"Could not write to '{out}': {error.strerror}.") from None
    ledger.save(path)
    write_text(out / "ledger.md", tables(ledger, [CELLS[r.cell] for r in ledger.results if r.cell in CELLS]))
    return ledger


def missing() -> str:
    """What the table of cells does not have, as a Markdown list."""
    return "".join(f"- {what}: {why}.\n" for what, why in MISSING.items())
