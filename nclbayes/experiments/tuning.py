"""The search for a method's hyperparameter on a held-out seed."""

from __future__ import annotations

import json
import math
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nclbayes.errors import FileError, MatrixError, NonFiniteError, SettingError
from nclbayes.experiments.locking import sole_use
from nclbayes.experiments.runs import RunConfig, run
from nclbayes.experiments.setup import base_name
from nclbayes.experiments.setups import find_setup
from nclbayes.methods import find_method

if TYPE_CHECKING:
    import optuna

HELD_OUT = 1000
"""The default seed of a search, which no evaluation uses."""


@dataclass(frozen=True)
class Range:
    """A range to search on a logarithmic scale.

    Attributes:
        name: The setting: one of the method's, or ``prior_scale``.
        low: The least value.
        high: The greatest.
        factor: The ratio of neighbours on a grid.
        whole: Whether only whole numbers will do.

    Raises:
        SettingError: If it is empty or not positive.
    """

    name: str
    low: float
    high: float
    factor: float = 10.0
    whole: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high < math.inf:
            raise SettingError(f"A range needs 0 < low <= high, both finite, not {self.low:g} to {self.high:g}.")
        if self.whole and round(self.low) < 1:
            raise SettingError(f"{self.name} is a whole number of at least 1: its range cannot begin at {self.low:g}.")

    @classmethod
    def parse(cls, text: str) -> Range:
        """A range from text such as ``alpha=1e-6:1e-2``.

        Args:
            text: The text.

        Returns:
            The range.

        Raises:
            SettingError: If it is not of that form.
        """
        name, equals, rest = text.partition("=")
        low, colon, high = rest.partition(":")
        try:
            if not (name and equals and colon):
                raise ValueError
            ends = float(low), float(high)
        except ValueError:
            raise SettingError(f"A range is given as name=low:high, such as alpha=1e-6:1e-2, not '{text}'.") from None
        return cls(name.strip(), *ends)

    def grid(self) -> list[float]:
        """From low on, each so many times the one before, and high."""
        steps = math.ceil(math.log(self.high / self.low, self.factor) - 1e-6)
        values = [self.low * self.factor**i for i in range(steps)] + [self.high]
        return list(dict.fromkeys(map(round, values))) if self.whole else values

    def suggest(self, trial: optuna.Trial) -> float:
        """A sampler's next value, or that of the grid which the trial stands for."""
        if self.whole:
            return trial.suggest_int(self.name, round(self.low), round(self.high), log=True)
        return trial.suggest_float(self.name, self.low, self.high, log=True)


# The paper's ranges. Of NCL it varies p_w^-2 = N s^2 from 1e2 to 1e11, with N = 12,000: s from 0.09 to 2,900.
_SCALES = Range("prior_scale", math.sqrt(1e2 / 12_000), math.sqrt(1e11 / 12_000), factor=math.sqrt(10))
PAPER_RANGES: dict[str, Range] = {
    "si": Range("prior_weight", 1e-5, 1e8),
    "ewc": Range("prior_weight", 1e-4, 1e14),
    "kfac": Range("prior_weight", 1e-4, 1e14),
    "decoupled-kfac": Range("preconditioner_weight", 1e0, 1e6),
    "reverse-decoupled-kfac": Range("prior_weight", 1e0, 1e6),
    "owm": Range("alpha", 1e-12, 1e6),
    "dowm": Range("alpha", 1e-12, 1e6),
    "gpm": Range("threshold", 0.8, 0.999, factor=1.05),
    "laplace-ncl": _SCALES,
    # Samples of wider priors are noise.
    "variational-ncl": Range("prior_scale", 0.01, 100.0, factor=math.sqrt(10)),
    "vcl": Range("prior_scale", 0.01, 100.0, factor=math.sqrt(10)),
}


@dataclass(frozen=True)
class Search:
    """What to search for.

    Attributes:
        base: The run whose hyperparameter is sought; its seed is the held-out one.
        ranges: What to vary; empty: the paper's range for the method.
        trials: How many values to try; None: the whole grid, or 20.
        sampler: "grid" or "tpe" (Optuna's tree of Parzen estimators).
    """

    base: RunConfig
    ranges: tuple[Range, ...] = ()
    trials: int | None = None
    sampler: str = "grid"

    def __post_init__(self) -> None:
        if self.sampler not in ("grid", "tpe"):
            raise SettingError(f"sampler is '{self.sampler}'; choose 'grid' or 'tpe'.")
        names = [r.name for r in self.ranges]
        if len(set(names)) < len(names):
            raise SettingError(f"A setting can have one range only, and these are of {', '.join(names)}.")
        method = find_method(self.base.method)
        ranges = self.ranges or (PAPER_RANGES.get(base_name(method.name), _SCALES),)
        if not self.ranges and not method.engine.has_prior and base_name(method.name) not in PAPER_RANGES:
            raise SettingError(f"{method.name} has no prior to search for: name a range, such as --range lr=0.001:0.1.")
        whole = method.whole_numbers
        object.__setattr__(self, "ranges", tuple(replace(r, whole=r.name in whole) for r in ranges))

    @property
    def count(self) -> int:
        """How many trials there will be."""
        if self.sampler == "grid":
            points = len(self.grid())
            return points if self.trials is None else min(self.trials, points)
        return self.trials or 20

    def grid(self) -> list[dict[str, float]]:
        """Every combination of the ranges' grids, in an order that is random and always the same."""
        points = product(*(r.grid() for r in self.ranges))
        found = [dict(zip((r.name for r in self.ranges), point, strict=True)) for point in points]
        random.Random(0).shuffle(found)
        return found

    def config(self, values: Mapping[str, float]) -> RunConfig:
        """The run with some values of the hyperparameters.

        Args:
            values: By name.

        Returns:
            The configuration.

        Raises:
            SettingError: If the method has no such setting.
        """
        base, rest = self.base, dict(values)
        scale = rest.pop("prior_scale", base.prior_scale)
        given: dict[str, Any] = {
            "size": base.size,
            "tasks": base.tasks,
            "num_samples": base.num_samples,
            "units": base.units,
        }
        return RunConfig.of(
            base.set,
            base.method,
            base.scenario,
            base.seed,
            prior_scale=scale,
            settings={**base.settings, **rest},
            device=base.device,
            **given,
        )


@dataclass(frozen=True)
class Tuned:
    """The best hyperparameters that a search found.

    Attributes:
        set: The task set.
        method: The method.
        scenario: The scenario.
        values: The hyperparameters.
        score: What they reached on the held-out seed: accuracy, or minus the loss where that counts.
        trials: Every value that was tried, with its score; None where learning diverged.
        seed: The held-out seed.
    """

    set: str
    method: str
    scenario: str
    values: Mapping[str, float]
    score: float
    trials: Sequence[Mapping[str, Any]] = ()
    seed: int = HELD_OUT

    def save(self, path: Path) -> None:
        """Write the result.

        Args:
            path: The file.
        """
        path.write_text(json.dumps({"format": 1, **asdict(self)}, indent=1) + "\n")

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
        try:
            content = json.loads(path.read_text())
            content.pop("format")
            return cls(**content)
        except OSError as error:
            raise FileError(f"Could not read '{path}': {error.strerror}.") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise FileError(f"'{path}' is not the result of a search.") from None

    def fits(self, set: str, method: str, scenario: str | None) -> bool:
        """Whether it was found for this task set, method and scenario."""
        return (self.set, self.method) == (set.replace("_", "-"), method) and scenario in (None, self.scenario)


def tune(search: Search, out: Path, *, jobs: int = 1, say: Callable[[str], None] = lambda text: None) -> Tuned:
    """Search, and keep what was found: trials that are done are not done again.

    Args:
        search: What to search for.
        out: The folder of the search.
        jobs: How many trials at a time, each in a process of its own.
        say: Called with a line after each trial.

    Returns:
        The best values.

    Raises:
        SettingError: If Optuna is not installed, or the method has no such setting or refuses an end of its range.
        FileError: If the folder cannot be written, holds another search, or another process is at work in it.
        NonFiniteError: If learning diverged at every value.
    """
    optuna = _optuna()
    # What the method refuses, and data that are not here, are errors before anything is written.
    for end in (0, -1):
        search.config({r.name: r.grid()[end] for r in search.ranges})
    base = search.base
    find_setup(base.set).make_tasks(base.scenario, base.seed, base.size)
    with sole_use(out):
        _claim(out / "search.json", search)
        trials = _Trials(optuna, search, out, say)
        if jobs == 1:
            while trials.left:
                trials.start(lambda config: _Done(_evaluate(config)))
                trials.collect()
        else:
            threads = max(1, torch.get_num_threads() // jobs)
            with get_context("spawn").Pool(jobs, _begin_work, (threads,)) as pool:
                while trials.left or trials.running:
                    while trials.left and len(trials.running) < jobs:
                        trials.start(lambda config: pool.apply_async(_evaluate, (config,)))
                    time.sleep(0.1)
                    trials.collect()
        return trials.result()


class _Trials:
    """The trials of a search: which are done, which are under way, which are to come.

    Args:
        optuna: The module.
        search: What to search for.
        out: The folder, with a journal of the trials.
        say: Called with a line after each trial.
    """

    def __init__(self, optuna: Any, search: Search, out: Path, say: Callable[[str], None]) -> None:
        self._optuna, self._search, self._out, self._say = optuna, search, out, say
        self._study = _study(optuna, out)
        states = optuna.trial.TrialState
        self._ended = (states.COMPLETE, states.PRUNED)
        self.running: list[tuple[optuna.Trial, Mapping[str, float], Any]] = []
        # A trial that failed for a reason of its own (a full disk, a kill) is repeated.
        for trial in self._study.get_trials(deepcopy=False, states=(states.RUNNING,)):
            self._study.tell(trial.number, state=states.FAIL)
        self.left = search.count - len(self._done())
        if search.sampler == "grid":
            tried = [trial.params for trial in self._done()]
            queued = self._study.get_trials(deepcopy=False, states=(states.WAITING,))
            tried += [trial.system_attrs["fixed_params"] for trial in queued]
            for values in search.grid()[: search.count]:
                if values not in tried:
                    self._study.enqueue_trial(values)

    def start(self, evaluate: Callable[[RunConfig], Any]) -> None:
        """Begin one more trial; `evaluate` returns something that is ready() at some time and then has its get()."""
        trial = self._study.ask()
        self.left -= 1
        values = {r.name: r.suggest(trial) for r in self._search.ranges}
        try:
            self.running.append((trial, values, evaluate(self._search.config(values))))
        except BaseException:
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
            raise

    def collect(self) -> None:
        """Note the scores of the trials that have ended."""
        for entry in [entry for entry in self.running if entry[2].ready()]:
            trial, values, pending = entry
            self.running.remove(entry)
            shown = ", ".join(f"{name} = {value:g}" for name, value in values.items())
            try:
                score = pending.get()
            except BaseException:
                self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
                raise
            if score is None:
                self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)
                self._say(f"{shown}: diverged")
            else:
                self._study.tell(trial, score)
                endless = find_setup(self._search.base.set).endless
                self._say(f"{shown}: {f'loss {-score:.4g}' if endless else f'accuracy {score:.1%}'}")

    def result(self) -> Tuned:
        """The best of them, written to the folder."""
        done = self._done()
        if all(trial.value is None for trial in done):
            raise NonFiniteError(
                "Learning diverged at every value that was tried: lower `lr`, or search another range."
            )
        base, best = self._search.base, self._study.best_trial
        trials = [{**trial.params, "score": trial.value} for trial in done]
        tuned = Tuned(base.set, base.method, base.scenario, best.params, float(best.value or 0.0), trials, base.seed)
        tuned.save(self._out / "tuned.json")
        return tuned

    def _done(self) -> list[Any]:
        return list(self._study.get_trials(deepcopy=False, states=self._ended))


@dataclass(frozen=True)
class _Done:
    """A result that is there already."""

    value: float | None

    def ready(self) -> bool:
        return True

    def get(self) -> float | None:
        return self.value


def _evaluate(config: RunConfig) -> float | None:
    """What a run reaches: accuracy, or minus the loss where that counts; None if numbers fail or learning diverges."""
    try:
        record = run(config, progress=False)
    except (NonFiniteError, MatrixError):
        return None
    return -record.average_loss if find_setup(config.set).endless else record.average_accuracy


def _begin_work(threads: int) -> None:
    # Ctrl-C is for the process that hands out the work.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)


def _study(optuna: Any, out: Path) -> optuna.Study:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    storage = JournalStorage(JournalFileBackend(str(out / "trials.log")))
    study = optuna.create_study(storage=storage, study_name="search", direction="maximize", load_if_exists=True)
    # Another stream each time that a search goes on: the same one would propose the same values again.
    study.sampler = optuna.samplers.TPESampler(seed=len(study.get_trials(deepcopy=False)))
    return study


def _claim(path: Path, search: Search) -> None:
    text = json.dumps(asdict(search), indent=1) + "\n"
    try:
        if not path.exists():
            path.write_text(text)
        is_other = path.read_text() != text
    except OSError as error:
        raise FileError(f"Could not write to '{path.parent}': {error.strerror}.") from None
    if is_other:
        raise FileError(f"'{path.parent}' holds another search: choose another folder, or remove that one.")


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise SettingError("A search needs Optuna: pip install 'nclbayes[experiments]'") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
