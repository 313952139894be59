"""The trials of a search: which are done, which are under way, which are to come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nclbayes.errors import NonFiniteError
from nclbayes.interrupts import deferred
from nclbayes.tuning.ranges import Plan
from nclbayes.tuning.storages import needed, reaching

if TYPE_CHECKING:
    import optuna

# How often, in seconds, a process shows that it is still at its trials, and after how many it is taken for dead.
_PULSE, _DEAD = 10.0, 60.0
# How often, in seconds, a process looks whether the trials of others are done.
_GLANCE = 1.0


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


@dataclass(frozen=True)
class Taken:
    """A trial that is this process's.

    Attributes:
        trial: Optuna's.
        values: What to try.
    """

    trial: optuna.Trial
    values: dict[str, float]

    def __str__(self) -> str:
        return ", ".join(f"{name} = {value:g}" for name, value in self.values.items())


class Trials:
    """The trials of a search, kept by Optuna, which may hand them to several processes.

    The plan has so many slots, numbered from 0. Each is put into Optuna's queue, from which a trial is taken by one
    process only. Of trials of the same slot, as two processes may put them there at once, the first is the one that
    counts.

    Args:
        study: Optuna's study.
        plan: Which values to try.
        storage: Where other processes find the study; None: there are none.
        say: Called with a line after each trial.
    """

    def __init__(self, study: optuna.Study, plan: Plan, storage: str | None, say: Callable[[str], None]) -> None:
        self._study, self._plan, self._storage, self._say = study, plan, storage, say
        self._states = needed().trial.TrialState
        self._lock, self._mine = threading.RLock(), dict[int, Taken]()
        # What is decided of a slot before it is tried.
        self._grid = plan.grid() if plan.sampler == "grid" else [{}] * plan.count
        # Of trials of other processes: what their pulse was when it was last seen to change, and when that was.
        self._pulses: dict[int, tuple[Any, float]] = {}
        if storage is None:
            # What a killed process has left: nobody else is at it.
            with self._safely():
                for trial in study.get_trials(deepcopy=False, states=(self._states.RUNNING,)):
                    study.tell(trial.number, state=self._states.FAIL)

    def take(self) -> Taken | None:
        """The next trial, which is this process's from now on; None if there is none at the moment."""
        with self._lock, self._safely():
            while True:
                self._bury()
                slots = self._slots()
                for slot in range(self._plan.count):
                    # A trial that failed for a reason of its own (a full disk, a kill) is repeated.
                    if slot not in slots:
                        self._study.enqueue_trial(self._grid[slot], user_attrs={"slot": slot})
                if not self._study.get_trials(deepcopy=False, states=(self._states.WAITING,)):
                    return None
                trial = self._study.ask()
                slot = trial.user_attrs.get("slot", -1)
                first = self._slots().get(slot)
                if first is not None and first.number == trial.number:
                    # Another stream for each slot: the same one would propose the same values again.
                    self._study.sampler = needed().samplers.TPESampler(seed=slot)
                    taken = Taken(trial, {r.name: r.suggest(trial) for r in self._plan.ranges})
                    self._mine[trial.number] = taken
                    return taken
                # Of a slot that another process has put there too, or of none: the queue was empty meanwhile.
                self._study.tell(trial, state=self._states.FAIL)

    def tell(self, taken: Taken, score: float | None) -> None:
        """Note what came of a trial.

        Args:
            taken: The trial.
            score: Its score; None: learning diverged.
        """
        state = self._states.PRUNED if score is None else self._states.COMPLETE
        with self._lock, self._safely():
            self._mine.pop(taken.trial.number, None)
            # One that others took for dead is over.
            self._study.tell(taken.trial, score, state, skip_if_finished=True)
        self._say(f"{taken}: {'diverged' if score is None else format(score, '.6g')}")

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """While trials are under way: others are shown that this process lives; what it leaves is for others."""
        over = threading.Event()
        pulse = threading.Thread(target=self._beat, args=(over,), daemon=True)
        if self._storage is not None:
            pulse.start()
        try:
            yield
        finally:
            with deferred():
                over.set()
                if self._storage is not None:
                    pulse.join()
                # If the storage is away, others will miss the pulse.
                with suppress(Exception):
                    for left in self._mine.values():
                        self._study.tell(left.trial, state=self._states.FAIL, skip_if_finished=True)

    def are_done(self) -> bool:
        """Whether all are, those of other processes too."""
        with self._lock, self._safely():
            return len(self._done()) == self._plan.count

    def wait(self) -> None:
        """Give others time for theirs."""
        time.sleep(_GLANCE)

    def result(self) -> Found:
        """The best of them.

        Returns:
            The best values, and all that were tried.

        Raises:
            NonFiniteError: If learning diverged at every value.
        """
        with self._lock, self._safely():
            done = self._done()
        scored = [trial for trial in done if trial.value is not None]
        if not scored:
            raise NonFiniteError(
                "Learning diverged at every value that was tried: lower `lr`, or search another range."
            )
        best = max(scored, key=lambda trial: trial.value)
        trials = tuple({**trial.params, "score": trial.value} for trial in done)
        return Found(dict(best.params), float(best.value), trials)

    def _slots(self) -> dict[int, Any]:
        """The trial of each slot that counts: the first that has not failed."""
        found: dict[int, Any] = {}
        for trial in self._study.get_trials(deepcopy=False):
            # Journals of earlier versions have no slots.
            slot = trial.user_attrs.get("slot", trial.number if trial.state.is_finished() else -1)
            if trial.state != self._states.FAIL and 0 <= slot < self._plan.count:
                found.setdefault(slot, trial)
        return found

    def _done(self) -> list[Any]:
        ended = (self._states.COMPLETE, self._states.PRUNED)
        return sorted((t for t in self._slots().values() if t.state in ended), key=lambda trial: trial.number)

    def _bury(self) -> None:
        """Let go of the trials of processes that have died."""
        if self._storage is None:
            return
        for trial in self._study.get_trials(deepcopy=False, states=(self._states.RUNNING,)):
            number, pulse = trial.number, trial.user_attrs.get("pulse", 0)
            seen, since = self._pulses.get(number, (None, 0.0))
            if number in self._mine or seen != pulse:
                self._pulses[number] = (pulse, time.monotonic())
            elif time.monotonic() - since > _DEAD:
                self._study.tell(number, state=self._states.FAIL, skip_if_finished=True)

    def _beat(self, over: threading.Event) -> None:
        count = 0
        while not over.wait(_PULSE):
            count += 1
            with self._lock:
                for taken in list(self._mine.values()):
                    # A server that is away, or a trial that was taken for dead, is told to who needs it.
                    with suppress(Exception):
                        taken.trial.set_user_attr("pulse", count)

    @contextmanager
    def _safely(self) -> Iterator[None]:
        # Optuna's journal has a lock of its own, which an interrupt would leave behind.
        with reaching(self._storage), deferred():
            yield
