"""Networks that are kept after each task, for the figure on latent dynamics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from nclbayes.analysis.record import Record
from nclbayes.data.task import Task
from nclbayes.experiments.comparison import run_folder
from nclbayes.experiments.config import RunConfig
from nclbayes.experiments.figures.recipe import Workplace
from nclbayes.experiments.runs import reopen_each

_CORE = "body.core"


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
        accuracies: The share of each task's test examples that is classified rightly, after 0, 1, 2 ... tasks; before
            a task is learnt, that of the network as it was initialised.
    """

    config: RunConfig
    network: Any
    tasks: Sequence[Task]
    weights: Sequence[Mapping[str, Tensor]]
    accuracies: Sequence[Sequence[float]]

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


def follow(configs: Sequence[RunConfig], place: Workplace) -> list[Followed]:
    """Learn the tasks of each configuration and keep the weights after each; what is done already is read.

    Args:
        configs: The runs, which keep the posterior after each task.
        place: Where and how.

    Returns:
        The networks.
    """
    runs = [(config, run_folder(place.out / "runs", config)) for config in configs]
    records = place.run_all(runs)
    return [_followed(folder, record) for (_, folder), record in zip(runs, records, strict=True)]


def _followed(folder: Path, record: Record) -> Followed:
    config, tasks, learners = reopen_each(folder)
    model: Any = learners[0].model
    initial = {name: value.cpu() for name, value in model.initial_values().items()}
    later = [{name: value.cpu() for name, value in learner.mean().items()} for learner in learners]
    learnt = [[score.accuracy for score in row[: k + 1]] for k, row in enumerate(record.scores)]
    accuracies = [[*row, *record.baseline[len(row) :]] for row in ([], *learnt)]
    return Followed(config, model.to("cpu").network, tasks, [initial, *({**initial, **w} for w in later)], accuracies)


def _test(task: Task) -> tuple[Tensor, Tensor, Tensor]:
    assert task.test is not None
    x, lengths, y = task.test
    return x, lengths, y
