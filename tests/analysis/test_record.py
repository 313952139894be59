"""Averages by hand, and files that come back."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from nclbayes import Record, Score
from nclbayes.errors import FileError, SettingError

R = [[0.9, 0.5, 0.4], [0.8, 0.95, 0.6], [0.85, 0.7, 1.0]]


def record() -> Record:
    found = Record(["a", "b", "c"], baseline=[0.5, 0.45, 0.5], about={"method": "laplace-ncl"})
    for i, row in enumerate(R):
        scores = [Score(value, 1 - value, 0.1, 10) for value in row]
        found.add(scores, losses=[1.0, 0.5], seconds=i + 1.0, evidence=-100.5 * (i + 1))
    return found


def test_the_averages_are_their_definitions() -> None:
    found = record()
    assert found.is_complete
    assert found.average_accuracy == pytest.approx((0.85 + 0.7 + 1.0) / 3)
    assert found.average_loss == pytest.approx(1 - (0.85 + 0.7 + 1.0) / 3)
    assert found.forgetting == pytest.approx(((0.9 - 0.85) + (0.95 - 0.7)) / 2)
    assert found.backward_transfer == pytest.approx(((0.85 - 0.9) + (0.7 - 0.95)) / 2)
    assert found.forward_transfer == pytest.approx(((0.5 - 0.45) + (0.6 - 0.5)) / 2)
    assert found.summary()["seconds"] == 6.0
    assert found.summary()["log evidence"] == found.log_evidence == -603.0


def test_a_record_of_the_tasks_so_far() -> None:
    found = Record(["a", "b"])
    assert math.isnan(found.average_accuracy)
    found.add([Score(0.9, 0.1, 0.0, 5)])
    assert found.average_accuracy == 0.9
    assert found.forgetting == found.backward_transfer == 0.0
    assert math.isnan(found.forward_transfer)
    assert math.isnan(found.matrix()[0][1])
    with pytest.raises(SettingError, match="Row 2 needs 2 to 2 scores, not 1"):
        found.add([Score(0.9, 0.1, 0.0, 5)])
    found.add([Score(0.9, 0.1, 0.0, 5)] * 2)
    with pytest.raises(SettingError, match="full"):
        found.add([Score(0.9, 0.1, 0.0, 5)] * 2)


def test_there_is_no_sum_where_a_task_has_no_evidence() -> None:
    found = Record(["a", "b"])
    assert math.isnan(found.log_evidence)
    found.add([Score(0.9, 0.1, 0.0, 5)], evidence=-3.0)
    assert found.log_evidence == -3.0
    found.add([Score(0.9, 0.1, 0.0, 5)] * 2)
    assert found.evidence == [-3.0, None]
    assert math.isnan(found.log_evidence)


def test_a_record_of_before_there_was_evidence_goes_on(tmp_path: Path) -> None:
    found = record()
    found.save(tmp_path / "r.json")
    old = json.loads((tmp_path / "r.json").read_text())
    del old["evidence"]
    (tmp_path / "r.json").write_text(json.dumps({**old, "format": 1, "tasks": ["a", "b", "c", "d"]}))
    loaded = Record.load(tmp_path / "r.json")
    assert loaded.evidence == [None] * 3
    assert (loaded.scores, loaded.losses, loaded.seconds) == (found.scores, found.losses, found.seconds)
    loaded.add([Score(0.9, 0.1, 0.0, 5)] * 4, evidence=-1.0)
    loaded.save(tmp_path / "r.json")
    assert Record.load(tmp_path / "r.json").evidence == [None, None, None, -1.0]
    # Of the present format it belongs there.
    (tmp_path / "r.json").write_text(json.dumps({**old, "format": 2}))
    with pytest.raises(FileError, match="it has the evidence of 0 tasks, not 3"):
        Record.load(tmp_path / "r.json")


def test_a_record_comes_back_from_its_file(tmp_path: Path) -> None:
    found = record()
    found.save(tmp_path / "record.json")
    assert Record.load(tmp_path / "record.json") == found
    lines = (tmp_path / "record.csv").read_text().splitlines()
    assert lines[0] == "after,a,b,c"
    assert lines[2] == "b,0.8,0.95,0.6"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["record.csv", "record.json"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 1, "tasks": [], "scores": [[{}]]}'])
def test_what_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(FileError, match="is not a record of nclbayes"):
        Record.load(tmp_path / "r.json")


def test_newer_and_missing_records_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text('{"format": 99}')
    with pytest.raises(FileError, match="newer"):
        Record.load(tmp_path / "r.json")
    with pytest.raises(FileError, match="There is no record"):
        Record.load(tmp_path / "nothing.json")


def test_a_record_is_printed_as_a_table() -> None:
    record = Record(["a", "bb"])
    assert str(record) == "no task has been scored yet"
    record.add([Score(0.9, 0.3, 0.1, 100)])
    record.add([Score(0.7, 0.8, 0.1, 100), Score(0.8, 0.5, 0.1, 100)])
    assert str(record).splitlines() == [
        "after a   90.0     .",
        "after bb  70.0  80.0",
        "average accuracy 75.0%, forgetting 20.0 points",
    ]
    record.evidence = [-1000.0, -234.56]
    assert str(record).splitlines()[-1] == "prequential log evidence -1,234.6 nats"
