"""Split digits: all of scikit-learn's images, each once, from 0 to 1."""

from __future__ import annotations

import importlib

import pytest
import torch

from nclbayes.errors import SettingError
from nclbayes.tasks import split_digits

datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")


@pytest.mark.usefixtures("untouched")
def test_the_tasks_hold_every_image_once_and_a_fifth_are_for_testing() -> None:
    tasks = split_digits("class", seed=1)
    original = datasets.load_digits()
    dealt = [int(digit) for task in tasks for digit in task.name.partition("(")[2].rstrip(")").split(", ")]
    assert sorted(dealt) == list(range(10))
    rows = []
    for task in tasks:
        for x, y in (task.train, task.test):
            assert x.shape[1:] == (1, 8, 8)
            assert x.dtype == torch.float32
            rows += [(dealt[label], *image.flatten().tolist()) for image, label in zip(x, y.tolist(), strict=True)]
    images = original.images.reshape(-1, 64) / 16
    assert sorted(rows) == sorted((int(y), *x) for x, y in zip(images.tolist(), original.target, strict=True))
    assert max(max(row[1:]) for row in rows) == 1
    assert min(min(row[1:]) for row in rows) == 0
    for task in tasks:
        for label in task.train[1].unique():
            held_out, kept = ((y == label).sum() for y in (task.test[1], task.train[1]))
            assert held_out / (held_out + kept) == pytest.approx(0.2, abs=0.005)


def test_the_seed_decides_the_split() -> None:
    first, again, other = (split_digits(seed=seed) for seed in (0, 0, 1))
    assert all(torch.equal(a.train[0], b.train[0]) for a, b in zip(first, again, strict=True))
    assert [task.name for task in first] != [task.name for task in other]


def test_sizes_and_settings() -> None:
    tasks = split_digits("task", size=30)
    assert [task.size for task in tasks] == [30] * 5
    assert [len(task.test[0]) for task in tasks] == [30] * 5
    assert [task.context["head"] for task in tasks] == list(range(5))
    with pytest.raises(SettingError, match="scenario"):
        split_digits("tasks")


def test_no_tensor_lands_on_the_default_device() -> None:
    torch.set_default_device("meta")
    try:
        tasks = split_digits("class", active="seen")
    finally:
        torch.set_default_device(None)
    assert all(part.device.type == "cpu" for task in tasks for part in (*task.train, *task.test))


def test_without_scikit_learn_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(SettingError, match=r"split_digits needs scikit-learn.*pip install 'nclbayes\[experiments\]'"):
        split_digits()
