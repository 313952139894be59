"""The convolutional layers that split CIFAR-100 is seen through: trained on CIFAR-10, then frozen."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from nclbayes.errors import FileError, NonFiniteError, SettingError
from nclbayes.isolation.randomness import drawing_from
from nclbayes.storage import Form, Misfit, open_sealed, write_file
from nclbayes.tasks.cifar_data import Channels, load_cifar
from nclbayes.tasks.files import cache_folder
from nclbayes.tasks.images import Images, check_size, choose, seeded

CHANNELS = (16, 32, 64, 128, 256)
_WEIGHTS, _FEATURES = "feature extractor", "set of features"
# What `pretrain` makes with its defaults.
_OURS = Path(__file__).with_name("cifar10-features-epochs-100-seed-0.safetensors")


class FeatureExtractor(nn.Module):
    """Five convolutions of 3 x 3 with batch norm and ReLU: 16, 32, 64, 128 and 256 channels, stride 2 after the first.

    Colour images of 32 x 32 become 1,024 features. Once frozen, it stays in evaluation mode whatever a module that it
    is part of is told.

    Args:
        device: Where its weights are.

    Example:
        >>> import torch
        >>> from nclbayes.tasks.cifar_features import FeatureExtractor
        >>> FeatureExtractor().freeze()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 1024])
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.frozen = False
        layers: list[nn.Module] = []
        for i, (before, after) in enumerate(zip((3, *CHANNELS), CHANNELS, strict=False)):
            stride = 1 if i == 0 else 2
            layers += [
                # No bias: the batch norm that follows has one.
                nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False, device=device),
                nn.BatchNorm2d(after, device=device),
                nn.ReLU(),
            ]
        self.layers = nn.Sequential(*layers, nn.Flatten())

    def forward(self, images: Tensor) -> Tensor:
        """The features of images.

        Args:
            images: z-scored, [N, 3, H, W].

        Returns:
            [N, features]; 1,024 of them for 32 x 32 pixels.
        """
        return self.layers(images)

    def train(self, mode: bool = True) -> FeatureExtractor:
        """Set training mode, unless frozen.

        Args:
            mode: Training, or evaluation.

        Returns:
            This module.
        """
        super().train(mode and not self.frozen)
        return self

    def freeze(self) -> FeatureExtractor:
        """Stop learning for good: evaluation mode, no gradients for the weights.

        Returns:
            This module.
        """
        self.frozen = True
        self.requires_grad_(False)
        return self.eval()

    def features(self, images: Tensor, batch_size: int = 500, cache: bool = True) -> Tensor:
        """The features of many images, computed in batches, in evaluation mode, without gradients.

        They are kept in the cache folder under a hash of the weights and the images, and found there the next time.

        Args:
            images: z-scored, [N, 3, H, W].
            batch_size: How many at a time.
            cache: Whether to use the cache folder.

        Returns:
            [N, features], on the device of the images.

        Raises:
            FileError: If the file that the cache holds is damaged (delete it), or cannot be written.
        """
        path = cache_folder() / "features" / f"{self._digest(images)}.safetensors"
        if cache and path.is_file():
            return self._kept(path, len(images)).to(images.device)
        device = next(self.parameters()).device
        mode = self.training
        self.eval()
        try:
            with torch.no_grad():
                found = torch.cat([self(batch.to(device)).to(images.device) for batch in images.split(batch_size)])
        finally:
            self.train(mode)
        if cache:
            _make_folder(path)
            write_file(path, _FEATURES, {"features": found}, {})
        return found

    def save(self, path: str | os.PathLike[str], **settings: float) -> None:
        """Write the weights to a file.

        Args:
            path: Where to.
            **settings: Numbers to write with them, such as an accuracy.

        Raises:
            FileError: If the file cannot be written.
        """
        _make_folder(Path(path))
        write_file(path, _WEIGHTS, self.state_dict(), settings)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> FeatureExtractor:
        """Read what :meth:`save` wrote.

        Args:
            path: Where from.
            device: Where to have the weights.

        Returns:
            A frozen extractor.

        Raises:
            FileError: If the file is missing, damaged, or holds something else.
        """
        # On the meta device no weights are drawn that would only be replaced.
        extractor = cls("meta")
        with open_sealed(path, _WEIGHTS) as file:
            own = {name: Form(tensor.dtype, tuple(tensor.shape)) for name, tensor in extractor.state_dict().items()}
            if file.forms != own:
                raise FileError(f"'{os.fspath(path)}' holds weights of another network.")
            tensors = file.read()
            for name, tensor in tensors.items():
                if not bool(torch.isfinite(tensor).all()) or (
                    name.endswith("running_var") and bool((tensor < 0).any())
                ):
                    raise Misfit(f"the tensor '{name}' has entries that no trained network has")
        extractor.load_state_dict(tensors, assign=True)
        return extractor.to(device).freeze()

    def _kept(self, path: Path, count: int) -> Tensor:
        """The features of so many images, from the cache."""
        with open_sealed(path, _FEATURES) as file:
            form = file.forms.get("features")
            if len(file.forms) != 1 or form is None or not form.dtype.is_floating_point or form.shape[:1] != (count,):
                raise Misfit(f"it should hold the features of {count} images")
            found = file.read()["features"]
            if found.ndim != 2 or not bool(torch.isfinite(found).all()):
                raise Misfit("the tensor 'features' has NaN or infinite entries, or is no table")
            return found

    def _digest(self, images: Tensor) -> str:
        digest = hashlib.sha256()
        for name, tensor in (*sorted(self.state_dict().items()), ("images", images)):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().data)
        return digest.hexdigest()


@dataclass(frozen=True)
class Pretrained:
    """What :func:`pretrain` made.

    Attributes:
        extractor: The frozen layers.
        accuracy: The share of CIFAR-10's test images that the network they were trained in got right.
        path: Where their weights were saved.
    """

    extractor: FeatureExtractor
    accuracy: float
    path: Path


def pretrain(
    epochs: int = 100,
    seed: int = 0,
    *,
    size: int | None = None,
    batch_size: int = 256,
    lr: float = 1e-4,
    device: torch.device | str = "cpu",
    path: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> Pretrained:
    """Train the convolutional layers on CIFAR-10, below two layers of 2,000 ReLU units, by Adam.

    Images are z-scored by CIFAR-10's own channels, shifted by up to four pixels and mirrored at random.

    Args:
        epochs: How often each image is seen.
        seed: Decides initial weights, order and shifts.
        size: Use so many of the training images, and at most so many test images; None: all.
        batch_size: Images a step.
        lr: Adam's learning rate.
        device: Where to train.
        path: Where to save the weights; None: in the cache folder, under a name with epochs, seed and size.
        progress: Whether to show a progress bar; by default only on a terminal.

    Returns:
        The frozen layers, the test accuracy, and the file.

    Raises:
        SettingError: If a setting is out of range.
        NonFiniteError: If the training diverges.
        DataError: If CIFAR-10 is not here and cannot be downloaded.
        FileError: If a file is damaged, or cannot be written.
    """
    if epochs < 1 or batch_size < 2 or not lr > 0:
        raise SettingError(
            f"epochs must be at least 1, batch_size at least 2 and lr above 0, not {epochs}, {batch_size} and {lr}."
        )
    check_size(size)
    generator = seeded(seed)
    train, test = load_cifar("cifar10")
    channels = Channels.of(train.x)
    train, test = (images[choose(len(images), size, generator)] for images in (train, test))
    with drawing_from(generator, torch.device("cpu")):
        extractor, head = FeatureExtractor(), _head()
    network = nn.Sequential(extractor, head).to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=lr)
    steps = max(1, len(train) // batch_size)
    # Without a terminal tqdm is silent if it is not told whether to be.
    disable = None if progress is None else not progress
    with tqdm(total=epochs * steps, desc="CIFAR-10 features", unit=" steps", disable=disable) as bar:
        for epoch in range(epochs):
            order = torch.randperm(len(train), generator=generator, device="cpu")
            for index in order.split(batch_size)[:steps]:
                x = _jittered(channels.z_score(train.x[index]), generator).to(device)
                loss = F.cross_entropy(network(x), train.y[index].to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                bar.update()
            if not torch.isfinite(loss):
                raise NonFiniteError(f"The training of the features diverged in epoch {epoch + 1}: use a smaller lr.")
            bar.set_postfix(epoch=epoch + 1, loss=f"{loss.item():.3f}")
    extractor.freeze()
    accuracy = _accuracy(network.eval(), test, channels, device)
    target = Path(path) if path is not None else weights_path(epochs, seed, size)
    extractor.save(target, accuracy=accuracy, epochs=epochs, seed=seed)
    return Pretrained(extractor, accuracy, target)


def weights_path(epochs: int = 100, seed: int = 0, size: int | None = None) -> Path:
    """Where :func:`pretrain` saves weights unless told otherwise.

    Args:
        epochs: As given to it.
        seed: As given to it.
        size: As given to it.

    Returns:
        A file in the cache folder.

    Example:
        >>> from nclbayes.tasks.cifar_features import weights_path
        >>> weights_path(10, seed=3).name
        'cifar10-features-epochs-10-seed-3.safetensors'
    """
    some = "" if size is None else f"-size-{size}"
    return cache_folder() / f"cifar10-features-epochs-{epochs}-seed-{seed}{some}.safetensors"


def pretrained() -> FeatureExtractor:
    """The extractor that :func:`pretrain` left in the cache, of several the one trained longest; or else the package's.

    Returns:
        The frozen layers.

    Example:
        >>> from nclbayes.tasks.cifar_features import pretrained
        >>> pretrained().frozen
        True
    """
    return FeatureExtractor.load(pretrained_path())


def pretrained_path() -> Path:
    """Where the weights are that :func:`pretrained` reads: those of the most images, of these of the most epochs.

    Returns:
        A file in the cache folder, of equal ones that of the least seed; if there is none, that which the package
        brings: what ``pretrain()`` made with all its defaults.
    """
    found = cache_folder().glob("cifar10-features-epochs-*-seed-*.safetensors")
    return max(found, key=lambda path: (_size(path), int(path.name.split("-")[3]), -_seed(path)), default=_OURS)


def _seed(path: Path) -> int:
    return int(path.stem.split("-")[5])


def _size(path: Path) -> float:
    """How many images weights were trained on, by their file's name."""
    return float(path.stem.split("-size-")[1]) if "-size-" in path.stem else float("inf")


def _head() -> nn.Module:
    layers: Iterable[tuple[int, int]] = ((4 * CHANNELS[-1], 2000), (2000, 2000))
    hidden = [part for n, m in layers for part in (nn.Linear(n, m, device="cpu"), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(2000, 10, device="cpu"))


def _jittered(x: Tensor, generator: torch.Generator) -> Tensor:
    """Images shifted by up to four pixels each way, half of them mirrored; x is [N, C, H, W]."""
    count, _, height, width = x.shape
    padded = F.pad(x, (4, 4, 4, 4))
    down, right = torch.randint(9, (2, count, 1), generator=generator, device="cpu")
    rows = down + torch.arange(height, device="cpu")
    columns = right + torch.arange(width, device="cpu")
    mirrored = torch.rand(count, 1, generator=generator, device="cpu") < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    each = torch.arange(count, device="cpu").view(-1, 1, 1)
    return padded[each, :, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)


def _accuracy(network: nn.Module, test: Images, channels: Channels, device: torch.device | str) -> float:
    with torch.no_grad():
        batches = zip(test.x.split(500), test.y.split(500), strict=True)
        right = sum(int((network(channels.z_score(x).to(device)).argmax(-1).cpu() == y).sum()) for x, y in batches)
    return right / len(test)


def _make_folder(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"Could not make the folder '{path.parent}': {error}.") from error
