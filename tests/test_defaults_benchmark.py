"""The benchmark of engines that decide themselves, in short."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import nclbayes as ncl
from tests.benchmarks import defaults
from tests.benchmarks.defaults import STREAMS, Run, Stream, learnt, summary

SHORT = {name: STREAMS[name] for name in ("split-digits/class", "breast-cancer", "friedman")}


def _short(name: str) -> Stream:
    stream = SHORT[name]()
    return replace(stream, settings={**stream.settings, "steps": 12})


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "STREAMS", {name: partial(_short, name) for name in SHORT})


@pytest.mark.parametrize("stream", SHORT)
@pytest.mark.parametrize("engine", defaults.ENGINES)
def test_it_is_learnt_in_both_ways_and_not_again(
    stream: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [Run(stream, engine, way, 0) for way in ("auto", "0.3")]
    found = learnt(tmp_path, runs)
    assert not any("failed" in result for result in found.values())
    assert stream in summary(found)
    assert "0.3" in summary(found)
    monkeypatch.setattr(Run, "learn", lambda self, folder: pytest.fail("learnt again"))
    assert str(learnt(tmp_path, runs)) == str(found)


def test_factors_in_blocks_are_a_row_of_their_own(tmp_path: Path) -> None:
    runs = [Run("split-digits/class", "laplace", "auto", 0, structure) for structure in ("auto", "4")]
    found = learnt(tmp_path, runs)
    assert found[runs[0]] != found[runs[1]]
    lines = summary(found).splitlines()
    assert [line.split("  ")[0] for line in lines[-2:]] == ["split-digits/class", "split-digits/class, structure 4"]
    posterior = next(tmp_path.glob("*structure*")) / "posterior.ncl"
    assert posterior.exists()


def test_a_run_that_was_stopped_goes_on_after_the_last_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, update, seen = Run("breast-cancer", "laplace", "auto", 0), ncl.OnlinePosterior.update, []

    def stopping(self: ncl.OnlinePosterior, task: ncl.Task, **rest: Any) -> Any:
        seen.append(task.name)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return update(self, task, **rest)

    monkeypatch.setattr(ncl.OnlinePosterior, "update", stopping)
    with pytest.raises(KeyboardInterrupt):
        run.learn(tmp_path)
    found = run.learn(tmp_path)
    assert seen == [f"part {k}" for k in (0, 1, 2, 2, 3, 4)]
    monkeypatch.undo()
    whole = Run("breast-cancer", "laplace", "auto", 0)
    monkeypatch.setattr(defaults, "STREAMS", {"breast-cancer": lambda: _short("breast-cancer")})
    assert {**found, "seconds": 0} == {**whole.learn(), "seconds": 0}
