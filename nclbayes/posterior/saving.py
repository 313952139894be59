"""The file that holds a posterior."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, get_type_hints

import torch
from torch import Tensor

from nclbayes.blocks.structures import Structures
from nclbayes.engines.base import ENGINES, Engine
from nclbayes.engines.settings import PAPER
from nclbayes.errors import FileError, NCLError, SettingError
from nclbayes.gaussians import SavedState, ShardedState
from nclbayes.posterior.belief import Belief
from nclbayes.ranks import ALONE, transaction
from nclbayes.storage import Form, Misfit, fitted, open_sealed, write_file
from nclbayes.storage.generators import set_state
from nclbayes.watch.run import Model


@dataclass(frozen=True)
class Saved:
    """What a posterior's file holds.

    Attributes:
        belief: The belief.
        engine: The engine.
        generator: The generator.
        initial: Where new sites start, values by site; None: where the model says.
        learner: Settings of the posterior itself, if it is of a kind that has some.
        kind: The class of the posterior; empty if the file does not say.
        notices: What whoever reads the file must be told of it.
    """

    belief: Belief
    engine: Engine
    generator: torch.Generator
    initial: Mapping[str, Tensor] | None = None
    learner: Mapping[str, Any] = field(default_factory=dict)
    kind: str = ""
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Settings:
    """The schema of a posterior's settings; what has a default was not there from the beginning."""

    blocks: dict[str, SavedState]
    trained: list[str]
    tasks: tuple[str, ...]
    outputs: tuple[str, ...]
    log_evidence: float | None
    engine: dict[str, Any]
    memory: list[str] = field(default_factory=list)
    initial: list[str] | None = None
    generator: str = "cpu"
    scheduled: bool = False
    learner: dict[str, Any] = field(default_factory=dict)
    kind: str = ""
    likelihood_weight: float | None = None
    structure: list[list[str]] = field(default_factory=list)


class Content(Protocol):
    """A sealed file, or a part of one."""

    @property
    def settings(self) -> dict[str, Any]:
        """What it holds besides tensors, as plain values."""

    @property
    def forms(self) -> Mapping[str, Form]:
        """The tensors' dtypes and shapes."""

    @property
    def version(self) -> int:
        """Its format."""

    def read(self) -> dict[str, Tensor]:
        """The tensors."""


def write_posterior(path: str | os.PathLike[str], saved: Saved) -> None:
    """Write a posterior to a file.

    Args:
        path: Where to.
        saved: What to write.
    """
    sharded = [state for state in saved.belief.states.values() if isinstance(state, ShardedState)]
    ranks = sharded[0].ranks if sharded else ALONE
    tensors, settings = content_of(saved)
    with transaction(ranks, f"Saving the posterior in '{path}'"):
        if ranks.is_first:
            write_file(path, "posterior", tensors, settings)


def content_of(saved: Saved) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a file holds of a posterior.

    Args:
        saved: The posterior. Where ranks have factors together, all of them must ask, and the first has all tensors.

    Returns:
        Tensors by name, and settings as plain values.
    """
    belief, engine = saved.belief, saved.engine
    tensors = {f"/memory/{name}": tensor for name, tensor in belief.memory.items()}
    tensors |= {f"/initial/{site}": value for site, value in (saved.initial or {}).items()}
    described = {}
    for name, state in belief.states.items():
        parts = state.saved()
        described[name] = {**state.settings(), "tensors": sorted(parts)}
        if not isinstance(state, ShardedState) or state.ranks.is_first:
            tensors |= {f"{name}/{part}": tensor for part, tensor in parts.items()}
    settings = {
        "blocks": described,
        "memory": sorted(belief.memory),
        "initial": None if saved.initial is None else sorted(saved.initial),
        "generator": saved.generator.device.type,
        "trained": sorted(belief.trained),
        "tasks": belief.tasks,
        "outputs": belief.outputs,
        "log_evidence": belief.log_evidence,
        "engine": describe(engine),
        "scheduled": callable(engine.schedule),
        "learner": dict(saved.learner),
        "kind": saved.kind,
        "likelihood_weight": belief.likelihood_weight,
        "structure": [[pattern, *map(str, sides)] for pattern, sides in belief.structures.patterns],
    }
    return tensors | {"generator": saved.generator.get_state()}, settings


def read_posterior(path: str | os.PathLike[str]) -> Saved:
    """Read what :func:`write_posterior` wrote, and believe nothing of it that has not been checked.

    Args:
        path: Where from.

    Returns:
        The same, on the CPU.

    Raises:
        FileError: If the file is damaged or foreign, holds what no posterior can be, or is of an engine that is not
            known.
    """
    with open_sealed(path, "posterior") as file:
        return saved_from(path, file)


def saved_from(path: str | os.PathLike[str], file: Content) -> Saved:
    """What :func:`content_of` gave.

    Args:
        path: Where the file is, for messages.
        file: The file, or the part of it that is a posterior.

    Returns:
        The same, on the CPU.

    Raises:
        Misfit: If it is what no posterior can be, or of an engine that is not known.
    """
    settings: _Settings = fitted(_Settings, _with_evidence(file))
    _check_names(settings, file.forms)
    engine = engine_from(settings.engine)
    likelihood_weight, structures = _first_weight(settings, engine), _structures(settings)
    tensors = file.read()
    # What a block is made of is let go of with it: a file's triangles are half of its factors.
    states = {
        name: block.state({part: tensors.pop(f"{name}/{part}") for part in block.tensors})
        for name, block in settings.blocks.items()
    }
    initial = None
    if settings.initial is not None:
        initial = {site: tensors[f"/initial/{site}"] for site in settings.initial}
        _check_initial(initial, settings.blocks)
    generator = _generator(settings.generator, tensors["generator"])
    notices = []
    if generator.device.type != settings.generator:
        notices.append(
            f"The generator of '{path}' is of a device that is not here ({settings.generator}): its draws cannot be "
            "repeated, and one of the CPU, seeded with 0, takes its place."
        )
    if settings.scheduled:
        notices.append(
            f"The engine of '{path}' had a schedule of its learning rate, a function, which a file cannot hold: set it "
            "again, as in posterior.engine = dataclasses.replace(posterior.engine, schedule=...)."
        )
    belief = Belief(
        states=states,
        trained=frozenset(settings.trained),
        tasks=settings.tasks,
        outputs=settings.outputs,
        log_evidence=settings.log_evidence,
        memory={name: tensors[f"/memory/{name}"] for name in settings.memory},
        likelihood_weight=likelihood_weight,
        structures=structures,
    )
    return Saved(belief, engine, generator, initial, settings.learner, settings.kind, tuple(notices))


def _with_evidence(file: Content) -> dict[str, Any]:
    """A file's settings; an evidence that is no number, which updates left when files had format 1, counts as none."""
    evidence = file.settings.get("log_evidence")
    is_none = file.version == 1 and isinstance(evidence, float) and not math.isfinite(evidence)
    return {**file.settings, "log_evidence": None} if is_none else file.settings


def _first_weight(settings: _Settings, engine: Engine) -> float | None:
    """What each example of the first task counted; earlier versions have only that of the engine, a number."""
    weight = settings.likelihood_weight
    if weight is None and settings.tasks:
        if isinstance(engine.likelihood_weight, str):
            raise Misfit(f"likelihood_weight is not there, and that of the engine is {engine.likelihood_weight!r}")
        weight = engine.likelihood_weight
    if weight is not None and not weight > 0:
        raise Misfit(f"likelihood_weight is {weight}")
    return weight


def _structures(settings: _Settings) -> Structures:
    """What is held of the factors of blocks that are yet to come: lists of a pattern and two sides."""
    try:
        return Structures.of(
            {
                pattern: [int(side) if side.isdecimal() else side for side in sides]
                for pattern, *sides in settings.structure
            }
        )
    except (SettingError, ValueError) as error:
        raise Misfit(f"structure is {settings.structure}"[:200]) from error


def describe(engine: Engine) -> dict[str, Any]:
    """An engine as plain values, for a file; without its schedule, if that is a function.

    Args:
        engine: The engine.

    Returns:
        Its name and its settings.
    """
    return {"name": type(engine).__name__, **engine.to_dict()}


def engine_from(described: Mapping[str, Any]) -> Engine:
    """What :func:`describe` described.

    Args:
        described: Its result.

    Returns:
        The engine.

    Raises:
        Misfit: If there is no such engine, or not with such settings.
    """
    # What a file of an earlier version does not say was so.
    settings = {**PAPER, **described}
    name = fitted(str, settings.pop("name", None), "engine.name")
    if name not in ENGINES:
        raise Misfit(f"it was written with the engine {name[:60]}, which is not known here: import it first")
    try:
        return ENGINES[name](**fitted_settings(ENGINES[name], settings, "engine"))
    except (NCLError, TypeError, ValueError, ArithmeticError) as error:
        raise Misfit(f"the engine {name} refuses its settings ({str(error).rstrip('.')})") from error


def fitted_settings(engine: type[Engine], settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """An engine's settings from a file, each of its own type; their ranges are for the engine to judge.

    Args:
        engine: The engine's class.
        settings: By name.
        where: What an error calls them together.

    Returns:
        The same.

    Raises:
        Misfit: If there is no such setting, or it is of another type.
    """
    # Of a schedule only a name can be in a file.
    kinds, known = {**_kinds(engine), "schedule": str | None}, {f.name for f in fields(engine)}
    for name in settings:
        if name not in known:
            raise Misfit(f"{engine.__name__} has no setting '{name[:60]}' in this version of nclbayes")
    return {k: fitted(kinds.get(k, Any), value, f"{where}.{k}", finite=False) for k, value in settings.items()}


def fitted_learner(learner: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a kind of posterior from a file, each of the type of its default, and in its range.

    Args:
        learner: The posterior's class.
        settings: By name.

    Returns:
        The same.

    Raises:
        Misfit: If there is no such setting, or it is of another type, or out of range.
    """
    defaults = learner.learner_settings
    for name in settings:
        if name not in defaults:
            raise Misfit(f"{learner.__name__} has no setting '{name[:60]}' in this version of nclbayes")
    found = {k: fitted(type(defaults[k]), value, f"learner.{k}") for k, value in settings.items()}
    try:
        learner.check_settings(found)
    except NCLError as error:
        raise Misfit(str(error).rstrip(".")) from error
    return found


def _kinds(engine: type[Engine]) -> dict[str, Any]:
    """The types of an engine's settings; of one that was made inside a function they may not be found."""
    try:
        return get_type_hints(engine)
    except NameError:
        return {}


def _check_names(settings: _Settings, forms: Mapping[str, Form]) -> None:
    """Refuse settings that contradict each other, or the tensors that the file has, before any of these is read."""
    expected = {"generator", *(f"/memory/{name}" for name in settings.memory)}
    expected |= {f"/initial/{site}" for site in settings.initial or ()}
    owners: dict[str, str] = {}
    for name, block in settings.blocks.items():
        parts = {part: f"{name}/{part}" for part in block.tensors}
        block.check(name, {part: forms[tensor] for part, tensor in parts.items() if tensor in forms})
        expected |= {f"{name}/{part}" for part in block.tensors}
        for site in block.block.sites:
            if owners.setdefault(site, name) != name:
                raise Misfit(f"the site '{site}' belongs to two blocks, '{owners[site]}' and '{name}'")
    for missing in sorted(expected - set(forms)):
        raise Misfit(f"the tensor '{missing}' is missing")
    for extra in sorted(set(forms) - expected):
        raise Misfit(f"the tensor '{extra}' belongs to nothing in it")
    for name in settings.trained:
        if name not in settings.blocks:
            raise Misfit(f"the block '{name}' was trained, and is not there")


def _check_initial(initial: Mapping[str, Tensor], blocks: Mapping[str, SavedState]) -> None:
    shapes = {site: shape for saved in blocks.values() for site, shape in saved.block.site_shapes.items()}
    for site, value in initial.items():
        if tuple(value.shape) != shapes.get(site, tuple(value.shape)):
            raise Misfit(f"the tensor '/initial/{site}' is {tuple(value.shape)}, and the site {shapes[site]}")
        if not bool(torch.isfinite(value).all()):
            raise Misfit(f"the tensor '/initial/{site}' has NaN or infinite entries")


def _generator(device: str, state: Tensor) -> torch.Generator:
    """The saved generator; one of a device that is not here starts anew."""
    if device not in ("cpu", "cuda"):
        raise Misfit(f"generator is '{device[:60]}', not cpu or cuda")
    if device != "cpu" and not torch.cuda.is_available():
        return torch.Generator().manual_seed(0)
    generator = torch.Generator(device=device)
    set_state(generator, state, "generator")
    return generator


def check_model(path: str | os.PathLike[str], model: Model, belief: Belief) -> None:
    """Refuse a model whose weights are not those of a posterior, where it says what they are.

    Args:
        path: The posterior's file.
        model: The model.
        belief: What the file holds.

    Raises:
        FileError: If the posterior is of another model.
    """
    initial_values = getattr(model, "initial_values", None)
    if initial_values is None:
        return
    initial = initial_values()
    for site, value in belief.mean().items():
        own = initial.get(site)
        if own is None or (own.shape, own.dtype) != (value.shape, value.dtype):
            found = "there is no such site, or it is frozen"
            if own is not None:
                found = f"that of the model {tuple(own.shape)}, {own.dtype}"
            raise FileError(
                f"'{path}' is of another model: its site '{site}' is {tuple(value.shape)}, {value.dtype}; {found}."
            )
