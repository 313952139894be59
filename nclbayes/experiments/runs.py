"""One run: one method on one task set, in a folder that holds all there is to know about it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nclbayes.analysis.evaluation import Score, among_seen, evaluate
from nclbayes.analysis.record import Record
from nclbayes.data.task import Task, to_device
from nclbayes.engines.loop import Callback
from nclbayes.errors import FileError
from nclbayes.experiments.config import RunConfig, check_device
from nclbayes.experiments.setup import Prior, Setup
from nclbayes.experiments.setups import find_setup
from nclbayes.experiments.streaming import learn_stream
from nclbayes.isolation.randomness import drawing_from
from nclbayes.methods import JointLearner, find_method
from nclbayes.nn import BayesianNetwork
from nclbayes.posterior import OnlinePosterior
from nclbayes.posterior.query import Query
from nclbayes.ranks import Ranks, present, transaction
from nclbayes.storage.locking import sole_use

Watcher = Callable[[str], None]


def run(
    config: RunConfig,
    out: Path | None = None,
    *,
    progress: bool | None = None,
    say: Watcher = lambda text: None,
    callbacks: Sequence[Callback] = (),
) -> Record:
    """Learn the tasks one after the other, and score all of them after each.

    In a folder the run can be stopped at any time: the same call goes on where it was.

    Args:
        config: What to run.
        out: Where to keep configuration, record, posterior and checkpoint; None: nowhere.
        progress: Whether to show bars; by default only on a terminal.
        say: Called with a line after each task.
        callbacks: Called after each step, as those of :meth:`OnlinePosterior.update
            <nclbayes.OnlinePosterior.update>`.

    Returns:
        The record.

    Raises:
        FileError: If the folder holds a run of another configuration, another process is at work in it, or it cannot
            be written.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from nclbayes.experiments import RunConfig, run
        >>> config = RunConfig.of("split-digits", "none", tasks=2, settings={"steps": 5})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     record = run(config, Path(folder) / "plain", progress=False)
        >>> len(record.tasks)
        2
    """
    found, ranks = prepared(config), present(torch.device(config.device))
    with transaction(ranks, "The run"), sole_use(out if ranks.is_first else None):
        return _learn(config, *found, out, progress, say, ranks, callbacks)


def _learn(
    config: RunConfig,
    setup: Setup,
    tasks: list[Task],
    model: BayesianNetwork,
    out: Path | None,
    progress: bool | None,
    say: Watcher,
    ranks: Ranks,
    callbacks: Sequence[Callback],
) -> Record:
    if out is not None:
        if ranks.is_first:
            claim_folder(out, config)
        # What the others find there, they find after that.
        ranks.meet("the run's folder")
    if config.stream:
        is_shown = sys.stderr.isatty() if progress is None else progress
        scorer = partial(_scores, config, setup)
        return learn_stream(config, tasks, model, out, score=scorer, progress=is_shown, say=say)
    learner, record = _begin(config, model, tasks, out)
    # A head of its own has nothing to say before its task is learnt.
    heads_differ = any(task.context != tasks[0].context for task in tasks)
    if not record.baseline:
        record.baseline = [score.accuracy for score in _scores(config, setup, _Untrained(model, config.device), tasks)]
    while not record.is_complete:
        k = len(record.scores)
        losses, seconds = [], float("nan")
        if len(learner.tasks) == k:
            checkpoint = None if out is None else out / "update.ckpt"
            report = learner.update(tasks[k], progress=progress, checkpoint=checkpoint, callbacks=callbacks)
            losses, seconds = report.losses, report.seconds
            if out is not None and ranks.is_first:
                if config.keep_each:
                    learner.save(_kept(out, k + 1))
                learner.save(out / "posterior.ncl")
        scored = [among_seen(task, tasks[k]) for task in tasks[: k + 1]] if heads_differ else tasks
        record.add(_scores(config, setup, learner, scored), losses, seconds, learner.log_evidence)
        if out is not None and ranks.is_first:
            record.save(out / "record.json")
        if ranks.is_first:
            say(f"{k + 1}/{len(tasks)} {tasks[k].name}: average accuracy {record.average_accuracy:.1%}")
    return record


def prepared(config: RunConfig) -> tuple[Setup, list[Task], BayesianNetwork]:
    """The task set, the tasks in the order in which they are learnt, and the model.

    Args:
        config: The run.

    Returns:
        All three.

    Raises:
        FileError: If its features are no longer there.
        SettingError: If the device is not here, or the set has not so many tasks.
    """
    setup = find_setup(config.set)
    here = "" if setup.features is None else setup.features()
    if config.features not in ("", here):
        raise FileError(
            f"The run was begun with the features '{config.features}', and those found now are '{here}': bring the "
            "file of the former back into the cache, or begin a new run."
        )
    check_device(config.device)
    # In another order any task of the set may be among the first ones, and the network has an output for each.
    count = config.tasks if setup.any_number or not config.shuffle else None
    tasks = setup.make_tasks(config.scenario, config.seed, config.size, count, config.active)
    model = setup.make_model(tasks, config.scenario, Prior(config.prior, config.prior_scale), config.seed, config.units)
    if config.shuffle and config.seed > 0:
        order = torch.randperm(len(tasks), generator=torch.Generator().manual_seed(config.seed))
        tasks = [tasks[int(k)] for k in order]
    return setup, setup.first(tasks, config.tasks), model.to(config.device)


def claim_folder(out: Path, config: RunConfig) -> None:
    """Make a folder that of a run: write its configuration there, unless it is there already.

    The folder must be there, and be in one's :func:`~nclbayes.storage.locking.sole_use`. One in which nothing was
    learnt yet, as after an error at the start, changes hands.

    Args:
        out: The folder.
        config: The run.

    Raises:
        FileError: If the folder holds a run of another configuration, or cannot be written.
    """
    try:
        learnt = any((out / name).exists() for name in ("record.json", "posterior.ncl", "update.ckpt", "stream.ncl"))
        if not (out / "config.json").exists() or not learnt:
            config.save(out / "config.json")
    except OSError as error:
        raise FileError(f"Could not write to '{out}': {error.strerror}.") from None
    # A run may go on elsewhere.
    if replace(RunConfig.load(out / "config.json"), device=config.device) != config:
        raise FileError(
            f"'{out}' holds a run of another configuration. Choose another folder, remove that one, or run it as it is "
            f"with --config {out / 'config.json'}."
        )


def reopen(out: Path) -> tuple[RunConfig, list[Task], OnlinePosterior]:
    """What a run has left in its folder.

    Args:
        out: The folder.

    Returns:
        The configuration, the tasks, and the learner after the last task that it learnt.

    Raises:
        FileError: If there is no run.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from nclbayes.experiments import RunConfig, reopen, run
        >>> config = RunConfig.of("split-digits", "none", tasks=1, settings={"steps": 5})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     record = run(config, Path(folder), progress=False)
        ...     _, tasks, learner = reopen(Path(folder))
        >>> learner.tasks == (tasks[0].name,)
        True
    """
    config = RunConfig.load(out / "config.json")
    _, tasks, model = prepared(config)
    return config, tasks, find_method(config.method).learner.load(out / "posterior.ncl", model).to(config.device)


def reopen_each(out: Path) -> tuple[RunConfig, list[Task], list[OnlinePosterior]]:
    """What a run that kept the posterior after each task has left in its folder.

    Args:
        out: The folder.

    Returns:
        The configuration, the tasks, and the learner after the first of them, after the second, and so on.

    Raises:
        FileError: If there is no run, or it did not keep them.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from nclbayes.experiments import RunConfig, reopen_each, run
        >>> config = RunConfig.of("split-digits", "none", tasks=2, settings={"steps": 5}, keep_each=True)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     record = run(config, Path(folder), progress=False)
        ...     _, tasks, learners = reopen_each(Path(folder))
        >>> [len(learner.tasks) for learner in learners]
        [1, 2]
    """
    config, tasks, last = reopen(out)
    learners = [type(last).load(_kept(out, k + 1), last.model).to(config.device) for k in range(len(last.tasks))]
    return config, tasks, learners


def _kept(out: Path, tasks: int) -> Path:
    """The posterior after so many tasks."""
    return out / f"posterior-{tasks}.ncl"


class _Untrained:
    """Predicts with the network as it was initialised."""

    def __init__(self, model: BayesianNetwork, device: str) -> None:
        self._model, self._device = model, torch.device(device)

    def predict(self, *inputs: Any, **context: Any) -> Any:
        """The distribution of the targets of new inputs."""
        generator = context.pop("generator", None) or torch.Generator().manual_seed(0)
        context.pop("num_samples", None)
        with torch.no_grad(), drawing_from(generator, self._device):
            inputs = to_device(inputs, self._device)
            return Query(self._model, inputs, context, ("y",)).at(self._model.initial_values())


def _scores(config: RunConfig, setup: Setup, learner: Any, tasks: list[Task]) -> list[Score]:
    generator = torch.Generator().manual_seed(config.seed)
    return evaluate(learner, tasks, num_samples=config.num_samples, metric=setup.metric, generator=generator)


def _begin(
    config: RunConfig, model: BayesianNetwork, tasks: list[Task], out: Path | None
) -> tuple[OnlinePosterior, Record]:
    """A new learner and record, or those that a folder holds."""
    method = find_method(config.method)
    names = [task.name for task in tasks]
    if out is None:
        generator = torch.Generator().manual_seed(config.seed)
        return method.build(model, config.settings, generator), Record(names, about=asdict(config))
    record = Record(names, about=asdict(config))
    if (out / "record.json").exists():
        record = Record.load(out / "record.json")
        if record.tasks != names:
            raise FileError(f"'{out / 'record.json'}' is of other tasks: remove the folder to start anew.")
    if not (out / "posterior.ncl").exists():
        if record.scores:
            raise FileError(f"'{out}' has a record and no posterior.ncl: remove the folder to start anew.")
        return method.build(model, config.settings, torch.Generator().manual_seed(config.seed)), record
    learner = method.learner.load(out / "posterior.ncl", model).to(config.device)
    if not 0 <= len(learner.tasks) - len(record.scores) <= 1:
        raise FileError(
            f"In '{out}' the posterior has learnt {len(learner.tasks)} tasks and the record has {len(record.scores)}: "
            "the one is not of the other. Remove the folder to start anew."
        )
    if isinstance(learner, JointLearner):
        learner.remember(tasks[: len(learner.tasks)])
    return learner, record
