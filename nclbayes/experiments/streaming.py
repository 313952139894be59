"""A run in which nobody says where a task ends: a task set as one stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nclbayes.analysis.evaluation import Score
from nclbayes.analysis.record import Record
from nclbayes.data.task import Task
from nclbayes.engines.progress import ProgressBar
from nclbayes.errors import FileError
from nclbayes.experiments.config import RunConfig
from nclbayes.methods import find_method
from nclbayes.nn import BayesianNetwork
from nclbayes.posterior import OnlinePosterior
from nclbayes.stream import Changed, Stream, StreamSettings
from nclbayes.tasks.streams import TaskStream

# How often each task of a recurring stream comes; of a blurred one, over which part of a stretch tasks cross over.
ROUNDS, BLUR = 2, 1 / 3
# After so many batches the stream is saved.
_KEPT = 200

Scorer = Callable[[OnlinePosterior, list[Task]], list[Score]]


class Found(NamedTuple):
    """What became of the boundaries of a stream.

    Attributes:
        delays: Of each boundary that was found, how many batches were observed from its first on until it was told.
        missed: How many were not found.
        false: How many changes were told where there was none.
    """

    delays: tuple[int, ...]
    missed: int
    false: int


def stream_of(config: RunConfig, tasks: Sequence[Task]) -> TaskStream:
    """The tasks of a run as a stream. Each has as many batches as it would have steps.

    Args:
        config: The run.
        tasks: Its tasks.

    Returns:
        The stream; a recurring one is as long as the others, and has its tasks in two rounds.

    Raises:
        SettingError: If the model must be told which task a batch is of.
    """
    engine = find_method(config.method).engine(**config.settings)
    batches = engine.num_steps(max(task.size for task in tasks) / engine.batch_size)
    order, blur = tuple(range(len(tasks))), 0
    if config.stream == "recurring":
        order, batches = order * ROUNDS, max(1, batches // ROUNDS)
    elif config.stream == "blurred":
        blur = max(1, round(BLUR * batches))
    elif config.stream == "unchanged":
        order, tasks = (0,) * len(tasks), tasks[:1]
    return TaskStream(tuple(tasks), order, batches, engine.batch_size, blur, config.seed)


def stretches(source: TaskStream) -> list[str]:
    """What each stretch of a stream is called: its task, numbered where it comes back."""
    names = list[str]()
    for place, k in enumerate(source.order):
        before = source.order[:place].count(k)
        names.append(f"{source.tasks[k].name} ({before + 1})" if before else source.tasks[k].name)
    return names


def found_boundaries(source: TaskStream, changes: Sequence[Changed]) -> Found:
    """Which boundaries of a stream were found, and what else was.

    Args:
        source: The stream.
        changes: What was told.

    Returns:
        A boundary is found by the first change between it and the next one; of blurred tasks, from where they begin
        to cross over, and further changes while they do are not false.
    """
    half = source.blur // 2
    starts = [boundary - half for boundary in source.boundaries]
    delays, false = list[int](), len(changes)
    for boundary, (start, end) in zip(source.boundaries, pairwise([*starts, len(source) + 1]), strict=True):
        told = [change.batch for change in changes if start <= change.batch < end]
        delays += [told[0] - boundary + 1] if told else []
        false -= sum(k == 0 or batch < boundary + half for k, batch in enumerate(told))
    return Found(tuple(delays), len(starts) - len(delays), false)


def learn_stream(
    config: RunConfig,
    tasks: list[Task],
    model: BayesianNetwork,
    out: Path | None,
    *,
    score: Scorer,
    progress: bool,
    say: Callable[[str], None],
) -> Record:
    """Learn the tasks as a stream, and score all of them after each stretch of it.

    Args:
        config: The run.
        tasks: Its tasks.
        model: The model.
        out: The run's folder, where it goes on from if it was stopped; None: nothing is kept.
        score: Scores a posterior on tasks.
        progress: Whether to show a bar.
        say: Called with a line after each stretch.

    Returns:
        The record; its ``about`` has the changes that were told, the true boundaries, and what was found of the latest
        batches.

    Raises:
        FileError: If the folder holds something else, or cannot be written.
        SettingError: If the method learns whole tasks only.
    """
    source = stream_of(config, tasks)
    stream, record = _begun(config, model, source, out)
    started, scored = time.perf_counter(), [tasks[k] for k in source.order]

    def note() -> None:
        nonlocal started
        seconds = time.perf_counter() - started
        record.add(_in_order(source, score(stream.present(), list(source.tasks))), seconds=seconds)
        changes = [event for event in stream.events if isinstance(event, Changed)]
        record.about["changes"] = [asdict(change) for change in changes]
        record.about["boundaries"] = list(source.boundaries)
        record.about["judged"] = [list(each) for each in stream.judged]
        if out is not None:
            record.save(out / "record.json")
        name = record.tasks[len(record.scores) - 1]
        say(
            f"{len(record.scores)}/{len(scored)} {name}: average accuracy {record.average_accuracy:.1%}, "
            f"{len(changes)} changes told"
        )
        started = time.perf_counter()

    def keep() -> None:
        if out is not None:
            stream.save(out / "stream.ncl")

    if stream.batches and len(record.scores) < stream.batches // source.batches:
        note()
    with ProgressBar(len(source), stream.batches, "stream", progress) as bar:
        for number, item in enumerate(source, 1):
            if number <= stream.batches:
                continue
            if config.boundaries == "told" and number in source.boundaries:
                stream.consolidate()
            stream.observe(*item.batch)
            bar.advance(segment=str(stream.segments))
            if number % source.batches == 0:
                keep()
                note()
            elif number % _KEPT == 0:
                keep()
    if out is not None:
        stream.present().save(out / "posterior.ncl")
    return record


def _in_order(source: TaskStream, scores: Sequence[Score]) -> list[Score]:
    """The tasks' scores, one for each stretch."""
    return [scores[k] for k in source.order]


def _begun(config: RunConfig, model: BayesianNetwork, source: TaskStream, out: Path | None) -> tuple[Stream, Record]:
    """A new stream and record, or those that a folder holds."""
    record = Record(stretches(source), about=asdict(config))
    if out is None or not (out / "stream.ncl").exists():
        generator = torch.Generator().manual_seed(config.seed)
        learner = find_method(config.method).build(model, config.settings, generator)
        return Stream(learner, **asdict(_settings(config, source))), record
    if (out / "record.json").exists():
        record = Record.load(out / "record.json")
    stream = Stream.load(out / "stream.ncl", model)
    done = stream.batches // source.batches
    at_end = done and stream.batches % source.batches == 0
    if record.tasks != stretches(source) or not done - (1 if at_end else 0) <= len(record.scores) <= done:
        raise FileError(
            f"In '{out}' the stream has observed {stream.batches} batches and the record has {len(record.scores)} "
            "rows: the one is not of the other. Remove the folder to start anew."
        )
    return stream, record


def _settings(config: RunConfig, source: TaskStream) -> StreamSettings:
    """How the stream looks for boundaries."""
    known: dict[str, Any] = {"segment_size": source.batches * source.batch_size}
    if config.boundaries not in ("", "found"):
        known["false_alarm_every"] = None
    if config.boundaries.isdecimal():
        known["longest"] = int(config.boundaries) * source.batch_size
    return StreamSettings(**known)
