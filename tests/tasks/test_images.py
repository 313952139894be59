"""Dealing classes to tasks: scenarios, labels, sizes, shared memory, refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nclbayes.data.task import Task
from nclbayes.errors import DataError, SettingError
from nclbayes.tasks.images import Images, Scenario, Split, choose, seeded, to_unit


def images(each: int, classes: int = 6) -> Images:
    """Image i is the number 10 i + its class."""
    y = torch.arange(classes).repeat(each)
    return Images((10 * torch.arange(len(y)) + y).view(-1, 1, 1, 1), y)


def deal(scenario: str = "domain", seed: int = 0, size: int | None = None, active: str = "all") -> list[Task]:
    split = Split("pairs", 6, 2, scenario, seed, size, active)
    return split.tasks(images(8), images(3), lambda x: x.float())


@settings(max_examples=20, deadline=None)
@given(scenario=st.sampled_from(Scenario), seed=st.integers(0, 10**6), size=st.none() | st.integers(1, 20))
def test_every_class_is_in_one_task_and_keeps_one_label(scenario: str, seed: int, size: int | None) -> None:
    tasks = deal(scenario, seed, size)
    met: dict[int, set[tuple[int, int]]] = {}
    for i, task in enumerate(tasks):
        for x, y in (task.train, task.test):
            assert y.dtype == torch.int64
            for original, label in zip((x.flatten() % 10).long().tolist(), y.tolist(), strict=True):
                met.setdefault(original, set()).add((i, label))
                assert (2 * i if scenario == "class" else 0) <= label < (2 * i + 2 if scenario == "class" else 2)
    assert all(len(places) == 1 for places in met.values())
    assert len(set.union(*met.values())) == len(met)
    assert [task.size for task in tasks] == [min(16, size or 16)] * 3
    assert [len(task.test[1]) for task in tasks] == [min(6, size or 6)] * 3


def test_contexts_follow_the_scenario() -> None:
    assert [task.context for task in deal("task")] == [{"head": 0}, {"head": 1}, {"head": 2}]
    assert [task.context for task in deal("domain")] == [{}] * 3
    assert [task.context for task in deal("class")] == [{}] * 3
    assert [task.context for task in deal("class", active="seen")] == [{"active": 2}, {"active": 4}, {"active": 6}]


def test_names_tell_the_classes() -> None:
    for task in deal("class"):
        x, y = task.train
        classes = [int(x[y == label][0] % 10) for label in y.unique()]
        assert task.name.endswith(f"({classes[0]}, {classes[1]})")


@pytest.mark.usefixtures("untouched")
def test_the_seed_decides_and_sets_share_memory() -> None:
    first, again, other = deal(seed=3, size=5), deal(seed=3, size=5), deal(seed=4, size=5)
    for a, b in zip(first, again, strict=True):
        assert all(torch.equal(p, q) for p, q in zip((*a.train, *a.test), (*b.train, *b.test), strict=True))
    assert [task.name for task in first] != [task.name for task in other]
    for part in range(2):
        assert len({task.train[part].untyped_storage().data_ptr() for task in first}) == 1


def test_examples_are_chosen_once_each_and_in_order() -> None:
    index = choose(50, 20, seeded(0))
    assert index.tolist() == sorted(set(index.tolist()))
    assert len(index) == 20
    assert choose(5, 5, seeded(0)).tolist() == list(range(5))


def test_bytes_become_numbers_from_0_to_1() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(to_unit(every), torch.arange(256) / 255)
    assert every.dtype == torch.uint8


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"scenario": "Task"}, r"scenario is 'Task'; choose one of 'task', 'domain', 'class'"),
        ({"scenario": "class", "active": "some"}, "active is 'some'; choose one of 'all', 'seen'"),
        ({"scenario": "task", "active": "seen"}, "goes with scenario='class' only, not 'task'"),
        ({"size": 0}, "size must be a whole number of at least 1"),
        ({"size": 2.5}, "size must be a whole number of at least 1"),
        ({"seed": "a"}, "seed must be a whole number, not 'a'"),
    ],
)
def test_wrong_settings_are_refused(settings_: dict[str, object], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        deal(**settings_)  # type: ignore[arg-type]


def test_a_task_without_examples_is_refused() -> None:
    with pytest.raises(DataError, match=r"pairs has no examples of the classes"):
        Split("pairs", 8, 1).tasks(images(8), images(3), torch.Tensor.float)
