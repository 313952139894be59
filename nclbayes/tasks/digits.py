"""Split digits: small handwritten digits that come with scikit-learn, so that nothing is downloaded."""

from __future__ import annotations

import torch
from torch import Tensor

from nclbayes.data.task import Task
from nclbayes.tasks.files import need
from nclbayes.tasks.images import Active, Images, Scenario, Split, seeded

_TEST_SHARE = 0.2


def split_digits(
    scenario: Scenario | str = "domain", seed: int = 0, size: int | None = None, active: Active | str = "all"
) -> list[Task]:
    """Five tasks of two digits each, from scikit-learn's 1,797 images of 8 x 8.

    A fifth of each digit's images, chosen by the seed, are for testing. Images are float32 [N, 1, 8, 8] in [0, 1].

    Args:
        scenario: "task": labels 0 and 1, and ``context={"head": k}``; "domain": labels 0 and 1; "class": the tasks'
            labels are 0 and 1, 2 and 3, and so on.
        seed: Decides which digits make which task, and which images are for testing.
        size: At most so many training examples a task, and at most so many test examples; None: all.
        active: "seen" (scenario "class" only): ``context={"active": n}``, n the number of classes met so far.

    Returns:
        The tasks, in order.

    Raises:
        SettingError: If a setting is not one of those allowed, or scikit-learn is not installed.

    Example:
        >>> from nclbayes.tasks import split_digits
        >>> tasks = split_digits(scenario="task", size=100)
        >>> len(tasks), tasks[0].size, tasks[4].context
        (5, 100, {'head': 4})
        >>> tasks[0].train[0].shape
        torch.Size([100, 1, 8, 8])
    """
    split = Split("split_digits", 10, 2, scenario, seed, size, active)
    loaded = need("sklearn.datasets", "split_digits").load_digits()
    images = Images(
        torch.tensor(loaded.images, dtype=torch.float32, device="cpu").unsqueeze(1),
        torch.tensor(loaded.target, dtype=torch.int64, device="cpu"),
    )
    held_out = _held_out(images.y, seeded(seed))
    return split.tasks(images[~held_out], images[held_out], lambda x: x / 16)


def _held_out(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Which examples are for testing: the same share of every class, bool [N]."""
    mask = torch.zeros(len(labels), dtype=torch.bool, device="cpu")
    for label in labels.unique():
        index = (labels == label).nonzero().squeeze(-1)
        order = torch.randperm(len(index), generator=generator, device="cpu")
        mask[index[order[: round(_TEST_SHARE * len(index))]]] = True
    return mask
