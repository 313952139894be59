"""CIFAR-10 and CIFAR-100 from their binary files, z-scored."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nclbayes.tasks.files import find
from nclbayes.tasks.formats import read_cifar
from nclbayes.tasks.images import Images

_LAYOUT = {"cifar10": (1, 10), "cifar100": (2, 100)}


@dataclass(frozen=True)
class Channels:
    """Mean and standard deviation of each colour channel, to z-score images with.

    Attributes:
        mean: float32 [C].
        std: float32 [C].
    """

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Channels:
        """The statistics of images.

        Args:
            x: uint8 [N, C, H, W].

        Returns:
            Means and standard deviations over images and pixels; a channel of one value has standard deviation 1.

        Example:
            >>> import torch
            >>> from nclbayes.tasks.cifar_data import Channels
            >>> Channels.of(torch.tensor([0, 4], dtype=torch.uint8).view(2, 1, 1, 1)).std
            tensor([2.])
        """
        # Counts of the 256 values are exact and need no float copy of all images.
        counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in x.unbind(1)])
        values = torch.arange(256, dtype=torch.float64, device=x.device)
        share = counts / counts.sum(1, keepdim=True, dtype=torch.float64)
        mean = share @ values
        std = (share @ values.square() - mean.square()).clamp_min(0).sqrt()
        std = torch.where(std > 0, std, 1.0)
        return cls(mean.to(torch.float32), std.to(torch.float32))

    def z_score(self, x: Tensor) -> Tensor:
        """Images with the mean taken off and divided by the standard deviation.

        Args:
            x: uint8 [N, C, H, W].

        Returns:
            float32 of the same shape.
        """
        mean, std = (part.to(x.device).view(-1, 1, 1) for part in (self.mean, self.std))
        return x.to(torch.float32).sub_(mean).div_(std)


def load_cifar(dataset: str) -> tuple[Images, Images]:
    """Training and test images as bytes.

    Args:
        dataset: "cifar10" or "cifar100" (with its fine labels).

    Returns:
        Training and test images, uint8 [N, 3, 32, 32].

    Raises:
        DataError: If the data are not here and cannot be downloaded.
        FileError: If a file is damaged.
    """
    paths = find(dataset)
    splits = []
    for split in ("train", "test"):
        # CIFAR-10's training files are called data_batch_1 and so on.
        keys = [key for key in paths if key.startswith("test") == (split == "test")]
        parts = [read_cifar(paths[key], *_LAYOUT[dataset]) for key in keys]
        x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        splits.append(Images(torch.from_numpy(x), torch.tensor(y, dtype=torch.int64, device="cpu")))
    return splits[0], splits[1]
