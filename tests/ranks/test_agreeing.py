"""What is said of ranks that do not mean the same: what differs, and no more."""

from __future__ import annotations

from typing import Any

import pytest

from nclbayes.errors import RankError
from nclbayes.ranks import Ranks, in_step


class Group(Ranks):
    """Ranks of which this process knows what the others say."""

    def __init__(self, *others: Any) -> None:
        super().__init__(0, 1 + len(others))
        self.others = others

    def gather(self, where: str, said: Any) -> list[Any]:
        return [said, *self.others]


def differing(*marks: dict[str, Any]) -> str:
    """What is said of what differs."""
    with pytest.raises(RankError) as error:
        in_step(Group(*marks[1:]), "the update", marks[0])
    said = str(error.value)
    start, end = "The ranks do not mean the same by the update. They differ in ", ". Every rank must be given"
    assert said.startswith(start)
    return said.removeprefix(start).partition(end)[0]


def test_ranks_that_mean_the_same_go_on() -> None:
    marks = {"engine": {"name": "LaplaceNCL", "steps": 3}, "context": [{"'active'": "2"}]}
    in_step(Group(marks, marks), "the update", marks)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"task": ["a", 61, 1]}, {"task": ["b", 61, 1]}, "their task (rank 0: ['a', 61, 1], rank 1: ['b', 61, 1])"),
        (
            {"engine": {"name": "LaplaceNCL", "steps": 3, "lr": 0.1}},
            {"engine": {"name": "LaplaceNCL", "steps": 4, "lr": 0.1}},
            "their engine.steps (rank 0: 3, rank 1: 4)",
        ),
        (
            {"engine": {"name": "LaplaceNCL", "stiffness": 20}},
            {"engine": {"name": "DiagonalNCL"}},
            "their engine.name (rank 0: LaplaceNCL, rank 1: DiagonalNCL); "
            "their engine.stiffness (rank 0: 20, rank 1: nothing)",
        ),
        ({"context": [{"a": "nothing"}]}, {"context": [{}]}, "their context[0].a (rank 0: nothing, rank 1: nothing)"),
        (
            {"engine": {"steps": 3}, "context": [{"active": "2"}, {"head": "0", "active": "2"}]},
            {"engine": {"steps": 3}, "context": [{"active": "2"}, {"head": "1", "active": "2"}]},
            "their context[1].head (rank 0: 0, rank 1: 1)",
        ),
        ({"context": [{"a": "1"}]}, {"context": [["a"]]}, "their context[0] (rank 0: {'a': '1'}, rank 1: ['a'])"),
        (
            {"earlier tasks": [f"task {k}" for k in range(100)]},
            {"earlier tasks": [f"task {k}" for k in range(99)] + ["another"]},
            "their earlier tasks[99] (rank 0: task 99, rank 1: another)",
        ),
    ],
    ids=["short list", "setting", "other settings", "word", "nested", "other kinds", "long list"],
)
def test_only_what_differs_is_said(first: dict[str, Any], second: dict[str, Any], said: str) -> None:
    assert differing(first, second) == said


def test_what_is_the_same_on_some_ranks_is_said_of_each() -> None:
    marks = ({"engine": {"steps": steps, "lr": 1}} for steps in (3, 3, 4))
    assert differing(*marks) == "their engine.steps (rank 0: 3, rank 1: 3, rank 2: 4)"


def test_much_that_differs_is_cut_short() -> None:
    some, others = ({f"setting {k}": value for k in range(12)} for value in (0, 1))
    said = differing({"engine": some}, {"engine": others})
    assert said.count("rank 1: 1") == 5
    assert said.endswith("; and 7 more")
    long = "x" * 1000
    said = differing({"context": [long + "a" + long]}, {"context": [long + "b" + long]})
    assert len(said) < 200
    assert "xa" in said
    assert "xb" in said
