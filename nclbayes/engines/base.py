"""What an engine is given, and what it gives back."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from nclbayes.blocks import Block
from nclbayes.data.agreement import batch_mark
from nclbayes.data.checking import AllowedTargets
from nclbayes.data.splitting import lengths_of, split
from nclbayes.data.task import Task
from nclbayes.engines.checkpoint import Checkpoint
from nclbayes.engines.latecomers import meet
from nclbayes.engines.loop import Callback, History, Stepper
from nclbayes.engines.settings import EngineSettings
from nclbayes.errors import SettingError
from nclbayes.fisher import DiagonalFisher, KroneckerFisher
from nclbayes.gaussians import State, Structure
from nclbayes.ranks import ALONE, WHOLE, Ranks, Share
from nclbayes.watch import ModelRun
from nclbayes.watch.run import Model, batch_size


class Part(NamedTuple):
    """Some examples of a batch, which are run at once.

    Attributes:
        batch: They.
        weight: What each of them counts.
        share: Which of the batch's examples they are.
    """

    batch: tuple[Any, ...]
    weight: float = 1.0
    share: Share = WHOLE


@dataclass(frozen=True)
class Problem:
    """One task to learn, from the Gaussians that earlier tasks left.

    Attributes:
        model: The Pyro model.
        task: The data.
        size: N, how many examples the task's likelihood counts as.
        least: The loss that an example would have if every prediction were right, where the engine asks for it; NaN if
            it is not known.
        guess: What an example loses if its target is guessed, where the engine asks for it; 0 where that cannot be
            told.
        states: The Gaussian of each block that the task touches.
        start: Where each of them starts, as a matrix.
        rows: How many rows an example adds to a block's gradient, for blocks that are plain products.
        trained: Which of these blocks an earlier task has touched.
        priors: The prior of each of those, where the engine asks for it.
        fixed: The values of the other sites that the model meets.
        late: Which of the blocks were found only when the task had begun.
        device: Where to work.
        generator: Decides every draw.
        progress: Whether to show a bar; None: on a terminal.
        callbacks: Called after each step.
        checkpoint: Where to keep the loop's state, if anywhere.
        memory: What earlier updates kept besides the Gaussians.
        allowed: The values that targets of each part of the task may have, where the model knows them.
        accumulate: Into how many parts a batch is split.
        ranks: The processes that learn it together.
    """

    model: Model
    task: Task
    size: float
    least: float
    guess: float
    states: dict[str, State]
    start: dict[str, Tensor]
    rows: dict[str, float]
    trained: frozenset[str]
    priors: dict[str, State]
    fixed: dict[str, Tensor]
    late: frozenset[str]
    device: torch.device
    generator: torch.Generator
    progress: bool | None
    callbacks: tuple[Callback, ...]
    checkpoint: Checkpoint | None
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    allowed: tuple[AllowedTargets | None, ...] = ()
    accumulate: int = 1
    ranks: Ranks = ALONE

    @cached_property
    def blocks(self) -> dict[str, Block]:
        """The blocks that take part, by name."""
        return {name: state.block for name, state in self.states.items()}

    def meet(self, run: ModelRun) -> None:
        """See whether a watched run reaches weights that do not take part yet; the task then begins anew with them.

        Args:
            run: The run.
        """
        meet(run, self.blocks, self.fixed)

    def parts(self, batch: tuple[Any, ...]) -> list[Part]:
        """The parts of a batch that this process runs one after the other; what they give is added up, over all ranks.

        A batch of fewer examples than there are ranks is run by each of them, and counts a fraction.

        Args:
            batch: The batch.

        Returns:
            Its parts, at least one, as many on every rank.
        """
        examples = batch_size(batch)
        if self.ranks.are_many:
            self.ranks.note(f"a batch of {examples} examples", batch_mark(batch))
        ranks = self.ranks if examples >= self.ranks.count else ALONE
        weight, count = ranks.count / self.ranks.count, min(self.accumulate, examples // ranks.count)
        if ranks.count == count == 1:
            return [Part(batch, weight)]
        # Of each rank, those of its parts: the shares lie one after the other, and so do the parts of each.
        lengths = [lengths_of(own, count) for own in lengths_of(examples, ranks.count)]
        start, found = sum(map(sum, lengths[: ranks.rank])), list[Part]()
        for i, part in enumerate(split(split(batch, ranks.count)[ranks.rank], count)):
            ahead = sum(own[i] for own in lengths[: ranks.rank])
            found.append(Part(part, weight, Share(ranks, start, examples, i + 1 if count > 1 else 0, ahead)))
            start += lengths[ranks.rank][i]
        return found

    def drawn_parts(self, batch: tuple[Any, ...], generator: torch.Generator) -> Iterator[Part]:
        """The same, each of which finds a generator as it was for the first.

        From one state each part draws the noise of the whole batch, and takes that of its own examples: neither what
        they get nor how the generator goes on depends on the number of parts, or of ranks.

        Args:
            batch: The batch.
            generator: Decides the draws.

        Yields:
            Parts.
        """
        before = generator.get_state()
        for part in self.parts(batch):
            generator.set_state(before)
            yield part

    def check(self, batch: tuple[Any, ...]) -> None:
        """Refuse a batch whose targets have values that they cannot have; where it was drawn, before it is moved.

        Args:
            batch: The batch.

        Raises:
            DataError: If they do.
        """
        allowed = self.allowed[self.task.part_of(batch)] if self.allowed else None
        if allowed is not None and isinstance(batch[-1], Tensor):
            allowed.check(batch[-1])


@dataclass(frozen=True)
class Outcome:
    """The Gaussians after the task.

    Attributes:
        states: The new Gaussian of each block that the task touched.
        history: The losses.
        log_evidence: An estimate of the task's log evidence, if there is one.
        memory: What to keep besides the Gaussians.
        least_rate: The least learning rate that was allowed.
    """

    states: dict[str, State]
    history: History
    log_evidence: float | None = None
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    least_rate: float = math.inf

    @property
    def kl_of_sums(self) -> dict[str, float]:
        """For each Kronecker block, the nats lost by replacing a sum of Kronecker products by one."""
        lost = {name: state.kl_of_sum for name, state in self.states.items()}
        return {name: kl for name, kl in lost.items() if kl is not None}


ENGINES: dict[str, type[Engine]] = {}
"""Every engine by its class's name, which is what a saved posterior holds."""


@dataclass(frozen=True, kw_only=True)
class Engine(EngineSettings, ABC):
    """An inference engine: its settings, and one entry point.

    Attributes:
        structure: The form of the Gaussians that it updates.
        needs_fisher: Whether it asks for the Fisher of a task; a model whose Fisher cannot be had is then refused.
        needs_activity: Whether it asks for E[z z^T] of a map's inputs alone; a weight that is used both straight and
            transposed, in whose Fisher gradients stand beside inputs, is then refused.
        can_stream: Whether it can learn batch by batch, from :meth:`begun` to :meth:`ended`, with no end in sight.
        sums_fisher: Whether its steps sum the Fisher themselves.
        keeps_last: Whether a segment of a stream leaves the weights of its last step; otherwise the mean of the latest.

    Example:
        >>> from dataclasses import dataclass
        >>> from nclbayes.engines import ENGINES, Engine, LaplaceNCL
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Careful(LaplaceNCL):
        ...     def run(self, problem):
        ...         print(f"{problem.task.name}: {len(problem.states)} blocks")
        ...         return super().run(problem)
        >>> issubclass(Careful, Engine), Careful(steps=10).steps, "Careful" in ENGINES
        (True, 10, True)
        >>> del ENGINES["Careful"]
    """

    structure: ClassVar[Structure] = Structure.KRONECKER
    needs_fisher: ClassVar[bool] = True
    needs_activity: ClassVar[bool] = False
    can_stream: ClassVar[bool] = False
    sums_fisher: ClassVar[bool] = False
    keeps_last: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        ENGINES[cls.__name__] = cls

    @abstractmethod
    def run(self, problem: Problem) -> Outcome:
        """Learn a task.

        Args:
            problem: The task, and the Gaussians before it.

        Returns:
            The Gaussians after it; the problem's own are left as they were.
        """

    @property
    def has_evidence(self) -> bool:
        """Whether, with these settings, it estimates the log evidence of a task."""
        return False

    def begun(self, problem: Problem) -> Stepper:
        """What takes the steps of a task.

        Args:
            problem: The task, and the Gaussians before it.

        Returns:
            The stepper, at the start.

        Raises:
            SettingError: If the engine learns whole tasks only.
        """
        raise self._no_stream()

    def ended(
        self, problem: Problem, stepper: Stepper, fishers: Mapping[str, KroneckerFisher | DiagonalFisher]
    ) -> tuple[dict[str, State], dict[str, Tensor]]:
        """What a task leaves, once its steps have been taken.

        Args:
            problem: The task, and the Gaussians before it.
            stepper: What has taken the steps.
            fishers: The task's Fisher, by block; nothing, if the steps sum it themselves.

        Returns:
            The Gaussians after it, and what to keep in memory besides.

        Raises:
            SettingError: If the engine learns whole tasks only.
        """
        raise self._no_stream()

    def _no_stream(self) -> SettingError:
        able = ", ".join(name for name, kind in ENGINES.items() if kind.can_stream)
        return SettingError(f"{type(self).__name__} learns whole tasks only. Of a stream can learn: {able}.")
