"""The benchmark of engines that decide themselves, in short."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import defaults
from tests.benchmarks.defaults import STREAMS, Run, learnt, summary

SHORT = {name: STREAMS[name] for name in ("split-digits/class", "breast-cancer", "friedman")}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    def shortened(name: str) -> Any:
        stream = STREAMS[name]()
        return lambda: replace(stream, settings={**stream.settings, "steps": 12})

    monkeypatch.setattr(defaults, "STREAMS", {name: shortened(name) for name in SHORT})


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
    monkeypatch.setattr(Run, "learn", lambda self: pytest.fail("learnt again"))
    assert str(learnt(tmp_path, runs)) == str(found)
