"""Natural variational NCL: the mean by trust-region steps at samples, the precision by averaged Fishers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from nclbayes.engines.base import Engine, Outcome, Problem
from nclbayes.engines.likelihood import block_gradients, blocks_by_rows, gradient_of_all, objective
from nclbayes.engines.loop import Stepper, run_loop
from nclbayes.engines.stability import StableRate
from nclbayes.engines.steps import hold, steps_of, take_step
from nclbayes.fisher import DiagonalFisher, FisherAccumulator, KroneckerFisher
from nclbayes.gaussians import State
from nclbayes.gaussians.checking import check_forms, check_parts
from nclbayes.gaussians.gradients import Gradient, summed
from nclbayes.isolation.randomness import drawing_from
from nclbayes.kronecker import SumRule
from nclbayes.storage import Form, Misfit, under
from nclbayes.watch import watch
from nclbayes.watch.run import batch_size

# Growing weights are brought back to 1 when they pass this.
_LARGEST_WEIGHT = 1e6


@dataclass(frozen=True, kw_only=True)
class VariationalNCL(Engine):
    """Settings of natural variational NCL.

    For task k it maximises the evidence lower bound over (mu, Lambda) by

        mu     <- mu + lr [ Lambda_{k-1}^-1 E_q[grad log p(D_k | theta)] - lambda (mu - mu_{k-1}) ]
        Lambda <- (1 - beta) Lambda + beta [ Lambda_{k-1} + E_q[Fisher_k(theta)] ],

    the expectations over reparameterised samples of q, the Fisher with targets drawn from the model. Unrolled, Lambda
    is Lambda_{k-1} plus a moving average of Fishers, which is formed every `refresh_every` steps only.

    Attributes:
        beta: The rate at which the average of Fishers moves.
        particles: Samples of the weights for each step.
        refresh_every: Form Lambda anew, and factorise it, every so many steps.
        init_scale: The standard deviation of the samples at the first step of a block's first task. Draws from the
            prior itself would be noise; the recursion forgets its start. None: start at the prior.

    Example:
        >>> from nclbayes import VariationalNCL
        >>> VariationalNCL(particles=4).beta
        0.01
    """

    can_stiffen: ClassVar[bool] = True
    can_stream: ClassVar[bool] = True
    sums_fisher: ClassVar[bool] = True

    schedule: Callable[[float], float] | str | None = "auto"
    likelihood_weight: float | str = "auto"
    stiffness: float | str | None = "auto"
    enough: float | str | None = "auto"
    kronecker_sum: SumRule | str = SumRule.ADDITIVE
    beta: float = 0.01
    particles: int = 1
    refresh_every: int = 50
    init_scale: float | None = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("beta", lambda v: 0 < v < 1, "above 0 and below 1")
        for name in ("particles", "refresh_every"):
            self._require_whole(name)
        self._require("init_scale", lambda v: 1e-100 <= v <= 1e100, "positive, from 1e-100 to 1e100")

    def _draws(self, examples: float) -> int:
        """One: every step draws anew."""
        return 1

    def run(self, problem: Problem) -> Outcome:
        """Learn a task.

        Args:
            problem: The task, and the Gaussians before it.

        Returns:
            The Gaussians after it.
        """
        stepper = self.begun(problem)
        history = run_loop(stepper, self, problem)
        after, _ = self.ended(problem, stepper)
        return Outcome(after, history, least_rate=stepper.least_rate)

    def begun(self, problem: Problem) -> VariationalStepper:
        """What takes the steps of a task.

        Args:
            problem: The task, and the Gaussians before it.

        Returns:
            The stepper, at the start.
        """
        return VariationalStepper(self, problem)

    def ended(
        self,
        problem: Problem,
        stepper: Stepper,
        fishers: Mapping[str, KroneckerFisher | DiagonalFisher] = MappingProxyType({}),
    ) -> tuple[dict[str, State], dict[str, Tensor]]:
        """What a task leaves, once its steps have been taken.

        Args:
            problem: The task, and the Gaussians before it.
            stepper: What has taken the steps, and summed the Fisher.
            fishers: Nothing.

        Returns:
            The Gaussians after it; nothing is kept in memory.
        """
        assert isinstance(stepper, VariationalStepper)
        return stepper.posterior(problem.size), {}


class VariationalStepper:
    """The steps of natural variational NCL on one task.

    Args:
        settings: The engine's settings.
        problem: The task, and the Gaussians before it.
    """

    def __init__(self, settings: VariationalNCL, problem: Problem) -> None:
        self._settings = settings
        self._problem = problem
        self._blocks = steps_of(settings, problem)
        self._rate = StableRate(settings, problem, self._blocks)
        self._fisher = FisherAccumulator(
            problem.model,
            {},
            kind=settings.fisher,
            samples=int(settings.fisher_samples),
            temperature=settings.fisher_temperature,
            blocks=problem.blocks,
            context=problem.task.context,
            generator=problem.generator,
        )
        self._batch_size = problem.task.batch_size(settings.batch_size)
        self._by_rows = blocks_by_rows(problem, self._blocks, settings.batch_size)
        self._weight, self._taken = 1.0, 0
        self._sampler: dict[str, State] = {}
        self._colouring: dict[str, Callable[[Tensor], Tensor]] = {}
        self._refresh()

    def step(self, batch: tuple[object, ...], lr: float) -> float:
        """Take one step on one batch.

        Args:
            batch: The batch.
            lr: The learning rate.

        Returns:
            The mean negative log likelihood at the samples.
        """
        rate, particles = self._rate.allowed(lr, batch, self.values()), self._settings.particles
        total, fit, examples = dict[str, Gradient](), 0.0, batch_size(batch)
        for _ in range(particles):
            gradient, value = self._particle(batch)
            total, fit = summed(total, gradient), fit + value
        fit, total = gradient_of_all(self._problem, self._blocks, fit, total, self._by_rows)
        take_step(self._blocks, total, examples * particles, rate, self._settings)
        self._weight /= 1 - self._settings.beta
        if self._weight > _LARGEST_WEIGHT:
            self._fisher.scale(1 / self._weight)
            self._weight = 1.0
        self._taken += 1
        # Often at first, when the average changes fast.
        if self._taken % self._settings.refresh_every == 0 or self._taken in (1, 2, 4, 8, 16, 32):
            self._refresh()
        return -fit / (examples * particles)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that changes with the steps, the Gaussian that samples come from included."""
        found = {"weight": torch.tensor([self._weight, self._taken], dtype=torch.float64, device="cpu")}
        for steps in self._blocks:
            name = steps.name
            parts = steps.tensors() | {f"sampler.{k}": t for k, t in self._sampler[name].tensors().items()}
            found |= {f"block.{name}.{part}": tensor for part, tensor in parts.items()}
        found |= {f"fisher.{name}": tensor for name, tensor in self._fisher.tensors().items()}
        return found | self._rate.tensors()

    def gathered(self) -> dict[str, Tensor]:
        """The same, with the Fishers that all ranks have summed."""
        own = {name: tensor for name, tensor in self.tensors().items() if not name.startswith("fisher.")}
        return own | {f"fisher.{name}": tensor for name, tensor in self._of_all().tensors().items()}

    def let_go(self) -> None:
        """Have no share in the Fishers that were taken up."""
        self._fisher.scale(0.0)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`tensors` gave.

        Args:
            tensors: Its result.
        """
        weight, taken = tensors["weight"]
        self._weight, self._taken = float(weight), int(taken)
        self._rate.restore(tensors)
        if not (self._weight >= 1 and self._taken >= 1 and bool(tensors["fisher.examples"] > 0)):
            raise Misfit("the tensors 'stepper.weight' and 'stepper.fisher.examples' are of no average")
        for steps in self._blocks:
            name, device = steps.name, steps.theta.device
            parts = under(tensors, f"block.{name}.")
            steps.restore(parts)
            sampler = {part: tensor.to(device) for part, tensor in under(parts, "sampler.").items()}
            forms = {part: Form(tensor.dtype, tuple(tensor.shape)) for part, tensor in sampler.items()}
            check_forms(name, forms, steps.state.structure, steps.state.block)
            check_parts(name, sampler)
            self._draw_from(name, steps.state.with_tensors(sampler))
        self._fisher.restore(
            under(tensors, "fisher."),
            {steps.name: steps.state.block for steps in self._blocks},
            {steps.name: steps.theta for steps in self._blocks},
        )

    def posterior(self, size: float) -> dict[str, State]:
        """Lambda_{k-1} + w_i Fbar around the present mean, for the blocks that the likelihood depends on.

        Where training ends as soon as enough is learnt, w_i is 1: what the recursion would have come to.

        Args:
            size: N, how many examples the likelihood counts as.

        Returns:
            By block.
        """
        rule, is_early = SumRule(self._settings.kronecker_sum), self._settings.enough is not None
        fishers = self._of_all().factors(size) if is_early else self._average(size)
        return {
            steps.name: steps.state.add(steps.theta.clone(), fishers[steps.name], rule)
            for steps in self._blocks
            if steps.name in fishers
        }

    def values(self) -> dict[str, Tensor]:
        """The present mean, by site."""
        found: dict[str, Tensor] = {}
        for steps in self._blocks:
            found |= steps.state.block.unpack(steps.theta)
        return found

    def hold(self, stiffness: float) -> None:
        """Hold earlier tasks so firmly from now on.

        Args:
            stiffness: How many times more slowly than a free direction the mean one is learnt.
        """
        hold(self._blocks, stiffness)

    @property
    def least_rate(self) -> float:
        """The least learning rate that the task's curvature allowed."""
        return self._rate.least

    def _particle(self, batch: tuple[object, ...]) -> tuple[dict[str, Gradient], float]:
        """One sample: its gradient and log likelihood, and its Fisher into the average; one forward pass for both."""
        problem = self._problem
        values: dict[str, Tensor] = dict(problem.fixed)
        for steps in self._blocks:
            name = steps.name
            values |= steps.state.block.unpack(steps.theta + self._noise(name, steps.theta))
        self._fisher.values = values
        # Each batch counts once in the gradient, however many examples it has: so it does here.
        counted = self._weight * self._batch_size / batch_size(batch)
        gradient, total = dict[str, Gradient](), 0.0
        for part in problem.drawn_parts(batch, problem.generator):
            # What the model draws itself, each part draws anew.
            with drawing_from(problem.generator, problem.device, part.share.start):
                run = watch(problem.model, part.batch, values, problem.task.context)
            problem.meet(run)
            fit = part.weight * objective(run.observed)
            planned = self._by_rows if problem.ranks.are_many else None
            own = block_gradients(fit, run, self._blocks, retain_graph=True, parts=problem.accumulate, planned=planned)
            gradient, total = summed(gradient, own), total + float(fit.detach())
            self._fisher.add(run, part.batch, counted * part.weight, part.share)
        return gradient, total

    def _average(self, size: float) -> dict[str, KroneckerFisher | DiagonalFisher]:
        """The moving average of Fishers with its weight, w_i Fbar, w_i = 1 - (1 - beta)^i."""
        warmth = 1 - (1 - self._settings.beta) ** self._taken
        return self._of_all().factors(size * warmth)

    def _of_all(self) -> FisherAccumulator:
        """The sums of all ranks, each of which adds its share of every batch."""
        return self._fisher.of_all(self._problem.ranks)

    def _refresh(self) -> None:
        """Form and factorise the Gaussian that samples are drawn from."""
        settings = self._settings
        rule = SumRule(settings.kronecker_sum)
        fishers = self._average(self._problem.size) if self._taken else {}
        for steps in self._blocks:
            name, state = steps.name, steps.state
            if settings.init_scale is not None and name not in self._problem.trained:
                # The narrow start adds (1 - beta)^i init_scale^-2 I.
                state = state.narrowed((1 - settings.beta) ** self._taken / settings.init_scale**2)
            if name in fishers:
                state = state.add(state.loc, fishers[name], rule, measure=False)
            self._draw_from(name, state)

    def _draw_from(self, name: str, state: State) -> None:
        """Draw a block's samples with the covariance of `state` from now on."""
        self._sampler[name], self._colouring[name] = state, state.colouring()

    def _noise(self, name: str, like: Tensor) -> Tensor:
        """A draw from N(0, Lambda^-1): S_G eps S_A^T."""
        generator = self._problem.generator
        eps = torch.randn(like.shape, generator=generator, dtype=like.dtype, device=generator.device).to(like.device)
        return self._colouring[name](eps)
