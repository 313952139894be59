"""How outputs vary with the weights to first order: the covariances ``sum_b J_b Lambda_b^-1 J_b^T`` of examples."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import pyro
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import jacrev, vmap

from nclbayes.blocks import KroneckerBlock
from nclbayes.errors import DataError, ModelError
from nclbayes.gaussians import KroneckerState, ShardedState, State, Structure
from nclbayes.isolation.failures import first_line, is_plain, running
from nclbayes.posterior.query import Query, Seen, base_of
from nclbayes.watch import LinearUse, MapRecorder
from nclbayes.watch.nesting import mapped, tensors_of
from nclbayes.watch.rows import ConvolutionRows, ProductRows

# What is held at a time are about so many numbers: of Jacobians, or of rows.
_JACOBIAN_NUMBERS, _ROW_NUMBERS = 1 << 26, 1 << 24
# So many examples tell how many numbers each of them needs.
_FIRST = 32
# An example by itself must have the Jacobian that rows tell of it, up to rounding in single precision.
_AGREE = 2e-3
# What torch says where it cannot vectorise: what looks into its data, some layers in mixed precision, checkpointing.
_NOT_VECTORISED = ("vmap", "expected scalar type", "saved tensor hooks")


@dataclass(frozen=True)
class Linearisation:
    """A network around a setting of its weights.

    Attributes:
        query: The model and its inputs, examples along the first dimension of each tensor.
        parameter: Which parameter of the output's distribution counts.
        values: The weights, by site.
        states: The blocks' Gaussians.
        priors: The normals of weights that belong to none of them, by site.
    """

    query: Query
    parameter: str
    values: Mapping[str, Tensor]
    states: Mapping[str, State]
    priors: Mapping[str, Any]

    def covariance(self, outputs: int, examples: int) -> Tensor:
        """The covariance of each example's outputs.

        A linear map that is used as such costs a backward pass for each output, and no Jacobian is formed: of rows z
        and g it is ``sum (z^T A^-1 z') (g^T G^-1 g')``. For other weights Jacobians are computed example by example.

        Args:
            outputs: How many outputs an example has.
            examples: How many examples there are.

        Returns:
            [examples, outputs, outputs].
        """
        return self._covariance(self._first(examples), outputs, examples)

    def _covariance(self, first: Seen, outputs: int, examples: int) -> Tensor:
        found, rest = self._by_rows(first, outputs, examples), set(self.states)
        total: Tensor | None = None
        if found is not None:
            total, known = found
            rest -= known
        sites = [site for name in self.states if name in rest for site in self.states[name].block.sites]
        sites += list(self.priors)
        if sites or total is None:
            further = self._by_jacobians(sites, rest, outputs)
            total = further if total is None else total + further
        return total

    def of_last(self, outputs: int, examples: int) -> Tensor:
        """The same, where only the weights of the last linear map are uncertain.

        Args:
            outputs: How many outputs an example has.
            examples: How many examples there are.

        Returns:
            [examples, outputs, outputs].

        Raises:
            ModelError: If the network has none.
        """
        first = self._first(examples)
        weights = {s.block.sites[0]: name for name, s in self.states.items() if s.structure is Structure.KRONECKER}
        last = next((weights[use.weight] for use in reversed(first.linear) if use.weight in weights), None)
        if last is None:
            raise ModelError("The model has no linear map with a Gaussian of its own: use method='linearized'.")
        return replace(self, states={last: self.states[last]}, priors={})._covariance(first, outputs, examples)

    def _by_rows(self, first: Seen, outputs: int, examples: int) -> tuple[Tensor, set[str]] | None:
        """The part of the blocks whose Jacobians are sums of products of rows, and which these are."""
        if first.has_drawn:
            # To vectorise it will say so.
            return None
        met = {site for use in first.linear for site in (use.weight, use.bias)} | {other.site for other in first.others}
        idle = {name for name, s in self.states.items() if not met & set(s.block.sites)}
        uses = {name: _rows_of(s, first) for name, s in self.states.items()}
        known = {name: found for name, found in uses.items() if found}
        if not known:
            return None
        numbers = sum(_numbers(self.states[name], found, outputs) for name, found in known.items())
        chunk = max(1, int(_ROW_NUMBERS * first.examples / numbers))
        pieces, which = [], examples // 2
        for start in range(0, examples, chunk):
            stop = min(start + chunk, examples)
            rows = self._rows(self._seen(range(start, stop)), known)
            pieces.append(sum((_product(self.states[name], *own) for name, own in rows.items()), torch.zeros(())))
            at = which - start
            if 0 <= at < stop - start and not self._are_of(which, {n: (z[at], g[:, at]) for n, (z, g) in rows.items()}):
                return None
        return torch.cat(pieces), idle | set(known)

    def _rows(self, seen: Seen, names: Iterable[str]) -> dict[str, tuple[Tensor, Tensor]]:
        """For each block its inputs [examples, rows, n], and its gradients [outputs, examples, rows, m]."""
        uses = {name: _rows_of(self.states[name], seen) for name in names}
        edges = [use.edge for found in uses.values() for use in found]
        with torch.enable_grad():
            sums = self._output(seen.fn).sum(0).unbind()
        gradients: list[Sequence[Tensor | None]] = [
            torch.autograd.grad(each, edges, retain_graph=True, allow_unused=True) for each in sums
        ]
        rows, start = dict[str, tuple[Tensor, Tensor]](), 0
        for name, found in uses.items():
            own = [each[start : start + len(found)] for each in gradients]
            rows[name] = _inputs_and_gradients(self.states[name], found, own, seen.examples)
            start += len(found)
        return rows

    def _are_of(self, which: int, rows: Mapping[str, tuple[Tensor, Tensor]]) -> bool:
        """Whether rows of an example have the Jacobian that it has by itself: others may have been mixed into it."""
        values, network = self._network([site for name in rows for site in self.states[name].block.sites])
        with running(self.query.inputs):
            alone = _jacobian(network, values, self._example(which))
        for name, (z, g) in rows.items():
            expected, found = self.states[name].block.pack(alone), g.mT @ z
            if (found - expected).abs().max() > _AGREE * expected.abs().max():
                return False
        return True

    def _by_jacobians(self, sites: Sequence[str], names: Set[str], outputs: int) -> Tensor:
        """The part of the given sites, example by example."""
        values, network = self._network(sites)
        size = max(1, sum(value.numel() for value in values.values()))
        chunk = max(1, _JACOBIAN_NUMBERS // (size * outputs))
        dims = (None, *(mapped(lambda _: 0, item, lambda _: None) for item in self.query.inputs))
        try:
            with pyro.validation_enabled(False):
                jacobians = vmap(jacrev(network), in_dims=dims, chunk_size=chunk)(values, *self.query.inputs)
        except (DataError, RuntimeError, ValueError, TypeError, IndexError) as error:
            _give_up_vectorising(error)
            with running(self.query.inputs):
                count = len(next(tensor for _, tensor in tensors_of(tuple(self.query.inputs))))
                each = [_jacobian(network, values, self._example(i)) for i in range(count)]
            jacobians = {site: torch.stack([found[site] for found in each]) for site in values}
        total: Any = 0.0
        for whitened in self._whitened(jacobians, names, outputs):
            total = total + whitened @ whitened.mT
        return total

    def _network(self, sites: Sequence[str]) -> tuple[dict[str, Tensor], Callable[..., Tensor]]:
        """The values of some sites, and an example's outputs as a function of them."""
        values = {site: self.values[site] for site in sites}
        others = {site: value for site, value in self.values.items() if site not in values}

        def network(weights: dict[str, Tensor], *example: Any) -> Tensor:
            arguments = mapped(lambda tensor: tensor.unsqueeze(0), example)
            return self._output(replace(self.query, inputs=arguments).at(others | weights)).reshape(-1)

        return values, network

    def _whitened(self, jacobians: Mapping[str, Tensor], names: Set[str], outputs: int) -> Iterator[Tensor]:
        """Jacobians whose inner products are covariances, [examples, outputs, weights] of each block."""
        for name, state in self.states.items():
            if name in names:
                jacobian = state.block.pack(jacobians)
                yield state.whiten(jacobian).reshape(len(jacobian), outputs, -1)
        for site, prior in self.priors.items():
            if site in jacobians:
                yield (jacobians[site] * prior.stddev).reshape(len(jacobians[site]), outputs, -1)

    def _example(self, which: int) -> tuple[Any, ...]:
        return mapped(itemgetter(which), tuple(self.query.inputs))

    def _first(self, examples: int) -> Seen:
        """The first examples, which tell what there is."""
        return self._seen(range(min(examples, _FIRST)))

    def _seen(self, which: range) -> Seen:
        part = slice(which.start, which.stop)
        inputs = mapped(lambda tensor: tensor[part], tuple(self.query.inputs))
        return replace(self.query, inputs=inputs).watched(self.values, len(which))

    def _output(self, fn: Any) -> Tensor:
        found = getattr(base_of(fn), self.parameter)
        return found.reshape(found.shape[0], -1)


def _rows_of(state: State, seen: Seen) -> list[LinearUse]:
    """The uses of a block, if its Jacobians are sums over rows that belong to examples; else none."""
    block = state.block
    if state.structure is not Structure.KRONECKER or not isinstance(block, KroneckerBlock) or len(block.shape) != 2:
        return []
    uses = [use for use in seen.linear if use.weight == block.weight]
    others = {other.site for other in seen.others} | {use.bias for use in seen.linear if use.weight != block.weight}
    is_plain = not others & set(block.sites) and all(
        isinstance(use.rows, (ProductRows, ConvolutionRows))
        and use.rows.count % seen.examples == 0
        and use.transposed == block.transposed
        and use.mask is None
        for use in uses
    )
    return uses if is_plain else []


def _numbers(state: State, uses: Sequence[LinearUse], outputs: int) -> float:
    """How many numbers their rows have."""
    m, n = state.block.shape
    return sum(float(use.count()) for use in uses) * (n + m * outputs)


def _inputs_and_gradients(
    state: State, uses: Sequence[LinearUse], gradients: Sequence[Sequence[Tensor | None]], examples: int
) -> tuple[Tensor, Tensor]:
    """The rows of a block.

    Args:
        state: The block's Gaussian.
        uses: Its uses.
        gradients: For each output, its gradient at each use's output.
        examples: How many examples there are.

    Returns:
        [examples, rows, n], and [outputs, examples, rows, m].
    """
    block = state.block
    assert isinstance(block, KroneckerBlock)
    inputs, outputs = [], []
    for i, use in enumerate(uses):
        z = torch.cat(list(use.input_rows()))
        if block.bias is not None:
            z = F.pad(z, (0, 1), value=1.0 if use.bias == block.bias else 0.0)
        zero = torch.zeros(use.shape, dtype=z.dtype, device=z.device)
        rows = torch.stack([use.gradient_rows(zero if g is None else g) for g in (own[i] for own in gradients)])
        inputs.append(z.reshape(examples, -1, z.shape[-1]))
        outputs.append(rows.reshape(len(rows), examples, -1, rows.shape[-1]))
    return torch.cat(inputs, 1), torch.cat(outputs, 2)


def _product(state: State, inputs: Tensor, gradients: Tensor) -> Tensor:
    """J Lambda^-1 J^T of a block, J a sum of g z^T over rows.

    Args:
        state: The block's Gaussian.
        inputs: [examples, rows, n].
        gradients: [outputs, examples, rows, m].

    Returns:
        [examples, outputs, outputs].
    """
    assert isinstance(state, (KroneckerState, ShardedState))
    a, h = state.whole().whitened_rows(inputs, gradients)
    (k, _, count, m), n = h.shape, a.shape[-1]
    h = h.movedim(0, 1)
    if count == 1:
        h = h.flatten(2)
        return a.square().sum(-1, keepdim=True) * (h @ h.mT)
    if count * (n + k * m) < k * m * n:
        # (a a^T) h for each output, and its products with the others.
        held = (a @ a.mT).unsqueeze(1) @ h
        return held.flatten(2) @ h.flatten(2).mT
    whitened = (h.mT @ a.unsqueeze(1)).flatten(2)
    return whitened @ whitened.mT


def _give_up_vectorising(error: Exception) -> None:
    """Refuse a model that draws random numbers; say what any other costs. Other errors pass."""
    cause = error.__cause__ if isinstance(error, DataError) else error
    if not isinstance(cause, Exception) or not is_plain(cause):
        raise error
    if not any(said in str(cause) for said in _NOT_VECTORISED):
        raise error
    if "randomness" in str(cause):
        raise ModelError(
            "The model draws random numbers (dropout, process noise), which has no linearised predictive: switch the "
            "noise off, as by net.eval(), or use num_samples."
        ) from error
    reason = first_line(cause).split(". ")[0]
    warnings.warn(
        f"torch.func cannot vectorise the model ({reason}): its Jacobians are computed one example and one output "
        "after the other.",
        stacklevel=2,
    )


def _jacobian(
    network: Callable[..., Tensor], weights: Mapping[str, Tensor], example: tuple[Any, ...]
) -> dict[str, Tensor]:
    """The derivatives of one example's outputs, [outputs, *site], by autograd."""
    leaves = {site: value.detach().requires_grad_() for site, value in weights.items()}
    # Refuses what autograd alone would differentiate wrongly.
    recorder = MapRecorder()
    for site, leaf in leaves.items():
        recorder.track(site, leaf)
    with torch.enable_grad(), recorder:
        outputs = network(leaves, *example).unbind()
    rows: dict[str, list[Tensor]] = {site: [] for site in leaves}
    for output in outputs:
        found = torch.autograd.grad(output, list(leaves.values()), retain_graph=True, allow_unused=True)
        for (site, leaf), gradient in zip(leaves.items(), found, strict=True):
            rows[site].append(torch.zeros_like(leaf) if gradient is None else gradient)
    return {site: torch.stack(gradients) for site, gradients in rows.items()}
