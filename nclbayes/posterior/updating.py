"""An update as a transaction: a belief and a task go in, a new belief and a report come out."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nclbayes.blocks import Block
from nclbayes.data.agreement import refuse_distributed
from nclbayes.data.task import Task, own_generators
from nclbayes.engines.base import Engine, Outcome, Problem
from nclbayes.engines.checkpoint import Checkpoint
from nclbayes.engines.curvature import diverged
from nclbayes.engines.latecomers import LatecomersError, begun_anew
from nclbayes.engines.loop import Callback
from nclbayes.errors import ModelError, PriorError
from nclbayes.gaussians import Factors, Shards, placed
from nclbayes.gaussians.checking import check_definite, check_parts
from nclbayes.isolation.failures import of_task
from nclbayes.posterior.arguments import checked_path
from nclbayes.posterior.belief import Belief, device_of
from nclbayes.posterior.decisions import decisions
from nclbayes.posterior.identity import model_probe, update_identity, update_marks
from nclbayes.posterior.joining import few_examples, join, look, touched_states
from nclbayes.ranks import in_step, present
from nclbayes.storage import Misfit
from nclbayes.watch.run import Model


@dataclass(frozen=True)
class UpdateReport:
    """What an update did.

    Attributes:
        task: The task's name.
        engine: The engine's name.
        losses: The mean negative log likelihood at each step.
        steps: How many steps were taken.
        seconds: How long the whole update took, also before it was interrupted.
        stopped_early: Whether the loop stopped before its last step.
        log_evidence: The Laplace estimate of log p(D_k | D_1 .. D_{k-1}), where the engine gives one; with a retention
            below 1, that of D_k under the faded prior.
        lr: The learning rate, where it was lowest because the curvature of the task allowed no more; a schedule's
            factors are not counted.
        likelihood_weight: What each example counted.
        stiffness: How firmly earlier tasks were held in the end; None for steps of the precision itself.
        decisions: What the engine decided that its settings left to it ("auto"), and why, in words.
        kl_of_sums: For each Kronecker block, the nats lost by replacing the sum of two Kronecker products by one.
        unused: Weights that the model samples, and that no task so far has used.
        structure: What is held of the factors of those blocks that have large ones, in words.

    Example:
        >>> import pyro.distributions as dist
        >>> import torch
        >>> from nclbayes import BayesianNetwork, LaplaceNCL, Normal, OnlinePosterior, Task
        >>> model = BayesianNetwork(torch.nn.Linear(3, 1), Normal(0.1), prior=dist.Normal(0.0, 1.0))
        >>> task = Task((torch.randn(20, 3), torch.randn(20, 1)), name="noise")
        >>> report = OnlinePosterior(model, LaplaceNCL(steps=5)).update(task)
        >>> report.task, report.steps, len(report.losses)
        ('noise', 5, 5)
    """

    task: str
    engine: str
    losses: list[float] = field(repr=False)
    steps: int
    seconds: float
    stopped_early: bool
    log_evidence: float | None
    lr: float
    likelihood_weight: float
    stiffness: float | None
    decisions: Mapping[str, str] = field(repr=False)
    kl_of_sums: Mapping[str, float] = field(repr=False)
    unused: tuple[str, ...] = ()
    structure: Mapping[str, str] = field(default_factory=dict, repr=False)


def updated(
    belief: Belief,
    model: Model,
    task: Task,
    engine: Engine,
    *,
    initial: Mapping[str, Tensor] | None,
    generator: torch.Generator,
    progress: bool | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 200,
    callbacks: Sequence[Callback] = (),
    factors: Factors = Factors.REPLICATE,
) -> tuple[Belief, UpdateReport]:
    """What a belief becomes when a task is learnt.

    Args:
        belief: What earlier tasks have left; it is not changed.
        model: The model.
        task: What to learn.
        engine: How.
        initial: Where blocks that no task has touched start, by site.
        generator: Decides every draw.
        progress: Whether to show a bar; by default only on a terminal.
        checkpoint: A file to keep snapshots in; it is removed when the update is done.
        checkpoint_every: How many steps lie between snapshots.
        callbacks: Called after each step.
        factors: Where the factors of precisions are, if several processes learn it.

    Returns:
        The new belief, and what the update did.
    """
    path = None if checkpoint is None else checked_path(checkpoint)
    _refuse_inference_tensors(model)
    device, started = device_of(belief, model, task), time.perf_counter()
    ranks = present(device)
    factors = factors if ranks.are_many else Factors.REPLICATE
    belief = replace(belief, states=placed(belief.states, factors, ranks))
    streams = [(source, source.get_state()) for source in (generator, *own_generators(task))]
    snapshots, late = None, dict[str, Block]()
    while True:
        joined = join(
            model,
            task,
            engine,
            known=belief.states,
            trained=belief.trained,
            initial=initial,
            device=device,
            generator=generator,
            late=late,
            structures=belief.structures,
            shards=Shards(ranks, belief.states) if factors is Factors.SHARD else None,
        )
        if ranks.are_many and not late:
            refuse_distributed(task)
            marks = update_marks(joined, model, task, engine, generator, belief.tasks)
            marks["place of factors"] = factors.value
            in_step(ranks, f"the update with task '{task.name}'", marks)
        weights = sum(state.loc.numel() for state in joined.states.values())
        settled = engine.settled(weights, task.size, certain=joined.certain, before=belief.likelihood_weight)
        if path is not None and snapshots is None:
            update = update_identity(joined, model, task, settled, streams[0][1], belief.memory)
            snapshots = Checkpoint(path, checkpoint_every, update, model_probe(joined, model, task, device))
        problem = Problem(
            model=task.model(model),
            task=task,
            size=float(settled.likelihood_weight) * task.size,
            least=joined.least,
            guess=joined.guess,
            states=joined.states,
            start=joined.start,
            rows=joined.rows,
            trained=belief.trained,
            priors=joined.priors,
            fixed=joined.fixed,
            late=frozenset(late),
            device=device,
            generator=generator,
            progress=progress,
            callbacks=tuple(callbacks),
            checkpoint=snapshots,
            memory=belief.memory,
            allowed=joined.allowed,
            accumulate=settled.accumulate,
            ranks=ranks,
        )
        try:
            with begun_anew(ranks):
                outcome = settled.run(problem)
            break
        except LatecomersError as error:
            # The task begins anew, with them.
            late |= error.blocks
            if snapshots is not None and not error.kept and ranks.is_first:
                snapshots.clear()
            for source, state in streams:
                source.set_state(state)
    check_outcome(outcome, task.name, settled)
    # What fails on another rank until here leaves the snapshots as they are.
    ranks.meet(f"what was learnt of '{task.name}'")
    if snapshots is not None and ranks.is_first:
        # Before anybody has the new belief: if the file resists, the update has not happened, and can be repeated.
        snapshots.clear()
    why = decisions(
        *(engine, settled, outcome),
        weights=weights,
        examples=task.size,
        is_first=not belief.tasks,
        holds=bool(joined.priors),
    )
    after = belief.after(task.name, joined.outputs, outcome, float(settled.likelihood_weight))
    learnt = {site for name in after.trained for site in after.states[name].block.sites}
    unused = tuple(site for site in joined.fixed if site not in learnt)
    return after, _report(task, settled, outcome, time.perf_counter() - started, why, unused)


def first_belief(
    belief: Belief, model: Model, example: Task, engine: Engine, initial: Mapping[str, Tensor] | None
) -> Belief:
    """The priors of the sites that a task shows; nothing is learnt from it.

    Args:
        belief: What is believed before any task.
        model: The model.
        example: The task.
        engine: How tasks will be learnt.
        initial: Where learning will start, by site.

    Returns:
        The belief with these priors.
    """
    with of_task(example.name):
        batch = few_examples(example, device_of(Belief(), model, example))
        run, _ = look(model, batch, example.context, initial or {})
        states = touched_states(run, {}, engine, belief.structures)
        return replace(belief, states=states, outputs=tuple(run.observed))


def _refuse_inference_tensors(model: Model) -> None:
    if isinstance(model, torch.nn.Module):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_inference():
                raise ModelError(
                    f"'{name}' of the model was made in torch.inference_mode, and nothing can be learnt from such a "
                    "tensor: build the model outside of it."
                )


def _report(
    task: Task, engine: Engine, outcome: Outcome, seconds: float, why: Mapping[str, str], unused: tuple[str, ...]
) -> UpdateReport:
    return UpdateReport(
        task=task.name,
        engine=type(engine).__name__,
        losses=outcome.history.losses,
        steps=len(outcome.history.losses),
        seconds=outcome.history.earlier + seconds,
        stopped_early=outcome.history.stopped_early,
        log_evidence=outcome.log_evidence,
        lr=min(engine.lr, outcome.least_rate),
        likelihood_weight=float(engine.likelihood_weight),
        stiffness=None if engine.stiffness is None else outcome.history.stiffness,
        decisions=why,
        kl_of_sums=outcome.kl_of_sums,
        unused=unused,
        structure={name: state.kind for name, state in outcome.states.items() if state.block.is_split},
    )


def check_outcome(outcome: Outcome, task: str, engine: Engine) -> None:
    """Refuse Gaussians that are none.

    Args:
        outcome: What the engine made of the task.
        task: The task's name.
        engine: The engine.

    Raises:
        ModelError: If there are none.
        NonFiniteError: If a number is NaN or infinite.
        PriorError: If a precision is lost in rounding.
    """
    if not outcome.states:
        raise ModelError(
            f"Task '{task}' was gone through, and left no Gaussian of any weight: its likelihood depends on none of "
            "them at the weights that were found. Look at the network's output there."
        )
    if outcome.log_evidence is not None and not math.isfinite(outcome.log_evidence):
        raise diverged(f"The log evidence became {outcome.log_evidence}", task, engine)
    for name, state in outcome.states.items():
        if not bool(torch.isfinite(state.loc).all()):
            raise diverged(f"The weights of block '{name}' became NaN or infinite", task, engine)
        here = state.here()
        if here is None:
            continue
        try:
            check_parts(name, here.tensors())
            check_definite(name, here.tensors())
        except Misfit as misfit:
            raise PriorError(
                f"The posterior of block '{name}' after task '{task}' is lost in rounding: {misfit}. Its prior and the "
                "task's Fisher lie too many powers of ten apart; choose a prior scale nearer to the size of weights."
            ) from misfit
