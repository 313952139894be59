"""The trials of a search: which are done, which are under way, which are to come."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.multiprocessing

from nclbayes.errors import FileError, NonFiniteError, SettingError
from nclbayes.interrupts import deferred, kept_from_children
from nclbayes.tuning.pilot import Pilot
from nclbayes.tuning.ranges import Plan

if TYPE_CHECKING:
    import optuna

Say = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        values: The best values.
        score: What they reached.
        trials: Every value that was tried, with its score; None where learning diverged.
    """

    values: dict[str, float]
    score: float
    trials: tuple[dict[str, Any], ...]


def search(pilot: Pilot, plan: Plan, folder: Path | None, jobs: int, say: Say) -> Found:
    """Try the values of a plan; trials that a folder has are not done again.

    Args:
        pilot: What a trial is.
        plan: Which values to try.
        folder: Where the trials are kept; None: nowhere.
        jobs: How many at a time, each in a process of its own.
        say: Called with a line after each trial.

    Returns:
        The best values.

    Raises:
        FileError: If the folder cannot be read or written.
        NonFiniteError: If learning diverged at every value.
        SettingError: If Optuna is not installed, or the pilot cannot be handed to another process.
    """
    with deferred():
        trials = _Trials(_optuna(), plan, folder, say)
    if jobs == 1:
        while trials.left:
            trials.start(lambda values: _Done(pilot.score(values)))
            trials.collect()
        return trials.result()
    threads = max(1, torch.get_num_threads() // jobs)
    _check_transport(pilot)
    context = torch.multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, context, _begin_work, (pilot, threads))

    def submit(values: Mapping[str, float]) -> _Pending:
        with kept_from_children():
            return _Pending(pool.submit(_score, dict(values)))

    try:
        while trials.left or trials.running:
            while trials.left and len(trials.running) < jobs:
                trials.start(submit)
            time.sleep(0.1)
            trials.collect()
    except BrokenProcessPool as error:
        raise SettingError(
            "A process of the search ended before its work did, or could not begin: in a script, begin the work under "
            '`if __name__ == "__main__":`; define functions and classes in a module; or search with jobs=1.'
        ) from error
    finally:
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
    return trials.result()


class _Trials:
    """The trials of a search, kept by Optuna.

    Args:
        optuna: The module.
        plan: Which values to try.
        folder: The folder, with a journal of the trials; None: they are not kept.
        say: Called with a line after each trial.
    """

    def __init__(self, optuna: Any, plan: Plan, folder: Path | None, say: Say) -> None:
        self._optuna, self._plan, self._say = optuna, plan, say
        self._study = _study(optuna, folder)
        states = optuna.trial.TrialState
        self._ended = (states.COMPLETE, states.PRUNED)
        self.running: list[tuple[optuna.Trial, Mapping[str, float], Any]] = []
        # A trial that failed for a reason of its own (a full disk, a kill) is repeated.
        for trial in self._study.get_trials(deepcopy=False, states=(states.RUNNING,)):
            self._study.tell(trial.number, state=states.FAIL)
        self.left = plan.count - len(self._done())
        if plan.sampler == "grid":
            tried = [trial.params for trial in self._done()]
            queued = self._study.get_trials(deepcopy=False, states=(states.WAITING,))
            tried += [trial.system_attrs["fixed_params"] for trial in queued]
            for values in plan.grid()[: plan.count]:
                if values not in tried:
                    self._study.enqueue_trial(values)

    def start(self, evaluate: Callable[[Mapping[str, float]], Any]) -> None:
        """Begin one more trial; `evaluate` returns something that is ready() at some time and then has its get()."""
        with deferred():
            trial = self._study.ask()
            values = {r.name: r.suggest(trial) for r in self._plan.ranges}
        self.left -= 1
        try:
            self.running.append((trial, values, evaluate(values)))
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
                self._say(f"{shown}: {score:.4g}")

    def result(self) -> Found:
        """The best of them."""
        done = self._done()
        if all(trial.value is None for trial in done):
            raise NonFiniteError(
                "Learning diverged at every value that was tried: lower `lr`, or search another range."
            )
        best = self._study.best_trial
        trials = tuple({**trial.params, "score": trial.value} for trial in done)
        return Found(dict(best.params), float(best.value or 0.0), trials)

    def _tell(self, *outcome: Any, **state: Any) -> None:
        # Optuna's journal has a lock of its own, which an interrupt would leave behind.
        with deferred():
            self._study.tell(*outcome, **state)

    def _done(self) -> list[Any]:
        return list(self._study.get_trials(deepcopy=False, states=self._ended))


@dataclass(frozen=True)
class _Pending:
    """A result that another process will have."""

    future: Future[float | None]

    def ready(self) -> bool:
        return self.future.done()

    def get(self) -> float | None:
        return self.future.result()


@dataclass(frozen=True)
class _Done:
    """A result that is there already."""

    value: float | None

    def ready(self) -> bool:
        return True

    def get(self) -> float | None:
        return self.value


# What the trials of a process of the pool are about.
_PILOT: list[Pilot] = []


def _check_transport(pilot: Pilot) -> None:
    """Refuse what cannot be handed to another process."""
    try:
        ForkingPickler.dumps(pilot)
    except Exception as error:
        raise SettingError(
            f"The model, the tasks, the engine or the metric cannot be handed to another process ({error}): define "
            "their functions and classes in a module, or search with jobs=1."
        ) from error


def _begin_work(pilot: Pilot, threads: int) -> None:
    # Ctrl-C is for the process that hands out the work.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    _PILOT[:] = [pilot]


def _score(values: Mapping[str, float]) -> float | None:
    return _PILOT[0].score(values)


def _study(optuna: Any, folder: Path | None) -> optuna.Study:
    if folder is None:
        study = optuna.create_study(direction="maximize")
    else:
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        path = folder / "trials.log"
        try:
            storage = JournalStorage(JournalFileBackend(str(path)))
            study = optuna.create_study(storage=storage, study_name="search", direction="maximize", load_if_exists=True)
        except Exception as error:
            # Optuna reads its journal line by line, and says nothing of its own of what it finds there.
            raise FileError(f"'{path}' is damaged, or cannot be written: {error}.") from error
    # Another stream each time that a search goes on: the same one would propose the same values again.
    study.sampler = optuna.samplers.TPESampler(seed=len(study.get_trials(deepcopy=False)))
    return study


def needed() -> None:
    """Refuse to begin without what a search needs.

    Raises:
        SettingError: If Optuna is not installed.
    """
    _optuna()


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise SettingError("A search needs Optuna: pip install 'nclbayes[experiments]'") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
