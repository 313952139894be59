"""A search for settings, from pilot tasks to an engine and a prior."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nclbayes import priors
from nclbayes.analysis.evaluation import Metric
from nclbayes.data.checking import number, shown, whole_number
from nclbayes.data.task import Task
from nclbayes.engines.base import Engine
from nclbayes.engines.checkpoint import identity
from nclbayes.errors import FileError, SettingError
from nclbayes.nn import BayesianNetwork
from nclbayes.posterior import OnlinePosterior
from nclbayes.posterior.joining import few_examples
from nclbayes.posterior.saving import describe
from nclbayes.storage import Misfit, fitted, parsed, refused, write_text
from nclbayes.storage.locking import sole_use
from nclbayes.storage.reading import opened
from nclbayes.tuning.pilot import Pilot, held_out
from nclbayes.tuning.ranges import Plan, Range, ranges_of
from nclbayes.tuning.storages import needed, shared_study, study_in_folder
from nclbayes.tuning.trials import Trials
from nclbayes.tuning.working import search
from nclbayes.watch.nesting import tensors_of
from nclbayes.watch.run import Model
from nclbayes.workers import Workers

# In bytes.
_LARGEST_SEARCH = 1_000_000
# Seconds.
_PATIENCE = 30.0


@dataclass(frozen=True)
class Tuning:
    """What a search found.

    Attributes:
        engine: The engine with the best values.
        prior: The prior of the best scale, if one was sought; None: the model's own.
        values: The best values, by name.
        score: What they reached on the held-out examples, or the log evidence of all others, in nats.
        trials: Every value that was tried, with its score; None where learning diverged.
    """

    engine: Engine
    prior: Any
    values: Mapping[str, float]
    score: float
    trials: Sequence[Mapping[str, Any]]


def tune(
    model: Model,
    tasks: Sequence[Task] | Task,
    engine: Engine,
    ranges: Mapping[str, tuple[float, float]] | Sequence[Range] | None = None,
    *,
    share: float = 0.2,
    trials: int | None = None,
    sampler: str = "grid",
    objective: str = "accuracy",
    metric: Metric | None = None,
    num_samples: int | None = None,
    prior: Callable[[float], Any] = priors.scaled,
    learner: type[OnlinePosterior] = OnlinePosterior,
    learner_settings: Mapping[str, Any] | None = None,
    folder: str | os.PathLike[str] | None = None,
    storage: str | None = None,
    jobs: int = 1,
    cluster: str | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Tuning:
    """Seek settings on pilot tasks, the first ones of a stream, say: each trial learns all of them.

    A share of each task's training examples is held out. What counts is how well those of all tasks are predicted after
    the last: the share of right classes, or the mean log likelihood where there are none. Test data are not looked at.

    With ``objective="evidence"`` it is the sum over tasks of the log evidence that an update reports: how probable the
    examples of each were before it was learnt. No held-out example is needed for that; the same ones are held out
    still, so that both objectives judge the same learning. It compares priors by what they say of the data, as far as
    the Laplace approximation is right, and does not see what is forgotten.

    Args:
        model: The model. Only for a :class:`~nclbayes.BayesianNetwork` a prior scale can be sought.
        tasks: The pilot tasks, or one, of tensors, data sets or samplers. Where they say how many classes have been
            seen, ``context={"active": n}``, all are judged among those that the last one says.
        engine: The engine; what has no range stays as it is.
        ranges: What to vary, by name the least and the greatest value: any setting of the engine or the learner that is
            a number, and "prior_scale". They are searched on a logarithmic scale, on a grid of powers of ten if not
            said otherwise by a :class:`~nclbayes.tuning.Range`. None: the stiffness, from 20 to 2,000.
        share: How many examples to hold out.
        trials: How many values to try; None: the whole grid, or 20.
        sampler: "grid" or "tpe" (Optuna's tree of Parzen estimators).
        objective: What is sought: "accuracy", the best predictions of held-out examples, or "evidence", for engines
            that estimate it: `LaplaceNCL` and `DiagonalNCL`, with ``likelihood_weight=1``.
        metric: What counts instead, as for :func:`~nclbayes.evaluate`.
        num_samples: Predict with so many samples of the weights; None: at the mean.
        prior: Makes the prior of a scale.
        learner: The class of the posterior, if one with a memory.
        learner_settings: Its own settings.
        folder: Where to keep the trials: the same call goes on there; None: nowhere.
        storage: Where several processes or machines that make the same call find each other's trials: the address of a
            database as Optuna has it, such as ``postgresql+psycopg://user@host/database`` or ``sqlite:///file``, or the
            path of a journal file. Each trial is made by one of them, and all return the same, once all trials are
            done; those of one that dies are made by the others. A folder is not needed then.
        jobs: How many trials at a time, each in a process of its own.
        cluster: Make the trials on the cluster at this address instead, such as ``dask://10.0.0.5:8786``.
        seed: Decides what is held out, and every draw.
        say: Called with a line after each trial.

    Returns:
        The engine and the prior.

    Raises:
        SettingError: If Optuna is not installed, the engine has no such setting or refuses an end of its range, a prior
            is sought for another model, or the evidence counts and there is none; if the address of a storage or of a
            cluster is none, or a package is missing.
        DataError: If a task's data cannot be taken apart.
        FileError: If the folder cannot be written, holds another search, or another process is at work in it.
        NonFiniteError: If learning diverged at every value.
        UnreachableError: If the server of the storage, or the cluster, cannot be reached.

    Example:
        >>> import torch
        >>> import nclbayes as ncl
        >>> x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
        >>> tasks = [ncl.Task((x, (x[:, k] > 0).long()), name=f"sign {k}") for k in (0, 1)]
        >>> model = ncl.BayesianNetwork(torch.nn.Linear(2, 2), ncl.Categorical())
        >>> found = ncl.tune(model, tasks, ncl.LaplaceNCL(steps=20), {"stiffness": (20, 200), "lr": (0.01, 0.1)})
        >>> sorted(found.values), len(found.trials), found.engine.steps
        (['lr', 'stiffness'], 4, 20)
    """
    share = number("share", share, lambda v: 0 < v < 1, "above 0 and below 1")
    workers = Workers(whole_number("jobs", jobs), cluster)
    trials = None if trials is None else whole_number("trials", trials)
    given: object = engine
    if not isinstance(given, Engine):
        raise SettingError(f"The engine must be one such as LaplaceNCL(...), not {shown(given)}.")
    tasks = [tasks] if isinstance(tasks, Task) else tasks
    if not tasks:
        raise SettingError("A search needs at least one pilot task.")
    pilot = Pilot(
        model=model,
        tasks=tuple(held_out(task, share, seed + k) for k, task in enumerate(tasks)),
        engine=engine,
        prior=prior,
        learner=learner,
        settings=dict(learner_settings or {}),
        metric=metric,
        num_samples=num_samples,
        seed=seed,
        objective=objective,
    )
    plan = Plan(pilot.fitted(ranges_of({"stiffness": (20.0, 2000.0)} if ranges is None else ranges)), trials, sampler)
    # What the engine refuses is an error before anything is written.
    for end in plan.ends():
        pilot.posterior(end)
        pilot.check_objective(end)
    place = None if folder is None else Path(folder)
    needed()
    about = _about(pilot, plan, share)
    if storage is None:
        with sole_use(place):
            if place is not None:
                _claim(place / "search.json", about)
            found = search(pilot, Trials(study_in_folder(place), plan, None, say), workers)
    else:
        name = f"nclbayes-{hashlib.sha256(about.encode()).hexdigest()[:16]}"
        study = shared_study(storage, name)
        if place is not None:
            # Others may make the same call, with the same folder.
            with sole_use(place, patience=_PATIENCE):
                _claim(place / "search.json", about)
        say(f"The study is {name}.")
        found = search(pilot, Trials(study, plan, storage, say), workers)
    scale = found.values.get("prior_scale")
    return Tuning(
        engine=pilot.engine_with(found.values),
        prior=None if scale is None else prior(scale),
        values=found.values,
        score=found.score,
        trials=found.trials,
    )


def _about(pilot: Pilot, plan: Plan, share: float) -> str:
    """What tells one search from another."""
    tensors: dict[str, Tensor] = {}
    for k, task in enumerate(pilot.tasks):
        batch = few_examples(task, torch.device("cpu"))
        tensors |= {f"data/{k}/{name}": tensor for name, tensor in tensors_of(batch)}
    if isinstance(pilot.model, torch.nn.Module):
        # The priors of a BayesianNetwork are among its buffers.
        held = (*pilot.model.named_parameters(), *pilot.model.named_buffers())
        tensors |= {f"model/{name}": value.detach() for name, value in held}
    likelihood = repr(pilot.model.likelihood) if isinstance(pilot.model, BayesianNetwork) else ""
    about = {
        "model": [_named(pilot.model), likelihood],
        "engine": {**describe(pilot.engine), "schedule": _named(pilot.engine.schedule)},
        "learner": [pilot.learner.__name__, dict(pilot.settings)],
        "tasks": [[task.name, task.size, repr(task.context)] for task in pilot.tasks],
        "share": share,
        "samples": pilot.num_samples,
        "seed": pilot.seed,
        "metric": _named(pilot.metric),
        "prior": _named(pilot.prior),
        "plan": asdict(plan),
        "data and model": identity([], tensors),
    }
    if pilot.objective != "accuracy":
        # Searches of before there was a choice go on.
        about["objective"] = pilot.objective
    return json.dumps(about, indent=1) + "\n"


def _claim(path: Path, text: str) -> None:
    """Say what a folder's search is, or refuse one that holds another."""
    if not os.path.lexists(path):
        write_text(path, text)
    with opened(path, "search") as (file, _), refused(path, "a search"):
        found = file.read(_LARGEST_SEARCH)
        if found != text.encode():
            if "plan" not in fitted(dict[str, Any], parsed(found)):
                raise Misfit("it has no plan, as those of earlier versions have none")
            raise FileError(f"'{path.parent}' holds another search: choose another folder, or remove that one.")


def _named(thing: object) -> object:
    """What can be said of a function in a file: where it is from, and the arguments that it was given before."""
    if isinstance(thing, partial):
        return [_named(thing.func), repr(thing.args), repr(thing.keywords)]
    if callable(thing):
        kind = thing if hasattr(thing, "__qualname__") else type(thing)
        code = getattr(thing, "__code__", None)
        if code is not None:
            # An address is another one in the next process.
            constants = re.sub(r" at 0x\w+", "", repr(code.co_consts))
            name = f"{kind.__module__}.{kind.__qualname__}"
            return [name, hashlib.sha256(code.co_code + constants.encode()).hexdigest()]
        return [f"{kind.__module__}.{kind.__qualname__}"]
    return thing
