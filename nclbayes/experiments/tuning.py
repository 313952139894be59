"""A search carried out: its trials, and the file of the best hyperparameters."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nclbayes.errors import FileError, MatrixError, NonFiniteError, SettingError
from nclbayes.experiments.config import RunConfig
from nclbayes.experiments.locking import sole_use
from nclbayes.experiments.runs import run
from nclbayes.experiments.search import HELD_OUT, Search
from nclbayes.experiments.setups import find_setup
from nclbayes.interrupts import deferred, kept_from_children
from nclbayes.storage import fitted, parsed, read_document, refused, write_document, write_text
from nclbayes.storage.reading import opened

if TYPE_CHECKING:
    import optuna

# In bytes.
_LARGEST_SEARCH = 1_000_000


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
        with deferred():
            trials = _Trials(optuna, search, out, say)
        if jobs == 1:
            while trials.left:
                trials.start(lambda config: _Done(_evaluate(config)))
                trials.collect()
        else:
            threads = max(1, torch.get_num_threads() // jobs)
            with ExitStack() as stack:
                with kept_from_children():
                    pool = stack.enter_context(get_context("spawn").Pool(jobs, _begin_work, (threads,)))
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
        with deferred():
            trial = self._study.ask()
            values = {r.name: r.suggest(trial) for r in self._search.ranges}
        self.left -= 1
        try:
            self.running.append((trial, values, evaluate(self._search.config(values))))
        except BaseException:
            self._tell(trial, state=self._optuna.trial.TrialState.FAIL)
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
                self._tell(trial, state=self._optuna.trial.TrialState.FAIL)
                raise
            if score is None:
                self._tell(trial, state=self._optuna.trial.TrialState.PRUNED)
                self._say(f"{shown}: diverged")
            else:
                self._tell(trial, score)
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

    def _tell(self, *outcome: Any, **state: Any) -> None:
        # Optuna's journal has a lock of its own, which an interrupt would leave behind.
        with deferred():
            self._study.tell(*outcome, **state)

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

    try:
        storage = JournalStorage(JournalFileBackend(str(out / "trials.log")))
        study = optuna.create_study(storage=storage, study_name="search", direction="maximize", load_if_exists=True)
    except Exception as error:
        # Optuna reads its journal line by line, and says nothing of its own of what it finds there.
        raise FileError(f"'{out / 'trials.log'}' is damaged, or cannot be written: {error}.") from error
    # Another stream each time that a search goes on: the same one would propose the same values again.
    study.sampler = optuna.samplers.TPESampler(seed=len(study.get_trials(deepcopy=False)))
    return study


def _claim(path: Path, search: Search) -> None:
    text = json.dumps(asdict(search), indent=1) + "\n"
    if not os.path.lexists(path):
        write_text(path, text)
    with opened(path, "search") as (file, _), refused(path, "a search"):
        found = file.read(len(text.encode()) + 1)
        if found != text.encode():
            fitted(Search, parsed(found + file.read(_LARGEST_SEARCH)))
            raise FileError(f"'{path.parent}' holds another search: choose another folder, or remove that one.")


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise SettingError("A search needs Optuna: pip install 'nclbayes[experiments]'") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
