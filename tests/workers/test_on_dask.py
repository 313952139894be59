"""Calls on a cluster of Dask: a real scheduler with two workers, on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from nclbayes.errors import UnreachableError
from nclbayes.workers import Answer, Workers, on_dask
from tests.workers.calls import die, fail, square, whose
from tests.workers.clusters import cluster

pytest.importorskip("distributed")
pytestmark = pytest.mark.slow


def test_calls_are_answered_by_the_workers_whether_they_get_all_at_once_or_not(tmp_path: Path) -> None:
    with cluster(tmp_path) as found:
        workers = Workers(cluster=found.address)
        for ahead in (True, False):
            answers = workers.answers(square, ((k,) for k in range(9)), ahead=ahead)
            assert sorted(answers, key=lambda answer: answer.index) == [Answer(k, k * k) for k in range(9)]
        pids = {answer.value for answer in workers.answers(whose, [()] * 8, ahead=True)}
        assert pids == {process.pid for process in found.workers}
        with pytest.raises(ZeroDivisionError, match="division by 3"):
            list(workers.answers(fail, [(3,)]))


def test_a_call_whose_worker_is_killed_is_made_by_another(tmp_path: Path) -> None:
    with cluster(tmp_path) as found:
        answers = Workers(cluster=found.address).answers(die, [(tmp_path, k, k == 1) for k in range(4)], ahead=True)
        assert sorted(answers, key=lambda answer: answer.index) == [Answer(k, k) for k in range(4)]
        assert sorted(process.poll() is None for process in found.workers) == [False, True]
        # With a single worker left, too, they are not made here.
        (left,) = [process.pid for process in found.workers if process.poll() is None]
        assert [answer.value for answer in Workers(cluster=found.address).answers(whose, [()] * 2)] == [left, left]


def test_a_call_that_kills_every_worker_is_given_up(tmp_path: Path) -> None:
    with cluster(tmp_path, workers=5) as found:
        answers = list(Workers(cluster=found.address).answers(die, [(tmp_path, 0, 99), (tmp_path, 1, 0)]))
        assert [answer.value for answer in answers if not answer.death] == [1]
        assert ["KilledWorker" in answer.death for answer in answers if answer.death] == [True]


def test_no_scheduler_and_no_workers_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_dask, "_PATIENCE", 2.0)
    with cluster(tmp_path, workers=0) as found, pytest.raises(UnreachableError, match="has no workers: start some"):
        list(Workers(cluster=found.address).answers(square, [(1,)]))
    with pytest.raises(UnreachableError, match=r"no scheduler of Dask at tcp://127\.0\.0\.1:"):
        list(Workers(cluster=found.address).answers(square, [(1,)]))
