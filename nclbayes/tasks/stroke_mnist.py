"""Stroke MNIST: digits as pen movements, fifteen pairs to tell apart, one head each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nclbayes.data.task import Task
from nclbayes.errors import DataError, SettingError
from nclbayes.tasks.files import find
from nclbayes.tasks.formats import Strokes, read_strokes
from nclbayes.tasks.images import check_size, choose, seeded

PAIRS = ((2, 3), (4, 5), (1, 7), (8, 9), (0, 6))
"""The digits of each binary task."""

TRANSFORMS = ("plain", "swapped", "negated")
"""What is done to (dx, dy): nothing, exchanged, sign changed."""

RESPONSE_STEPS = 5
NOISE = 1.0


def stroke_mnist(
    seed: int = 0, size: int | None = None, order: Sequence[int] | None = None, num_tasks: int = 15
) -> list[Task]:
    """Fifteen tasks: five pairs of digits, plain, then with x and y swapped, then negated.

    A batch is ``(x, lengths, y)``: x float32 [B, T, 4] holds dx, dy, end of stroke, end of digit at each step, without
    the first step (where the pen starts), then five response steps, then zeros up to the longest sequence of the batch;
    lengths int64 [B] counts the steps with the response steps; y int64 [B, 5] is the label, 0 or 1, at each response
    step. All steps but the padding have Gaussian noise of standard deviation 1 added, drawn anew for each trial; the
    response steps are noise alone.

    ``Task.train`` is a sampler, which draws digits uniformly with replacement; ``Task.test`` holds every test digit
    once, with noise from the seed.

    Args:
        seed: Decides the noise of the test data, and which digits are used if `size` is given.
        size: At most so many training digits a task, and at most so many test digits; None: all.
        order: A permutation of 0 .. 14, which task comes when; None: the order above.
        num_tasks: Use only the first so many of the ordered tasks.

    Returns:
        The tasks, in order. Task k, counted from 0 in that order, has ``context={"head": k}``.

    Raises:
        SettingError: If the order is not a permutation, or a setting is out of range.
        DataError: If the data are not here and cannot be downloaded.
        FileError: If the file is damaged.

    Example:
        >>> import torch
        >>> from nclbayes.tasks import stroke_mnist
        >>> tasks = stroke_mnist(size=50, num_tasks=6)
        >>> tasks[0].name, tasks[5].name
        ('stroke_mnist 2/3 plain', 'stroke_mnist 2/3 swapped')
        >>> x, lengths, y = tasks[0].train(8, torch.Generator().manual_seed(0))
        >>> x.shape[2], y.shape
        (4, torch.Size([8, 5]))
    """
    kinds = [(pair, transform) for transform in TRANSFORMS for pair in PAIRS]
    order = range(len(kinds)) if order is None else order
    if sorted(order) != list(range(len(kinds))):
        raise SettingError(f"order must be a permutation of 0 to {len(kinds) - 1}, not {list(order)}.")
    if not 1 <= num_tasks <= len(kinds):
        raise SettingError(f"num_tasks must be from 1 to {len(kinds)}, not {num_tasks}.")
    check_size(size)
    path = find("stroke-mnist")["strokes"]
    train, test = (_Digits.of(read_strokes(path, split)) for split in ("train", "test"))
    tasks = []
    for head, kind in enumerate(list(order)[:num_tasks]):
        # A generator for each kind of task, so that its data do not depend on the order.
        generator = seeded(seed * len(kinds) + kind)
        pair, transform = kinds[kind]
        sampler = StrokeSampler(train, pair, transform, size, generator)
        tester = StrokeSampler(test, pair, transform, size, generator)
        name = f"stroke_mnist {pair[0]}/{pair[1]} {transform}"
        everything = torch.arange(tester.size, device="cpu")
        batch = tester.trials(everything, generator)
        tasks.append(Task(sampler, batch, name=name, size=sampler.size, context={"head": head}))
    return tasks


@dataclass(frozen=True)
class _Digits:
    """Digits without their first step; tasks share these tensors.

    Attributes:
        steps: int8 [steps, 4].
        starts: Where a digit begins in `steps`, int64 [N].
        lengths: How many steps it has, int64 [N].
        labels: int64 [N].
    """

    steps: Tensor
    starts: Tensor
    lengths: Tensor
    labels: Tensor

    @classmethod
    def of(cls, strokes: Strokes) -> _Digits:
        offsets = torch.tensor(strokes.offsets, dtype=torch.int64, device="cpu")
        return cls(
            torch.tensor(strokes.steps, dtype=torch.int8, device="cpu"),
            offsets[:-1] + 1,
            offsets.diff() - 1,
            torch.tensor(strokes.labels, dtype=torch.int64, device="cpu"),
        )


class StrokeSampler:
    """Draws noisy trials of two digits; called as ``sampler(batch_size, generator)``.

    Args:
        digits: All digits of a split.
        pair: The two digits; the label is the place in the pair.
        transform: One of ``TRANSFORMS``.
        size: At most so many of the digits; None: all.
        generator: Decides which.

    Attributes:
        size: How many digits there are to draw from.

    Raises:
        DataError: If there are no such digits.
    """

    def __init__(
        self, digits: _Digits, pair: tuple[int, int], transform: str, size: int | None, generator: torch.Generator
    ) -> None:
        index = ((digits.labels == pair[0]) | (digits.labels == pair[1])).nonzero().squeeze(-1)
        if len(index) == 0:
            raise DataError(f"Stroke MNIST has no digits {pair[0]} or {pair[1]}: its data are not complete.")
        index = index[choose(len(index), size, generator)]
        self._steps = digits.steps
        self._starts, self._lengths = digits.starts[index], digits.lengths[index]
        self._labels = (digits.labels[index] == pair[1]).to(torch.int64)
        self._transform = transform
        self.size = len(index)

    def __call__(self, batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Trials of digits drawn uniformly.

        Args:
            batch_size: How many.
            generator: Decides digits and noise; the batch is on its device.

        Returns:
            x [B, T, 4], lengths [B], y [B, 5], as :func:`stroke_mnist` says.

        Raises:
            SettingError: If the batch size is below 1.
        """
        if batch_size < 1:
            raise SettingError(f"batch_size must be at least 1, not {batch_size}.")
        drawn = torch.randint(self.size, (batch_size,), generator=generator, device=generator.device)
        return self.trials(drawn.cpu(), generator)

    def trials(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Trials of given digits.

        Args:
            index: Which of the digits, int64 [B], on the CPU.
            generator: Decides the noise; the batch is on its device.

        Returns:
            x [B, T, 4], lengths [B], y [B, 5], as :func:`stroke_mnist` says.
        """
        strokes = self._lengths[index]
        lengths = strokes + RESPONSE_STEPS
        time = torch.arange(int(lengths.max()), device="cpu")
        rows = self._starts[index].unsqueeze(-1) + torch.minimum(time, strokes.unsqueeze(-1) - 1)
        steps = self._steps[rows] * (time < strokes.unsqueeze(-1)).unsqueeze(-1)
        if self._transform == "swapped":
            steps = torch.cat([steps[..., 1:2], steps[..., 0:1], steps[..., 2:]], dim=-1)
        elif self._transform == "negated":
            steps = torch.cat([-steps[..., :2], steps[..., 2:]], dim=-1)
        device = generator.device
        x = torch.randn(steps.shape, generator=generator, device=device, dtype=torch.float32)
        x.mul_(NOISE).add_(steps.to(device))
        x.mul_((time < lengths.unsqueeze(-1)).unsqueeze(-1).to(device))
        y = self._labels[index].unsqueeze(-1).expand(-1, RESPONSE_STEPS).contiguous()
        return x, lengths.to(device), y.to(device)


def responses(output: Tensor, lengths: Tensor) -> Tensor:
    """A recurrent network's output at the response steps: the last five steps of each sequence.

    Args:
        output: [B, T, outputs], or states of a network.
        lengths: How many steps each sequence has, int64 [B].

    Returns:
        [B, 5, outputs].

    Example:
        >>> import torch
        >>> from nclbayes.tasks.stroke_mnist import responses
        >>> responses(torch.arange(7.0).view(1, 7, 1), torch.tensor([6])).flatten()
        tensor([1., 2., 3., 4., 5.])
    """
    back = torch.arange(-RESPONSE_STEPS, 0, device=output.device)
    rows = (lengths.to(output.device).unsqueeze(-1) + back).unsqueeze(-1)
    return output.gather(1, rows.expand(-1, -1, output.shape[-1]))
