"""Stroke MNIST: the fifteen tasks, padding, noise and response steps."""

from __future__ import annotations

from importlib import import_module
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nclbayes.data.task import Task
from nclbayes.errors import DataError, FileError, SettingError
from nclbayes.tasks import stroke_mnist
from nclbayes.tasks.formats import read_strokes
from nclbayes.tasks.stroke_mnist import PAIRS, responses
from tests.tasks import fakes

# The package exports the function under the module's name.
module = import_module("nclbayes.tasks.stroke_mnist")


@pytest.fixture
def small(folder: Path) -> Path:
    return fakes.write_strokes(folder / "stroke-mnist.npz")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def without_noise(task: Task, batch_size: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor, Tensor]:
    monkeypatch.setattr(module, "NOISE", 0.0)
    return task.train(batch_size, generator())


@pytest.mark.usefixtures("small")
def test_fifteen_pairs_with_a_head_each() -> None:
    assert PAIRS == ((2, 3), (4, 5), (1, 7), (8, 9), (0, 6))
    tasks = stroke_mnist()
    pairs = ["2/3", "4/5", "1/7", "8/9", "0/6"]
    expected = [f"stroke_mnist {pair} {kind}" for kind in ("plain", "swapped", "negated") for pair in pairs]
    assert [task.name for task in tasks] == expected
    assert [task.context for task in tasks] == [{"head": k} for k in range(15)]
    assert [task.size for task in tasks] == [8] * 15


@pytest.mark.usefixtures("small", "untouched")
def test_a_trial_is_the_digit_without_its_start_then_five_steps_then_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    transforms = {"plain": (1, -1), "swapped": (-1, 1), "negated": (-1, 1)}
    digits = fakes.stroke_digits()["train"]
    for task in stroke_mnist():
        x, lengths, y = without_noise(task, 64, monkeypatch)
        first, second = map(int, task.name.split()[1].split("/"))
        assert x.dtype == torch.float32
        assert (lengths.dtype, y.dtype) == (torch.int64, torch.int64)
        assert x.shape == (64, int(lengths.max()), 4)
        assert set(y.flatten().tolist()) == {0, 1}
        assert bool((y == y[:, :1]).all())
        assert y.shape == (64, 5)
        for trial, length, label in zip(x, lengths.tolist(), y[:, 0].tolist(), strict=True):
            digit = torch.tensor(digits[(first, second)[label]][1:]).float()
            assert length == len(digit) + 5
            expected = digit.clone()
            expected[:-1, :2] = torch.tensor(transforms[task.name.split()[2]]).float()
            assert torch.equal(trial[: len(digit)], expected)
            assert not trial[len(digit) :].any()


def test_swapping_and_negating_differ(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fakes.write_strokes(folder / "stroke-mnist.npz")
    strokes = read_strokes(path, "train")
    strokes.steps[:, :2] = (3, 2)
    monkeypatch.setattr(module, "read_strokes", lambda path, split: strokes)
    tasks = stroke_mnist()
    rows = [without_noise(tasks[i], 1, monkeypatch)[0][0, 0, :2].tolist() for i in (0, 5, 10)]
    assert rows == [[3, 2], [2, 3], [-3, -2]]


@pytest.mark.usefixtures("small")
def test_noise_has_standard_deviation_one_up_to_the_last_response_step(monkeypatch: pytest.MonkeyPatch) -> None:
    task = stroke_mnist()[0]
    x, lengths, _ = task.train(4000, generator())
    clean, same, _ = without_noise(task, 4000, monkeypatch)
    assert torch.equal(lengths, same)
    valid = torch.arange(x.shape[1]) < lengths.unsqueeze(-1)
    noise = x - clean
    assert not noise[~valid].any()
    assert noise[valid].std() == pytest.approx(1, abs=0.01)
    assert noise[valid].mean() == pytest.approx(0, abs=0.01)
    response = valid & (torch.arange(x.shape[1]) >= lengths.unsqueeze(-1) - 5)
    assert noise[response].std() == pytest.approx(1, abs=0.01)


@pytest.mark.usefixtures("small", "untouched")
def test_draws_follow_the_generator_and_the_test_data_the_seed() -> None:
    first, again, other = stroke_mnist(seed=0), stroke_mnist(seed=0), stroke_mnist(seed=1)
    for a, b, c in zip(first, again, other, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a.test, b.test, strict=True))
        assert not torch.equal(a.test[0], c.test[0])
        assert torch.equal(a.test[2], c.test[2])
        assert all(torch.equal(p, q) for p, q in zip(a.train(6, generator(3)), b.train(6, generator(3)), strict=True))
    assert not torch.equal(first[0].test[0], first[5].test[0])
    batches = list(islice(first[0].batches(6, generator()), 2))
    assert batches[0][0].shape != batches[1][0].shape or not torch.equal(batches[0][0], batches[1][0])


@pytest.mark.usefixtures("small")
def test_order_moves_tasks_and_numbers_heads_anew() -> None:
    plain = {task.name: task for task in stroke_mnist()}
    order = torch.randperm(15, generator=generator()).tolist()
    tasks = stroke_mnist(order=order, num_tasks=4)
    names = list(plain)
    assert [task.name for task in tasks] == [names[i] for i in order[:4]]
    assert [task.context["head"] for task in tasks] == [0, 1, 2, 3]
    for task in tasks:
        assert torch.equal(task.test[0], plain[task.name].test[0])


@pytest.mark.usefixtures("small")
def test_size_cuts_training_and_test_digits() -> None:
    for task in stroke_mnist(size=3):
        assert task.size == 3
        assert len(task.test[0]) == 3
    assert [len(y) for *_, y in stroke_mnist(size=3)[0].epoch(2, generator())] == [2, 1]
    assert stroke_mnist(size=1000)[0].size == 8


@pytest.mark.usefixtures("small")
def test_wrong_settings_are_refused() -> None:
    for order in ([0, 1], [0] * 15, list(range(1, 16))):
        with pytest.raises(SettingError, match="order must be a permutation of 0 to 14"):
            stroke_mnist(order=order)
    for count in (0, 16):
        with pytest.raises(SettingError, match="num_tasks must be from 1 to 15"):
            stroke_mnist(num_tasks=count)
    with pytest.raises(SettingError, match="size"):
        stroke_mnist(size=0)
    with pytest.raises(SettingError, match="batch_size must be at least 1, not 0"):
        stroke_mnist()[0].train(0, generator())


def test_damaged_data_are_refused(small: Path) -> None:
    small.write_bytes(small.read_bytes()[:300])
    with pytest.raises(FileError, match=f"{small}"):
        stroke_mnist()


def test_missing_digits_are_refused(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strokes = read_strokes(small, "train")
    strokes.labels[:] = 9
    monkeypatch.setattr(module, "read_strokes", lambda path, split: strokes)
    with pytest.raises(DataError, match="no digits 2 or 3"):
        stroke_mnist()


@pytest.mark.usefixtures("small")
def test_responses_are_each_sequences_last_five_steps() -> None:
    x, lengths, y = stroke_mnist()[0].test
    picked = responses(x, lengths)
    assert picked.shape == (*y.shape, 4)
    for trial, length, part in zip(x, lengths.tolist(), picked, strict=True):
        assert torch.equal(part, trial[length - 5 : length])


@pytest.mark.usefixtures("small")
def test_no_tensor_lands_on_the_default_device() -> None:
    torch.set_default_device("meta")
    try:
        task = stroke_mnist()[7]
        batch = task.train(4, torch.Generator("cpu"))
    finally:
        torch.set_default_device(None)
    assert all(part.device.type == "cpu" for part in (*batch, *task.test))


def test_the_real_digits(data_folder: Path) -> None:
    if not (data_folder / "stroke-mnist.npz").is_file():
        pytest.skip("stroke MNIST is not among the real data")
    tasks = stroke_mnist()
    assert [task.size for task in tasks] == [12089, 11263, 13007, 11800, 11841] * 3
    assert [len(task.test[0]) for task in tasks] == [2042, 1874, 2163, 1983, 1938] * 3
    for task in tasks:
        assert 12 + 5 <= task.test[1].min()
        assert task.test[1].max() <= 116 + 5
        assert task.test[0].shape[1] == task.test[1].max()
