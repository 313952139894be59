"""A task meets a posterior: which blocks it touches, what they are, and where each starts."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nclbayes.blocks import Block, KroneckerBlock
from nclbayes.blocks.layout import quoted
from nclbayes.blocks.structures import Structures, as_known, known_blocks
from nclbayes.data.checking import AllowedTargets
from nclbayes.data.sources import pick
from nclbayes.data.task import Task, own_generators, to_device
from nclbayes.engines.base import Engine
from nclbayes.engines.likelihood import can_be_certain, guess_loss, least_loss, objective
from nclbayes.errors import MatrixError, ModelError, PriorError, SettingError, UnsupportedUseError
from nclbayes.fisher import FisherAccumulator, KroneckerFisher
from nclbayes.gaussians import Shards, State, Structure, prior_state
from nclbayes.gaussians.gradients import rows_of_blocks
from nclbayes.gaussians.kronecker import cost_of
from nclbayes.isolation.failures import of_task
from nclbayes.isolation.randomness import drawing_from, restored
from nclbayes.posterior.starting import present_values, starting_points
from nclbayes.watch import ModelRun, watch
from nclbayes.watch.nesting import tensors_of
from nclbayes.watch.run import Model
from nclbayes.watch.sites import base_normal

_FREEZING = "If a parameter of it was frozen, or is no longer, freeze all of the block's or none."


@dataclass(frozen=True)
class Joined:
    """A task as a posterior meets it.

    Attributes:
        states: The Gaussian of each block that the task touches, faded by the engine's retention; a new block has
            its prior.
        priors: The prior of each that an earlier task has trained, where the engine asks for it.
        start: Where each of them starts, as a matrix.
        rows: How many rows an example adds to a block's gradient, for blocks that are plain products.
        fixed: The values of the other sites that the model meets.
        outputs: The observed sites, those of the last part first.
        least: The loss that an example would have if every prediction were right, where the engine asks for it; NaN if
            it is not known.
        guess: What an example loses if its target is guessed; 0 where that cannot be told.
        certain: Whether its targets can be predicted with certainty, as classes can.
        examples: A few examples of each part of the task.
        allowed: The values that targets of each part may have, where the model knows them.
    """

    states: dict[str, State]
    priors: dict[str, State]
    start: dict[str, Tensor]
    rows: dict[str, float]
    fixed: dict[str, Tensor]
    outputs: tuple[str, ...]
    least: float
    guess: float
    certain: bool
    examples: tuple[tuple[Any, ...], ...]
    allowed: tuple[AllowedTargets | None, ...]

    @property
    def values(self) -> dict[str, Tensor]:
        """The weights at the start, by site."""
        values = dict(self.fixed)
        for name, matrix in self.start.items():
            values |= self.states[name].block.unpack(matrix)
        return values


def join(
    model: Model,
    task: Task,
    engine: Engine,
    *,
    known: Mapping[str, State],
    trained: Set[str],
    initial: Mapping[str, Tensor] | None,
    device: torch.device,
    generator: torch.Generator,
    structures: Structures,
    late: Mapping[str, Block] | None = None,
    shards: Shards | None = None,
) -> Joined:
    """See what a task touches, and refuse what cannot be learnt from before the first step.

    Args:
        model: The Pyro model.
        task: The task.
        engine: Whose kind of Fisher must be had.
        known: The Gaussians so far.
        trained: The blocks that an earlier task has touched.
        initial: Where new blocks start, values by site; None: at small random weights.
        device: Where to work.
        generator: Decides those.
        late: Blocks that are known to take part, though the few examples that are looked at do not show it.
        structures: What is held of the factors of new blocks.
        shards: Which rank holds which block; None: every one holds them all.

    Returns:
        The task's blocks, where they start, and the rest.

    Raises:
        NCLError: If data and model do not fit, or the Fisher of a weight cannot be had.
    """
    present = present_values(known, trained, initial, device)
    states: dict[str, State] = {}
    priors: dict[str, State] = {}
    values: dict[str, Tensor] = {}
    rows: dict[str, float] = {}
    outputs: tuple[str, ...] = ()
    least, guess, certain = 0.0, 0.0, True
    allowed: list[AllowedTargets | None] = []
    needs_priors = engine.retention != 1 or engine.stiffness is not None
    # Drawn once: a loader that can be read once only loses no more than this batch to being looked at.
    examples = tuple(few_examples(part, torch.device("cpu")) for part in task.parts)
    for part, batch in zip(task.parts, examples, strict=True):
        with of_task(part.name):
            run, targets = look(model, to_device(batch, device), part.context, present)
            touched = touched_states(run, {**known, **states}, engine, structures, late or {}, shards)
        states |= touched
        for name in touched.keys() & trained if needs_priors else ():
            prior = prior_state(touched[name].block, run.latents, engine.structure)
            priors[name] = prior if shards is None else shards.of(prior)
        allowed.append(targets)
        if engine.enough is not None or engine.stiffness == "auto":
            least += least_loss(run.observed) / run.examples / len(task.parts)
            guess += guess_loss(run.observed) / run.examples / len(task.parts)
        certain = certain and can_be_certain(run.observed)
        counts = rows_of_blocks(run, (state.block for state in states.values()))
        rows |= {name: count / run.examples for name, count in counts.items()}
        values |= {name: latent.value.detach() for name, latent in run.latents.items()}
        outputs = tuple(dict.fromkeys((*run.observed, *outputs)))
    if engine.retention != 1:
        states |= {name: states[name].faded(prior, engine.retention) for name, prior in priors.items()}
    with of_task(task.name):
        start = starting_points(states, trained, initial, generator)
    learnt: dict[str, Tensor] = {}
    for name, matrix in start.items():
        learnt |= states[name].block.unpack(matrix)
    for part, batch in zip(task.parts, examples, strict=True) if engine.needs_fisher else ():
        with of_task(part.name):
            check_fisher(model, to_device(batch, device), part.context, values | learnt, engine, states)
    fixed = {name: value for name, value in values.items() if name not in learnt}
    return Joined(states, priors, start, rows, fixed, outputs, least, guess, certain, examples, tuple(allowed))


def few_examples(task: Task, device: torch.device) -> tuple[Any, ...]:
    """A few examples of a task, the same ones each time; of tensors, the smallest and the largest target among them.

    Args:
        task: The task.
        device: Where to put them.

    Returns:
        A batch.
    """
    with restored(*own_generators(task)):
        batch = next(iter(task.epoch(8, torch.Generator().manual_seed(0))))
    if isinstance(task.train, tuple) and not task.train[-1].is_complex():
        targets = task.train[-1].reshape(len(task.train[-1]), -1).double()
        extreme = torch.stack([targets.amin(-1).argmin(), targets.amax(-1).argmax()])
        first = torch.arange(min(6, len(targets)), device=extreme.device)
        batch = pick(task.train, torch.cat([first, extreme]).unique())
    return to_device(batch, device)


def look(
    model: Model, batch: tuple[Any, ...], context: Mapping[str, Any], values: Mapping[str, Tensor]
) -> tuple[ModelRun, AllowedTargets | None]:
    """Run a model once on a small batch, to see its sites and to refuse data that do not fit.

    Args:
        model: The Pyro model.
        batch: A few examples.
        context: The model's keyword arguments.
        values: The weights known so far, by site.

    Returns:
        What the run showed, and the values that targets may have, if the model knows.

    Raises:
        NCLError: If data and model do not fit, or there is nothing to learn.
    """
    check = getattr(model, "check", None)
    device = next((tensor.device for _, tensor in tensors_of(batch)), torch.device("cpu"))
    # To look changes nothing: what the network draws comes from a stream of its own.
    with drawing_from(torch.Generator().manual_seed(0), device):
        allowed = None if check is None else check(*batch, **context)
        run = watch(model, batch, values, context)
        if not run.latents:
            raise ModelError(
                "The model has no weights to learn: no site is sampled that is not observed. Parameters of a network "
                "that are frozen (requires_grad=False) are none."
            )
        objective(run.observed)
    return run, allowed if isinstance(allowed, AllowedTargets) else None


def check_examples(model: Model, task: Task, values: Mapping[str, Tensor], device: torch.device) -> None:
    """Refuse examples that the model cannot learn from.

    Args:
        model: The Pyro model.
        task: The examples.
        values: The present weights, by site.
        device: Where to work.

    Raises:
        NCLError: If data and model do not fit.
    """
    with of_task(task.name):
        for batch in task.epoch(256):
            look(model, to_device(batch, device), task.context, values)


def check_fisher(
    model: Model,
    batch: tuple[Any, ...],
    context: Mapping[str, Any],
    values: Mapping[str, Tensor],
    engine: Engine,
    states: Mapping[str, State],
) -> None:
    """Refuse a model whose Fisher cannot be had before the first step, not after the last.

    Args:
        model: The Pyro model.
        batch: A few examples.
        context: The model's keyword arguments.
        values: The weights, by site.
        engine: Whose kind of Fisher is meant.
        states: The Gaussians, by block.

    Raises:
        NCLError: If the Fisher of a weight cannot be had.
    """
    accumulator = FisherAccumulator(
        model,
        values,
        kind=engine.fisher,
        temperature=engine.fisher_temperature,
        diagonal=engine.structure is Structure.DIAGONAL,
        blocks={name: state.block for name, state in states.items()},
        context=context,
    )
    accumulator.update(batch)
    for name, found in accumulator.factors(1.0).items() if engine.needs_activity else ():
        if isinstance(found, KroneckerFisher) and found.is_exchanged:
            raise UnsupportedUseError(
                f"The weight of block '{name}' is used straight here and transposed there, so that it has no inputs of "
                f"its own for {type(engine).__name__} to protect: untie it, or use another method, such as LaplaceNCL."
            )


def touched_states(
    run: ModelRun,
    known: Mapping[str, State],
    engine: Engine,
    structures: Structures,
    late: Mapping[str, Block] | None = None,
    shards: Shards | None = None,
) -> dict[str, State]:
    """The Gaussians of the blocks that a run touches; a block that was never met before has its prior.

    Args:
        run: A run of the model.
        known: The Gaussians so far.
        engine: Which says what form the Gaussians of linear maps must have.
        structures: What is held of the factors of new blocks.
        late: Blocks that other examples touch, where the run has met their sites.
        shards: Which rank holds which block; None: every one holds them all.

    Returns:
        By block.

    Raises:
        ModelError: If the run uses a known site in another way than before.
        SettingError: If a known Gaussian is of another form.
    """
    structure = engine.structure
    owners = {site: name for name, state in known.items() for site in state.block.sites}
    states: dict[str, State] = {}
    held = {name: state.block for name, state in known.items()}
    blocks = known_blocks(run, held)
    for block in (late or {}).values():
        if run.latents.keys() >= set(block.sites):
            blocks |= as_known(block, held)
    new = {
        name: structures.applied(block, whole=engine.needs_activity)
        for name, block in blocks.items()
        if name not in known
    }
    if shards is not None:
        shards.deal({name: cost_of(block) for name, block in new.items() if isinstance(block, KroneckerBlock)})
    for name, block in blocks.items():
        state = known.get(name)
        if state is None:
            taken = [site for site in block.sites if site in owners]
            if taken:
                owner = owners[taken[0]]
                raise ModelError(
                    f"Sites {quoted(taken)} belong to block '{owner}' of the posterior, with "
                    f"{quoted(known[owner].block.sites)}; this task uses them otherwise. {_FREEZING}"
                )
            state = _prior(new[name], run, structure)
            state = state if shards is None else shards.of(state)
        elif state.block != block:
            raise ModelError(
                f"Block '{name}' is {state.block} in the posterior, but this task uses it as {block}. {_FREEZING}"
            )
        elif engine.needs_activity and state.block.is_split:
            raise SettingError(
                f"Block '{name}' of the posterior is {state.kind}, and {type(engine).__name__} needs its factors "
                "whole: start a new posterior with structure='dense', or use another engine, such as LaplaceNCL."
            )
        elif isinstance(block, KroneckerBlock) and state.structure is not structure:
            raise SettingError(
                f"Block '{name}' of the posterior is {state.kind}, and this engine needs {structure.value} blocks. "
                "Start a new posterior with this engine, or go on with one that has such blocks."
            )
        states[name] = state
    return states


def _prior(block: Block, run: ModelRun, structure: Structure) -> State:
    for site in block.sites:
        normal = base_normal(site, run.latents[site].fn)
        if normal.loc.dtype in (torch.float16, torch.bfloat16):
            raise PriorError(
                f"The prior of site '{site}' is of half precision ({normal.loc.dtype}), in which small steps round to "
                "none. Give it a prior in float32, and let the model round the weight where it is used: "
                f"w.to({normal.loc.dtype}). A BayesianNetwork does so by itself."
            )
        if not bool(
            torch.isfinite(normal.loc).all() and torch.isfinite(normal.scale).all() and (normal.scale > 0).all()
        ):
            raise PriorError(
                f"The prior of site '{site}' is not a Normal of finite mean and positive, finite scale: choose another."
            )
    try:
        return prior_state(block, run.latents, structure)
    except MatrixError as error:
        raise PriorError(
            f"The prior scales of {quoted(block.sites)} are too small or too large for their precisions to be held in "
            "numbers: choose another prior."
        ) from error
