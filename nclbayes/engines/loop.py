"""The loop that every engine runs: batches, schedule, progress, early stopping, and the guard against NaN."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from tqdm import tqdm

from nclbayes.engines.settings import EngineSettings
from nclbayes.errors import NonFiniteError
from nclbayes.task import Task, to_device

# The running loss, for the progress bar and for early stopping, forgets with this rate.
_FORGET = 0.02
# By how much, relatively, it must fall to count as better.
_BETTER = 1e-3


@dataclass(frozen=True)
class Progress:
    """What a callback is told after a step.

    Attributes:
        step: How many steps have been taken.
        steps: How many there will be.
        loss: The mean negative log likelihood of the step's batch.
        values: A function that returns the present weights, by site.
    """

    step: int
    steps: int
    loss: float
    values: Callable[[], dict[str, torch.Tensor]]


Callback = Callable[[Progress], None]


class Stepper(Protocol):
    """What an engine gives to the loop."""

    def step(self, batch: tuple[Any, ...], lr: float) -> float:
        """Take one step; returns the batch's mean negative log likelihood."""

    def values(self) -> dict[str, torch.Tensor]:
        """The present weights, by site."""


@dataclass
class History:
    """What the loop records.

    Attributes:
        losses: The mean negative log likelihood at each step.
        seconds: How long the loop took.
        stopped_early: Whether it stopped before its last step.
    """

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    stopped_early: bool = False


def run_loop(
    stepper: Stepper,
    task: Task,
    settings: EngineSettings,
    device: torch.device,
    generator: torch.Generator,
    *,
    progress: bool | None = None,
    callbacks: Sequence[Callback] = (),
) -> History:
    """Take an engine's steps over a task.

    Args:
        stepper: Takes one step.
        task: The data.
        settings: How many steps, how large, when to stop.
        device: Where the batches go.
        generator: Decides their order.
        progress: Whether to show a bar; by default only on a terminal.
        callbacks: Called after each step.

    Returns:
        The losses and the time.

    Raises:
        NonFiniteError: If a loss is NaN or infinite.
    """
    history, total = History(), settings.num_steps(task.size)
    running, best, best_step = math.nan, math.inf, 0
    show = sys.stderr.isatty() if progress is None else progress
    started = time.perf_counter()
    with _flushing_denormals(), tqdm(total=total, desc=task.name, disable=not show, leave=False) as bar:
        for step, batch in _numbered(task.batches(settings.batch_size, generator), total):
            lr = settings.lr * (1.0 if settings.schedule is None else settings.schedule((step - 1) / total))
            try:
                loss = stepper.step(to_device(batch, device), lr)
            except ValueError as error:
                # A distribution refuses NaN in its parameters before there is a loss.
                _check_finite(stepper, task.name, step, error)
                raise
            if not math.isfinite(loss):
                raise _diverged(f"The loss became {loss}", task.name, step)
            history.losses.append(loss)
            running = loss if step == 1 else (1 - _FORGET) * running + _FORGET * loss
            bar.set_postfix(loss=f"{running:.4g}", refresh=False)
            bar.update()
            for callback in callbacks:
                callback(Progress(step, total, loss, stepper.values))
            if settings.patience is not None:
                if running < best - _BETTER * abs(best) or not math.isfinite(best):
                    best, best_step = running, step
                elif step - best_step >= settings.patience:
                    history.stopped_early = True
                    break
    history.seconds = time.perf_counter() - started
    return history


@contextmanager
def _flushing_denormals() -> Iterator[None]:
    """On a CPU, let numbers below 1e-38 be zero: dead units breed them, and each costs a hundred ordinary products."""
    was_flushing = bool(torch.tensor(1e-38, device="cpu") * 0.1 == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(was_flushing)


def _check_finite(stepper: Stepper, task: str, step: int, cause: Exception) -> None:
    for site, value in stepper.values().items():
        if not bool(torch.isfinite(value).all()):
            raise _diverged(f"The weights of site '{site}' became NaN or infinite", task, step) from cause


def _diverged(what: str, task: str, step: int) -> NonFiniteError:
    return NonFiniteError(
        f"{what} at step {step} of task '{task}'. The posterior is as it was before the update. Look at the data, "
        "lower `lr`, or set `trust_radius`."
    )


def _numbered(batches: Iterator[tuple[Any, ...]], total: int) -> Iterator[tuple[int, tuple[Any, ...]]]:
    for step in range(1, total + 1):
        yield step, next(batches)
