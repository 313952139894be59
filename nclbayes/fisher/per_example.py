"""Per-example gradients, for the sites that are no linear maps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pyro
import torch
from torch import Tensor
from torch.func import grad, vmap

from nclbayes.blocks import Block
from nclbayes.errors import UnsupportedUseError
from nclbayes.fisher.targets import Target, example_axis, score, temper
from nclbayes.isolation.autocasting import as_called
from nclbayes.isolation.failures import first_line, is_plain
from nclbayes.watch import ModelRun, SiteRecorder
from nclbayes.watch.nesting import mapped
from nclbayes.watch.run import Batch, Model

# Gradients are formed for so many numbers at a time, to bound the memory that they take.
NUMBERS = 1 << 24


class NoisyModelError(UnsupportedUseError):
    """A model draws random numbers itself, so that its examples cannot be run again one by one."""


class Moments(NamedTuple):
    """What per-example gradients of a block add up to.

    Attributes:
        total: Their sum, of the block's shape.
        squares: That of their squares, float64.
        rows: Of a table, which rows alone both have; elsewhere they are zero. None: all.
    """

    total: Tensor
    squares: Tensor
    rows: Tensor | None = None

    def whole(self, shape: Sequence[int]) -> Moments:
        """The same with all rows.

        Args:
            shape: The block's.

        Returns:
            Both of that shape.
        """
        if self.rows is None:
            return self
        total, squares = (part.new_zeros(*shape).index_copy_(0, self.rows, part) for part in self[:2])
        return Moments(total, squares)


class ExampleGradients:
    """Runs a model's examples again, each by itself: vectorised, or, where the model cannot be, one after the other.

    Args:
        model: The Pyro model.
        context: Its keyword arguments.
        temperature: The Fisher's temperature.
    """

    def __init__(self, model: Model, context: Mapping[str, Any], temperature: float) -> None:
        self._model, self._context, self._temperature = model, context, temperature
        self._one_at_a_time = False

    def moments(self, batch: Batch, run: ModelRun, target: Target, blocks: Sequence[Block]) -> dict[str, Moments]:
        """The sums over examples of their gradients, and of the squares.

        Args:
            batch: The model's positional arguments, examples along the first dimension of every tensor.
            run: A watched run on that batch.
            target: Values and weights of the observed sites.
            blocks: What to differentiate by.

        Returns:
            By block.

        Raises:
            NoisyModelError: If the model draws random numbers.
            UnsupportedUseError: If the model cannot take its examples one by one.
        """
        found: dict[str, Moments] = {}
        for gradients in self._pieces(batch, run, target, [site for block in blocks for site in block.sites]):
            for block in blocks:
                matrices = block.pack(gradients)
                total, squares = matrices.sum(0), matrices.double().square().sum(0)
                if block.name in found:
                    total, squares = total + found[block.name].total, squares + found[block.name].squares
                found[block.name] = Moments(total, squares)
        return found

    def of_one(
        self, batch: Batch, run: ModelRun, target: Target, blocks: Sequence[Block], which: int
    ) -> dict[str, Tensor] | None:
        """The gradient of one example, run by itself.

        Args:
            batch: As for :meth:`moments`.
            run: As there.
            target: As there.
            blocks: As there.
            which: The example.

        Returns:
            By block; None if the model draws random numbers, which would be others then.
        """
        values = {name: latent.value.detach() for name, latent in run.latents.items()}
        chosen = {site: values.pop(site) for block in blocks for site in block.sites}
        axes = {name: example_axis(run, name) for name in target.values}
        likelihood = partial(self._log_likelihood, values, target)
        before = torch.get_rng_state()
        gradient = _alone(likelihood, chosen, *_some(batch, target, axes, which, 1))
        if not torch.equal(before, torch.get_rng_state()):
            return None
        return {block.name: block.pack(gradient) for block in blocks}

    def _pieces(self, batch: Batch, run: ModelRun, target: Target, sites: list[str]) -> Iterator[dict[str, Tensor]]:
        """Gradients of a bounded number of examples at a time, [examples, *site] each."""
        values = {name: latent.value.detach() for name, latent in run.latents.items()}
        chosen = {name: values.pop(name) for name in sites}
        axes = {name: example_axis(run, name) for name in target.values}
        likelihood = partial(self._log_likelihood, values, target)
        several = max(1, NUMBERS // sum(value.numel() for value in chosen.values()))
        for start in range(0, run.examples, several):
            count = min(several, run.examples - start)
            if not self._one_at_a_time:
                try:
                    yield _vectorised(likelihood, chosen, *_some(batch, target, axes, start, count), axes)
                    continue
                except (RuntimeError, ValueError, TypeError, IndexError) as error:
                    self._give_up_vectorising(error, sites)
            each = [_alone(likelihood, chosen, *_some(batch, target, axes, i, 1)) for i in range(start, start + count)]
            yield {name: torch.stack([gradient[name] for gradient in each]) for name in chosen}

    def _log_likelihood(
        self,
        fixed: Mapping[str, Tensor],
        kind: Target,
        weights: dict[str, Tensor],
        examples: list[Any],
        targets: dict[str, Tensor],
        counts: dict[str, Tensor],
    ) -> Tensor:
        recorder = SiteRecorder({**fixed, **weights})
        with as_called(), recorder:
            self._model(*examples, **self._context)
        return score(temper(recorder.observed, self._temperature), replace(kind, values=targets, weights=counts))

    def _give_up_vectorising(self, error: Exception, sites: list[str]) -> None:
        """Refuse a model that draws random numbers; say what any other will cost."""
        if not is_plain(error):
            raise error
        names = ", ".join(map(repr, sites))
        if "randomness" in str(error):
            raise NoisyModelError(
                f"Sites {names} need the gradient of each example by itself, and the model draws random numbers "
                "(dropout, process noise) that would be others then. Switch the noise off, or apply these weights with "
                "F.linear, x @ w or F.conv1d/2d/3d to inputs whose first dimension is the examples."
            ) from error
        self._one_at_a_time = True
        reason = first_line(error).split(". ")[0]
        warnings.warn(
            f"Sites {names} need the gradient of each example by itself, and torch.func cannot vectorise the model "
            f"({reason}): its examples are run one after the other, which takes as long as batches of one.",
            stacklevel=2,
        )


def _some(
    batch: Batch, target: Target, axes: Mapping[str, int], start: int, count: int
) -> tuple[list[Any], dict[str, Tensor], dict[str, Tensor]]:
    """A few examples of a batch, with their targets and what these count."""
    examples = [mapped(lambda tensor: tensor.narrow(0, start, count), item) for item in batch]
    values = {name: value.narrow(axes[name], start, count) for name, value in target.values.items()}
    return examples, values, {name: value.narrow(axes[name], start, count) for name, value in target.weights.items()}


def _vectorised(
    likelihood: Callable[..., Tensor],
    weights: dict[str, Tensor],
    examples: list[Any],
    targets: dict[str, Tensor],
    counts: dict[str, Tensor],
    axes: Mapping[str, int],
) -> dict[str, Tensor]:
    """The gradients of several examples, by torch.func."""

    def one(weights: dict[str, Tensor], example: list[Any], *parts: dict[str, Tensor]) -> Tensor:
        arguments = mapped(lambda tensor: tensor.unsqueeze(0), example)
        return likelihood(weights, arguments, *({n: v.unsqueeze(axes[n]) for n, v in part.items()} for part in parts))

    in_dims = (
        None,
        mapped(lambda _: 0, examples, lambda _: None),
        {name: axes[name] for name in targets},
        {name: axes[name] for name in counts},
    )
    # Validation branches on data, which cannot be vectorised; the watched run has validated the same call.
    with pyro.validation_enabled(False):
        return vmap(grad(one), in_dims=in_dims)(weights, examples, targets, counts)


def _alone(
    likelihood: Callable[..., Tensor],
    weights: dict[str, Tensor],
    example: list[Any],
    targets: dict[str, Tensor],
    counts: dict[str, Tensor],
) -> dict[str, Tensor]:
    """The gradient of one example, by autograd."""
    leaves = {name: value.detach().requires_grad_() for name, value in weights.items()}
    try:
        with torch.enable_grad():
            total = likelihood(leaves, example, targets, counts)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if not is_plain(error):
            raise
        raise UnsupportedUseError(
            f"Sites {', '.join(map(repr, weights))} need the gradient of each example by itself, and the model cannot "
            f"take an example by itself: {first_line(error)}."
        ) from error
    found: Sequence[Tensor | None] = [None] * len(leaves)
    if total.requires_grad:
        found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if g is None else g for (name, leaf), g in zip(leaves.items(), found, strict=True)
    }
