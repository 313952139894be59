"""MNIST and Fashion-MNIST: split by class, permuted, rotated."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from nclbayes.data.task import Task
from nclbayes.errors import FileError, SettingError
from nclbayes.tasks.files import find
from nclbayes.tasks.formats import read_idx
from nclbayes.tasks.images import Active, Images, Scenario, Split, check_size, choose, seeded, to_unit


def split_mnist(
    scenario: Scenario | str = "domain", seed: int = 0, size: int | None = None, active: Active | str = "all"
) -> list[Task]:
    """Five tasks of two digits each, the digits dealt to tasks at random.

    Images are float32 [N, 1, 28, 28] in [0, 1]; training and test images are MNIST's own.

    Args:
        scenario: "task": labels 0 and 1, and ``context={"head": k}``; "domain": labels 0 and 1; "class": the tasks'
            labels are 0 and 1, 2 and 3, and so on.
        seed: Decides which digits make which task.
        size: At most so many training examples a task, and at most so many test examples; None: all.
        active: "seen" (scenario "class" only): ``context={"active": n}``, n the number of classes met so far.

    Returns:
        The tasks, in order.

    Raises:
        SettingError: If a setting is not one of those allowed.
        DataError: If the data are not here and cannot be downloaded.
        FileError: If a file is damaged.

    Example:
        >>> from nclbayes.tasks import split_mnist
        >>> tasks = split_mnist("class", size=100)
        >>> len(tasks), tasks[1].train[0].shape, sorted(set(tasks[1].train[1].tolist()))
        (5, torch.Size([100, 1, 28, 28]), [2, 3])
    """
    split = Split("split_mnist", 10, 2, scenario, seed, size, active)
    return split.tasks(*_load("mnist"), to_unit)


def split_fashion_mnist(
    scenario: Scenario | str = "domain", seed: int = 0, size: int | None = None, active: Active | str = "all"
) -> list[Task]:
    """Five tasks of two kinds of clothing each; otherwise as :func:`split_mnist`.

    Args:
        scenario: As for :func:`split_mnist`.
        seed: Decides which kinds make which task.
        size: At most so many training examples a task, and at most so many test examples; None: all.
        active: As for :func:`split_mnist`.

    Returns:
        The tasks, in order.

    Raises:
        SettingError: If a setting is not one of those allowed.
        DataError: If the data are not here and cannot be downloaded.
        FileError: If a file is damaged.

    Example:
        >>> from nclbayes.tasks import split_fashion_mnist
        >>> tasks = split_fashion_mnist("task", size=100)
        >>> tasks[1].context
        {'head': 1}
    """
    split = Split("split_fashion_mnist", 10, 2, scenario, seed, size, active)
    return split.tasks(*_load("fashion-mnist"), to_unit)


def permuted_mnist(num_tasks: int = 10, seed: int = 0, size: int | None = None) -> list[Task]:
    """All ten digits in every task, the pixels in another order in each; one shared head.

    The first task's pixels are in their own order. Every task uses the same examples, and all share the same labels.
    At full size a task takes 220 MB.

    Args:
        num_tasks: How many tasks.
        seed: Decides the orders, and which examples are used.
        size: At most so many training examples a task, and at most so many test examples; None: all.

    Returns:
        The tasks, in order.

    Raises:
        SettingError: If a setting is out of range.
        DataError: If the data are not here and cannot be downloaded.
        FileError: If a file is damaged.

    Example:
        >>> from nclbayes.tasks import permuted_mnist
        >>> [task.name for task in permuted_mnist(2, size=100)]
        ['permuted_mnist 1', 'permuted_mnist 2']
    """
    _check_count(num_tasks)
    generator = seeded(seed)
    train, test = _chosen(size, generator)
    tasks = [_whole("permuted_mnist 1", train, test)]
    for i in range(1, num_tasks):
        order = torch.randperm(28 * 28, generator=generator, device="cpu")
        tasks.append(_whole(f"permuted_mnist {i + 1}", _permuted(train, order), _permuted(test, order)))
    return tasks


def rotated_mnist(num_tasks: int = 5, seed: int = 0, size: int | None = None) -> list[Task]:
    """All ten digits in every task, turned by another angle in each; one shared head.

    Task k of n, counted from 0, is turned counter-clockwise by 180 k / n degrees: 0, 36, 72, 108 and 144 for five
    tasks. The half turn itself is left out, as it makes a 9 of a 6. Greys are interpolated linearly, and what comes
    from outside is black. Every task uses the same examples, and all share the same labels. At full size a task takes
    220 MB.

    Args:
        num_tasks: How many tasks.
        seed: Decides which examples are used.
        size: At most so many training examples a task, and at most so many test examples; None: all.

    Returns:
        The tasks, in order.

    Raises:
        SettingError: If a setting is out of range.
        DataError: If the data are not here and cannot be downloaded.
        FileError: If a file is damaged.

    Example:
        >>> from nclbayes.tasks import rotated_mnist
        >>> [task.name for task in rotated_mnist(2, size=100)]
        ['rotated_mnist 1 (0 degrees)', 'rotated_mnist 2 (90 degrees)']
    """
    _check_count(num_tasks)
    train, test = _chosen(size, seeded(seed))
    tasks = []
    for i in range(num_tasks):
        angle = 180 * i / num_tasks
        name = f"rotated_mnist {i + 1} ({angle:g} degrees)"
        tasks.append(_whole(name, _rotated(train, angle), _rotated(test, angle)))
    return tasks


def rotate(x: Tensor, degrees: float) -> Tensor:
    """Turn images about their centre.

    Args:
        x: [N, C, H, W], H equal to W.
        degrees: Counter-clockwise, as one looks at the image.

    Returns:
        Images of the same shape, interpolated linearly, black where there was nothing.

    Example:
        >>> import torch
        >>> from nclbayes.tasks.mnist import rotate
        >>> rotate(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), 90).round().squeeze()
        tensor([[2., 4.],
                [1., 3.]])
    """
    if degrees == 0:
        return x
    angle = math.radians(degrees)
    cos, sin = math.cos(angle), math.sin(angle)
    turn = x.new_tensor([[cos, -sin, 0.0], [sin, cos, 0.0]])
    grid = F.affine_grid(turn.unsqueeze(0), [1, *x.shape[1:]], align_corners=False)
    turned = torch.empty_like(x)
    for source, target in zip(x.split(1000), turned.split(1000), strict=True):
        target.copy_(F.grid_sample(source, grid.expand(len(source), -1, -1, -1), align_corners=False))
    return turned


def _load(dataset: str) -> tuple[Images, Images]:
    """Training and test images, uint8 [N, 1, 28, 28]."""
    paths = find(dataset)
    splits = []
    for split in ("train", "test"):
        x, y = read_idx(paths[f"{split}_images"]), read_idx(paths[f"{split}_labels"])
        if x.shape != (len(y), 28, 28) or y.shape != (len(y),):
            raise FileError(
                f"'{paths[f'{split}_images']}' holds {x.shape} and '{paths[f'{split}_labels']}' {y.shape}; they must "
                "hold (N, 28, 28) images and (N,) labels."
            )
        if y.size and y.max() > 9:
            raise FileError(f"'{paths[f'{split}_labels']}' is damaged: it has a label {y.max()}, above 9.")
        splits.append(
            Images(
                torch.tensor(x, dtype=torch.uint8, device="cpu").unsqueeze(1),
                torch.tensor(y, dtype=torch.int64, device="cpu"),
            )
        )
    return splits[0], splits[1]


def _chosen(size: int | None, generator: torch.Generator) -> tuple[Images, Images]:
    """The examples that every task uses, as float images."""
    check_size(size)
    train, test = (images[choose(len(images), size, generator)] for images in _load("mnist"))
    return Images(to_unit(train.x), train.y), Images(to_unit(test.x), test.y)


def _permuted(images: Images, order: Tensor) -> Images:
    return Images(images.x.flatten(1)[:, order].view_as(images.x), images.y)


def _rotated(images: Images, degrees: float) -> Images:
    return Images(rotate(images.x, degrees), images.y)


def _whole(name: str, train: Images, test: Images) -> Task:
    return Task((train.x, train.y), (test.x, test.y), name=name)


def _check_count(num_tasks: int) -> None:
    if num_tasks < 1:
        raise SettingError(f"num_tasks must be at least 1, not {num_tasks}.")
