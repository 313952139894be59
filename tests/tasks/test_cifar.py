"""Split CIFAR-10 and CIFAR-100: z-scores, classes, features."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from nclbayes.errors import DataError, SettingError
from nclbayes.tasks import files, split_cifar10, split_cifar100
from nclbayes.tasks.cifar_data import Channels, load_cifar
from nclbayes.tasks.cifar_features import FeatureExtractor
from tests.tasks import fakes


@pytest.fixture
def small(folder: Path) -> Path:
    fakes.write_cifar100(folder)
    fakes.write_cifar10(folder)
    return folder


def test_channel_statistics_agree_with_numpy() -> None:
    x = torch.randint(0, 256, (7, 3, 5, 5), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    channels = Channels.of(x)
    assert np.allclose(channels.mean, x.numpy().mean((0, 2, 3)), rtol=1e-6)
    assert np.allclose(channels.std, x.numpy().std((0, 2, 3)), rtol=1e-6)
    scored = channels.z_score(x)
    assert scored.dtype == torch.float32
    assert np.allclose(scored.mean((0, 2, 3)), 0, atol=1e-5)
    assert x.dtype == torch.uint8
    constant = torch.full((2, 3, 1, 1), 9, dtype=torch.uint8)
    assert not Channels.of(constant).z_score(constant).any()


@pytest.mark.usefixtures("small", "untouched")
def test_ten_tasks_of_ten_classes_z_scored_over_the_training_set() -> None:
    tasks = split_cifar100("class", seed=1)
    assert [task.size for task in tasks] == [30] * 10
    assert [len(task.test[0]) for task in tasks] == [20] * 10
    x = torch.cat([task.train[0] for task in tasks])
    assert x.shape == (300, 3, 32, 32)
    assert torch.allclose(x.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(x.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5)
    dealt = [int(c) for task in tasks for c in task.name.partition("(")[2].rstrip(")").split(", ")]
    assert sorted(dealt) == list(range(100))
    raw, _ = load_cifar("cifar100")
    scored = Channels.of(raw.x).z_score(raw.x)
    for label in (0, 57):
        assert torch.equal(x[torch.cat([t.train[1] for t in tasks]) == label], scored[raw.y == dealt[label]])


@pytest.mark.usefixtures("small", "untouched")
def test_five_tasks_of_two_classes_of_cifar10() -> None:
    tasks = split_cifar10("class", seed=1, active="seen")
    assert [task.size for task in tasks] == [20] * 5
    assert [len(task.test[0]) for task in tasks] == [4] * 5
    assert [task.context["active"] for task in tasks] == [2, 4, 6, 8, 10]
    dealt = [int(c) for task in tasks for c in task.name.partition("(")[2].rstrip(")").split(", ")]
    assert sorted(dealt) == list(range(10))
    raw, _ = load_cifar("cifar10")
    x = torch.cat([task.train[0] for task in tasks])
    scored = Channels.of(raw.x).z_score(raw.x)
    for label in (0, 7):
        assert torch.equal(x[torch.cat([t.train[1] for t in tasks]) == label], scored[raw.y == dealt[label]])
    means = split_cifar10("task", features=lambda images: images.mean((2, 3)))
    assert means[2].train[0].shape == (20, 3)
    assert means[2].context == {"head": 2}


@pytest.mark.usefixtures("small")
def test_scenarios_and_sizes() -> None:
    tasks = split_cifar100("task", size=4)
    assert [(task.size, len(task.test[1]), task.context["head"]) for task in tasks] == [(4, 4, k) for k in range(10)]
    assert all(task.train[1].max() < 10 for task in tasks)
    assert [t.context["active"] for t in split_cifar100("class", active="seen")] == list(range(10, 101, 10))
    full, cut = split_cifar100()[0].train[0], split_cifar100(size=4)[0].train[0]
    # The z-score is that of all training images, however few are used.
    assert all(bool((full == image).flatten(1).all(1).any()) for image in cut)
    with pytest.raises(SettingError, match="scenario"):
        split_cifar100("all")


@pytest.mark.usefixtures("small")
def test_features_of_a_function_stand_in_for_the_images() -> None:
    def means(x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        return x.mean((2, 3))

    plain, seen = split_cifar100(seed=2), split_cifar100(seed=2, features=means)
    for a, b in zip(plain, seen, strict=True):
        assert torch.equal(b.train[0], a.train[0].mean((2, 3)))
        assert torch.equal(a.train[1], b.train[1])
    with pytest.raises(DataError, match="returned 1 rows for 300 images"):
        split_cifar100(features=lambda x: x[:1])


@pytest.mark.usefixtures("small", "untouched")
def test_features_of_an_extractor_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.random.fork_rng(devices=[]):
        extractor = FeatureExtractor().freeze()
    tasks = split_cifar100("task", size=3, features=extractor)
    assert tasks[0].train[0].shape == (3, 1024)
    assert len(list((files.cache_folder() / "features").glob("*.safetensors"))) == 2

    def never(*_: object) -> Tensor:
        raise AssertionError("the features are in the cache")

    monkeypatch.setattr(FeatureExtractor, "forward", never)
    again = split_cifar100("task", size=3, features=extractor)
    assert all(torch.equal(a.train[0], b.train[0]) for a, b in zip(tasks, again, strict=True))


@pytest.mark.usefixtures("small")
def test_no_tensor_lands_on_the_default_device() -> None:
    torch.set_default_device("meta")
    try:
        tasks = split_cifar100(features=FeatureExtractor().freeze())
    finally:
        torch.set_default_device(None)
    assert all(part.device.type == "cpu" for task in tasks for part in (*task.train, *task.test))


def test_the_real_images(data_folder: Path) -> None:
    if not (data_folder / "cifar-100-binary" / "train.bin").is_file():
        pytest.skip("CIFAR-100 is not among the real data")
    train, test = load_cifar("cifar100")
    assert train.y.bincount().tolist() == [500] * 100
    assert test.y.bincount().tolist() == [100] * 100
    channels = Channels.of(train.x)
    assert torch.allclose(channels.mean / 255, torch.tensor([0.5071, 0.4866, 0.4409]), atol=1e-3)
    assert torch.allclose(channels.std / 255, torch.tensor([0.2673, 0.2564, 0.2762]), atol=1e-3)
    assert [task.size for task in split_cifar100(size=50)] == [50] * 10
