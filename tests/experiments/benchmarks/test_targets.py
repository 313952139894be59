"""Nothing in the engines or methods moves what five small cells come to, unless it is meant to."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("sklearn")

from nclbayes.experiments.benchmarks import CELLS
from tests.experiments.benchmarks.targets import LEAST, NAMES, Target, complaint, load, measured, moved, target_of


@pytest.mark.slow
def test_no_cell_has_moved() -> None:
    complaints = moved({name: measured(name) for name in NAMES}, load())
    assert not complaints, "\n".join(complaints)


def test_every_target_is_of_a_cell_and_of_a_commit() -> None:
    targets = load()
    assert list(targets) == list(NAMES)
    assert set(targets) <= set(CELLS)
    for target in targets.values():
        assert re.fullmatch("[0-9a-f]{12}", target.commit)
        # A tolerance that lets a method fall to another's level would notice nothing.
        assert LEAST <= target.tolerance < 5


def test_a_cell_that_moved_is_told_with_the_commit_and_the_commands() -> None:
    target = Target(90.0, 1.0, "0123456789ab")
    assert complaint("x", [90.5, 91.5], target) is None
    said = complaint("x", [88.0, 89.5], target)
    assert said is not None
    for part in ("88.75 ± 0.75", "90.00 ± 1.00", "git bisect start HEAD 0123456789ab", "targets x --update"):
        assert part in said
    assert moved({"x": [91.2, 91.3], "y": [90.0, 90.0]}, {"x": target, "y": target}) != []


def test_a_tolerance_is_three_standard_errors_but_never_less_than_two_images() -> None:
    assert target_of([90.0, 92.0, 94.0, 96.0], "c") == Target(93.0, 3.873, "c")
    assert target_of([90.0, 90.0, 90.0], "c").tolerance == LEAST
