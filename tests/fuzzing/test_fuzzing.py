"""Odd tasks, models, settings and calls: a clear refusal or a sound result, and nothing else has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzzing.judging import run_case


def faults(seeds: range, folder: Path) -> str:
    results = (run_case(seed, folder) for seed in seeds)
    return "\n\n".join(str(result) for result in results if result.faults)


@pytest.mark.filterwarnings("ignore")
def test_odd_inputs_are_refused_in_clear_words_and_leave_everything_as_it_was(tmp_path: Path) -> None:
    assert not faults(range(100_000, 100_200), tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_so_are_hundreds(tmp_path: Path) -> None:
    assert not faults(range(200_000, 200_500), tmp_path)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", [0, 5_000])
def test_so_are_ten_thousand(tmp_path: Path, first: int) -> None:
    assert not faults(range(first, first + 5_000), tmp_path)
