"""Runs of task sets as streams: stopped and gone on with, scored, and refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nclbayes import OnlinePosterior, Record
from nclbayes.errors import FileError, SettingError
from nclbayes.experiments import RunConfig, run
from nclbayes.experiments.runs import prepared, reopen
from nclbayes.experiments.streaming import Found, found_boundaries, stream_of, stretches
from nclbayes.stream import Changed, Stream
from nclbayes.tasks import split_digits
from nclbayes.tasks.streams import blurred, hard

pytest.importorskip("sklearn")

SETTINGS = {"steps": 60, "batch_size": 16}


def config(kind: str = "hard", method: str = "laplace-ncl", **rest: Any) -> RunConfig:
    rest = {"settings": SETTINGS, "tasks": 3, "units": 20, **rest}
    return RunConfig.of("split-digits", method, stream=kind, **rest)


def change(batch: int) -> Changed:
    return Changed(batch, batch - 1, 2e4, 1e-3, -2.0, -0.3)


def same(first: Record, second: Record) -> bool:
    return replace(first, seconds=[]) == replace(second, seconds=[])


def posteriors_agree(first: OnlinePosterior, second: OnlinePosterior) -> bool:
    one, other = first.guide(), second.guide()
    del one, other
    return all(
        torch.equal(state.loc, second._belief.states[name].loc) for name, state in first._belief.states.items()
    ) and set(first._belief.states) == set(second._belief.states)


@pytest.mark.parametrize(("kind", "method"), [("hard", "laplace-ncl"), ("recurring", "variational-ncl")])
def test_a_stream_that_is_killed_anywhere_goes_on_and_ends_the_same(
    kind: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nclbayes.experiments.streaming._KEPT", 7)
    asked = config(kind, method)
    whole = run(asked, tmp_path / "whole", progress=False)
    observe, count = Stream.observe, 0

    def killed(stream: Stream, *batch: Any) -> Any:
        nonlocal count
        count += 1
        # In the middle of a stretch, right after its end, and again later.
        if count in (50, 62, 100):
            raise KeyboardInterrupt
        return observe(stream, *batch)

    monkeypatch.setattr(Stream, "observe", killed)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            run(asked, tmp_path / "parts", progress=False)
    monkeypatch.setattr(Stream, "observe", observe)
    again = run(asked, tmp_path / "parts", progress=False)
    assert same(whole, again)
    assert same(Record.load(tmp_path / "parts" / "record.json"), whole)
    learners = [reopen(tmp_path / name)[2] for name in ("whole", "parts")]
    assert posteriors_agree(*learners)


def test_what_was_killed_between_stream_and_record_is_scored_then(tmp_path: Path) -> None:
    def stop(text: str) -> None:
        if text.startswith("2/3"):
            raise KeyboardInterrupt

    whole = run(config(), tmp_path / "a", progress=False)
    with pytest.raises(KeyboardInterrupt):
        run(config(), tmp_path / "b", progress=False, say=stop)
    record = Record.load(tmp_path / "b" / "record.json")
    for rows in (record.scores, record.losses, record.seconds, record.evidence):
        rows.pop()
    record.save(tmp_path / "b" / "record.json")
    assert same(run(config(), tmp_path / "b", progress=False), whole)
    for rows in (record.scores, record.losses, record.seconds, record.evidence):
        rows.clear()
    record.save(tmp_path / "b" / "record.json")
    with pytest.raises(FileError, match=r"180 batches and the record has 0 rows"):
        run(config(), tmp_path / "b", progress=False)


def test_boundaries_are_told_found_or_left_alone() -> None:
    asked = [
        config(boundaries=how, units=50, settings={"steps": 150, "batch_size": 16})
        for how in ("found", "told", "none", "50")
    ]
    found, told, none, each = (run(one, progress=False) for one in asked)
    source = stream_of(asked[0], prepared(asked[0])[1])
    changes = [Changed(**each) for each in found.about["changes"]]
    assert (found_boundaries(source, changes).missed, found_boundaries(source, changes).false) == (0, 0)
    assert all(not record.about["changes"] and not record.about["judged"] for record in (told, none, each))
    # No batch of a new task was learnt into the old one: the posteriors are the same.
    assert found.scores[-1] == told.scores[-1]
    assert found.average_accuracy > none.average_accuracy + 0.2


@pytest.mark.parametrize(
    ("method", "settings"),
    [("bgd", {"particles": 4}), ("foo-vb", {"particles": 4}), ("ivon", {"lr": 0.1, "second_momentum": 0.999})],
)
def test_methods_without_boundaries_learn_a_stream_in_one_segment(
    method: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    asked = config(method=method, boundaries="none", settings={"steps": 120, "batch_size": 16, **settings}, tasks=2)
    record = run(asked, tmp_path / "run", progress=False)
    assert record.scores[0][0].accuracy > 0.9
    assert record.scores[1][1].accuracy > 0.8
    _, _, posterior = reopen(tmp_path / "run")
    assert posterior.tasks == ("segment 1",)


def test_a_recurring_stream_has_two_rounds_and_is_as_long_as_others() -> None:
    tasks = prepared(config())[1]
    streams = {kind: stream_of(config(kind), tasks) for kind in ("hard", "blurred", "recurring", "unchanged")}
    assert {len(stream) for stream in streams.values()} == {180}
    assert streams["recurring"].order == (0, 1, 2, 0, 1, 2)
    assert stretches(streams["recurring"])[3] == f"{tasks[0].name} (2)"
    assert streams["blurred"].blur == 20
    assert not streams["unchanged"].boundaries


@pytest.mark.parametrize(
    ("batches", "found"),
    [
        ((), Found((), 2, 0)),
        ((12, 23), Found((2, 3), 0, 0)),
        ((5, 12, 15, 23), Found((2, 3), 0, 2)),
        ((30,), Found((10,), 1, 0)),
    ],
)
def test_boundaries_are_counted(batches: tuple[int, ...], found: Found) -> None:
    source = hard(split_digits()[:3], batches=10, batch_size=4)
    assert source.boundaries == (11, 21)
    assert found_boundaries(source, [change(batch) for batch in batches]) == found


def test_where_tasks_cross_over_several_changes_are_right() -> None:
    source = blurred(split_digits()[:2], batches=20, batch_size=4, blur=10)
    found = found_boundaries(source, [change(batch) for batch in (10, 17, 24, 30)])
    assert found == Found((-3,), 0, 2)


@pytest.mark.parametrize(
    ("rest", "text"),
    [
        ({"stream": "soft"}, "choose one of hard, blurred, recurring, unchanged"),
        ({"stream": "hard", "boundaries": "seldom"}, "or a number of batches"),
        ({"stream": "hard", "boundaries": "0"}, "or a number of batches"),
        ({"boundaries": "told"}, "in a stream only"),
        ({"stream": "hard", "keep_each": True}, "leave out keep_each"),
    ],
)
def test_what_makes_no_sense_is_refused(rest: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingError, match=text):
        RunConfig.of("split-digits", "laplace-ncl", **rest)


def test_methods_and_scenarios_that_cannot_stream_say_so() -> None:
    with pytest.raises(SettingError, match="learns whole tasks only"):
        run(config(method="owm"), progress=False)
    with pytest.raises(SettingError, match="different contexts"):
        run(config(scenario="task"), progress=False)


def test_sequences_with_normal_outputs_are_a_stream_too(tmp_path: Path) -> None:
    """The stimulus-response tasks: recurrent networks, whose changes are found."""
    asked = RunConfig.of(
        "stimulus-response", "laplace-ncl", stream="hard", settings={"steps": 60, "batch_size": 16}, units=16, tasks=2
    )
    record = run(asked, tmp_path / "run", progress=False)
    source = stream_of(asked, prepared(asked)[1])
    found = found_boundaries(source, [Changed(**each) for each in record.about["changes"]])
    assert (found.missed, found.false) == (0, 0)
    assert all(math.isfinite(score.loss) for row in record.scores for score in row)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["stream"] == "hard"
