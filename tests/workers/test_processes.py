"""Calls in the processes of this machine: what comes back when they fail or die."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from nclbayes.errors import SettingError
from nclbayes.workers import Answer, Workers
from tests.processes import heed_interrupts
from tests.workers.calls import die, fail, square, whose

pytest.importorskip("joblib")


def test_each_call_is_answered_once() -> None:
    answers = list(Workers(jobs=2).answers(square, ((k,) for k in range(7))))
    assert sorted(answers, key=lambda answer: answer.index) == [Answer(k, k * k) for k in range(7)]


def test_they_are_made_elsewhere_and_the_rest_can_be_left() -> None:
    with closing(Workers(jobs=2).answers(whose, [()] * 50)) as answers:
        assert next(answers).value != os.getpid()


def test_what_a_call_raises_comes_through() -> None:
    with pytest.raises(ZeroDivisionError, match="division by 3"):
        list(Workers(jobs=2).answers(fail, [(3,)]))


def test_an_interrupt_while_processes_are_started_leaves_no_warning_behind() -> None:
    def calls() -> Iterator[tuple[int]]:
        yield (1,)
        signal.raise_signal(signal.SIGINT)
        yield (2,)

    before = signal.getsignal(signal.SIGINT)
    heed_interrupts()
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with pytest.raises(KeyboardInterrupt):
                list(Workers(jobs=2).answers(square, calls()))
    finally:
        signal.signal(signal.SIGINT, before)
    assert [str(each.message) for each in said] == []


@pytest.mark.slow
def test_a_call_whose_process_is_killed_is_made_again(tmp_path: Path) -> None:
    times = [0, 1, 0, 2, 0]
    answers = Workers(jobs=2).answers(die, [(tmp_path, k, count) for k, count in enumerate(times)])
    assert sorted(answers, key=lambda answer: answer.index) == [Answer(k, k) for k in range(5)]


@pytest.mark.slow
def test_a_call_that_kills_every_process_keeps_no_other_from_its_answer(tmp_path: Path) -> None:
    times = [0, 99, 0, 0]
    answers = list(Workers(jobs=2).answers(die, [(tmp_path, k, count) for k, count in enumerate(times)]))
    assert sorted(answer.value for answer in answers if not answer.death) == [0, 2, 3]
    ((index, said),) = [(answer.index, answer.death) for answer in answers if answer.death]
    assert index == 1
    assert "A worker process managed by the executor was unexpectedly terminated" in said


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("tcp://localhost:8786", r"In place of tcp:// write dask://\."),
        ("ray://localhost:10001", "A cluster of Ray .* is not supported"),
        ("dask://localhost", "dask://HOST:PORT, the address of its scheduler"),
        ("dask://localhost:8786/x", "dask://HOST:PORT"),
        ("localhost:8786", "dask://HOST:PORT"),
        ("", "dask://HOST:PORT"),
    ],
)
def test_what_is_no_address_is_refused(address: str, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        Workers(cluster=address)


def test_a_cluster_decides_how_many_calls_it_makes_at_a_time() -> None:
    assert Workers(cluster="dask://[::1]:8786").are_others
    with pytest.raises(SettingError, match="leave out jobs"):
        Workers(jobs=2, cluster="dask://localhost:8786")
