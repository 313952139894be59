"""The Fishers of recurrent networks, task after task: of random networks, and of networks that learn.

All are those of W, the recurrent and input weights, and of one trial: a prior of precision 1 then counts as much as one
trial does, as in the paper, which divides by the number of trials.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyro.distributions as dist
import torch

from nclbayes.data.task import to_device
from nclbayes.engines import LaplaceNCL
from nclbayes.experiments.figures.recipe import Workplace
from nclbayes.experiments.networks import SequenceRegressor
from nclbayes.experiments.setup import Setup
from nclbayes.experiments.setups import find_setup
from nclbayes.fisher import DiagonalFisher, FisherAccumulator, KroneckerFisher, fisher
from nclbayes.nn import BayesianNetwork, Normal
from nclbayes.posterior import OnlinePosterior

_METHOD = "laplace-ncl"
_FISHER_BATCH = 128


def random_fishers(settings: Mapping[str, Any], seed: int) -> Iterator[KroneckerFisher]:
    """Of random recurrent networks of ReLU units, each with weights and white inputs of its own.

    Args:
        settings: How many ``tasks``; ``units``, ``inputs`` and ``outputs`` of the networks; how many ``trials`` of how
            many ``steps``.
        seed: Decides the draws.

    Yields:
        The Fisher of one network after the other.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    trials, steps, inputs, outputs = (settings[name] for name in ("trials", "steps", "inputs", "outputs"))
    prior = dist.Normal(torch.zeros((), device="cpu"), torch.ones((), device="cpu"))
    for _ in range(settings["tasks"]):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**31, (), generator=generator, device="cpu")))
            network = SequenceRegressor(inputs, settings["units"], outputs)
        model = BayesianNetwork(network, Normal(1.0), prior, inputs=2)
        x = torch.randn(trials, steps, inputs, generator=generator, device="cpu")
        lengths, y = torch.full((trials,), steps, device="cpu"), torch.zeros(trials, steps, outputs, device="cpu")
        yield _of_core(fisher(model, model.initial_values(), (x, lengths, y), size=1, generator=generator))


def stimulus_fishers(settings: Mapping[str, Any], seed: int, place: Workplace) -> Iterator[KroneckerFisher]:
    """Of a network that learns the stimulus-response tasks.

    Args:
        settings: How many ``tasks``, ``units`` and training ``steps`` a task, the ``batch_size``, and of how many
            ``trials`` a Fisher is.
        seed: Decides the tests, the initial weights and every draw.
        place: Where and how.

    Yields:
        The Fisher of one task after the other.
    """
    yield from _learnt(find_setup("stimulus-response"), settings, seed, place)


def stroke_fishers(settings: Mapping[str, Any], seed: int, place: Workplace) -> Iterator[KroneckerFisher]:
    """Of a network that learns the tasks of stroke MNIST.

    Args:
        settings: As for :func:`stimulus_fishers`.
        seed: Decides the data that are used, the initial weights and every draw.
        place: Where and how.

    Yields:
        The Fisher of one task after the other.
    """
    yield from _learnt(find_setup("stroke-mnist"), settings, seed, place)


def _learnt(setup: Setup, settings: Mapping[str, Any], seed: int, place: Workplace) -> Iterator[KroneckerFisher]:
    """Learn the tasks one after the other by Laplace-NCL; after each, its Fisher at the new mean."""
    steps, batch_size = settings["steps"], settings["batch_size"]
    tasks = setup.make_tasks("", seed, steps * batch_size if setup.endless else None)[: settings["tasks"]]
    prior = setup.prior(_METHOD, "", paper=True)
    model = setup.make_model(tasks, "", prior, seed, settings["units"]).to(place.device)
    changed = {"steps": steps, "batch_size": batch_size, "fisher_size": settings["trials"]}
    generator = torch.Generator(device="cpu").manual_seed(seed)
    posterior = OnlinePosterior(
        model, LaplaceNCL(**{**setup.engine_settings(_METHOD, "", paper=True), **changed}), generator=generator
    )
    for task in tasks:
        place.say(f"{setup.name}: learning {task.name}")
        posterior.update(task, progress=place.progress)
        # Heads of later tasks have no posterior yet.
        values = {**model.initial_values(), **posterior.mean()}
        accumulator = FisherAccumulator(model, values, context=task.context, generator=generator)
        for batch in task.epoch(_FISHER_BATCH, generator, settings["trials"]):
            accumulator.update(to_device(batch, torch.device(place.device)))
        yield _of_core(accumulator.factors(size=1))


def _of_core(factors: Mapping[str, KroneckerFisher | DiagonalFisher]) -> KroneckerFisher:
    (found,) = (block for name, block in factors.items() if name.rpartition(".")[2] == "core")
    assert isinstance(found, KroneckerFisher)
    return found
