"""The online posterior: Gaussian blocks that tasks update, one after the other."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from nclbayes.blocks.structures import Structures
from nclbayes.data.checking import whole_number
from nclbayes.data.task import Task, own_generators
from nclbayes.engines.base import Engine
from nclbayes.engines.loop import Callback
from nclbayes.errors import FileError, ModelError, SettingError
from nclbayes.gaussians import Factors, State
from nclbayes.isolation import Alone, Turn, as_found
from nclbayes.posterior.arguments import check_posterior, check_predict, check_update, checked_engine, checked_factors
from nclbayes.posterior.belief import Belief, device_of
from nclbayes.posterior.prediction import predicted
from nclbayes.posterior.saving import Saved, check_model, fitted_learner, read_posterior, write_posterior
from nclbayes.posterior.updating import UpdateReport, first_belief, updated
from nclbayes.ranks import present, transaction
from nclbayes.storage import Misfit, refused
from nclbayes.watch.run import Model


class OnlinePosterior:
    """A Gaussian posterior over a Pyro model's weights, updated task by task.

    Args:
        model: Any Pyro model, called as ``model(*batch, **task.context)``.
        engine: How to update, unless an update says otherwise.
        initial: Where learning starts, values by site, for all sites of a block or none. By default the model's own
            ``initial_values()`` (a :class:`BayesianNetwork` has its network's parameters), else small random weights
            around the prior mean.
        generator: Decides every draw, unless an update passes another; by default one seeded with 0.
        example: A task that shows the model's sites at once: their prior is then there to look at and to sample from.
            Without it the first update shows them. Nothing is learnt from it.
        structure: What is held of the factors of a linear map: "dense", "diagonal", the width of blocks, or "auto", all
            up to a size of 2,048 and blocks beyond it; a pair of these for inputs and outputs; or a mapping from
            patterns of names, such as ``{"lm_head*": ("dense", "diagonal"), "*": "auto"}``.
        factors: Where the factors of precisions are, if several processes learn together: each has them all
            ("replicate"), or those of some blocks ("shard"). May be set at any time; the next update brings it about.

    Example:
        >>> import torch, pyro.distributions as dist
        >>> import nclbayes as ncl
        >>> model = ncl.BayesianNetwork(torch.nn.Linear(2, 1), ncl.Normal(1.0), prior=dist.Normal(0.0, 1.0))
        >>> posterior = ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=50, batch_size=8, lr=0.2))
        >>> x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
        >>> report = posterior.update(ncl.Task((x, x.sum(-1, keepdim=True)), name="sum"), progress=False)
        >>> posterior.tasks
        ('sum',)
    """

    learner_settings: ClassVar[Mapping[str, Any]] = {}
    """Further settings of a kind of posterior, with their defaults."""
    _may_hold_nan: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def check_settings(cls, settings: Mapping[str, Any]) -> None:
        """Refuse values of `learner_settings` that are out of range.

        Args:
            settings: By name.

        Raises:
            SettingError: If one is.
        """

    def __init__(
        self,
        model: Model,
        engine: Engine,
        *,
        initial: Mapping[str, Tensor] | None = None,
        generator: torch.Generator | None = None,
        example: Task | None = None,
        structure: Any = "auto",
        factors: Factors | str = Factors.REPLICATE,
    ) -> None:
        check_posterior(model, engine, initial, generator, example)
        self.model = model
        self.engine = engine
        self.factors: Factors | str = checked_factors(factors)
        self.generator = torch.Generator().manual_seed(0) if generator is None else generator
        self._initial = dict(initial) if initial is not None else None
        # Whoever changes the posterior, or draws from its generator, holds it.
        self._turn = Turn("The posterior")
        self._belief = Belief(structures=Structures.of(structure))
        if example is not None:
            initial = self._initial_values()
            self._belief = as_found(model, lambda: first_belief(self._belief, model, example, engine, initial))

    @property
    def blocks(self) -> Mapping[str, State]:
        """The blocks by name; each has its `.distribution`."""
        return MappingProxyType(dict(self._belief.states))

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the tasks seen, in order."""
        return self._belief.tasks

    @property
    def memory(self) -> Mapping[str, Tensor]:
        """What the engine, or the posterior itself, keeps besides the Gaussians."""
        return MappingProxyType(dict(self._belief.memory))

    @property
    def log_evidence(self) -> float | None:
        """The Laplace estimate of the last task's log evidence, where its engine gives one."""
        return self._belief.log_evidence

    def mean(self) -> dict[str, Tensor]:
        """The posterior mean, by site; a copy."""
        return {site: value.clone() for site, value in self._belief.mean().items()}

    def update(
        self,
        task: Task,
        *,
        engine: Engine | None = None,
        progress: bool | None = None,
        generator: torch.Generator | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 200,
        callbacks: Sequence[Callback] = (),
    ) -> UpdateReport:
        """Learn a task. If anything goes wrong, the posterior stays exactly as it was.

        Args:
            task: What to learn.
            engine: How, if not by the posterior's own.
            progress: Whether to show a bar; by default only on a terminal.
            generator: Decides every draw of this update.
            checkpoint: A file to keep snapshots in. If the update is killed, the same call on the same posterior goes
                on from the last snapshot and ends in the same posterior. The file is removed when the update is done.
            checkpoint_every: How many steps lie between snapshots.
            callbacks: Called after each step.

        Returns:
            Losses, time and what was lost.
        """
        with transaction(present(), "A call of update"):
            check_update(task, progress, generator, checkpoint_every, callbacks)
            if engine is not None:
                checked_engine(engine)
            self._refuse_while_learning(f"Task '{task.name}' cannot be learnt")
        source = self.generator if generator is None else generator
        told: dict[str, Any] = {"engine": engine, "generator": source, "progress": progress, "callbacks": callbacks}
        told |= {"checkpoint": checkpoint, "checkpoint_every": checkpoint_every}
        with self._turn.taken():
            before = self._belief

            def learn() -> UpdateReport:
                belief = before

                def commit() -> None:
                    self._belief = belief

                # Where processes learn together, all of them have the new belief, or none.
                with transaction(present(device_of(before, self.model, task)), f"Task '{task.name}'", commit):
                    belief, report = self._update(task, **told)
                return report

            sources = (source, *own_generators(task))
            return as_found(self.model, learn, generators=sources, is_done=lambda: self._belief is not before)

    def _update(self, task: Task, **settings: Any) -> tuple[Belief, UpdateReport]:
        """What the posterior's belief becomes with a task; other kinds of posterior do it otherwise."""
        return self._updated(task, **settings)

    def predict(
        self,
        *inputs: Any,
        num_samples: int | None = None,
        method: str | None = None,
        generator: torch.Generator | None = None,
        **context: Any,
    ) -> Any:
        """The distribution of the targets of new inputs.

        Args:
            *inputs: What the model takes, without the observed argument.
            num_samples: How many samples of the weights to average over; None: 32 of them if the method is "samples".
            method: "mean": the weights at the posterior mean; "samples"; "linearized": the network linearised around
                the mean, whose outputs are Gaussian (for Categorical and Normal outputs; `num_samples` is then the
                number of draws of a Categorical's logits, 256 by default); "probit": the same in closed form; or
                "last-layer": that for the last map alone. By default "samples" if `num_samples` is given, else "mean".
            generator: Decides the samples; by default the posterior's own.
            **context: Keyword arguments of the model, such as ``head=2``.

        Returns:
            A torch distribution.

        Raises:
            DataError: If an input is an array, or the model cannot take the inputs.
            ModelError: If no task has been learnt yet, or the output is not one that can be linearised.
            SettingError: If the method is unknown, or `num_samples` less than 1, or given for the mean.
        """
        if not self._belief.outputs:
            raise ModelError("There is nothing to predict from yet: call update(task) first.")
        check_predict(inputs, num_samples, method, generator)
        method = method or ("mean" if num_samples is None else "samples")
        if generator is None and method == "mean":
            # At the mean a network's own noise comes from a fixed seed, so that to look changes nothing.
            generator = torch.Generator().manual_seed(0)
        # Draws of the posterior's own generator wait until an update in another thread is done with it.
        with nullcontext() if generator is not None else self._turn.taken():
            source, model = self.generator if generator is None else generator, self.model
            return as_found(model, lambda: predicted(self._belief, model, inputs, context, method, num_samples, source))

    def guide(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The posterior as a Pyro guide: one auxiliary site a block, then the block's sites.

        Args:
            *args: The model's arguments, which are not needed.
            **kwargs: Likewise.

        Returns:
            The weights, by site.
        """
        return self._belief.guide()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the posterior to a file: tensors and settings, no code. The model itself is not saved.

        Where ranks have the factors together, all of them must call it, and the first one writes.

        Args:
            path: Where to.
        """
        with self._turn.taken():
            write_posterior(path, self._saved())

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Model) -> OnlinePosterior:
        """Read a posterior from a file.

        Args:
            path: Where from.
            model: The model that it is of.

        Returns:
            The posterior, on the CPU.

        Raises:
            FileError: If the file is damaged or foreign, of another kind of posterior, or of another model.
        """
        # Tensors that were made in inference mode could not be learnt from.
        return cls._from(path, as_found(None, lambda: read_posterior(path)), model)

    def _saved(self) -> Saved:
        learner = {name: getattr(self, name) for name in self.learner_settings}
        return Saved(self._belief, self.engine, self.generator, self._initial, learner, type(self).__name__)

    @classmethod
    def _from(cls, path: str | os.PathLike[str], saved: Saved, model: Model) -> OnlinePosterior:
        if saved.kind not in ("", cls.__name__):
            raise FileError(f"'{path}' was written by {saved.kind}, not {cls.__name__}: use {saved.kind}.load.")
        with refused(path, "a posterior of nclbayes"):
            learner = fitted_learner(cls, saved.learner)
            posterior = cls(model, saved.engine, generator=saved.generator, **learner)
            posterior._belief = saved.belief
            posterior._initial = None if saved.initial is None else dict(saved.initial)
            posterior._check_memory()
        check_model(path, model, saved.belief)
        for notice in saved.notices:
            warnings.warn(notice, stacklevel=3)
        return posterior

    def sample(self, num_samples: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Draw weights.

        Args:
            num_samples: How many.
            generator: Decides the draws; by default the posterior's own.

        Returns:
            For each site, [num_samples, ...].

        Raises:
            SettingError: If `num_samples` is not a whole number of at least 0.
        """
        num_samples = whole_number("num_samples", num_samples, least=0)
        with nullcontext() if generator is not None else self._turn.taken():
            return self._belief.sample(num_samples, self.generator if generator is None else generator)

    def log_prob(self, values: Mapping[str, Tensor]) -> Tensor:
        """The joint log density of weights.

        Args:
            values: For every site of the posterior, ``[*samples, ...]``.

        Returns:
            ``[*samples]``.

        Raises:
            ValuesError: If a site is missing, misshapen, or unknown.
        """
        return self._belief.log_prob(values)

    def entropy(self) -> float:
        """Differential entropy in nats."""
        return self._belief.entropy()

    def kl(self, other: OnlinePosterior) -> float:
        """KL( self || other ) in nats, of two posteriors over the same blocks.

        Args:
            other: The other posterior.

        Returns:
            The divergence.

        Raises:
            ModelError: If their blocks are not the same.
        """
        return self._belief.kl(other._belief)

    def to(self, device: torch.device | str) -> OnlinePosterior:
        """Move the posterior, and its model if that is a module.

        Args:
            device: Where to.

        Returns:
            The posterior itself.
        """
        self._refuse_while_learning("The posterior cannot be moved")
        with self._turn.taken():
            moved = as_found(None, lambda: self._belief.to(torch.device(device)))
            if isinstance(self.model, torch.nn.Module):
                with Alone():
                    self.model.to(torch.device(device))
            self._belief = moved
        return self

    def __repr__(self) -> str:
        seen = f"tasks seen: {', '.join(self.tasks) or 'none yet'}"
        return "\n".join([f"OnlinePosterior({type(self.engine).__name__}, {seen})", *self._belief.described()])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_turn"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._turn = Turn("The posterior")

    def _refuse_while_learning(self, what: str) -> None:
        if self._turn.is_mine:
            raise SettingError(
                f"{what} in a callback of an update of the same posterior: one of the two would be lost. Do it with "
                "another posterior there, or with this one afterwards."
            )

    def _check_memory(self) -> None:
        """Refuse what a file may have put there in place of what was kept."""
        for name, tensor in self._belief.memory.items():
            if not name.startswith(self._may_hold_nan) and not bool(torch.isfinite(tensor).all()):
                raise Misfit(f"the tensor '/memory/{name}' has NaN or infinite entries")

    def _updated(
        self,
        task: Task,
        *,
        belief: Belief | None = None,
        initial: Mapping[str, Tensor] | None = None,
        engine: Engine | None = None,
        generator: torch.Generator | None = None,
        **settings: Any,
    ) -> tuple[Belief, UpdateReport]:
        """What the posterior's belief, or another one, becomes with a task; the posterior stays as it is."""
        return updated(
            self._belief if belief is None else belief,
            self.model,
            task,
            self.engine if engine is None else engine,
            initial=self._initial_values() if initial is None else initial,
            generator=self.generator if generator is None else generator,
            factors=checked_factors(self.factors),
            **settings,
        )

    def _initial_values(self) -> Mapping[str, Tensor] | None:
        if self._initial is not None:
            return self._initial
        initial_values = getattr(self.model, "initial_values", None)
        return None if initial_values is None else initial_values()
