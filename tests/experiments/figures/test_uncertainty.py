"""The figure about uncertainty: what it asks, of whom, and that its statements can fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib", reason="pictures need matplotlib")
pytest.importorskip("sklearn")

from nclbayes.analysis.uncertainty import guesses
from nclbayes.experiments import reopen_each
from nclbayes.experiments.figures import Results
from nclbayes.experiments.figures.uncertainty import (
    END,
    LEARNT,
    MEASURES,
    RECIPE,
    TO_COME,
    WAYS,
    _statements,
    average,
    blank,
    measures,
    permuted,
)

TINY = {"steps": 20, "tasks": 2, "test_size": 40, "samples": 4}


def test_every_way_is_asked_for_every_task_when_learnt_and_in_the_end(made: tuple[Results, Path]) -> None:
    results, out = made
    rows = results.tables["measures"]
    keys = [(row["method"], row["way"], row["number"], row["when"]) for row in rows]
    assert len(set(keys)) == len(keys) == 2 * len(WAYS) * 2 * 2
    for row in rows:
        assert 0 <= row["accuracy"] <= 1
        assert row["loss"] >= 0
        assert all(row[name] >= 0 for name in MEASURES)
    # The last task has only just been learnt in the end.
    for method, way in {(row["method"], row["way"]) for row in rows}:
        own = [r for r in rows if (r["method"], r["way"], r["number"]) == (method, way, 2)]
        assert [{name: r[name] for name in MEASURES} for r in own[:1]] == [
            {name: r[name] for name in MEASURES} for r in own[1:]
        ]
    assert (out / "uncertainty.png").stat().st_size > 10_000


def test_the_numbers_are_those_of_the_learner_that_had_just_learnt_the_task(made: tuple[Results, Path]) -> None:
    results, out = made
    config, tasks, learners = reopen_each(out / "runs" / "laplace-ncl" / "seed-0")
    x, y = tasks[0].test  # type: ignore[misc]
    task = type(tasks[0])(tasks[0].train, (x[:40], y[:40]), name="cut", context=tasks[0].context)
    for when, learner in ((LEARNT, learners[0]), (END, learners[-1])):
        (row,) = (
            r
            for r in results.tables["measures"]
            if (r["method"], r["way"], r["number"], r["when"]) == (config.method, "mean", 1, when)
        )
        found = measures(guesses(learner, task, method="mean"))
        assert found == pytest.approx({name: row[name] for name in MEASURES})


def test_tasks_to_come_are_asked_for_only_while_there_are_some(made: tuple[Results, Path]) -> None:
    rows = made[0].tables["foreign"]
    to_come = [row for row in rows if row["foreign"] == TO_COME]
    assert {(row["number"], row["when"]) for row in to_come} == {(1, LEARNT)}
    others = {row["foreign"] for row in rows} - {TO_COME}
    assert others == {"permuted pixels", "blank images"}
    assert all(0 <= row["auroc"] <= 1 and 0 <= row["false positives"] <= 1 for row in rows)


def test_reliability_and_risk_are_of_all_tasks_together(made: tuple[Results, Path]) -> None:
    tables = made[0].tables
    where = {"method": "variational-ncl", "way": "samples", "when": END}
    bins = [row for row in tables["reliability"] if all(row[k] == v for k, v in where.items())]
    assert sum(row["examples"] for row in bins) == 80
    right = sum(row["examples"] * row["accuracy"] for row in bins) / 80
    assert right == pytest.approx(average(tables["measures"], "accuracy", **where))
    risks = [row for row in tables["risk"] if all(row[k] == v for k, v in where.items())]
    assert risks[-1]["coverage"] == 1
    assert risks[-1]["risk"] == pytest.approx(1 - right)


def test_foreign_images_keep_the_form_and_not_the_content() -> None:
    x = torch.rand(6, 1, 4, 4)
    other = permuted(x)
    assert other.shape == x.shape
    assert torch.equal(other.flatten(1).sort().values, x.flatten(1).sort().values)
    assert not torch.equal(other, x)
    assert torch.equal(permuted(x), other)
    greys = blank(x)
    assert greys.shape == x.shape
    assert torch.equal(greys.flatten(1).std(1), torch.zeros(6))
    assert (float(greys.min()), float(greys.max())) == (float(x.min()), float(x.max()))


def test_the_statements_can_fail() -> None:
    def rows(value: float, auroc: float) -> dict[str, list[dict[str, object]]]:
        common = {"method": "laplace-ncl", "when": END}
        own = [
            {**common, "way": way, **dict.fromkeys(MEASURES, v)} for way, v in (("mean", 0.5), ("linearized", value))
        ]
        foreign = [
            {**common, "way": way, "foreign": "blank", "auroc": v} for way, v in (("mean", 0.5), ("linearized", auroc))
        ]
        return {"measures": own, "foreign": foreign}

    assert [s.holds for s in _statements(rows(0.4, 0.6))] == [True] * 4
    assert [s.holds for s in _statements(rows(0.5, 0.5))] == [False] * 4


def test_every_scale_has_the_same_settings() -> None:
    assert len({tuple(settings) for settings in RECIPE.scales.values()}) == 1
