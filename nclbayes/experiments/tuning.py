"""A search on a task set, and the file of the best hyperparameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nclbayes.experiments.runs import prepared
from nclbayes.experiments.search import HELD_OUT, Search
from nclbayes.experiments.setup import Prior
from nclbayes.methods import find_method
from nclbayes.storage import read_document, write_document
from nclbayes.tuning import tune as tune_on

# What share of the training examples is held out.
_SHARE = 0.2


@dataclass(frozen=True)
class Tuned:
    """The best hyperparameters that a search found.

    Attributes:
        set: The task set.
        method: The method.
        scenario: The scenario.
        values: The hyperparameters.
        score: What they reached on held-out examples: accuracy, or minus the loss where that counts; or the log
            evidence of all others, in nats.
        trials: Every value that was tried, with its score; None where learning diverged.
        seed: The held-out seed.
        prior: The kind of prior of the runs: "normal" where engines that decide themselves took the paper's steps.
        objective: What was sought: "accuracy" or "evidence".
    """

    set: str
    method: str
    scenario: str
    values: Mapping[str, float]
    score: float
    trials: Sequence[Mapping[str, Any]] = ()
    seed: int = HELD_OUT
    prior: str = "normal"
    objective: str = "accuracy"

    def save(self, path: Path) -> None:
        """Write the result.

        Args:
            path: The file.
        """
        write_document(path, asdict(self), 1)

    @classmethod
    def load(cls, path: Path) -> Tuned:
        """Read a result.

        Args:
            path: The file, or the folder of the search.

        Returns:
            The result.

        Raises:
            FileError: If it is not one.
        """
        path = path / "tuned.json" if path.is_dir() else path
        return read_document(path, cls, "the result of a search", 1)

    def fits(self, set: str, method: str, scenario: str | None) -> bool:
        """Whether it was found for this task set, method and scenario."""
        return (self.set, self.method) == (set.replace("_", "-"), method) and scenario in (None, self.scenario)


def tune(
    search: Search,
    out: Path,
    *,
    storage: str | None = None,
    jobs: int = 1,
    cluster: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Tuned:
    """Search, and keep what was found: trials that are done are not done again.

    Args:
        search: What to search for.
        out: The folder of the search.
        storage: Where several processes or machines find each other's trials, as for :func:`nclbayes.tune`.
        jobs: How many trials at a time, each in a process of its own.
        cluster: Make them on the cluster at this address instead.
        say: Called with a line after each trial.

    Returns:
        The best values.

    Raises:
        SettingError: If Optuna is not installed, the method has no such setting or refuses an end of its range, or the
            evidence counts and it has none.
        FileError: If the folder cannot be written, holds another search, or another process is at work in it.
        NonFiniteError: If learning diverged at every value.
        UnreachableError: If the server of the storage, or the cluster, cannot be reached.
    """
    base, method = search.base, find_method(search.base.method)
    for end in search.plan.ends():
        search.config(end)
    setup, tasks, model = prepared(base)
    own = method.learner.learner_settings
    found = tune_on(
        model,
        tasks,
        method.engine(**{name: value for name, value in base.settings.items() if name not in own}),
        search.ranges,
        share=_SHARE,
        trials=search.trials,
        sampler=search.sampler,
        objective=search.objective,
        # Of endless data the loss is what counts.
        metric=None if setup.endless or search.objective == "evidence" else setup.metric,
        num_samples=base.num_samples,
        prior=partial(_prior, base.prior),
        learner=method.learner,
        learner_settings={name: value for name, value in base.settings.items() if name in own},
        folder=out,
        storage=storage,
        jobs=jobs,
        cluster=cluster,
        seed=base.seed,
        say=say,
    )
    best = (base.set, base.method, base.scenario, found.values, found.score)
    tuned = Tuned(*best, found.trials, base.seed, base.prior, search.objective)
    tuned.save(out / "tuned.json")
    return tuned


def _prior(kind: str, scale: float) -> Any:
    return Prior(kind, scale).make()
