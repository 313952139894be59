"""The file of a stream: the posterior, the open segment, the batches that are held, and what was decided."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from nclbayes.engines.resuming import take_up
from nclbayes.gaussians import SavedState, State
from nclbayes.posterior.belief import Belief
from nclbayes.posterior.saving import Content, Saved, content_of, describe, engine_from, saved_from
from nclbayes.storage import Form, Misfit, fitted, open_sealed, under, write_file
from nclbayes.stream.detection import ChangeTest
from nclbayes.stream.events import Changed, Consolidated, Judged, Opened
from nclbayes.stream.opening import problem_of
from nclbayes.stream.place import Place
from nclbayes.stream.segment import Batch, Opening, Segment
from nclbayes.stream.settings import StreamSettings
from nclbayes.watch.run import Model


@dataclass(frozen=True)
class SavedStream:
    """What a stream's file holds.

    Attributes:
        settings: The stream's settings.
        posterior: What the segments that have ended left.
        place: How far the stream is.
        segment: The open segment, if there is one.
    """

    settings: StreamSettings
    posterior: Saved
    place: Place
    segment: Segment | None


@dataclass(frozen=True)
class _Part:
    """A part of a file, which looks as a file of its own would."""

    settings: dict[str, Any]
    forms: Mapping[str, Form]
    version: int
    tensors: dict[str, Tensor]

    def read(self) -> dict[str, Tensor]:
        return dict(self.tensors)


@dataclass(frozen=True)
class _Segment:
    """The schema of an open segment."""

    opening: Opening
    engine: dict[str, Any]
    outputs: tuple[str, ...]
    states: dict[str, SavedState]
    priors: dict[str, SavedState]
    rows: dict[str, float]
    fixed: list[str]
    least: float | None
    guess: float


@dataclass(frozen=True)
class _Stream:
    """The schema of a stream's settings; of a held batch, the keys of each item that is a mapping."""

    settings: StreamSettings
    posterior: dict[str, Any]
    batches: int
    segments: int
    test: ChangeTest
    events: tuple[Opened | Consolidated | Changed, ...]
    held: list[list[list[str]]]
    segment: _Segment | None


def write_stream(path: str | os.PathLike[str], saved: SavedStream) -> None:
    """Write a stream to a file.

    Args:
        path: Where to.
        saved: What to write.
    """
    place, segment = saved.place, saved.segment
    own, posterior = content_of(saved.posterior)
    tensors = {f"posterior/{name}": tensor for name, tensor in own.items()}
    tensors["judged"] = torch.tensor(place.judged, dtype=torch.float64, device="cpu").reshape(-1, len(Judged._fields))
    for i, batch in enumerate(place.held):
        tensors |= {f"held/{i}/{name}": tensor for name, tensor in _named(batch)}
    settings = {
        "settings": asdict(saved.settings),
        "posterior": posterior,
        "batches": place.batches,
        "segments": place.segments,
        "test": asdict(place.test),
        "events": [asdict(event) for event in place.events],
        "held": [[sorted(item) if isinstance(item, Mapping) else [] for item in batch] for batch in place.held],
        "segment": None if segment is None else _described(segment),
    }
    if segment is not None:
        for group, states in (("states", segment.problem.states), ("priors", segment.problem.priors)):
            for name, state in states.items():
                tensors |= {f"{group}/{name}/{part}": tensor for part, tensor in state.saved().items()}
        tensors |= {f"fixed/{site}": value for site, value in segment.problem.fixed.items()}
        tensors |= {f"segment/{name}": tensor for name, tensor in segment.tensors().items()}
    write_file(path, "stream", tensors, settings)


def read_stream(path: str | os.PathLike[str], model: Model) -> SavedStream:
    """Read what :func:`write_stream` wrote.

    Args:
        path: Where from.
        model: The model of the posterior.

    Returns:
        The same, on the CPU.

    Raises:
        FileError: If the file is damaged or foreign, or holds what no stream can be.
    """
    with open_sealed(path, "stream") as file:
        found: _Stream = fitted(_Stream, file.settings)
        found.test.check()
        tensors = file.read()
        forms = under(file.forms, "posterior/")
        part: Content = _Part(found.posterior, forms, file.version, under(tensors, "posterior/"))
        posterior = saved_from(path, part)
        try:
            held = tuple(_batch(under(tensors, f"held/{i}/"), keys) for i, keys in enumerate(found.held))
            judged = tuple(Judged(int(number), *rest) for number, *rest in tensors["judged"].tolist())
            place = Place(found.batches, found.segments, found.test, held, found.events, judged)
            segment = None
            if found.segment is not None:
                segment = _segment(found.segment, posterior.belief, model, posterior.generator, tensors)
        except KeyError as error:
            raise Misfit(f"the tensor '{error.args[0]}' is missing") from error
        except (TypeError, ValueError, RuntimeError) as error:
            raise Misfit(f"its tensors are not those of a stream ({error})") from error
    return SavedStream(found.settings, posterior, place, segment)


def _described(segment: Segment) -> dict[str, Any]:
    problem = segment.problem
    least = problem.least
    return {
        "opening": asdict(segment.opening),
        "engine": describe(segment.engine),
        "outputs": segment.outputs,
        "states": _settings_of(problem.states),
        "priors": _settings_of(problem.priors),
        "rows": problem.rows,
        "fixed": sorted(problem.fixed),
        "least": None if least != least else least,
        "guess": problem.guess,
    }


def _settings_of(states: Mapping[str, State]) -> dict[str, Any]:
    return {name: {**state.settings(), "tensors": sorted(state.saved())} for name, state in states.items()}


def _segment(
    saved: _Segment, belief: Belief, model: Model, generator: torch.Generator, tensors: Mapping[str, Tensor]
) -> Segment:
    """The open segment, which needs no data to be taken up."""
    engine = engine_from(saved.engine)
    states, priors = (
        {name: _state(name, block, under(tensors, f"{group}/{name}/")) for name, block in blocks.items()}
        for group, blocks in (("states", saved.states), ("priors", saved.priors))
    )
    fixed = {site: tensors[f"fixed/{site}"] for site in saved.fixed}
    start = {name: state.loc.clone() for name, state in states.items()}
    segment = Segment(
        saved.opening,
        engine,
        problem_of(
            belief,
            model,
            engine,
            saved.opening,
            states,
            start,
            generator,
            priors=priors,
            rows=dict(saved.rows),
            fixed=fixed,
            least=float("nan") if saved.least is None else saved.least,
            guess=saved.guess,
        ),
        saved.outputs,
    )
    take_up(segment, under(tensors, "segment/"))
    return segment


def _state(name: str, saved: SavedState, parts: Mapping[str, Tensor]) -> State:
    saved.check(name, {part: Form(tensor.dtype, tuple(tensor.shape)) for part, tensor in parts.items()})
    return saved.state(parts)


def _named(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    for i, item in enumerate(batch):
        if isinstance(item, Mapping):
            yield from ((f"{i}/{key}", item[key]) for key in item)
        else:
            yield str(i), item


def _batch(tensors: Mapping[str, Tensor], keys: list[list[str]]) -> Batch:
    return tuple(
        {key: tensors[f"{i}/{key}"] for key in named} if named else tensors[str(i)] for i, named in enumerate(keys)
    )
