"""The loop that every engine runs: batches, schedule, progress, early stopping, and the guard against NaN."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from nclbayes.blocks import DiagonalBlock, KroneckerBlock
from nclbayes.data.task import Batches, to_device
from nclbayes.engines.checkpoint import Checkpoint
from nclbayes.engines.latecomers import LatecomersError
from nclbayes.engines.place import Place
from nclbayes.engines.progress import ProgressBar
from nclbayes.engines.resuming import seek, take_up
from nclbayes.engines.settings import EngineSettings
from nclbayes.errors import MatrixError, NonFiniteError, SettingError
from nclbayes.gaussians.saved import check_layout
from nclbayes.isolation.failures import of_task
from nclbayes.isolation.randomness import drawing_from
from nclbayes.kronecker import is_finite
from nclbayes.ranks import in_step
from nclbayes.storage import Misfit, fitted, under
from nclbayes.storage.generators import set_state

if TYPE_CHECKING:
    from nclbayes.engines.base import Problem

# Turns the generator's next draw, which seeds the stream of a loader, into the seed of another stream.
_NOISE = 0x6E6F6973


@dataclass(frozen=True)
class Progress:
    """What a callback is told after a step.

    Attributes:
        step: How many steps have been taken.
        steps: How many there will be.
        loss: The mean negative log likelihood of the step's batch.
        values: A function that returns the present weights, by site.

    Example:
        >>> from nclbayes.engines import Progress
        >>> def report(progress: Progress) -> None:
        ...     if progress.step == progress.steps:
        ...         print(f"{progress.loss:.1f} after {progress.step} steps")
        >>> report(Progress(step=3, steps=3, loss=0.51, values=dict))
        0.5 after 3 steps
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

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that changes with the steps."""

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take up what `tensors` gave."""


@runtime_checkable
class Holding(Stepper, Protocol):
    """What an engine gives to the loop whose steps can be held by a stiffness."""

    def hold(self, stiffness: float) -> None:
        """Hold earlier tasks so firmly from now on."""


@runtime_checkable
class Sharing(Stepper, Protocol):
    """What an engine gives to the loop of whose tensors each rank holds a share."""

    def gathered(self) -> dict[str, torch.Tensor]:
        """Everything that changes with the steps, of all ranks together."""

    def let_go(self) -> None:
        """Have no share in what was taken up: the first rank has it."""


@dataclass
class History:
    """What the loop records.

    Attributes:
        losses: The mean negative log likelihood at each step.
        seconds: How long the loop took.
        total: How many steps there would have been.
        learnt: Whether enough was learnt before that.
        stiffness: How firmly earlier tasks were held in the end, if by a stiffness.
        halvings: How often that was halved.
        earlier: How much of that time lies before the snapshot that it went on from.
    """

    losses: list[float]
    seconds: float
    total: int
    learnt: bool
    stiffness: float
    halvings: int
    earlier: float = 0.0

    @property
    def stopped_early(self) -> bool:
        """Whether the loop stopped before its last step."""
        return len(self.losses) < self.total


def run_loop(stepper: Stepper, settings: EngineSettings, problem: Problem) -> History:
    """Take an engine's steps over a task.

    Args:
        stepper: Takes one step.
        settings: How many steps, how large, when to stop.
        problem: The task; whether to show a bar, what to call after each step, and where to keep snapshots (the loop
            goes on from the last one there).

    Returns:
        The losses and the time.

    Raises:
        NonFiniteError: If a loss is NaN or infinite.
    """
    task, generator, checkpoint = problem.task, problem.generator, problem.checkpoint
    with of_task(task.name):
        total = settings.num_steps(task.num_batches(settings.batch_size))
    batches = task.batches(settings.batch_size, generator)
    place = Place()
    # What a network draws itself (dropout, process noise) has a stream of its own, so that it changes no other draw.
    ahead = generator.clone_state()
    seed = int(torch.randint(2**63 - 1, (), generator=ahead, device=ahead.device))
    noise = torch.Generator().manual_seed(seed ^ _NOISE)
    if checkpoint is not None:
        place = _resume(checkpoint, stepper, problem, batches, noise, total)
        in_step(problem.ranks, f"the checkpoint '{checkpoint.path}'", {"number of steps in it": place.step})
        if place.halvings:
            _hold(stepper, place.firmness(settings))
    show = problem.ranks.is_first and (sys.stderr.isatty() if problem.progress is None else problem.progress)
    earlier, started = place.seconds, time.perf_counter()
    # On a CPU, let numbers below 1e-38 be zero: dead units breed them, and each costs a hundred ordinary products. The
    # update puts the switch back.
    torch.set_flush_denormal(True)
    with ProgressBar(total, place.step, task.name, show) as bar:
        for step in range(place.step + 1, total + 1):
            if settings.patience is not None and place.step - place.best_step >= settings.patience:
                break
            left = place.left(settings)
            if left <= 0:
                break
            with of_task(task.name, f"step {step}"):
                lr = left * settings.rate((step - 1) / total)
                drawn = next(batches)
                problem.check(drawn)
                batch = to_device(drawn, problem.device)
                with drawing_from(noise, problem.device, problem.ranks.rank):
                    loss = guarded_step(stepper, batch, lr, partial(_diverged, settings, task.name, step))
            place.advance(step, loss)
            if settings.enough is not None:
                place.look(float(settings.enough), problem)
            if settings.stiffness == "auto" and problem.priors and place.softens(problem, total):
                _hold(stepper, place.firmness(settings))
            held = {"stiffness": f"{place.firmness(settings):g}"} if settings.stiffness and problem.priors else {}
            bar.advance(loss=f"{place.running:.4g}", **held)
            _call(problem.callbacks, Progress(step, total, loss, partial(_copies, stepper)), task.name)
            if checkpoint is not None and step % checkpoint.every == 0 and step < total:
                place.seconds = earlier + time.perf_counter() - started
                _snapshot(checkpoint, place, stepper, problem, batches, noise)
    seconds = earlier + time.perf_counter() - started
    return History(
        losses=place.losses,
        seconds=seconds,
        total=total,
        learnt=place.learnt > 0,
        stiffness=place.firmness(settings),
        halvings=place.halvings,
        earlier=earlier,
    )


def _hold(stepper: Stepper, stiffness: float) -> None:
    assert isinstance(stepper, Holding)
    stepper.hold(stiffness)


def _call(callbacks: Iterable[Callback], progress: Progress, task: str) -> None:
    """Call the callbacks; what they raise passes, but for StopIteration, which would end a loop of the caller's."""
    for callback in callbacks:
        try:
            callback(progress)
        except (StopIteration, GeneratorExit) as error:
            raise SettingError(
                f"One of the callbacks of task '{task}' raised {type(error).__name__} at step {progress.step}. To end "
                "an update let it raise an error of its own; `patience` stops one early."
            ) from error
        except TypeError as error:
            trace = error.__traceback__
            if trace is not None and trace.tb_next is not None:
                raise
            # The call itself failed, and nothing inside it.
            raise SettingError(
                f"One of the callbacks cannot be called with the progress of task '{task}': {error}."
            ) from error


def _copies(stepper: Stepper) -> dict[str, torch.Tensor]:
    return {site: value.clone() for site, value in stepper.values().items()}


@dataclass(frozen=True)
class _Snapshot:
    """The schema of a snapshot's settings."""

    place: Place
    late: dict[str, KroneckerBlock | DiagonalBlock]


def _snapshot(
    checkpoint: Checkpoint,
    place: Place,
    stepper: Stepper,
    problem: Problem,
    batches: Batches,
    noise: torch.Generator,
) -> None:
    if problem.ranks.are_many and isinstance(stepper, Sharing):
        held = stepper.gathered()
    else:
        held = stepper.tensors()
    if not all(is_finite(tensor) for tensor in held.values()):
        return  # The next step will say what went wrong; a snapshot of it would help nobody.
    tensors = {f"stepper.{name}": tensor for name, tensor in held.items()}
    tensors |= {f"batches.{name}": tensor for name, tensor in batches.place().items()}
    states = {"generator": problem.generator.get_state(), "noise": noise.get_state()}
    late = {name: asdict(problem.blocks[name]) for name in sorted(problem.late)}
    if problem.ranks.is_first:
        checkpoint.save(tensors | states, {"place": asdict(place), "late": late})


def _resume(
    checkpoint: Checkpoint,
    stepper: Stepper,
    problem: Problem,
    batches: Batches,
    noise: torch.Generator,
    total: int,
) -> Place:
    """Go back to the last snapshot, if there is one that can be of this loop."""
    with checkpoint.load() as found:
        if found is None:
            return Place()
        tensors, settings = found
        snapshot: _Snapshot = fitted(_Snapshot, settings)
        place = snapshot.place
        place.check(total)
        if snapshot.late.keys() != problem.late:
            for name, block in snapshot.late.items():
                check_layout(name, block)
                for site, shape in block.site_shapes.items():
                    if site not in problem.fixed or tuple(problem.fixed[site].shape) != shape:
                        raise Misfit(f"there is no site '{site}' of {shape} that could have come late")
            raise LatecomersError(snapshot.late, kept=True)
        for name in ("generator", "noise"):
            if name not in tensors:
                raise Misfit(f"the tensor '{name}' is missing")
        held, at = under(tensors, "stepper."), under(tensors, "batches.")
        if len(tensors) != len(held) + len(at) + 2:
            raise Misfit("it has tensors that belong to nothing in it")
        take_up(stepper, held)
        if isinstance(stepper, Sharing) and not problem.ranks.is_first:
            stepper.let_go()
        seek(batches, at, problem.generator, place.step)
        set_state(problem.generator, tensors["generator"], "generator")
        set_state(noise, tensors["noise"], "noise")
        return place


def guarded_step(
    stepper: Stepper, batch: tuple[Any, ...], lr: float, diverged: Callable[[str], NonFiniteError]
) -> float:
    """One step, or an error that says where numbers ceased to be finite.

    Args:
        stepper: Takes the step.
        batch: The batch.
        lr: The learning rate.
        diverged: From what is not finite to the error that says so.

    Returns:
        The batch's mean negative log likelihood.

    Raises:
        NonFiniteError: If a number is NaN or infinite.
    """
    try:
        loss = stepper.step(batch, lr)
    except NonFiniteError as error:
        raise diverged(_first_sentence(error)) from error
    except MatrixError as error:
        raise diverged(f"The Fisher could not be added to the precision ({error})") from error
    except (OverflowError, RuntimeError) as error:
        if "overflow" not in str(error):
            raise
        raise diverged("A number became too large to be held") from error
    except ValueError as error:
        for site, value in stepper.values().items():
            if not is_finite(value):
                raise diverged(f"The weights of site '{site}' became NaN or infinite") from error
        if "to satisfy the constraint" in str(error):
            # A distribution refuses NaN in its parameters before there is a loss.
            raise diverged("The likelihood was given parameters that are not finite") from error
        raise
    if not math.isfinite(loss):
        raise diverged(f"The loss became {loss}")
    return loss


def _first_sentence(error: Exception) -> str:
    return str(error).split(". ")[0].rstrip(".")


def _diverged(settings: EngineSettings, task: str, step: int, what: str) -> NonFiniteError:
    radius = "set `trust_radius`, " if settings.has_trust_region else ""
    return NonFiniteError(
        f"{what} at step {step} of task '{task}'. The posterior is as it was before the update. Look at the data, "
        f"lower `lr`, {radius}or, if weights are sampled, give them a narrower prior."
    )
