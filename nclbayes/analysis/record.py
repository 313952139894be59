"""What a run of continual learning leaves behind: scores after every task, on every task."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from nclbayes.analysis.evaluation import Score
from nclbayes.errors import SettingError
from nclbayes.storage import Misfit, read_document, refused, write_document, write_text

_FORMAT = 2


@dataclass
class Record:
    """Scores R[i, j] after task i on task j, with what is read off them.

    Rows are added with :meth:`add`, one after each task. Tasks that were not learnt yet (j > i) may be scored too:
    forward transfer needs them.

    Attributes:
        tasks: The names of the tasks, in order.
        scores: One row after each task, each with a score for the tasks from the first on.
        losses: The training losses of each task, if they were kept.
        seconds: How long each task took to learn.
        baseline: The accuracies before any task was learnt, for forward transfer.
        evidence: The log evidence of each task given the earlier ones, as :class:`~nclbayes.UpdateReport` has it; None
            where there is none.
        about: Anything else worth keeping, such as the method and the seed.

    Example:
        >>> from nclbayes import Record
        >>> from nclbayes.analysis import Score
        >>> record = Record(["a", "b"])
        >>> record.add([Score(0.9, 0.3, 0.1, 100)])
        >>> record.add([Score(0.7, 0.8, 0.1, 100), Score(0.8, 0.5, 0.1, 100)])
        >>> record.average_accuracy, round(record.forgetting, 3)
        (0.75, 0.2)
    """

    tasks: list[str]
    scores: list[list[Score]] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    baseline: list[float] = field(default_factory=list)
    evidence: list[float | None] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    def add(
        self,
        scores: Sequence[Score],
        losses: Sequence[float] = (),
        seconds: float = math.nan,
        evidence: float | None = None,
    ) -> None:
        """Add the scores after one more task.

        Args:
            scores: For the tasks from the first on, at least those learnt so far.
            losses: The task's training losses.
            seconds: How long it took.
            evidence: Its log evidence given the earlier tasks, if the engine tells one.

        Raises:
            SettingError: If there are too few or too many scores, or the record is full.
        """
        learnt = len(self.scores) + 1
        if learnt > len(self.tasks):
            raise SettingError(f"The record is full: it has a row for each of its {len(self.tasks)} tasks.")
        if not learnt <= len(scores) <= len(self.tasks):
            raise SettingError(f"Row {learnt} needs {learnt} to {len(self.tasks)} scores, not {len(scores)}.")
        self.scores.append(list(scores))
        self.losses.append([float(loss) for loss in losses])
        self.seconds.append(float(seconds))
        self.evidence.append(None if evidence is None else float(evidence))

    @property
    def is_complete(self) -> bool:
        """Whether every task has been learnt."""
        return len(self.scores) == len(self.tasks)

    def matrix(self, what: str = "accuracy") -> list[list[float]]:
        """R[i][j], NaN where task j was not scored after task i.

        Args:
            what: "accuracy", "loss" or "calibration_error".

        Returns:
            One row for each task learnt.
        """
        rows = [[float(getattr(score, what)) for score in row] for row in self.scores]
        return [row + [math.nan] * (len(self.tasks) - len(row)) for row in rows]

    @property
    def average_accuracy(self) -> float:
        """The mean over j of R[k, j], k the last task learnt and j = 1..k."""
        return self._average("accuracy")

    @property
    def average_loss(self) -> float:
        """The mean negative log likelihood over the tasks learnt, after the last of them."""
        return self._average("loss")

    @property
    def average_calibration_error(self) -> float:
        """The mean calibration error over the tasks learnt, after the last of them."""
        return self._average("calibration_error")

    @property
    def forgetting(self) -> float:
        """The mean over j < k of max_i R[i, j] - R[k, j]: how far below its best each earlier task has fallen."""
        matrix, k = self.matrix(), len(self.scores)
        if k < 2:
            return 0.0
        return sum(max(matrix[i][j] for i in range(j, k)) - matrix[k - 1][j] for j in range(k - 1)) / (k - 1)

    @property
    def backward_transfer(self) -> float:
        """The mean over j < k of R[k, j] - R[j, j]: what later tasks did to earlier ones; negative if they hurt."""
        matrix, k = self.matrix(), len(self.scores)
        if k < 2:
            return 0.0
        return sum(matrix[k - 1][j] - matrix[j][j] for j in range(k - 1)) / (k - 1)

    @property
    def forward_transfer(self) -> float:
        """The mean over j > 1 of R[j-1, j] - b_j, b_j the accuracy before any task; NaN where those are not there."""
        matrix, k = self.matrix(), len(self.scores)
        if k < 2 or len(self.baseline) < k:
            return math.nan
        return sum(matrix[j - 1][j] - self.baseline[j] for j in range(1, k)) / (k - 1)

    @property
    def log_evidence(self) -> float:
        """The sum over the tasks learnt of log p(D_k | D_1 .. D_{k-1}), in nats: the prequential log evidence.

        It is the log probability of all training examples, each task predicted before it was learnt, and as good as the
        Laplace approximations that it consists of. It says nothing of what was forgotten. NaN if a task has none.
        """
        known = [value for value in self.evidence if value is not None]
        return sum(known) if known and len(known) == len(self.scores) else math.nan

    def summary(self) -> dict[str, float]:
        """All averages by name."""
        return {
            "average accuracy": self.average_accuracy,
            "forgetting": self.forgetting,
            "backward transfer": self.backward_transfer,
            "forward transfer": self.forward_transfer,
            "average loss": self.average_loss,
            "calibration error": self.average_calibration_error,
            "log evidence": self.log_evidence,
            "seconds": sum(self.seconds),
        }

    def __str__(self) -> str:
        """Accuracies in percent, a row after each task, the averages, and the log evidence where there is one."""
        width = max(map(len, self.tasks), default=0)
        lines = []
        for name, row in zip(self.tasks, self.matrix(), strict=False):
            shown = ("     ." if math.isnan(value) else f"{100 * value:6.1f}" for value in row)
            lines.append(f"after {name:{width}}{''.join(shown)}")
        if self.scores:
            lines.append(f"average accuracy {self.average_accuracy:.1%}, forgetting {100 * self.forgetting:.1f} points")
        if not math.isnan(self.log_evidence):
            lines.append(f"prequential log evidence {self.log_evidence:,.1f} nats")
        return "\n".join(lines) or "no task has been scored yet"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record as JSON, and the accuracies as CSV beside it.

        Args:
            path: The JSON file; the table has the same name with the suffix ``.csv``.

        Raises:
            FileError: If they cannot be written.
        """
        target = Path(path)
        lines = [["after", *self.tasks]]
        for name, row in zip(self.tasks, self.matrix(), strict=False):
            lines.append([name, *("" if math.isnan(value) else f"{value:.6g}" for value in row)])
        table = io.StringIO()
        csv.writer(table, lineterminator="\n").writerows(lines)
        write_document(target, asdict(self), _FORMAT)
        write_text(target.with_suffix(".csv"), table.getvalue())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Record:
        """Read a record.

        Args:
            path: The JSON file.

        Returns:
            The record.

        Raises:
            FileError: If it is no record, a damaged one, or one of a newer format.
        """
        record: Record = read_document(path, cls, "a record of nclbayes", _FORMAT, finite=False, upgrade=_upgraded)
        with refused(path, "a record of nclbayes"):
            record._check()
        return record

    def _check(self) -> None:
        """Refuse what no run can have left."""
        count, learnt = len(self.tasks), len(self.scores)
        if learnt > count or len(self.baseline) > count:
            raise Misfit(f"it has {learnt} rows of scores and {len(self.baseline)} baselines for {count} tasks")
        if len(self.losses) != learnt or len(self.seconds) != learnt:
            raise Misfit(f"it has losses of {len(self.losses)} tasks and seconds of {len(self.seconds)}, not {learnt}")
        if len(self.evidence) != learnt:
            raise Misfit(f"it has the evidence of {len(self.evidence)} tasks, not {learnt}")
        for i, row in enumerate(self.scores):
            if not i < len(row) <= count:
                raise Misfit(f"scores[{i}] has {len(row)} scores, not {i + 1} to {count}")

    def _average(self, what: str) -> float:
        if not self.scores:
            return math.nan
        last = self.matrix(what)[-1][: len(self.scores)]
        return sum(last) / len(last)


def _upgraded(record: Record, version: int) -> Record:
    """What a record of an earlier format means: before the second there was no evidence."""
    return replace(record, evidence=[None] * len(record.scores)) if version < 2 else record
