"""The extractor: its shape, freezing, files, and a short training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from nclbayes.cli import run_command_line
from nclbayes.errors import FileError, NonFiniteError, SettingError
from nclbayes.storage import write_file
from nclbayes.tasks import cifar_features, files
from nclbayes.tasks.cifar_data import Channels, load_cifar
from nclbayes.tasks.cifar_features import FeatureExtractor, pretrain, pretrained, pretrained_path, weights_path
from tests.tasks import fakes


@pytest.fixture
def extractor() -> FeatureExtractor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return FeatureExtractor()


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(7, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_the_layers_are_the_papers(extractor: FeatureExtractor, images: torch.Tensor) -> None:
    convolutions = [layer for layer in extractor.modules() if isinstance(layer, nn.Conv2d)]
    assert [layer.out_channels for layer in convolutions] == [16, 32, 64, 128, 256]
    assert [layer.stride for layer in convolutions] == [(1, 1), (2, 2), (2, 2), (2, 2), (2, 2)]
    assert {layer.kernel_size for layer in convolutions} == {(3, 3)}
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in extractor.modules()) == 5
    assert extractor(images).shape == (7, 1024)
    assert extractor(images).min() == 0


def test_a_frozen_extractor_stays_frozen(extractor: FeatureExtractor, images: torch.Tensor) -> None:
    network = nn.Sequential(extractor.freeze(), nn.Linear(1024, 2)).train()
    before = {name: value.clone() for name, value in extractor.state_dict().items()}
    network(images).sum().backward()
    assert not extractor.training
    assert all(parameter.grad is None for parameter in extractor.parameters())
    assert all(torch.equal(value, before[name]) for name, value in extractor.state_dict().items())


def test_features_are_those_of_evaluation_whatever_the_batches(
    extractor: FeatureExtractor, images: torch.Tensor
) -> None:
    extractor(images)
    found = extractor.features(images, batch_size=3, cache=False)
    assert extractor.training
    assert not found.requires_grad
    assert torch.allclose(found, extractor.freeze()(images), atol=1e-6)
    assert not (files.cache_folder() / "features").exists()


def test_kept_features_depend_on_weights_and_images(extractor: FeatureExtractor, images: torch.Tensor) -> None:
    extractor.freeze()
    kept = files.cache_folder() / "features"
    first = extractor.features(images)
    assert torch.equal(extractor.features(images), first)
    assert len(list(kept.iterdir())) == 1
    extractor.features(images[:3])
    extractor.layers[0].weight.mul_(2)
    extractor.features(images)
    assert len(list(kept.iterdir())) == 3
    for path in kept.iterdir():
        path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(FileError, match=r"features.*damaged"):
        extractor.features(images)


def test_weights_are_saved_and_loaded(extractor: FeatureExtractor, images: torch.Tensor, tmp_path: Path) -> None:
    extractor(images)
    extractor.save(tmp_path / "new" / "weights.safetensors", accuracy=0.5)
    loaded = FeatureExtractor.load(tmp_path / "new" / "weights.safetensors")
    assert loaded.frozen
    assert torch.equal(loaded(images), extractor.freeze()(images))
    write_file(tmp_path / "other", "feature extractor", {"w": torch.zeros(1)}, {})
    with pytest.raises(FileError, match="other' holds weights of another network"):
        FeatureExtractor.load(tmp_path / "other")
    with pytest.raises(FileError, match="There is no file"):
        FeatureExtractor.load(tmp_path / "none")


def test_jitter_shifts_and_mirrors_whole_images(images: torch.Tensor) -> None:
    jittered = cifar_features._jittered(images, torch.Generator().manual_seed(0))
    assert jittered.shape == images.shape
    padded = nn.functional.pad(images, (4, 4, 4, 4))
    for image, wide in zip(jittered, padded, strict=True):
        windows = wide.unfold(1, 32, 1).unfold(2, 32, 1).flatten(1, 2).transpose(0, 1)
        plain, mirrored = ((windows == each).flatten(1).all(1).sum() for each in (image, image.flip(-1)))
        assert plain + mirrored == 1


@pytest.mark.usefixtures("untouched")
def test_pretraining_learns_saves_and_repeats(folder: Path) -> None:
    fakes.write_cifar10(folder, each=4)
    made = pretrain(1, seed=3, batch_size=40, progress=False)
    assert 0 <= made.accuracy <= 1
    assert made.path == weights_path(1, 3)
    assert made.extractor.frozen
    again = pretrain(1, seed=3, batch_size=40, progress=False, path=folder / "again.safetensors")
    assert again.path == folder / "again.safetensors"
    assert again.accuracy == made.accuracy
    loaded = FeatureExtractor.load(made.path)
    for name, value in again.extractor.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name])
    other = pretrain(1, seed=4, batch_size=40, size=80, progress=False)
    assert not torch.equal(other.extractor.layers[0].weight, loaded.layers[0].weight)
    assert other.path == weights_path(1, 4, 80)


def test_the_package_brings_layers_which_give_way_to_ones_own(folder: Path, extractor: FeatureExtractor) -> None:
    theirs = pretrained_path()
    assert theirs.name == weights_path().name
    assert theirs.parent == Path(cifar_features.__file__).parent
    assert pretrained().frozen
    for epochs, seed, size in ((100, 1, 50), (2, 5, None), (2, 4, None), (3, 7, None)):
        extractor.save(weights_path(epochs, seed, size))
        assert pretrained_path() == weights_path(epochs, seed, size)
    extractor.save(weights_path(3, 8))
    assert pretrained_path() == weights_path(3, 7)


@pytest.mark.slow
def test_the_packages_layers_tell_classes_apart(data_folder: Path) -> None:
    """By the nearest mean of a class, of z-scored features."""
    if not (data_folder / "cifar-10-batches-bin" / "test_batch.bin").is_file():
        pytest.skip("CIFAR-10 is not among the real data")
    train, test = load_cifar("cifar10")
    channels = Channels.of(train.x)
    extractor = FeatureExtractor.load(cifar_features._OURS)
    x, other = (extractor.features(channels.z_score(images.x[:4000]), cache=False) for images in (train, test))
    spread = x.std(0) + 1e-6
    means = torch.stack([x[train.y[:4000] == k].mean(0) for k in range(10)])
    found = torch.cdist(other / spread, means / spread).argmin(-1)
    assert float((found == test.y[:4000]).float().mean()) > 0.6


def test_without_a_terminal_there_is_no_progress_bar(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fakes.write_cifar10(folder, each=4)
    assert run_command_line(["data", "pretrain-cifar", "--epochs", "1", "--size", "40"]) == 0
    printed = capsys.readouterr()
    assert "test accuracy" in printed.out
    assert printed.err == ""


def test_wrong_settings_and_divergence_are_refused(folder: Path) -> None:
    fakes.write_cifar10(folder)
    for settings in ({"epochs": 0}, {"batch_size": 1}, {"lr": 0.0}):
        with pytest.raises(SettingError, match="epochs must be at least 1"):
            pretrain(**settings)
    with pytest.raises(SettingError, match="size"):
        pretrain(size=0)
    with pytest.raises(NonFiniteError, match="diverged in epoch"):
        pretrain(3, lr=1e30, batch_size=20, progress=False)


@pytest.mark.slow
def test_real_pretraining_beats_chance(data_folder: Path) -> None:
    if not (data_folder / "cifar-10-batches-bin" / "test_batch.bin").is_file():
        pytest.skip("CIFAR-10 is not among the real data")
    assert pretrain(2, size=5000, lr=1e-3, progress=False).accuracy > 0.25
