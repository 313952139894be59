"""Learning from batches without being told where a task ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from nclbayes.data.checking import checked_batch, shown
from nclbayes.errors import DataError, ModelError, SettingError
from nclbayes.isolation import as_found
from nclbayes.posterior.belief import Belief, device_of
from nclbayes.posterior.online import OnlinePosterior
from nclbayes.ranks import present
from nclbayes.stream.detection import ChangeTest, Verdict, limit, suspicion
from nclbayes.stream.events import Changed, Consolidated, Event, Judged, Opened, Reason
from nclbayes.stream.holding import UnlearnableError, learning
from nclbayes.stream.opening import opened
from nclbayes.stream.place import MOST_EVENTS, Place
from nclbayes.stream.saving import SavedStream, read_stream, write_stream
from nclbayes.stream.segment import Batch, Opening, Segment
from nclbayes.stream.settings import StreamSettings
from nclbayes.watch.nesting import mapped, tensors_of
from nclbayes.watch.run import Model

# No segment is found to end before it has this share of the size that it is told to have: a task that fades into the
# next one would be taken for several.
_SHORTEST = 0.125


class Stream:
    """Learns from one batch after the other, and finds by itself where a task ends.

    Batches between two boundaries are a segment. Within it the posterior's engine steps as within a task; at its end
    what was learnt is added to the posterior, as a task is. Before a batch is learnt its log predictive probability
    is compared with those of the segment so far (:class:`~nclbayes.stream.ChangeTest`).

    Args:
        posterior: What is believed so far; the stream updates it when a segment ends.
        **settings: Those of :class:`~nclbayes.stream.StreamSettings`.

    Attributes:
        settings: The settings.

    Example:
        >>> import torch, pyro.distributions as dist
        >>> import nclbayes as ncl
        >>> model = ncl.BayesianNetwork(torch.nn.Linear(2, 1), ncl.Normal(0.3), prior=dist.Normal(0.0, 1.0))
        >>> stream = ncl.Stream(ncl.OnlinePosterior(model, ncl.LaplaceNCL()), segment_size=500)
        >>> g = torch.Generator().manual_seed(0)
        >>> for k in range(120):
        ...     x = torch.randn(8, 2, generator=g)
        ...     slope = 1.0 if k < 60 else -1.0
        ...     events = stream.observe(x, slope * x.sum(-1, keepdim=True))
        >>> [event.first for event in stream.events if isinstance(event, ncl.stream.Changed)]
        [61]
    """

    def __init__(self, posterior: OnlinePosterior, **settings: Any) -> None:
        self._posterior = _checked(posterior)
        try:
            self.settings = StreamSettings(**settings)
        except TypeError as error:
            known = ", ".join(StreamSettings.__dataclass_fields__)
            raise SettingError(
                f"{error}. The settings of a stream are {known}.".replace("StreamSettings.", "")
            ) from None
        self._segment: Segment | None = None
        self._belief = posterior._belief
        self._place = Place()

    @property
    def posterior(self) -> OnlinePosterior:
        """What the segments that have ended left."""
        return self._posterior

    @property
    def events(self) -> tuple[Event, ...]:
        """What was decided, when, and why: the latest thousand."""
        return self._place.events

    @property
    def judged(self) -> tuple[Judged, ...]:
        """What was found of the latest two thousand batches before they were learnt."""
        return self._place.judged

    @property
    def batches(self) -> int:
        """How many batches were observed."""
        return self._place.batches

    @property
    def segments(self) -> int:
        """How many segments were opened."""
        return self._place.segments

    @property
    def held(self) -> int:
        """How many batches are held, and not learnt yet, as they may belong to a new segment."""
        return len(self._place.held)

    def observe(self, *batch: Any) -> tuple[Event, ...]:
        """Learn from a batch. If anything goes wrong, the stream stays exactly as it was.

        Args:
            *batch: What the model is called with; the last tensor is the observed one.

        Returns:
            What was decided.

        Raises:
            DataError: If the batch is not one that can be learnt from.
            ModelError: If it reaches weights that no batch of the segment has reached.
            NonFiniteError: If NaN or infinity is in it, or comes of it.
            SettingError: If the posterior has learnt otherwise meanwhile.
        """
        items = checked_batch(batch)
        if not all(isinstance(item, Tensor) or _is_named(item) for item in items):
            raise DataError("A batch of a stream is made of tensors, and of mappings from names to tensors.")
        lengths = {len(tensor) if tensor.ndim else 0 for _, tensor in tensors_of(items)}
        if len(lengths) > 1:
            raise DataError(f"The tensors of a batch have different lengths: {', '.join(map(str, sorted(lengths)))}.")
        return self._changing(lambda: self._observe(items))

    def consolidate(self) -> tuple[Event, ...]:
        """End the open segment here, if there is one: what comes is of another task.

        Returns:
            What was decided.
        """
        return self._changing(self._end_here)

    def present(self) -> OnlinePosterior:
        """What the posterior would be if the open segment ended here; the stream goes on as if nothing was asked.

        Returns:
            A posterior of its own, to predict with or to evaluate.
        """
        return self._copy(self._ended)

    def predict(
        self,
        *inputs: Any,
        num_samples: int | None = None,
        method: str | None = None,
        generator: torch.Generator | None = None,
    ) -> Any:
        """The distribution of the targets of new inputs, with all that was learnt so far.

        Args:
            *inputs: What the model takes, without the observed argument.
            num_samples: As of :meth:`OnlinePosterior.predict`.
            method: Likewise.
            generator: Likewise; by default one that goes on where the posterior's is, which stays there.

        Returns:
            A torch distribution.

        Raises:
            ModelError: If no batch has been observed yet.
        """
        is_mean = num_samples is None and method in (None, "mean")
        now = self._copy(self._moved if is_mean else self._ended)
        if not now._belief.outputs:
            raise ModelError("There is nothing to predict from yet: call observe(x, y) first.")
        return now.predict(*inputs, num_samples=num_samples, method=method, generator=generator)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the stream to a file, with its posterior, the open segment and the batches that are held.

        Args:
            path: Where to.
        """
        posterior = self._posterior
        with posterior._turn.taken():
            self._check_posterior()
            write_stream(path, SavedStream(self.settings, posterior._saved(), self._place, self._segment))

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Model) -> Stream:
        """Read a stream from a file: it goes on as if it had not been away.

        Args:
            path: Where from.
            model: The model that it is of.

        Returns:
            The stream, on the CPU.

        Raises:
            FileError: If the file is damaged or foreign, or of another model.
        """
        saved = as_found(None, lambda: read_stream(path, model))
        stream = cls(OnlinePosterior._from(path, saved.posterior, model), **asdict(saved.settings))
        stream._place, stream._segment = saved.place, saved.segment
        return stream

    def __repr__(self) -> str:
        learnt = 0 if self._segment is None else self._segment.batches
        return f"Stream({self.batches} batches, {self._place.segments} segments, {learnt} batches in the open one)"

    def _copy(self, belief_of: Callable[[Belief], Belief]) -> OnlinePosterior:
        posterior = self._posterior
        with posterior._turn.taken():
            self._check_posterior()
            source = posterior.generator.clone_state()
            found = OnlinePosterior(posterior.model, posterior.engine, initial=posterior._initial, generator=source)
            found._belief = as_found(posterior.model, lambda: belief_of(posterior._belief))
        return found

    def _moved(self, belief: Belief) -> Belief:
        """The belief with the weights of the open segment as its mean."""
        if self._segment is None:
            return belief
        outputs = tuple(dict.fromkeys((*self._segment.outputs, *belief.outputs)))
        return replace(belief, states={**belief.states, **self._segment.states()}, outputs=outputs)

    def _ended(self, belief: Belief) -> Belief:
        """The belief with the open segment in it."""
        segment = self._segment
        if segment is None or not segment.batches:
            return belief
        weight = float(segment.engine.likelihood_weight)
        return belief.after(segment.opening.name, segment.outputs, segment.ended(), weight)

    def _changing(self, work: Callable[[], None]) -> tuple[Event, ...]:
        """Do some work that is done as a whole, or not at all."""
        posterior = self._posterior
        with posterior._turn.taken():
            self._check_posterior()
            before, segment, belief = self._place, self._segment, posterior._belief
            kept = None if segment is None else segment.kept(whole=bool(before.held) or segment.sums_next)

            def whole() -> tuple[Event, ...]:
                count = len(before.events)
                # As in the engines' loop; put back when all is done.
                torch.set_flush_denormal(True)
                try:
                    work()
                except BaseException as error:
                    self._place, self._segment, self._belief = before, segment, belief
                    posterior._belief = belief
                    if segment is not None and kept is not None:
                        segment.restore(kept)
                    if isinstance(error, UnlearnableError):
                        self._leave_out(error)
                    raise
                new = self._place.events
                return new[count:] if len(new) < MOST_EVENTS else _after(before.events, new)

            return as_found(posterior.model, whole, generators=(posterior.generator,))

    def _observe(self, batch: Batch) -> None:
        settings, held = self.settings, self._place.held
        self._place = replace(self._place, batches=self._place.batches + 1)
        if self._segment is None:
            self._open(batch)
        segment, every, test = self._segment, settings.false_alarm_every, self._place.test
        assert segment is not None
        if every is None:
            segment.learn(batch)
        else:
            score = segment.score(batch)
            verdict = test.judged(score, limit(every, settings.window))
            if segment.examples < _SHORTEST * settings.segment_size:
                verdict = Verdict(1.0, verdict.expected, 0.0)
            self._note(score, verdict)
            if verdict.odds >= every:
                self._tell(score, verdict, batch)
                return
            suspected = verdict.odds >= suspicion(every)
            waiting = (*held, batch)
            learnt = max(0, len(waiting) - settings.window + 1) if suspected else len(waiting)
            for each in waiting[:learnt]:
                with learning(each, batch):
                    segment.learn(each)
            # The caller may put other numbers into his tensors.
            kept = tuple(each if each is not batch else mapped(torch.clone, batch) for each in waiting[learnt:])
            self._place = replace(self._place, test=test.after(score, verdict.odds, suspected), held=kept)
        if settings.longest is not None and not self._place.held and segment.examples >= settings.longest:
            self._end(Reason.LENGTH)

    def _tell(self, score: float, verdict: Verdict, batch: Batch) -> None:
        """End the segment before the batches that are held, and begin a new one with them."""
        batches = (*self._place.held, batch)
        last, now = self._place.batches - len(batches), self._place.batches
        told = Changed(now, last + 1, verdict.odds, verdict.p, score, verdict.expected)
        self._place = replace(self._place, held=(), test=ChangeTest()).noting(told)
        self._end(Reason.CHANGE, last)
        with learning(batches[0], batch):
            self._open(batches[0], last + 1)
        segment = self._segment
        assert segment is not None
        for each in batches:
            with learning(each, batch):
                score = segment.score(each)
                segment.learn(each)
            self._place = replace(self._place, test=self._place.test.after(score, 0.0, suspected=False))

    def _open(self, batch: Batch, first: int | None = None) -> None:
        posterior, settings = self._posterior, self.settings
        number = self._place.segments + 1
        opening = Opening(f"segment {number}", settings.segment_size, settings.fisher_every)
        self._segment = opened(
            posterior._belief,
            posterior.model,
            batch,
            posterior.engine,
            opening,
            initial=posterior._initial_values(),
            generator=posterior.generator,
        )
        event = Opened(self._place.batches if first is None else first, opening.name)
        self._place = replace(self._place, segments=number).noting(event)

    def _end_here(self) -> None:
        if self._segment is None:
            return
        for batch in self._place.held:
            with learning(batch):
                self._segment.learn(batch)
        self._place = replace(self._place, held=(), test=ChangeTest())
        self._end(Reason.ASKED)

    def _end(self, reason: Reason, last: int | None = None) -> None:
        segment = self._segment
        assert segment is not None
        self._belief = self._ended(self._posterior._belief)
        self._posterior._belief = self._belief
        event = Consolidated(
            self._place.batches if last is None else last,
            segment.opening.name,
            segment.batches,
            segment.examples,
            reason,
        )
        self._segment, self._place = None, self._place.noting(event)

    def _leave_out(self, error: UnlearnableError) -> None:
        """Hold a batch no longer that cannot be learnt: everything that comes would be refused for its sake."""
        held = self._place.held
        at = next(i for i, batch in enumerate(held) if batch is error.batch)
        self._place = replace(self._place, held=held[:at] + held[at + 1 :])
        raise DataError(
            f"Batch {at + 1} of the {len(held)} that are held cannot be learnt, and is left out: {error.__cause__} But "
            "for this the stream is as it was: call this again."
        ) from error.__cause__

    def _note(self, score: float, verdict: Verdict) -> None:
        found = Judged(self._place.batches, score, verdict.expected, verdict.odds)
        self._place = self._place.finding(found)

    def _check_posterior(self) -> None:
        if self._posterior._belief is not self._belief:
            raise SettingError(
                "The posterior of the stream has learnt a task, or was moved, since the stream saw it last: make a new "
                "stream of it. Before an update, call `consolidate`."
            )


def _is_named(item: object) -> bool:
    """Whether it is a mapping from names to tensors."""
    return (
        isinstance(item, Mapping)
        and bool(item)
        and all(isinstance(name, str) and isinstance(part, Tensor) for name, part in item.items())
    )


def _after(before: tuple[Event, ...], now: tuple[Event, ...]) -> tuple[Event, ...]:
    """The events that are new, where old ones had to go."""
    known = set(map(id, before))
    return tuple(event for event in now if id(event) not in known)


def _checked(posterior: object) -> OnlinePosterior:
    """A posterior that can learn from a stream."""
    if not isinstance(posterior, OnlinePosterior):
        raise SettingError(f"A stream needs an OnlinePosterior, not {shown(posterior)}.")
    if type(posterior) is not OnlinePosterior:
        raise SettingError(
            f"A {type(posterior).__name__} keeps examples of whole tasks, and cannot learn from a stream: use an "
            "OnlinePosterior."
        )
    engine = posterior.engine
    if not engine.can_stream:
        raise engine._no_stream()
    if callable(engine.schedule):
        raise SettingError(
            "The schedule of the engine is a function of how much of a task is done, and a stream has no end: use "
            '"auto" or None.'
        )
    if present(device_of(posterior._belief, posterior.model, None)).are_many:
        raise SettingError("A stream is learnt by one process: several ranks are for tasks.")
    return posterior
