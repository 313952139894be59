"""MNIST's task sets, on made-up files and on the real ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import ndimage

from nclbayes.errors import FileError, SettingError
from nclbayes.tasks import permuted_mnist, rotated_mnist, split_fashion_mnist, split_mnist
from nclbayes.tasks.files import status
from nclbayes.tasks.mnist import rotate
from tests.tasks import fakes

TRAIN_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
TEST_COUNTS = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


@pytest.fixture
def small(folder: Path) -> Path:
    fakes.write_mnist(folder / "mnist")
    fakes.write_mnist(folder / "fashion-mnist")
    return folder


@pytest.mark.usefixtures("small", "untouched")
@pytest.mark.parametrize("function", [split_mnist, split_fashion_mnist])
def test_split_sets_hold_every_image_once(function: object) -> None:
    tasks = function("task", seed=2)  # type: ignore[operator]
    assert len(tasks) == 5
    assert [task.size for task in tasks] == [40] * 5
    values = torch.cat([task.train[0] for task in tasks])
    assert values.shape == (200, 1, 28, 28)
    assert values.dtype == torch.float32
    assert sorted((values[:, 0, 3, 5] * 255).round().int().tolist()) == list(range(200))
    for i, task in enumerate(tasks):
        assert task.context == {"head": i}
        digits = {int(d) for d in task.name.partition("(")[2].rstrip(")").split(", ")}
        assert set((task.train[0][:, 0, 0, 0] * 255).round().int().remainder(10).tolist()) == digits


@pytest.mark.usefixtures("small", "untouched")
def test_permuted_tasks_move_the_same_images_pixels(folder: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (200, 28, 28))
    fakes.write_idx(folder / "mnist" / "train-images-idx3-ubyte.gz", pixels)
    tasks = permuted_mnist(3, seed=1)
    plain = torch.tensor(pixels / 255, dtype=torch.float32).unsqueeze(1)
    assert torch.equal(tasks[0].train[0], plain)
    for task in tasks[1:]:
        moved = task.train[0]
        assert moved.shape == plain.shape
        assert not torch.equal(moved, plain)
        assert torch.equal(moved.flatten(1).sort().values, plain.flatten(1).sort().values)
        # One order for all images: pixels as vectors over images are only exchanged.
        columns = {tuple(column) for column in plain.flatten(1).T.tolist()}
        assert {tuple(column) for column in moved.flatten(1).T.tolist()} == columns
        assert task.train[1] is tasks[0].train[1]
        assert task.context == {}
    assert not torch.equal(tasks[1].train[0], tasks[2].train[0])
    again = permuted_mnist(3, seed=1)
    assert all(torch.equal(a.train[0], b.train[0]) for a, b in zip(tasks, again, strict=True))
    assert not torch.equal(permuted_mnist(2, seed=2)[1].train[0], tasks[1].train[0])


@pytest.mark.parametrize("degrees", [0, 30, 90, 144])
def test_rotation_agrees_with_scipy(degrees: float) -> None:
    y, x = np.mgrid[:28, :28]
    image = np.exp(-((x - 17) ** 2 + (y - 11) ** 2) / 6)
    turned = rotate(torch.tensor(image, dtype=torch.float32).view(1, 1, 28, 28), degrees)
    reference = ndimage.rotate(image, degrees, reshape=False, order=1)
    assert torch.allclose(turned.squeeze().double(), torch.tensor(reference), atol=1e-5)


@pytest.mark.usefixtures("small", "untouched")
def test_rotated_tasks_share_labels_and_start_upright() -> None:
    tasks = rotated_mnist(4, size=50)
    assert [task.name.partition("(")[2] for task in tasks] == [f"{a} degrees)" for a in (0, 45, 90, 135)]
    assert all(task.train[1] is tasks[0].train[1] for task in tasks)
    assert [task.size for task in tasks] == [50] * 4
    assert torch.allclose(tasks[2].train[0], tasks[0].train[0].rot90(1, (2, 3)), atol=1e-3)
    assert all(0 <= task.train[0].min() and task.train[0].max() <= 1 + 1e-6 for task in tasks)


@pytest.mark.usefixtures("small")
def test_no_tensor_lands_on_the_default_device() -> None:
    torch.set_default_device("meta")
    try:
        tasks = [*split_mnist("class"), *permuted_mnist(2), *rotated_mnist(2)]
    finally:
        torch.set_default_device(None)
    assert all(part.device.type == "cpu" for task in tasks for part in (*task.train, *task.test))


def test_wrong_settings_are_refused(small: Path) -> None:
    for function in (permuted_mnist, rotated_mnist):
        with pytest.raises(SettingError, match="num_tasks must be at least 1, not 0"):
            function(0)
        with pytest.raises(SettingError, match="size"):
            function(size=-1)
    with pytest.raises(SettingError, match="scenario"):
        split_mnist("x")


def test_files_that_do_not_fit_together_are_refused(small: Path) -> None:
    path = small / "mnist" / "train-labels-idx1-ubyte.gz"
    fakes.write_idx(path, np.zeros(7))
    with pytest.raises(FileError, match=rf"\(200, 28, 28\) and '{path}' \(7,\)"):
        split_mnist()
    fakes.write_idx(path, np.full(200, 11))
    with pytest.raises(FileError, match=rf"{path}' is damaged: it has a label 11"):
        split_mnist()


@pytest.mark.usefixtures("data_folder")
def test_the_real_digits_have_their_known_counts() -> None:
    if not next(entry.found for entry in status() if entry.dataset == "mnist"):
        pytest.skip("MNIST is not among the real data")
    tasks = split_mnist("class", seed=5)
    dealt = [int(d) for task in tasks for d in task.name.partition("(")[2].rstrip(")").split(", ")]
    for part, counts in (("train", TRAIN_COUNTS), ("test", TEST_COUNTS)):
        found = torch.bincount(torch.cat([getattr(task, part)[1] for task in tasks]))
        assert found.tolist() == [counts[digit] for digit in dealt]
    x = tasks[0].train[0]
    assert (x.min(), x.max()) == (0, 1)
    assert torch.cat([task.train[0].flatten() for task in tasks]).mean() == pytest.approx(0.1307, abs=1e-4)
