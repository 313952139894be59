"""A task meets a posterior: which blocks it touches, what they are, and where each starts."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nclbayes.blocks import Block, KroneckerBlock, find_blocks
from nclbayes.data.sources import pick
from nclbayes.data.task import Task, own_generators, to_device
from nclbayes.engines.base import Engine
from nclbayes.engines.checkpoint import identity
from nclbayes.errors import ModelError, SettingError, UnsupportedUseError
from nclbayes.fisher import FisherAccumulator, KroneckerFisher
from nclbayes.gaussians import State, Structure, prior_state
from nclbayes.gaussians.gradients import rows_of_blocks
from nclbayes.isolation.randomness import drawing_from, restored
from nclbayes.watch import ModelRun, watch
from nclbayes.watch.run import Model


@dataclass(frozen=True)
class Joined:
    """A task as a posterior meets it.

    Attributes:
        states: The Gaussian of each block that the task touches, faded by the engine's retention; a new block has
            its prior.
        start: Where each of them starts, as a matrix.
        rows: How many rows an example adds to a block's gradient, for blocks that are plain products.
        fixed: The values of the other sites that the model meets.
        outputs: The observed sites.
    """

    states: dict[str, State]
    start: dict[str, Tensor]
    rows: dict[str, float]
    fixed: dict[str, Tensor]
    outputs: tuple[str, ...]

    def identity(self, task: Task, engine: Engine, generator: Tensor, memory: Mapping[str, Tensor]) -> str:
        """What an interrupted update must have in common with the call that goes on with it.

        Args:
            task: The task.
            engine: The engine.
            generator: The state of the generator when the update was called.
            memory: What earlier updates kept besides the Gaussians.

        Returns:
            A string that is equal for equal updates.
        """
        tensors = {"generator": generator, **{f"memory/{name}": tensor for name, tensor in memory.items()}}
        for name, state in self.states.items():
            parts = {"start": self.start[name], **state.tensors()}
            tensors |= {f"state/{name}/{part}": tensor for part, tensor in parts.items()}
        for k, part in enumerate(task.parts):
            batch = few_examples(part, torch.device("cpu"))
            tensors |= {f"data/{k}/{i}": item for i, item in enumerate(batch) if isinstance(item, Tensor)}
        contexts = [repr(part.context) for part in task.parts]
        settings = {"name": type(engine).__name__, **engine.to_dict(), "schedule": engine.schedule is not None}
        return identity([task.name, task.size, contexts, settings], tensors)


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

    Returns:
        The task's blocks, where they start, and the rest.

    Raises:
        NCLError: If data and model do not fit, or the Fisher of a weight cannot be had.
    """
    mean: dict[str, Tensor] = {}
    for state in known.values():
        mean |= state.block.unpack(state.loc)
    states: dict[str, State] = {}
    priors: dict[str, State] = {}
    values: dict[str, Tensor] = {}
    rows: dict[str, float] = {}
    outputs: tuple[str, ...] = ()
    for part in task.parts:
        run = look(model, few_examples(part, device), part.context, mean)
        touched = touched_states(run, {**known, **states}, engine.structure)
        states |= touched
        for name in touched.keys() & trained if engine.retention != 1 else ():
            priors[name] = prior_state(touched[name].block, run.latents, engine.structure)
        counts = rows_of_blocks(run, (state.block for state in states.values()))
        rows |= {name: count / run.examples for name, count in counts.items()}
        values |= {name: latent.value.detach() for name, latent in run.latents.items()}
        outputs = tuple(run.observed)
    states |= {name: states[name].faded(prior, engine.retention) for name, prior in priors.items()}
    start = starting_points(states, trained, initial, generator)
    learnt: dict[str, Tensor] = {}
    for name, matrix in start.items():
        learnt |= states[name].block.unpack(matrix)
    for part in task.parts if engine.needs_fisher else ():
        check_fisher(model, few_examples(part, device), part.context, values | learnt, engine)
    fixed = {name: value for name, value in values.items() if name not in learnt}
    return Joined(states, start, rows, fixed, outputs)


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


def look(model: Model, batch: tuple[Any, ...], context: Mapping[str, Any], values: Mapping[str, Tensor]) -> ModelRun:
    """Run a model once on a small batch, to see its sites and to refuse data that do not fit.

    Args:
        model: The Pyro model.
        batch: A few examples.
        context: The model's keyword arguments.
        values: The weights known so far, by site.

    Returns:
        What the run showed.

    Raises:
        NCLError: If data and model do not fit.
    """
    check = getattr(model, "check", None)
    device = next((item.device for item in batch if isinstance(item, Tensor)), torch.device("cpu"))
    # To look changes nothing: what the network draws comes from a stream of its own.
    with drawing_from(torch.Generator().manual_seed(0), device):
        if check is not None:
            check(*batch, **context)
        return watch(model, batch, values, context)


def check_fisher(
    model: Model,
    batch: tuple[Any, ...],
    context: Mapping[str, Any],
    values: Mapping[str, Tensor],
    engine: Engine,
) -> None:
    """Refuse a model whose Fisher cannot be had before the first step, not after the last.

    Args:
        model: The Pyro model.
        batch: A few examples.
        context: The model's keyword arguments.
        values: The weights, by site.
        engine: Whose kind of Fisher is meant.

    Raises:
        NCLError: If the Fisher of a weight cannot be had.
    """
    accumulator = FisherAccumulator(
        model,
        values,
        kind=engine.fisher,
        temperature=engine.fisher_temperature,
        diagonal=engine.structure is Structure.DIAGONAL,
        context=context,
    )
    accumulator.update(batch)
    for name, found in accumulator.factors(1.0).items() if engine.needs_activity else ():
        if isinstance(found, KroneckerFisher) and found.is_exchanged:
            raise UnsupportedUseError(
                f"The weight of block '{name}' is used straight here and transposed there, so that it has no inputs of "
                f"its own for {type(engine).__name__} to protect: untie it, or use another method, such as LaplaceNCL."
            )


def touched_states(run: ModelRun, known: Mapping[str, State], structure: Structure) -> dict[str, State]:
    """The Gaussians of the blocks that a run touches; a block that was never met before has its prior.

    Args:
        run: A run of the model.
        known: The Gaussians so far.
        structure: The form that the Gaussians of linear maps must have.

    Returns:
        By block.

    Raises:
        ModelError: If the run uses a known site in another way than before.
        SettingError: If a known Gaussian is of another form.
    """
    owners = {site: name for name, state in known.items() for site in state.block.sites}
    states: dict[str, State] = {}
    for name, block in find_blocks(run).items():
        state = known.get(name)
        if state is None:
            taken = [site for site in block.sites if site in owners]
            if taken:
                raise ModelError(f"Sites {taken} belong to block '{owners[taken[0]]}'; this task uses them otherwise.")
            state = prior_state(block, run.latents, structure)
        elif state.block != block:
            raise ModelError(f"Block '{name}' is {state.block} in the posterior, but this task uses it as {block}.")
        elif isinstance(block, KroneckerBlock) and state.structure is not structure:
            raise SettingError(
                f"Block '{name}' of the posterior is {state.kind}, and this engine needs {structure.value} blocks. "
                "Start a new posterior with this engine, or go on with one that has such blocks."
            )
        states[name] = state
    return states


def starting_points(
    states: Mapping[str, State],
    trained: Set[str],
    initial: Mapping[str, Tensor] | None,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Where learning starts in each block, as a matrix.

    A block that was trained before starts at its mean; a new one at the initial values if there are any, else at small
    random weights around its prior mean.

    Args:
        states: The Gaussians of the blocks.
        trained: The blocks that were trained before.
        initial: Values by site.
        generator: Decides the random weights.

    Returns:
        By block.
    """
    start: dict[str, Tensor] = {}
    for name, state in states.items():
        block = state.block
        if name in trained:
            start[name] = state.loc
        elif initial is not None and all(site in initial for site in block.sites):
            start[name] = block.pack({site: initial[site].to(state.loc) for site in block.sites})
        else:
            start[name] = _near_the_prior_mean(block, state, generator)
    # Laid out as they are when read from a file: products of another layout may round otherwise.
    return {name: matrix.contiguous() for name, matrix in start.items()}


def _near_the_prior_mean(block: Block, state: State, generator: torch.Generator) -> Tensor:
    fan_in = block.shape[-1] if block.shape else 1
    like = state.loc
    noise = torch.randn(like.shape, generator=generator, dtype=like.dtype, device=generator.device).to(like.device)
    widest = torch.full_like(state.loc, fan_in**-0.5)
    return state.loc + noise * torch.minimum(state.distribution.variance.sqrt(), widest)
