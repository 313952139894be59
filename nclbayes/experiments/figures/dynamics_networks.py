"""Networks that are kept after each task, for the figure on latent dynamics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from nclbayes.experiments.comparison import run_folder
from nclbayes.experiments.figures.recipe import Workplace
from nclbayes.experiments.runs import RunConfig, claim_folder
from nclbayes.experiments.setups import find_setup
from nclbayes.methods import find_method
from nclbayes.storage import read_file, write_file
from nclbayes.task import Task

_CORE = "body.core"
_KIND = "weights after each task"


@dataclass(frozen=True)
class Trials:
    """The stimuli of one task that a network is shown at all times.

    Attributes:
        x: [examples, time, inputs].
        lengths: How many steps of each are valid, [examples].
        labels: 0 or 1, [examples].
    """

    x: Tensor
    lengths: Tensor
    labels: Tensor

    @classmethod
    def of(cls, task: Task, each: int) -> Trials:
        """The first test examples of each class.

        Args:
            task: A task of stroke MNIST.
            each: How many of each class, if there are so many.

        Returns:
            The trials, class 0 first.
        """
        x, lengths, y = _test(task)
        chosen = torch.cat([(y[:, 0] == label).nonzero().squeeze(-1)[:each] for label in (0, 1)])
        return cls(x[chosen, : int(lengths[chosen].max())], lengths[chosen], y[chosen, 0])


@dataclass(frozen=True)
class Followed:
    """A network that learnt tasks one after the other.

    Attributes:
        config: The run.
        network: A recurrent core with one head a task.
        tasks: The tasks.
        weights: The network's parameters after 0, 1, 2 ... tasks: the posterior mean; where a site was not learnt yet,
            as it was initialised.
    """

    config: RunConfig
    network: Any
    tasks: Sequence[Task]
    weights: Sequence[Mapping[str, Tensor]]

    def states(self, after: int, trials: Trials) -> Tensor:
        """The responses of the recurrent units.

        Args:
            after: With the weights after so many tasks.
            trials: The stimuli.

        Returns:
            r_1 .. r_T, [examples, time, units].
        """
        prefix = f"{_CORE}."
        core = {
            name.removeprefix(prefix): value for name, value in self.weights[after].items() if name.startswith(prefix)
        }
        with torch.no_grad():
            return functional_call(self.network.get_submodule(_CORE), core, (trials.x, trials.lengths))

    def accuracy(self, after: int, task: Task) -> float:
        """The share of a task's test examples that are classified rightly at the last step.

        Args:
            after: With the weights after so many tasks.
            task: The task.

        Returns:
            From 0 to 1.
        """
        x, lengths, y = _test(task)
        with torch.no_grad():
            output = functional_call(self.network, dict(self.weights[after]), (x, lengths), task.context)
        return float((output[:, -1].argmax(-1) == y[:, -1]).double().mean())


def follow(configs: Sequence[RunConfig], place: Workplace) -> list[Followed]:
    """Learn the tasks of each configuration and keep the weights after each; what is done already is read.

    Args:
        configs: The runs, each with its own folder in ``runs``.
        place: Where and how.

    Returns:
        The networks.
    """
    out = place.out / "runs"
    if place.jobs > 1:
        # Each process with its share of the cores; the results are in the folders.
        threads = max(1, torch.get_num_threads() // place.jobs)
        context = get_context("spawn")
        with ProcessPoolExecutor(place.jobs, context, torch.set_num_threads, (threads,)) as pool:
            waiting = [pool.submit(_learn_quietly, config, run_folder(out, config)) for config in configs]
            for config, done in zip(configs, waiting, strict=True):
                done.result()
                place.say(f"{config.method}, seed {config.seed}: learnt")
    return [_learn(config, run_folder(out, config), place) for config in configs]


def _learn_quietly(config: RunConfig, out: Path) -> None:
    _learn(config, out, Workplace(out, progress=False))


def _learn(config: RunConfig, out: Path, place: Workplace) -> Followed:
    setup, method = find_setup(config.set), find_method(config.method)
    tasks = setup.make_tasks(config.scenario, config.seed, config.size)[: config.tasks]
    model = setup.make_model(tasks, config.scenario, config.prior_scale, config.seed, config.units).to(config.device)
    initial = {name: value.cpu() for name, value in model.initial_values().items()}
    claim_folder(out, config)
    kept: dict[str, Tensor] = {}
    if (out / "weights.ncl").exists():
        kept, _ = read_file(out / "weights.ncl", _KIND)
    weights = _by_time(kept, initial)
    if len(weights) <= len(tasks):
        if (out / "posterior.ncl").exists():
            learner = method.learner.load(out / "posterior.ncl", model).to(config.device)
        else:
            learner = method.build(model, config.settings, torch.Generator().manual_seed(config.seed))
        # The posterior is written first: if no more than that was done, its weights are still to be kept.
        while len(weights) <= len(tasks):
            after = len(weights)
            if len(learner.tasks) < after:
                task = tasks[after - 1]
                place.say(f"{config.method}, seed {config.seed}: {after}/{len(tasks)} {task.name}")
                learner.update(task, progress=place.progress, checkpoint=out / "update.ckpt")
                learner.save(out / "posterior.ncl")
            kept |= {f"{after}/{name}": value.cpu() for name, value in learner.mean().items()}
            write_file(out / "weights.ncl", _KIND, kept, {})
            weights = _by_time(kept, initial)
    return Followed(config, model.to("cpu").network, tasks, weights)


def _test(task: Task) -> tuple[Tensor, Tensor, Tensor]:
    assert task.test is not None
    x, lengths, y = task.test
    return x, lengths, y


def _by_time(kept: Mapping[str, Tensor], initial: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The weights after 0, 1, 2 ... tasks, from names such as "2/body.core.weight"."""
    weights = [dict(initial)]
    while any(name.startswith(f"{len(weights)}/") for name in kept):
        prefix = f"{len(weights)}/"
        found = {name.removeprefix(prefix): value for name, value in kept.items() if name.startswith(prefix)}
        weights.append({**initial, **found})
    return weights
