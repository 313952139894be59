"""A search at work: its trials are made here, in other processes, or on a cluster."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import lru_cache

from nclbayes.errors import SettingError
from nclbayes.tuning.pilot import Pilot
from nclbayes.tuning.trials import Found, Taken, Trials
from nclbayes.workers import Workers


def search(pilot: Pilot, trials: Trials, workers: Workers) -> Found:
    """Try the values of a plan; trials that are done are not done again.

    Args:
        pilot: What a trial is.
        trials: Which there are.
        workers: Where to make them.

    Returns:
        The best values, once all trials are done, those of other processes too.

    Raises:
        NonFiniteError: If learning diverged at every value.
        SettingError: If the pilot cannot be handed to another process, or the process that tries a value always dies.
    """
    packed = _packed(pilot) if workers.are_others else b""
    with trials.at_work():
        while True:
            if workers.are_others:
                _score_elsewhere(packed, trials, workers)
            else:
                while (taken := trials.take()) is not None:
                    trials.tell(taken, pilot.score(taken.values))
            if trials.are_done():
                return trials.result()
            trials.wait()


def _score_elsewhere(packed: bytes, trials: Trials, workers: Workers) -> None:
    given: list[Taken] = []

    def calls() -> Iterator[tuple[bytes, Mapping[str, float]]]:
        while (taken := trials.take()) is not None:
            given.append(taken)
            yield packed, taken.values

    with closing(workers.answers(_score, calls())) as answers:
        for answer in answers:
            taken = given[answer.index]
            if answer.death:
                raise SettingError(
                    f"The process that tried {taken} ended before its work did, each time that it was tried "
                    f"({answer.death}). Is the memory too small? Search with fewer jobs."
                )
            trials.tell(taken, answer.value)


def _packed(pilot: Pilot) -> bytes:
    """What is handed to other processes, where functions of a script come along."""
    import cloudpickle

    try:
        pickle.dumps(pilot)
        return bytes(cloudpickle.dumps(pilot))
    except Exception as error:
        raise SettingError(
            f"The model, the tasks, the engine or the metric cannot be handed to another process ({error}): define "
            "their functions and classes in a module, or search with jobs=1."
        ) from error


@lru_cache(maxsize=1)
def _unpacked(packed: bytes) -> Pilot:
    found: Pilot = pickle.loads(packed)
    return found


def _score(packed: bytes, values: Mapping[str, float]) -> float | None:
    return _unpacked(packed).score(values)
