"""Six stimulus-response tasks (Yang et al. 2019): see a direction, hold fixation, answer with a direction.

Inputs, 11: fixation, two modalities of (cos, sin), and which task it is (one-hot, at all times). Outputs, 3: fixation
and (cos, sin). A step is 20 ms. All inputs carry Gaussian noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from nclbayes.data.task import Task
from nclbayes.errors import DataError, SettingError

DT = 20
"""Milliseconds a step."""
GRACE = 100
"""Milliseconds that are not scored, at the start of a trial and after fixation goes off."""
RESPONSE_WEIGHT = 5.0
"""Weight of all errors in the response period."""
FIXATION_WEIGHT = 2.0
"""Weight of the errors of the fixation output."""
INPUT_NOISE = 0.1 * math.sqrt(2 / 0.2)
"""Standard deviation of the noise on every input."""
RECURRENT_NOISE = 0.05 * math.sqrt(2 / 0.2)
"""Standard deviation of the noise that the paper adds in the recurrent network."""
TOLERANCE = 0.1 * math.pi
"""How far an answer may be from the target direction."""

Batch = tuple[Tensor, Tensor, Tensor, Tensor]
Range = tuple[float, float]


class Anti(str, Enum):
    """Where the answer of an anti task points.

    Attributes:
        MIRROR: To 2 pi - theta, as in the paper's text.
        OPPOSITE: To theta + pi, as in the authors' code.
    """

    MIRROR = "mirror"
    OPPOSITE = "opposite"


@dataclass(frozen=True)
class TrialKind:
    """What the trials of a task have in common; durations are ranges in milliseconds.

    Attributes:
        name: What the task is called.
        before: From the start of the trial until the stimulus goes on.
        stimulus: How long the stimulus is on before the delay.
        delay: From then until fixation goes off.
        response: From then until the end.
        stays: Whether the stimulus stays on until the end.
        anti: Whether the answer is not the direction seen.
        modality: Which modality shows the stimulus, 0 or 1; None: either, drawn for each trial.
        choice: Whether there is a second, weaker direction.
    """

    name: str
    before: Range
    stimulus: Range
    delay: Range = (0, 0)
    response: Range = (300, 700)
    stays: bool = False
    anti: bool = False
    modality: int | None = None
    choice: bool = False


KINDS = (
    TrialKind("fdgo", before=(300, 700), stimulus=(500, 1500), stays=True),
    TrialKind("fdanti", before=(300, 700), stimulus=(500, 1500), stays=True, anti=True),
    TrialKind("delaygo", before=(300, 700), stimulus=(200, 600), delay=(200, 1600)),
    TrialKind("delayanti", before=(300, 700), stimulus=(200, 600), delay=(200, 1600), anti=True),
    TrialKind("dm1", before=(100, 400), stimulus=(600, 1400), modality=0, choice=True),
    TrialKind("dm2", before=(100, 400), stimulus=(600, 1400), modality=1, choice=True),
)
"""The six tasks, in the paper's order."""
INPUTS, OUTPUTS = 5 + len(KINDS), 3
"""How many inputs and outputs a network for these tasks has."""

_MEAN_STRENGTH, _COHERENCE, _SEPARATION = (0.8, 1.2), (0.4, 0.8), (0.5 * math.pi, 1.5 * math.pi)


class _Timing(NamedTuple):
    """Steps at which things happen, [B] each: stimulus on, stimulus off, fixation off, end of the trial."""

    on: Tensor
    off: Tensor
    go: Tensor
    end: Tensor


@dataclass(frozen=True)
class TrialSampler:
    """Makes trials of one task; every draw is from the generator, on its device.

    Attributes:
        kind: The task, one of :data:`KINDS`.
        anti: Where the answer of an anti task points.
    """

    kind: TrialKind
    anti: Anti = Anti.MIRROR

    def __call__(self, batch_size: int, generator: torch.Generator) -> Batch:
        """Make trials, padded with zeros to the longest of them.

        Args:
            batch_size: How many, B.
            generator: Decides the draws.

        Returns:
            x [B, T, 11], lengths [B], weights [B, T, 3] and targets y [B, T, 3].

        Raises:
            SettingError: If the batch size is not at least 1.
        """
        if batch_size < 1:
            raise SettingError(f"The batch size must be at least 1, not {batch_size}.")
        timing = _draw_timing(self.kind, batch_size, generator)
        field, direction = _draw_stimulus(self.kind, self.anti, batch_size, generator)
        steps = torch.arange(int(timing.end.max()), device=generator.device)
        on, off, go, end = (time.unsqueeze(-1) for time in timing)
        fixating, present = steps < go, steps < end  # [B, T]
        shape = (*present.shape, INPUTS)
        x = INPUT_NOISE * torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
        x[..., 0] += fixating
        x[..., 1:5] += ((steps >= on) & (steps < off)).unsqueeze(-1) * field.unsqueeze(1)
        x[..., 5 + KINDS.index(self.kind)] += 1
        x *= present.unsqueeze(-1)
        y = x.new_zeros(*present.shape, OUTPUTS)
        y[..., 0] = fixating
        y[..., 1:] = (present & ~fixating).unsqueeze(-1) * direction.unsqueeze(1)
        return x, timing.end, _error_weights(timing, steps), y


def stimulus_response(
    *,
    size: int = 1_000_000,
    anti: Anti | str = Anti.MIRROR,
    names: Sequence[str] | None = None,
    seed: int = 0,
    test_size: int = 512,
) -> list[Task]:
    """The six stimulus-response tasks, with endless training data made on the fly.

    fdgo: answer with the direction seen when fixation goes off, the stimulus being on still. delaygo: the same from
    memory. fdanti, delayanti: the same with another direction, see `anti`. dm1, dm2: of two directions shown at once in
    modality 1 or 2, answer with the stronger. Durations are uniform over the whole steps in their range.

    A batch is ``(x [B, T, 11], lengths [B], weights [B, T, 3], y [B, T, 3])``, padded with zeros to its longest trial.
    The weight of a squared error is the product of that of its period (0 in the first 100 ms, in the 100 ms after
    fixation goes off and in padding; 1 while fixating; 5 in the response) and that of its output (2 for fixation, 1 for
    the direction): 10 for the fixation output in the response.

    Args:
        size: The number of training trials N that each task stands for.
        anti: "mirror": the anti tasks ask for 2 pi - theta (the paper's text); "opposite": for theta + pi.
        names: Which tasks, in which order; None: all six.
        seed: Decides the test trials.
        test_size: How many test trials each task has.

    Returns:
        The tasks. Each has a sampler for training, fixed tensors for testing, and no context: the inputs tell the tasks
        apart.

    Raises:
        SettingError: If a name or `anti` is unknown, or there are no names or no test trials.

    Example:
        >>> import torch
        >>> from nclbayes.tasks.stimulus_response import stimulus_response
        >>> tasks = stimulus_response(test_size=16)
        >>> [task.name for task in tasks]
        ['fdgo', 'fdanti', 'delaygo', 'delayanti', 'dm1', 'dm2']
        >>> x, lengths, weights, y = tasks[0].train(32, torch.Generator().manual_seed(1))
        >>> x.shape[0], x.shape[2], y.shape[2], x.shape[1] == int(lengths.max())
        (32, 11, 3, True)
    """
    kinds = {kind.name: kind for kind in KINDS}
    names = list(kinds) if names is None else [names] if isinstance(names, str) else list(names)
    unknown = [name for name in names if name not in kinds]
    if unknown or not names:
        wrong = f"There is no stimulus-response task {unknown[0]!r}" if unknown else "`names` is empty"
        raise SettingError(f"{wrong}; choose from {', '.join(map(repr, kinds))}.")
    try:
        anti = Anti(anti)
    except ValueError:
        raise SettingError(f"anti is {anti!r}; choose 'mirror' or 'opposite'.") from None
    if test_size < 1:
        raise SettingError(f"test_size must be at least 1, not {test_size}.")
    seeds = torch.randint(2**63 - 1, (len(KINDS),), generator=_seeded(seed), device="cpu").tolist()
    seed_of = dict(zip(kinds, seeds, strict=True))
    tasks = []
    for name in names:
        sampler = TrialSampler(kinds[name], anti)
        tasks.append(Task(sampler, sampler(test_size, _seeded(seed_of[name])), name=name, size=size))
    return tasks


def performance(output: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
    """Which trials were answered correctly, judged by the last step of each.

    Correct is an answer within 0.1 pi of the target direction with the fixation output below one half.

    Args:
        output: What a network answered, [B, T, 3].
        y: The targets, [B, T, 3].
        lengths: How many steps each trial has, [B].

    Returns:
        Booleans, [B].

    Raises:
        DataError: If the shapes do not fit each other, or a length is not from 1 to T.

    Example:
        >>> import torch
        >>> from nclbayes.tasks.stimulus_response import performance, stimulus_response
        >>> x, lengths, weights, y = stimulus_response(names=["dm1"], test_size=4)[0].test
        >>> performance(y, y, lengths)
        tensor([True, True, True, True])
    """
    if output.shape != y.shape or y.ndim != 3 or y.shape[-1] != OUTPUTS or lengths.shape != y.shape[:1]:
        shapes = ", ".join(str(tuple(item.shape)) for item in (output, y, lengths))
        raise DataError(f"Output, targets and lengths must be [B, T, {OUTPUTS}], the same, and [B], not {shapes}.")
    lengths = lengths.to(y.device)
    if bool(((lengths < 1) | (lengths > y.shape[1])).any()):
        raise DataError(f"Lengths must lie in [1, {y.shape[1]}], the number of steps of the targets.")
    last = (torch.arange(len(y), device=y.device), lengths - 1)
    answer, target = output[last], y[last]  # [B, 3]
    cosine = (answer[:, 1:] * target[:, 1:]).sum(-1)
    bound = math.cos(TOLERANCE) * answer[:, 1:].norm(dim=-1) * target[:, 1:].norm(dim=-1)
    # An answer of no direction, (0, 0), is not close to any: hence strictly above.
    return (cosine > bound) & (answer[:, 0] < 0.5)


def _draw_timing(kind: TrialKind, batch_size: int, generator: torch.Generator) -> _Timing:
    """When things happen in each trial: a number of steps uniform in its range for each period."""

    def duration(low: float, high: float) -> Tensor:
        steps = (round(low / DT), round(high / DT) + 1)
        return torch.randint(*steps, (batch_size,), generator=generator, device=generator.device, dtype=torch.int64)

    on = duration(*kind.before)
    off = on + duration(*kind.stimulus)
    go = off + duration(*kind.delay)
    end = go + duration(*kind.response)
    return _Timing(on, end if kind.stays else off, go, end)


def _draw_stimulus(kind: TrialKind, anti: Anti, batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The inputs of both modalities while the stimulus is on, [B, 4], and the direction to answer with, [B, 2]."""

    def uniform(low: float, high: float) -> Tensor:
        draws = torch.rand(batch_size, generator=generator, device=generator.device, dtype=torch.float32)
        return low + (high - low) * draws

    theta = uniform(0.0, 2 * math.pi)
    shown = _unit(theta)
    if kind.choice:
        # Which of the two is called the first makes no difference: theta is the stronger one.
        mean, coherence = uniform(*_MEAN_STRENGTH).unsqueeze(-1), uniform(*_COHERENCE).unsqueeze(-1)
        shown = (mean + coherence) * shown + (mean - coherence) * _unit(theta + uniform(*_SEPARATION))
    second = uniform(0.0, 1.0) < 0.5 if kind.modality is None else torch.full_like(theta, kind.modality).bool()
    modality = torch.stack([~second, second], dim=-1)  # [B, 2]
    field = (modality.unsqueeze(-1) * shown.unsqueeze(1)).flatten(1)
    if not kind.anti:
        return field, _unit(theta)
    return field, _unit(-theta if anti is Anti.MIRROR else theta + math.pi)


def _error_weights(timing: _Timing, steps: Tensor) -> Tensor:
    """The weight of each squared error, that of the period times that of the output: [B, T, 3]."""
    go, end, grace = timing.go.unsqueeze(-1), timing.end.unsqueeze(-1), GRACE // DT
    fixation = (steps >= grace) & (steps < go)
    response = (steps >= go + grace) & (steps < end)
    period = fixation.float() + RESPONSE_WEIGHT * response.float()
    output = torch.tensor([FIXATION_WEIGHT, 1.0, 1.0], device=steps.device, dtype=torch.float32)
    return period.unsqueeze(-1) * output


def _unit(theta: Tensor) -> Tensor:
    return torch.stack([theta.cos(), theta.sin()], dim=-1)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator(device="cpu").manual_seed(seed)
