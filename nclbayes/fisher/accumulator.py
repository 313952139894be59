"""The Fisher of a model, summed over batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nclbayes.blocks import Block, DiagonalBlock, KroneckerBlock
from nclbayes.blocks.structures import known_blocks
from nclbayes.errors import DataError, ModelError, NonFiniteError, SettingError, ValuesError
from nclbayes.fisher.backward import KroneckerUses, backpropagated
from nclbayes.fisher.diagonal import DiagonalFisher, DiagonalSums, Pairs
from nclbayes.fisher.one_by_one import OneByOne
from nclbayes.fisher.per_example import ExampleGradients
from nclbayes.fisher.separate import Told, gradients_of, pieces_of, summed
from nclbayes.fisher.sharing import summed_over
from nclbayes.fisher.sums import BlockSums, KroneckerFisher
from nclbayes.fisher.targets import (
    Draws,
    FisherKind,
    Target,
    as_observed,
    draw_unlikely,
    enumerate_targets,
    score,
    temper,
)
from nclbayes.fisher.verify import agree, verify_uses
from nclbayes.fisher.whole import WholeBatch, own_noise
from nclbayes.isolation import as_found, drawing_from
from nclbayes.ranks import WHOLE, Ranks, Share
from nclbayes.storage import under
from nclbayes.watch import LinearUse, ModelRun, Observed, Separable, watch
from nclbayes.watch.nesting import tensors_of
from nclbayes.watch.run import Batch, Model, batch_size


class FisherAccumulator:
    """Sums a model's Fisher over batches; memory does not grow with their number.

    Args:
        model: The Pyro model, called as ``model(*batch, **context)``.
        values: The weights, by site.
        kind: "model", "signs", "exact" or "empirical".
        samples: How many targets to draw for each example (kinds "model" and "signs").
        temperature: Divides the logits of Categorical and Bernoulli outputs.
        diagonal: Whether to sum the diagonal only, also of linear maps.
        blocks: Blocks that are known, by name: they say how much of their factors is summed. By default all is.
        context: Keyword arguments of the model.
        generator: Decides all draws; by default one seeded with 0. The global random state is left as found.

    Raises:
        SettingError: If a setting is out of range.

    Example:
        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from nclbayes import FisherAccumulator
        >>> def model(x, y):
        ...     w = pyro.sample("w", dist.Normal(torch.zeros(3, 2), 1.0).to_event(2))
        ...     pyro.sample("y", dist.Normal(x @ w, 1.0).to_event(1), obs=y)
        >>> fisher = FisherAccumulator(model, {"w": torch.ones(3, 2)}, kind="exact")
        >>> for _ in range(4):
        ...     run = fisher.update((torch.ones(5, 3), torch.zeros(5, 2)))
        >>> factors = fisher.factors(size=100)["w"]
        >>> factors.input[0, 0].item(), factors.output[0, 0].item()
        (1.0, 100.0)
    """

    def __init__(
        self,
        model: Model,
        values: Mapping[str, Tensor],
        *,
        kind: FisherKind | str = FisherKind.MODEL,
        samples: int = 1,
        temperature: float = 1.0,
        diagonal: bool = False,
        blocks: Mapping[str, Block] | None = None,
        context: Mapping[str, Any] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        try:
            self.kind = FisherKind(kind)
        except ValueError:
            allowed = ", ".join(repr(k.value) for k in FisherKind)
            raise SettingError(f"Unknown kind of Fisher {kind!r}; choose one of {allowed}.") from None
        if samples < 1:
            raise SettingError(f"samples must be at least 1, not {samples}.")
        if not temperature > 0:
            raise SettingError(f"temperature must be positive, not {temperature}.")
        self.model = model
        self.values = values
        self.samples = samples if self.kind.is_drawn else 1
        self.temperature = temperature
        self.diagonal = diagonal
        self.context = dict(context or {})
        self.generator = torch.Generator().manual_seed(0) if generator is None else generator
        self.blocks: dict[str, Block] = {}
        self._known = dict(blocks or {})
        self.examples = 0.0
        self._forms: dict[Any, list[Block]] = {}
        self._sums: dict[str, BlockSums] = {}
        self._squares = DiagonalSums()
        self._examples = ExampleGradients(model, self.context, temperature)
        # Blocks whose uses do not tell examples apart, though it looks as if they did.
        self._mixed: set[str] = set()

    def update(self, batch: Batch, weight: float = 1.0, share: Share = WHOLE) -> ModelRun:
        """Add one batch.

        Args:
            batch: The model's positional arguments; the last tensor is the observed one.
            weight: What each of its examples counts.
            share: Which examples these are, of a batch that is added in parts, or by several ranks: if each of them
                begins with the same state of the generator, targets are those of the whole batch.

        Returns:
            What the run on that batch showed, such as the distributions of the observed sites.

        Raises:
            NonFiniteError: If an activation or gradient is NaN or infinite.
        """
        return as_found(self.model, lambda: self._run_and_add(batch, weight, share))

    def _run_and_add(self, batch: Batch, weight: float, share: Share) -> ModelRun:
        with drawing_from(self.generator, _device(batch)):
            with own_noise(share, _device(batch)):
                run = watch(self.model, batch, self.values, self.context)
            self._add(run, batch, weight, share)
        return run

    def add(self, run: ModelRun, batch: Batch, weight: float = 1.0, share: Share = WHOLE) -> None:
        """Add a batch on which the model has been run already.

        Args:
            run: The watched run, at these or at other weights.
            batch: Its batch.
            weight: What each of the batch's examples counts. Growing weights make a moving average.
            share: As of :meth:`update`.

        Raises:
            NonFiniteError: If an activation or gradient is NaN or infinite.
            UnsupportedUseError: If what was seen of a weight does not add up to its gradient; checked on the first
                batch of each form.
        """
        as_found(self.model, lambda: self._add_drawn(run, batch, weight, share))

    def _add_drawn(self, run: ModelRun, batch: Batch, weight: float, share: Share) -> None:
        with drawing_from(self.generator, _device(batch)):
            self._add(run, batch, weight, share)

    def scale(self, factor: float) -> None:
        """Multiply the weight of everything added so far; the Fisher of a given size stays the same.

        Args:
            factor: By what.
        """
        for sums in self._sums.values():
            sums.scale(factor)
        self._squares.scale(factor)
        self.examples *= factor

    def of_all(self, ranks: Ranks) -> FisherAccumulator:
        """What all ranks have summed, each its share; itself, if there is one rank.

        Args:
            ranks: The ranks.

        Returns:
            The sums over all of them, the same on each.
        """
        if not ranks.are_many:
            return self
        kinds, own = {name: sums.dtype for name, sums in self._sums.items()}, self._totals()
        kinds, totals = summed_over(ranks, kinds, own)
        whole = FisherAccumulator(self.model, self.values, kind=self.kind, samples=self.samples)
        blocks = self._known | self.blocks
        for name, dtype in kinds.items():
            block = blocks[name]
            assert isinstance(block, KroneckerBlock)
            whole._sums[name] = BlockSums(block, dtype, own["examples"].device)
            whole._sums[name].take(under(totals, f"kronecker.{name}."))
        whole._squares.squares = under(totals, "diagonal.")
        whole.blocks, whole.examples = blocks, float(totals["examples"])
        return whole

    def _totals(self) -> dict[str, Tensor]:
        """What was summed, each number once; a copy."""
        device = next(iter(self.values.values())).device
        found = {"examples": torch.tensor(self.examples, dtype=torch.float64, device=device)}
        for name, sums in self._sums.items():
            found |= {f"kronecker.{name}.{part}": tensor for part, tensor in sums.totals().items()}
        return found | {f"diagonal.{name}": squares.clone() for name, squares in self._squares.squares.items()}

    def factors(self, size: float | None = None) -> dict[str, KroneckerFisher | DiagonalFisher]:
        """The Fisher of `size` examples like those seen.

        Args:
            size: The number of examples, N; by default as many as were seen.

        Returns:
            For every block that the likelihood depends on, its factors.

        Raises:
            DataError: If no batch was added.
            NonFiniteError: If an activation or gradient was NaN or infinite.
        """
        return dict(self.one_by_one(size))

    def one_by_one(self, size: float | None = None) -> Mapping[str, KroneckerFisher | DiagonalFisher]:
        """The same, each made when it is asked for: not all of them need be held, or made on every rank.

        Args:
            size: As of :meth:`factors`.

        Returns:
            The factors by block.
        """
        if self.examples == 0:
            raise DataError("No batch was added, so there is no Fisher yet.")
        scale = 1.0 if size is None else size / self.examples
        for sums in self._sums.values():
            sums.multiply()
        self._check_finite()
        return OneByOne(self._sums, self._squares.squares, scale, self.samples, self.examples)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that is summed, to be restored exactly."""
        found = {"examples": torch.tensor(self.examples, dtype=torch.float64, device="cpu")}
        for name, sums in self._sums.items():
            found |= {f"kronecker.{name}.{part}": tensor for part, tensor in sums.tensors().items()}
        return found | {f"diagonal.{name}": squares for name, squares in self._squares.squares.items()}

    def restore(self, tensors: Mapping[str, Tensor], blocks: Mapping[str, Block], like: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`tensors` gave.

        Args:
            tensors: Its result.
            blocks: The blocks, by name.
            like: A tensor of the rows' dtype and device for each block.
        """
        self.examples = float(tensors["examples"])
        for name, block in blocks.items():
            summed = under(tensors, f"kronecker.{name}.")
            if summed and isinstance(block, KroneckerBlock):
                self.blocks[name] = block
                self._sums[name] = BlockSums(block, like[name].dtype, like[name].device)
                self._sums[name].restore(summed)
            elif f"diagonal.{name}" in tensors:
                self.blocks[name] = block
                squares = torch.zeros(block.shape, dtype=torch.float64, device=like[name].device)
                self._squares.squares[name] = squares.copy_(tensors[f"diagonal.{name}"])

    def _add(self, run: ModelRun, batch: Batch, weight: float, share: Share) -> None:
        blocks, is_new = self._meet(run)
        observed = temper(run.observed, self.temperature)
        kronecker = {b.weight: KroneckerUses(b) for b in blocks if isinstance(b, KroneckerBlock)}
        for use in run.linear:
            if use.weight in kronecker:
                kronecker[use.weight].uses.append(use)
        groups = list(kronecker.values())
        for group in groups:
            self._check_examples(group.uses, run)
        # What has a diagonal Fisher: all that is no linear map, or everything.
        squared = [block for block in blocks if self.diagonal or isinstance(block, DiagonalBlock)]
        alone = partial(self._examples.moments, batch, run)
        separate = {b: pieces_of(b, run) for b in blocks if isinstance(b, DiagonalBlock) and b.name not in self._mixed}
        if is_new:
            self._verify(run, batch, observed, blocks, groups, separate)
        separate = {block: pieces for block, pieces in separate.items() if block.name not in self._mixed}
        for target in self._targets(observed, run, share):
            total = score(observed, target)
            if total.requires_grad:
                seen, told = backpropagated(total, groups, separate)
                moments = {b.name: summed(b, pairs, run.examples, total.device) for b, pairs in told.items()}
                self._squares.add(squared, seen, moments, run.examples, partial(alone, target), weight)
                if not self.diagonal:
                    self._add_gradients(groups, seen, weight)
        for group in groups:
            if group.reached and not self.diagonal:
                self._sums[group.block.name].add_inputs([group.uses[i] for i in sorted(group.reached)], weight)
        self.examples += weight * run.examples
        self._check_finite()

    def _verify(
        self,
        run: ModelRun,
        batch: Batch,
        observed: Mapping[str, Observed],
        blocks: Sequence[Block],
        groups: list[KroneckerUses],
        separate: Mapping[DiagonalBlock, list[Separable] | None],
    ) -> None:
        """Refuse a model of which something was not seen."""
        # Of their own stream, so that a check more or less changes no other draw.
        device = next(iter(observed.values())).value.device
        with drawing_from(torch.Generator().manual_seed(0), device):
            target = draw_unlikely(observed)
        total = score(observed, target)
        if total.requires_grad:
            seen, told = backpropagated(total, groups, separate)
            alone = partial(self._examples.moments, batch, run, target)
            self._spot_check(batch, run, target, told)
            found = {b.name: summed(b, pairs, run.examples, total.device).whole(b.shape) for b, pairs in told.items()}
            others = [b for b in blocks if isinstance(b, DiagonalBlock) and (b not in told or b.name in self._mixed)]
            found |= alone(others) if others else {}
            verify_uses(run, blocks, seen, found, total)
            if self.diagonal:
                maps = [group.block for group in groups]
                self._squares.verify(maps, seen, run.examples, alone, run.eps)

    def _spot_check(self, batch: Batch, run: ModelRun, target: Target, told: Mapping[DiagonalBlock, Told]) -> None:
        """Compare what uses tell of one example with that example by itself.

        A dimension may be as long as the batch by chance: where it is not the examples', uses are not asked again.
        """
        which = run.examples // 2
        checked = [block for block, pairs in told.items() if pairs]
        # What the model draws then comes from a stream of its own too.
        with drawing_from(torch.Generator().manual_seed(0), _device(batch)):
            expected = self._examples.of_one(batch, run, target, checked, which) if checked else None
        for block in checked:
            gradient = gradients_of(told[block], slice(which, which + 1))[0]
            if expected is not None and not agree(expected[block.name], gradient, eps=run.eps):
                self._mixed.add(block.name)

    def _meet(self, run: ModelRun) -> tuple[list[Block], bool]:
        """The run's blocks, which must be those of earlier runs or new; and whether its form is new."""
        missing = [name for name in run.latents if name not in self.values]
        if missing:
            raise ValuesError(
                f"The model has latent sites without a value: {', '.join(map(repr, missing))}. Give every one of them "
                "a value; a model that learns must sample every weight in every call, whether it is used or not."
            )
        form = (
            tuple((use.weight, use.bias, use.function, use.transposed) for use in run.linear),
            tuple((other.site, other.call, other.separable is not None) for other in run.others),
        )
        if form in self._forms:
            return self._forms[form], False
        blocks = known_blocks(run, self._known)
        for name, block in blocks.items():
            if self.blocks.setdefault(name, block) != block:
                raise ModelError(f"Block '{name}' changed its form between batches: {self.blocks[name]}, {block}.")
        self._forms[form] = list(blocks.values())
        return self._forms[form], True

    def _targets(self, observed: Mapping[str, Observed], run: ModelRun, share: Share) -> Iterator[Target]:
        if self.kind is FisherKind.EMPIRICAL:
            yield as_observed(observed)
        elif self.kind is FisherKind.EXACT:
            yield from enumerate_targets(observed, run)
        else:
            signs = self.kind is FisherKind.SIGNS
            draws = WholeBatch(observed, run, share, signs) if share.examples else Draws(observed, signs)
            for _ in range(self.samples):
                yield draws.draw()

    def _add_gradients(self, groups: list[KroneckerUses], seen: Mapping[str, Pairs], weight: float) -> None:
        for group in groups:
            name, pairs = group.block.name, seen[group.block.name]
            if pairs:
                if name not in self._sums:
                    grad = pairs[0][1]
                    dtype = torch.promote_types(grad.dtype, torch.float32)
                    self._sums[name] = BlockSums(group.block, dtype, grad.device)
                self._sums[name].add_gradients(pairs, weight)

    def _check_examples(self, uses: Sequence[LinearUse], run: ModelRun) -> None:
        """Only drawn targets make the cross terms of a row that all examples share vanish."""
        # The maps of a stack may have shared the examples among them.
        dealt = sum(use.rows.count for use in uses if use.maps is not None)
        for use in uses:
            count = use.rows.count if use.maps is None else dealt
            if not self.kind.is_drawn and count % run.examples:
                raise DataError(
                    f"{use.call} with weight '{use.weight}' has {count} rows for {run.examples} examples: they "
                    "share rows, or not all of them have one, and a Fisher of kind "
                    f"'{self.kind.value}' cannot tell whose rows they are. Use kind='model'."
                )

    def _check_finite(self) -> None:
        for name, sums in self._sums.items():
            side = sums.non_finite_side()
            if side is not None:
                raise NonFiniteError(
                    f"NaN or infinity in the {side} of the map with weight '{self.blocks[name].sites[0]}', up to "
                    f"example {self.examples:.0f}. Look at the data and the weights; nothing was added to hide it."
                )
        self._squares.check_finite(self.examples)


def _device(batch: Batch) -> torch.device:
    batch_size(batch)
    return next(tensor.device for _, tensor in tensors_of(batch))
