"""Split CIFAR-10 and CIFAR-100, as images or as features of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nclbayes.data.task import Task
from nclbayes.errors import DataError
from nclbayes.tasks.cifar_data import Channels, load_cifar
from nclbayes.tasks.cifar_features import FeatureExtractor
from nclbayes.tasks.images import Active, Scenario, Split

_BATCH = 500
# Something for images, in place of them.
Features = Callable[[Tensor], Tensor]


def split_cifar10(
    scenario: Scenario | str = "domain",
    seed: int = 0,
    size: int | None = None,
    features: Features | None = None,
    active: Active | str = "all",
) -> list[Task]:
    """Five tasks of two classes each, the classes dealt to tasks at random.

    Everything else is as in :func:`split_cifar100`. Mind that the layers of
    :func:`~nclbayes.tasks.cifar_features.pretrained` have learnt to tell these very classes apart: their features make
    an easy set.

    Args:
        scenario: "task": labels 0 and 1, and ``context={"head": k}``; "domain": labels 0 and 1; "class": the tasks'
            labels are 0 and 1, 2 and 3, and so on.
        seed: Decides which classes make which task.
        size: At most so many training examples a task, and at most so many test examples; None: all.
        features: Put these in place of the images.
        active: "seen" (scenario "class" only): ``context={"active": n}``, n the number of classes met so far.

    Returns:
        The tasks, in order.

    Raises:
        SettingError: If a setting is not one of those allowed.
        DataError: If the data are not here and cannot be downloaded, or `features` does not return a row an image.
        FileError: If a file is damaged.

    Example:
        >>> from nclbayes.tasks import split_cifar10
        >>> tasks = split_cifar10("class", size=20, features=lambda images: images.mean((2, 3)), active="seen")
        >>> len(tasks), tasks[3].train[1].unique(), tasks[3].context
        (5, tensor([6, 7]), {'active': 8})
    """
    return _split("cifar10", Split("split_cifar10", 10, 2, scenario, seed, size, active), features)


def split_cifar100(
    scenario: Scenario | str = "domain",
    seed: int = 0,
    size: int | None = None,
    features: Features | None = None,
    active: Active | str = "all",
) -> list[Task]:
    """Ten tasks of ten classes each, the classes dealt to tasks at random.

    Images are float32 [N, 3, 32, 32], each channel z-scored by its mean and standard deviation over the whole training
    set; training and test images are CIFAR-100's own. At full size they take 740 MB.

    Args:
        scenario: "task": labels 0 to 9, and ``context={"head": k}``; "domain": labels 0 to 9; "class": the tasks'
            labels are 0 to 9, 10 to 19, and so on.
        seed: Decides which classes make which task.
        size: At most so many training examples a task, and at most so many test examples; None: all.
        features: Put these in place of the images: a function from z-scored images to features, which is called on
            batches without gradients; or a :class:`~nclbayes.tasks.cifar_features.FeatureExtractor`, whose features are
            kept in the cache.
        active: "seen" (scenario "class" only): ``context={"active": n}``, n the number of classes met so far.

    Returns:
        The tasks, in order.

    Raises:
        SettingError: If a setting is not one of those allowed.
        DataError: If the data are not here and cannot be downloaded, or `features` does not return a row an image.
        FileError: If a file is damaged.

    Example:
        >>> from nclbayes.tasks import split_cifar100
        >>> tasks = split_cifar100("task", size=20, features=lambda images: images.mean((2, 3)))
        >>> len(tasks), tasks[3].train[0].shape, tasks[3].context
        (10, torch.Size([20, 3]), {'head': 3})
    """
    return _split("cifar100", Split("split_cifar100", 100, 10, scenario, seed, size, active), features)


def _split(dataset: str, split: Split, features: Features | None) -> list[Task]:
    """The classes of a data set dealt to tasks, its images z-scored, or features of them."""
    train, test = load_cifar(dataset)
    channels = Channels.of(train.x)

    def scale(x: Tensor) -> Tensor:
        images = channels.z_score(x)
        if features is None:
            return images
        return features.features(images) if isinstance(features, FeatureExtractor) else _in_batches(features, images)

    return split.tasks(train, test, scale)


def _in_batches(features: Features, images: Tensor) -> Tensor:
    with torch.no_grad():
        parts = [features(batch) for batch in images.split(_BATCH)]
    rows = sum(len(part) for part in parts)
    if rows != len(images):
        raise DataError(f"`features` returned {rows} rows for {len(images)} images; it must return one for each.")
    return torch.cat(parts).detach()
