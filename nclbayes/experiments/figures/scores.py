"""What figures over sequences of tasks are drawn from: the score of every task from when it was learnt on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nclbayes.analysis.record import Record
from nclbayes.data.task import Task
from nclbayes.experiments.figures.recipe import Row


def score_rows(record: Record, least: Sequence[float] = ()) -> list[Row]:
    """A run's scores as rows of a table.

    Args:
        record: The run.
        least: The least possible loss of each task, which is taken off; by default 0.

    Returns:
        For each number of tasks learnt, a row for each of them.
    """
    rows: list[Row] = []
    for i, scores in enumerate(record.scores):
        for j in range(i + 1):
            loss = scores[j].loss - (least[j] if least else 0.0)
            where = {"task": record.tasks[j], "number": j + 1, "tasks learnt": i + 1}
            rows.append({**where, "loss": loss, "accuracy": scores[j].accuracy})
    return rows


def least_losses(tasks: Sequence[Task]) -> list[float]:
    """The loss on each stimulus-response task of a network that makes no error: what a normal density costs anyway.

    Args:
        tasks: The tasks, with test data.

    Returns:
        ``log(2 pi / w) / 2`` for each output that counts w, summed over a trial; the mean over trials.
    """
    found = []
    for task in tasks:
        total, trials = 0.0, 0
        for *_, weight, y in task.epoch(1024, test=True):
            counts = weight.expand_as(y)
            total += float((2 * math.pi / counts[counts > 0]).log().sum()) / 2
            trials += len(y)
        found.append(total / trials)
    return found
