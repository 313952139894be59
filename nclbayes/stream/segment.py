"""The open segment of a stream: steps as within a task, and the Fisher summed as batches pass."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nclbayes.data.task import to_device
from nclbayes.engines.base import Engine, Outcome, Problem
from nclbayes.engines.latecomers import LatecomersError
from nclbayes.engines.likelihood import log_likelihood
from nclbayes.engines.loop import History, Holding, guarded_step
from nclbayes.engines.place import Place
from nclbayes.errors import ModelError, NCLError, NonFiniteError
from nclbayes.fisher import FisherAccumulator
from nclbayes.gaussians import State, Structure
from nclbayes.isolation import drawing_from, restored
from nclbayes.isolation.autocasting import as_called
from nclbayes.isolation.failures import of_task, running
from nclbayes.kronecker import is_finite
from nclbayes.posterior.joining import look
from nclbayes.posterior.updating import check_outcome
from nclbayes.storage import under
from nclbayes.storage.generators import set_state
from nclbayes.watch import SiteRecorder
from nclbayes.watch.nesting import mapped, tensors_of
from nclbayes.watch.run import batch_size

Batch = tuple[Any, ...]
# The Fisher of a batch counts by this power of its place in the segment: weights become better as it goes on.
_RECENCY = 3
# So many forms of batches are known at most.
_FORMS = 64
# The mean of the latest weights is over about this part of the segment.
_LATEST = 8
# Of a batch are scored so many examples, or up to twice as many: a change shows in them too.
_SCORED = 64


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
        self._noise = torch.Generator()
        with restored(problem.generator):
            source = problem.generator
            self._noise.manual_seed(int(torch.randint(2**63 - 1, (), generator=source, device=source.device)))
        self._stepper = engine.begun(problem)
        self._fisher = self._nothing() if engine.needs_fisher and not engine.sums_fisher else None
        self._forms: set[object] = set()
        # The mean of the latest weights, which jitter with the batches since the rate does not fall; or the last ones.
        self._mean = {site: value.clone() for site, value in self._stepper.values().items()}
        self._place = Place()
        # Memory for copies, which would otherwise have to be given anew with each batch. The mean is replaced and not
        # changed, so that its old one is its copy.
        self._spare: dict[str, Tensor] = {}
        self._idle: dict[str, Tensor] | None = None
        self._copied: dict[str, Tensor] | None = None

    def score(self, batch: Batch) -> float:
        """The mean log predictive probability of a batch, before it is learnt; to look changes nothing.

        Args:
            batch: The batch. Of a large one every second, third ... example is scored.

        Returns:
            That at the mean of the segment's latest weights, or at the last ones, where the engine keeps these.

        Raises:
            DataError: If the batch does not fit the model.
            NonFiniteError: If it is NaN or infinite.
        """
        problem = self.problem
        with of_task(self.opening.name, self._where):
            moved = to_device(batch, problem.device)
            self._check(moved)
            total, stream, every = 0.0, torch.Generator().manual_seed(0), max(1, batch_size(moved) // _SCORED)
            scored = moved if every == 1 else mapped(lambda tensor: tensor[::every], moved)
            with torch.no_grad(), drawing_from(stream, problem.device):
                for part in problem.parts(scored):
                    recorder = SiteRecorder({**problem.fixed, **self._mean})
                    with running(part.batch), as_called(), recorder:
                        self._run(part.batch)
                    total += float(log_likelihood(recorder.observed))
            if not math.isfinite(total):
                raise self._diverged(f"The log predictive probability is {total}")
        return total / batch_size(scored)

    def learn(self, batch: Batch) -> None:
        """Take a step on a batch, and let it count.

        Args:
            batch: The batch.

        Raises:
            DataError: If the batch does not fit the model.
            ModelError: If it reaches weights that the segment does not have.
            NonFiniteError: If a number is NaN or infinite.
        """
        problem = self.problem
        with of_task(self.opening.name, self._where), _no_latecomers():
            moved = to_device(batch, problem.device)
            self._check(moved)
            with drawing_from(self._noise, problem.device):
                loss = guarded_step(self._stepper, moved, self.engine.rate(0.0), self._diverged)
            self._average()
            if self.sums_next:
                self._add(moved)
        self.batches += 1
        self.examples += batch_size(moved)
        self._soften(loss)

    def _average(self) -> None:
        """Count the present weights in."""
        before, now = self._mean, self._idle or {site: torch.empty_like(value) for site, value in self._mean.items()}
        rate = 1.0 if self.engine.keeps_last else min(1.0, (_LATEST + 1) / (self.batches + 1 + _LATEST))
        for site, value in self._stepper.values().items():
            torch.lerp(before[site], value, rate, out=now[site])
            if not is_finite(now[site]):
                raise self._diverged(f"The weights of site '{site}' became NaN or infinite")
        self._mean, self._idle = now, None if before is self._copied else before

    def _soften(self, loss: float) -> None:
        """Hold earlier segments less firmly as this one goes on, as far as that pays."""
        place, total = self._place, max(1, round(self.opening.size / self.engine.batch_size))
        if place.step < total:
            place.advance(place.step + 1, loss)
            if self.engine.stiffness == "auto" and self.problem.priors and place.softens(self.problem, total):
                self._hold()

    def _hold(self) -> None:
        assert isinstance(self._stepper, Holding)
        self._stepper.hold(self._place.firmness(self.engine))

    @property
    def sums_next(self) -> bool:
        """Whether the next batch is one of those whose Fisher is summed."""
        # At first more often, so that of a short segment not only its first weights are known.
        now, every = self.batches, self.opening.fisher_every
        return self._fisher is not None and (now % every == 0 or (now < every and now.bit_count() == 1))

    def ended(self) -> Outcome:
        """What the segment leaves; it may go on nevertheless."""
        engine, name = self.engine, self.opening.name
        size = float(engine.likelihood_weight) * self.examples
        problem = replace(self.problem, size=size)
        # Sums are put in order where they are asked for, and would round otherwise from there on.
        before = {name: tensor.clone() for name, tensor in self.tensors().items()}
        try:
            fishers = {} if self._fisher is None else self._fisher.factors(size)
            with of_task(name):
                states, memory = engine.ended(problem, self._stepper, fishers)
        finally:
            self.restore(before)
        states = {name: state.moved(state.block.pack(self._mean).clone()) for name, state in states.items()}
        outcome = Outcome(states, _NO_HISTORY, memory=memory)
        check_outcome(outcome, name, engine)
        return outcome

    def states(self) -> dict[str, State]:
        """The Gaussians before the segment around the mean of its latest weights."""
        return {name: state.moved(state.block.pack(self._mean).clone()) for name, state in self.problem.states.items()}

    def tensors(self, whole: bool = True) -> dict[str, Tensor]:
        """Everything that changes as batches are learnt, not copied.

        Args:
            whole: Whether the sums of the Fisher are among it, and what only grows.

        Returns:
            By name.
        """
        found = {f"stepper.{name}": tensor for name, tensor in self._stepper.tensors().items()}
        found |= {f"mean.{site}": value for site, value in self._mean.items()}
        if whole:
            found["losses"] = torch.tensor(self._place.losses, dtype=torch.float64, device="cpu")
        if whole and self._fisher is not None:
            found |= {f"fisher.{name}": tensor for name, tensor in self._fisher.tensors().items()}
        place = self._place
        before = (0.0, 0.0) if place.before is None else (1.0, place.before)
        counts = [self.batches, self.examples, place.step, place.halvings, place.misses, *before]
        return found | {
            "noise": self._noise.get_state(),
            "counts": torch.tensor(counts, dtype=torch.float64, device="cpu"),
        }

    def kept(self, whole: bool) -> dict[str, Tensor]:
        """A copy of :meth:`tensors`, in memory that the next copy takes again; it lasts until then.

        Args:
            whole: Likewise.

        Returns:
            By name.
        """
        found = self.tensors(whole)
        if self._copied is not self._mean:
            self._idle, self._copied = self._copied, self._mean
        for name, tensor in found.items():
            if name.startswith("mean."):
                continue
            spare = self._spare.get(name)
            if spare is None or spare.shape != tensor.shape:
                spare = self._spare[name] = torch.empty_like(tensor)
            found[name] = spare.copy_(tensor)
        return found

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`tensors` gave.

        Args:
            tensors: Its result.
        """
        *whole, has_before, before = tensors["counts"].tolist()
        self.batches, self.examples, step, halvings, misses = map(int, whole)
        place, is_other = self._place, self._place.halvings != halvings
        losses = tensors["losses"].tolist() if "losses" in tensors else place.losses
        place.step, place.halvings, place.misses, place.losses = step, halvings, misses, losses[:step]
        place.before = before if has_before else None
        if is_other:
            self._hold()
        set_state(self._noise, tensors["noise"], "noise")
        self._stepper.restore(under(tensors, "stepper."))
        for site, value in under(tensors, "mean.").items():
            self._mean[site].copy_(value)
        if self._fisher is not None and "fisher.examples" in tensors:
            self._fisher = self._nothing()
            self._fisher.restore(under(tensors, "fisher."), self.problem.blocks, self.problem.start)

    def _run(self, batch: Batch) -> None:
        try:
            self.problem.model(*batch, **self.problem.task.context)
        except ValueError as error:
            if isinstance(error, NCLError) or "to satisfy the constraint" not in str(error):
                raise
            raise self._diverged("The likelihood was given parameters that are not finite") from error

    @property
    def _where(self) -> str:
        return f"batch {self.batches + 1}"

    def _diverged(self, what: str) -> NonFiniteError:
        return NonFiniteError(
            f"{what} at {self._where} of '{self.opening.name}'. The stream is as it was before this batch. Look at the "
            "batch; if it is sound, lower `lr` of the engine."
        )

    def _add(self, batch: Batch) -> None:
        """Add a batch's Fisher at the mean of the latest weights; it counts by its place among those that are added."""
        fisher, now, every = self._fisher, self.batches, self.opening.fisher_every
        assert fisher is not None
        # Batches 1, 2, 4 .. before the first one in `every`.
        count = 1 + (now.bit_length() if now < every else now // every + (every - 1).bit_length())
        # Weights are those relative to the last power of two, so that they stay small: i^3 overflows in a long segment.
        unit = 1 << count.bit_length() - 1
        if count == unit > 1:
            fisher.scale(0.5**_RECENCY)
        fisher.values = {**self.problem.fixed, **self._mean}
        for part in self.problem.drawn_parts(batch, self.problem.generator):
            self.problem.meet(fisher.update(part.batch, part.weight * (count / unit) ** _RECENCY, part.share))
        # To be asked sums the rows that wait: what is not finite must not be found when its batch is gone.
        fisher.one_by_one()

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
            _, allowed = look(self.problem.model, batch, self.problem.task.context, self._stepper.values())
            self.problem = replace(self.problem, allowed=(allowed,))
            self._forms = {form} if len(self._forms) >= _FORMS else self._forms | {form}
        self.problem.check(batch)


_NO_HISTORY = History(losses=[], seconds=0.0, total=0, learnt=False, stiffness=0.0, halvings=0)


@contextmanager
def _no_latecomers() -> Iterator[None]:
    try:
        yield
    except LatecomersError as error:
        raise ModelError(
            f"{error} A stream cannot begin a segment anew, as its batches are gone: use all weights for every batch, "
            "or call `consolidate` before the first batch that reaches them."
        ) from error
