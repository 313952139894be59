"""How the numbers of records are summed up and written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nclbayes.analysis.record import Record
from nclbayes.errors import SettingError


@dataclass(frozen=True)
class Measure:
    """How a number of :meth:`~nclbayes.Record.summary` is shown.

    Attributes:
        title: What it is called.
        unit: Its unit.
        scale: By how much it is multiplied to have that unit.
        decimals: How many are written.
    """

    title: str
    unit: str
    scale: float
    decimals: int

    def write(self, values: Sequence[float], with_unit: bool = False) -> str:
        """The mean and its standard error; where some values are not finite, how many are.

        Args:
            values: As in the summaries, one a seed.
            with_unit: Write the unit too.

        Returns:
            Text such as ``"97.3 ± 0.2"``; a dash if no value is finite.

        Example:
            >>> from nclbayes.analysis.measures import MEASURES
            >>> MEASURES["average accuracy"].write([0.96, 0.98, float("nan")])
            '97.0 ± 1.0 (2 of 3)'
        """
        mean, error, count = mean_and_error(values)
        if not count:
            return "-"
        text = self._number(mean) + ("" if math.isnan(error) else f" ± {self._number(error)}")
        text += f" {self.unit}" if with_unit else ""
        return text if count == len(values) else f"{text} ({count} of {len(values)})"

    def _number(self, value: float) -> str:
        value *= self.scale
        if abs(value) >= 1e5:
            return f"{value:.3g}"
        return f"{round(value, self.decimals) + 0.0:.{self.decimals}f}"


MEASURES = {
    "average accuracy": Measure("average accuracy", "%", 100, 1),
    "forgetting": Measure("forgetting", "%", 100, 1),
    "backward transfer": Measure("backward transfer", "%", 100, 1),
    "forward transfer": Measure("forward transfer", "%", 100, 1),
    "average loss": Measure("loss", "nats", 1, 3),
    "calibration error": Measure("calibration error", "%", 100, 1),
    "log evidence": Measure("log evidence", "nats", 1, 1),
    "seconds": Measure("learning time", "minutes", 1 / 60, 2),
}
"""How each number of a record's summary is shown."""


def mean_and_error(values: Iterable[float]) -> tuple[float, float, int]:
    """The mean of the finite values, its standard error, and how many there are.

    Args:
        values: One a seed.

    Returns:
        ``(mean, s / sqrt(n), n)`` with s the standard deviation (n - 1 in its denominator); the error is NaN for fewer
        than two values, the mean for none.

    Example:
        >>> from nclbayes.analysis.measures import mean_and_error
        >>> mean_and_error([1.0, 3.0, float("nan")])
        (2.0, 1.0, 2)
    """
    finite = [value for value in values if math.isfinite(value)]
    n = len(finite)
    mean = sum(finite) / n if n else math.nan
    error = math.sqrt(sum((value - mean) ** 2 for value in finite) / (n - 1) / n) if n > 1 else math.nan
    return mean, error, n


def values_of(records: Iterable[Record], what: str) -> list[float]:
    """One number of each record.

    Args:
        records: The records.
        what: A name in :meth:`~nclbayes.Record.summary`.

    Returns:
        The numbers; NaN for a record with no row yet.
    """
    return [record.summary()[what] if record.scores else math.nan for record in records]


def check_runs(runs: Mapping[str, Sequence[Record]]) -> None:
    """Refuse runs with no method, or a method with no records.

    Args:
        runs: The records of each method.

    Raises:
        SettingError: If there is nothing to show.
    """
    if not runs:
        raise SettingError("There are no runs to show: give each method's records, {'method': [record, ...]}.")
    for name, records in runs.items():
        if not records:
            raise SettingError(f"Method '{name}' has no records: give at least one, or leave the method out.")
