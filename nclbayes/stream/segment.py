"""The open segment of a stream: steps as within a task, and the Fisher summed as batches pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nclbayes.data.task import Task, to_device
from nclbayes.engines.base import Engine, Outcome, Problem
from nclbayes.engines.latecomers import LatecomersError
from nclbayes.engines.loop import History, guarded_step
from nclbayes.errors import DataError, ModelError, NonFiniteError
from nclbayes.fisher import FisherAccumulator
from nclbayes.gaussians import State, Structure
from nclbayes.isolation import drawing_from, restored
from nclbayes.isolation.failures import of_task
from nclbayes.posterior.belief import Belief, device_of
from nclbayes.posterior.joining import join, look
from nclbayes.posterior.updating import check_outcome
from nclbayes.storage import under
from nclbayes.storage.generators import set_state
from nclbayes.watch.nesting import tensors_of
from nclbayes.watch.run import Model, batch_size

Batch = tuple[Any, ...]
# The Fisher of a batch counts by this power of its place in the segment: weights become better as it goes on.
_RECENCY = 3
# So many forms of batches are known at most.
_FORMS = 64


@dataclass(frozen=True)
class Opening:
    """What a segment is opened with.

    Attributes:
        name: The segment's name.
        size: About how many examples it will have.
        fisher_every: One batch in so many is added to its Fisher.
    """

    name: str
    size: int
    fisher_every: int


class Segment:
    """The batches since the last boundary, as far as they have been learnt.

    Args:
        opening: Its name, and what it is told.
        engine: The engine, with the numbers that were left to it.
        problem: The Gaussians before it, and the model.
        outputs: The model's observed sites.

    Attributes:
        batches: How many batches have been learnt.
        examples: How many examples.
    """

    def __init__(self, opening: Opening, engine: Engine, problem: Problem, outputs: tuple[str, ...]) -> None:
        self.opening, self.engine, self.problem, self.outputs = opening, engine, problem, outputs
        self.batches, self.examples = 0, 0
        self.noise = torch.Generator()
        with restored(problem.generator):
            source = problem.generator
            self.noise.manual_seed(int(torch.randint(2**63 - 1, (), generator=source, device=source.device)))
        self.stepper = engine.begun(problem)
        self._fisher = self._nothing() if engine.needs_fisher and not engine.sums_fisher else None
        self._forms: set[object] = set()

    def step(self, batch: Batch) -> float:
        """Take one step on a batch; it counts only when :meth:`keep` says so.

        Args:
            batch: The batch.

        Returns:
            The mean log probability of the batch before the step, at the weights that the step begins from (of the
            variational engine, drawn around them).

        Raises:
            DataError: If the batch does not fit the model.
            ModelError: If it reaches weights that the segment does not have.
            NonFiniteError: If a number is NaN or infinite.
        """
        problem, diverged = self.problem, partial(_diverged, self.opening.name, self._where)
        with of_task(self.opening.name, self._where), _no_latecomers():
            moved = to_device(batch, problem.device)
            self._check(moved)
            torch.set_flush_denormal(True)
            with drawing_from(self.noise, problem.device):
                loss = guarded_step(self.stepper, moved, self.engine.rate(0.0), diverged)
            for site, value in self.stepper.values().items():
                if not bool(torch.isfinite(value).all()):
                    raise diverged(f"The weights of site '{site}' became NaN or infinite")
        return -loss

    def keep(self, batch: Batch) -> None:
        """Let a batch count whose step has been taken.

        Args:
            batch: The batch.

        Raises:
            ModelError: If it reaches weights that the segment does not have.
            NonFiniteError: If an activation or gradient is NaN or infinite.
        """
        if self.sums_next:
            with of_task(self.opening.name, self._where), _no_latecomers():
                self._add(to_device(batch, self.problem.device))
        self.batches += 1
        self.examples += batch_size(batch)

    @property
    def sums_next(self) -> bool:
        """Whether the next batch is one of those whose Fisher is summed."""
        return self._fisher is not None and self.batches % self.opening.fisher_every == 0

    def ended(self) -> Outcome:
        """What the segment leaves; it may go on nevertheless."""
        engine, name = self.engine, self.opening.name
        size = float(engine.likelihood_weight) * self.examples
        problem = replace(self.problem, size=size)
        fishers = {} if self._fisher is None else self._fisher.factors(size)
        with of_task(name):
            states, memory = engine.ended(problem, self.stepper, fishers)
        # With means of their own, which later steps do not move.
        states = {name: state.moved(state.loc.clone()) for name, state in states.items()}
        outcome = Outcome(states, _NO_HISTORY, memory=memory)
        check_outcome(outcome, name, engine)
        return outcome

    def states(self) -> dict[str, State]:
        """The Gaussians before the segment around its present weights."""
        values = self.stepper.values()
        return {name: state.moved(state.block.pack(values).clone()) for name, state in self.problem.states.items()}

    def tensors(self, fisher: bool = True) -> dict[str, Tensor]:
        """Everything that changes with the steps; a copy.

        Args:
            fisher: Whether the Fisher's sums are among it.

        Returns:
            By name.
        """
        found = {f"stepper.{name}": tensor.clone() for name, tensor in self.stepper.tensors().items()}
        if self._fisher is not None and fisher:
            found |= {f"fisher.{name}": tensor.clone() for name, tensor in self._fisher.tensors().items()}
        counts = torch.tensor([self.batches, self.examples], dtype=torch.int64, device="cpu")
        return found | {"noise": self.noise.get_state(), "counts": counts}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`tensors` gave.

        Args:
            tensors: Its result.
        """
        batches, examples = tensors["counts"].tolist()
        self.batches, self.examples = int(batches), int(examples)
        set_state(self.noise, tensors["noise"], "noise")
        if self.batches:
            self.stepper.restore(under(tensors, "stepper."))
        else:
            self.stepper = self.engine.begun(self.problem)
        if self._fisher is not None and "fisher.examples" in tensors:
            self._fisher = self._nothing()
            self._fisher.restore(under(tensors, "fisher."), self.problem.blocks, self.problem.start)

    @property
    def _where(self) -> str:
        return f"batch {self.batches + 1}"

    def _add(self, batch: Batch) -> None:
        """Add a batch's Fisher at the present weights, and let those of earlier ones count less."""
        fisher, before = self._fisher, self.batches // self.opening.fisher_every
        assert fisher is not None
        fisher.scale((before / (before + 1)) ** _RECENCY)
        fisher.values = {**self.problem.fixed, **self.stepper.values()}
        for part, stream in self.problem.drawn_parts(batch):
            fisher.generator = stream
            self.problem.meet(fisher.update(part.batch, part.weight))

    def _nothing(self) -> FisherAccumulator:
        engine, problem = self.engine, self.problem
        return FisherAccumulator(
            problem.model,
            {},
            kind=engine.fisher,
            samples=int(engine.fisher_samples),
            temperature=engine.fisher_temperature,
            diagonal=engine.structure is Structure.DIAGONAL,
            blocks=problem.blocks,
            context=problem.task.context,
            generator=problem.generator,
        )

    def _check(self, batch: Batch) -> None:
        """Refuse targets that cannot be, and batches of a form that was not met yet if the model cannot take them."""
        form = tuple((name, tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in tensors_of(batch))
        if form not in self._forms:
            _, allowed = look(self.problem.model, batch, self.problem.task.context, self.stepper.values())
            self.problem = replace(self.problem, allowed=(allowed,))
            self._forms = {form} if len(self._forms) >= _FORMS else self._forms | {form}
        self.problem.check(batch)


def opened(
    belief: Belief,
    model: Model,
    batch: Batch,
    engine: Engine,
    opening: Opening,
    *,
    initial: Mapping[str, Tensor] | None,
    generator: torch.Generator,
) -> Segment:
    """A segment, before its first batch is learnt.

    Args:
        belief: What earlier segments have left.
        model: The model.
        batch: The first batch.
        engine: How to learn.
        opening: Its name, and what it is told.
        initial: Where blocks that nothing has touched start, by site.
        generator: Decides every draw.

    Returns:
        The segment.

    Raises:
        NCLError: If batch and model do not fit, or the Fisher of a weight cannot be had.
    """
    example = Task(batch, name=opening.name)
    device = device_of(belief, model, example)
    joined = join(
        model,
        example,
        engine,
        known=belief.states,
        trained=belief.trained,
        initial=initial,
        device=device,
        generator=generator,
        structures=belief.structures,
    )
    weights = sum(state.loc.numel() for state in joined.states.values())
    settled = engine.settled(weights, opening.size, certain=joined.certain, before=belief.likelihood_weight)
    # When a segment ends is not for the engine to say.
    settled = replace(settled, enough=None, patience=None, batch_size=example.size)
    problem = problem_of(
        belief,
        model,
        settled,
        opening,
        joined.states,
        joined.priors,
        joined.start,
        joined.rows,
        joined.fixed,
        generator,
    )
    return Segment(opening, settled, problem, joined.outputs)


def problem_of(
    belief: Belief,
    model: Model,
    engine: Engine,
    opening: Opening,
    states: dict[str, State],
    priors: dict[str, State],
    start: dict[str, Tensor],
    rows: dict[str, float],
    fixed: dict[str, Tensor],
    generator: torch.Generator,
) -> Problem:
    """What an engine is given to learn a segment: a task without data.

    Args:
        belief: What earlier segments have left.
        model: The model.
        engine: The engine, with the numbers that were left to it.
        opening: The segment's name, and what it is told.
        states: The Gaussian of each block before it.
        priors: The prior of each that was trained before, where the engine asks for it.
        start: Where each of them starts, as a matrix.
        rows: How many rows an example adds to a block's gradient, for blocks that are plain products.
        fixed: The values of the other sites that the model meets.
        generator: Decides every draw.

    Returns:
        The problem.
    """
    return Problem(
        model=model,
        task=Task(_gone, name=opening.name, size=opening.size),
        size=float(engine.likelihood_weight) * opening.size,
        least=0.0,
        guess=0.0,
        states=states,
        start=start,
        rows=rows,
        trained=belief.trained,
        priors=priors,
        fixed=fixed,
        late=frozenset(),
        device=next(iter(states.values())).loc.device,
        generator=generator,
        progress=False,
        callbacks=(),
        checkpoint=None,
        memory=belief.memory,
        allowed=(None,),
        accumulate=engine.accumulate,
    )


_NO_HISTORY = History(losses=[], seconds=0.0, total=0, learnt=False, stiffness=0.0, halvings=0)


def _gone(batch_size: int, generator: torch.Generator) -> Batch:
    raise DataError("The batches of a stream are gone.")


@contextmanager
def _no_latecomers() -> Iterator[None]:
    try:
        yield
    except LatecomersError as error:
        raise ModelError(
            f"{error} A stream cannot begin a segment anew, as its batches are gone: use all weights for every batch, "
            "or call `consolidate` before the first batch that reaches them."
        ) from error


def _diverged(name: str, where: str, what: str) -> NonFiniteError:
    return NonFiniteError(
        f"{what} at {where} of '{name}'. The stream is as it was before this batch. Look at the batch; if it is sound, "
        "lower `lr` of the engine."
    )
