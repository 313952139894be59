"""What a recipe of a table or figure is, and how one is made into files."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nclbayes.analysis.plots import save
from nclbayes.analysis.record import Record
from nclbayes.errors import FileError, SettingError
from nclbayes.experiments.comparison import run_all
from nclbayes.experiments.config import RunConfig
from nclbayes.storage import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALES = ("quick", "laptop", "paper")
"""To see that it runs; in minutes to some hours on two cores; as in the paper."""

Row = Mapping[str, Any]
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Statement:
    """Something that the paper says, and whether the results show it.

    Attributes:
        claim: What is said.
        holds: Whether it is so here.
        detail: The numbers.

    Example:
        >>> from nclbayes.experiments.figures import Statement
        >>> Statement("two and two make four", 2 + 2 == 4, f"{2 + 2}").holds
        True
    """

    claim: str
    holds: bool
    detail: str


@dataclass(frozen=True)
class Results:
    """The data of a figure: everything that it is drawn from.

    Attributes:
        tables: Rows of plain values, by the table's name; each becomes a CSV file.
        statements: What the paper says of them.
        facts: Anything else, as plain values.

    Example:
        >>> from nclbayes.experiments.figures import Results
        >>> Results({"accuracy": [{"method": "joint", "accuracy": 98.7}]}).tables["accuracy"][0]["accuracy"]
        98.7
    """

    tables: Mapping[str, Sequence[Row]]
    statements: Sequence[Statement] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Workplace:
    """Where and how a recipe works.

    Attributes:
        out: A folder for what it keeps: runs that were done are not done again.
        jobs: How many runs at a time.
        device: Where to compute.
        progress: Whether to show bars; None: on a terminal.
        say: Called with a line now and then.
        cluster: The address of a cluster that makes the runs instead, such as ``dask://10.0.0.5:8786``.

    Example:
        >>> from pathlib import Path
        >>> from nclbayes.experiments.figures import Workplace
        >>> Workplace(Path("figures/toy"), jobs=2).jobs
        2
    """

    out: Path
    jobs: int = 1
    device: str = "cpu"
    progress: bool | None = None
    say: Callable[[str], None] = lambda text: None
    cluster: str | None = None

    def run_all(self, runs: Sequence[tuple[RunConfig, Path]]) -> list[Record]:
        """Runs of a recipe, made as this workplace has it.

        Args:
            runs: Configurations, each with a folder of its own.

        Returns:
            Their records, in this order.
        """
        return run_all(runs, jobs=self.jobs, cluster=self.cluster, progress=self.progress, say=self.say)


@dataclass(frozen=True)
class Recipe:
    """How a table or figure comes about.

    Attributes:
        name: What it is called on the command line.
        summary: One line about it.
        scales: The settings of each of `SCALES`.
        compute: From settings to results.
        draw: From results to pictures by name.

    Example:
        >>> from nclbayes.experiments.figures import find_figure
        >>> recipe = find_figure("feedforward")
        >>> recipe.scales["laptop"]["seeds"]
        3
    """

    name: str
    summary: str
    scales: Mapping[str, Settings]
    compute: Callable[[Settings, Workplace], Results]
    draw: Callable[[Results], Mapping[str, Figure]]


def make(recipe: Recipe, scale: str, place: Workplace, changes: Settings | None = None) -> Results:
    """Compute a recipe's results and write them: ``results.json``, a CSV file a table, and the pictures.

    Args:
        recipe: The recipe.
        scale: One of `SCALES`.
        place: Where and how.
        changes: What to change in the scale's settings.

    Returns:
        The results.

    Raises:
        SettingError: If the scale or a setting is unknown.
        FileError: If the folder cannot be written, or holds a figure of other settings.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from matplotlib.figure import Figure
        >>> from nclbayes.experiments.figures import Recipe, Results, Workplace, make
        >>> def compute(settings, place):
        ...     return Results({"squares": [{"n": n, "square": n * n} for n in range(settings["count"])]})
        >>> scales = {scale: {"count": 3} for scale in ("quick", "laptop", "paper")}
        >>> squares = Recipe("squares", "the first squares", scales, compute, lambda results: {"empty": Figure()})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     results = make(squares, "quick", Workplace(Path(folder)))
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['empty.png', 'figure.json', 'results.json', 'squares.csv']
    """
    if scale not in SCALES:
        raise SettingError(f"scale is '{scale}'; choose one of {', '.join(SCALES)}.")
    settings = dict(recipe.scales[scale])
    for name, value in (changes or {}).items():
        if name not in settings:
            raise SettingError(f"The figure {recipe.name} has no setting '{name}': it has {', '.join(settings)}.")
        _check(name, value, settings[name])
        settings[name] = value
    try:
        place.out.mkdir(parents=True, exist_ok=True)
        _claim(place.out / "figure.json", {"figure": recipe.name, "settings": settings})
    except FileError:
        raise
    except OSError as error:
        raise _unwritable(place.out, error) from None
    results = recipe.compute(settings, place)
    pictures = recipe.draw(results)
    try:
        _write(results, place.out)
        for name, picture in pictures.items():
            save(picture, place.out / f"{name}.png")
    except FileError:
        raise
    except OSError as error:
        raise _unwritable(place.out, error) from None
    return results


def _unwritable(folder: Path, error: OSError) -> FileError:
    return FileError(f"Could not write to '{folder}': {error.strerror}.")


# Settings that may be 0.
_FROM_ZERO = ("seed", "process_noise")


def _check(name: str, value: Any, usual: Any) -> None:
    """Refuse a value of another kind than the scale has; numbers of things start at 1, and lists are not empty."""
    if usual is None or (value is None and name in ("steps", "size", "tasks")):
        return
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if isinstance(usual, bool):
        right, kind = isinstance(value, bool), "true or false"
    elif name in _FROM_ZERO:
        right, kind = is_number and value >= 0 and (value == int(value) or isinstance(usual, float)), "0 or more"
    elif isinstance(usual, int):
        right, kind = is_number and value == int(value) and value >= 1, "a whole number of at least 1"
    elif isinstance(usual, float):
        right, kind = is_number and value > 0, "a positive number"
    else:
        right, kind = isinstance(value, type(usual)) and bool(value or not usual), f"something like {usual!r}"
    if not right:
        raise SettingError(f"{name} must be {kind}, not {value!r}.")


def _claim(path: Path, identity: Mapping[str, Any]) -> None:
    """Keep runs of other settings apart: a folder belongs to one figure with one set of settings."""
    text = json.dumps(identity, indent=1) + "\n"
    # A folder in which nothing was made yet, as after an error at the start, changes hands.
    made = any(other != path for other in path.parent.iterdir())
    if path.exists() and path.read_bytes() != text.encode() and made:
        raise FileError(f"'{path.parent}' holds a figure of other settings: choose another folder, or remove that one.")
    write_text(path, text)


def _write(results: Results, out: Path) -> None:
    write_text(out / "results.json", json.dumps(asdict(results), indent=1) + "\n")
    for name, rows in results.tables.items():
        table = io.StringIO()
        writer = csv.DictWriter(table, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
        write_text(out / f"{name}.csv", table.getvalue())
