"""The check that every use of a weight was understood: what was seen must add up to autograd's gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from nclbayes.blocks import Block, KroneckerBlock
from nclbayes.errors import UnsupportedUseError
from nclbayes.fisher.per_example import Moments
from nclbayes.watch import LinearUse, ModelRun

# Sums in another order differ by rounding, more so in half precision; anything unseen differs by far more.
_TOLERANCE, _ROUNDINGS = 1e-3, 16
# Above this machine epsilon numbers are of half precision: so few roundings, or nothing unseen would be found.
_HALF, _HALF_ROUNDINGS = 1e-4, 4
# Multiples of a score whose gradients are each rounded in a way of their own, as they are no powers of two; and how
# many times the rounding that they show two sums of the same terms may differ by.
_FACTORS, _DRAWS = (1.1, 1.3, 1.6, 1.7, 1.9), 8
# Matrices are compared by their products with so many random vectors: equal products of different matrices would be a
# coincidence, and these are the cheaper the larger the matrices.
_VECTORS = 8


def verify_uses(
    run: ModelRun,
    blocks: Sequence[Block],
    seen: Mapping[str, Sequence[tuple[LinearUse, Tensor]]],
    summed: Mapping[str, Moments],
    total: Tensor,
) -> None:
    """Refuse a model of which something was not seen.

    Args:
        run: The run.
        blocks: The run's blocks.
        seen: For each Kronecker block, its uses with the gradient of their outputs.
        summed: For each diagonal block, the sums of its per-example gradients, and of their squares, of all rows.
        total: The score that was backpropagated.

    Raises:
        UnsupportedUseError: If the sum of g z^T over a block's rows, or of its per-example gradients, is not autograd's
            gradient; or if a site has a gradient but no block.
    """
    kronecker = {block.name: block for block in blocks if isinstance(block, KroneckerBlock)}
    vectors = {name: _random_vectors(block, run) for name, block in kronecker.items()}
    rows = {name: _from_rows(block, seen.get(name, ()), vectors[name]) for name, block in kronecker.items()}
    # Sites of frozen parameters have no gradient.
    names = [name for name, latent in run.latents.items() if latent.value.requires_grad]
    leaves = {name: run.latents[name].value for name in names}
    gradient = _gradient(total, leaves)
    owned: set[str] = set()
    for block in blocks:
        owned.update(block.sites)
        rounding = partial(_rounding, total, {site: leaves[site] for site in block.sites if site in leaves})
        if isinstance(block, KroneckerBlock):
            terms = _size_of_terms(seen.get(block.name, ()), vectors[block.name])
            product = partial(_product, block, vectors[block.name])
            _compare(block, product(gradient), rows[block.name], run.eps, terms, partial(rounding, product))
        elif block.name in summed:
            found, squares = summed[block.name].total, summed[block.name].squares
            # The root of what the squares sum to, times that of their number, bounds the sum of absolute values.
            terms = (run.examples * float(squares.max())) ** 0.5 if squares.numel() else 0.0
            _compare(block, gradient[block.name], found, run.eps, terms, partial(rounding, block.pack))
    for name in names:
        if name not in owned and bool((gradient[name] != 0).any()):
            raise unseen_use(name)


def unseen_use(site: str) -> UnsupportedUseError:
    """The refusal of a site that has a gradient, and no use that was seen.

    Args:
        site: The site.

    Returns:
        The error to raise.
    """
    return UnsupportedUseError(
        f"Site '{site}' reaches the likelihood through a call that cannot be seen (a custom autograd function, a "
        "scripted function, reentrant checkpointing, vmap). Apply it with F.linear, x @ w or F.conv1d/2d/3d."
    )


def verify_sum(block: KroneckerBlock, pairs: Sequence[tuple[LinearUse, Tensor]], summed: Tensor, eps: float) -> None:
    """Refuse a model whose examples, each by itself, do not add up to the batch.

    Args:
        block: A linear map.
        pairs: Its uses, with the gradient of their outputs.
        summed: The sum over examples of the gradient of each by itself.
        eps: The machine epsilon of the run.

    Raises:
        UnsupportedUseError: If that is not the gradient of the batch.
    """
    identity = torch.eye(block.shape[-1], dtype=summed.dtype, device=summed.device)
    _compare(block, _from_rows(block, pairs, identity), summed, eps)


def _gradient(total: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Autograd's gradient of a score, by site; zero where there is none."""
    found = torch.autograd.grad(total, list(leaves.values()), retain_graph=True, allow_unused=True)
    return {n: torch.zeros_like(v) if g is None else g for (n, v), g in zip(leaves.items(), found, strict=True)}


def _product(block: KroneckerBlock, vectors: Tensor, gradient: Mapping[str, Tensor]) -> Tensor:
    return block.pack(gradient) @ vectors


def _rounding(total: Tensor, leaves: Mapping[str, Tensor], compared: Callable[[Mapping[str, Tensor]], Tensor]) -> float:
    """How much of a block's gradient is rounding, as where terms inside the network all but cancel.

    The gradient of c times a score is c times that of the score, and rounded in another way: what they differ by is
    rounding. That holds where the backward pass is linear. In one that clips gradients they differ the more the larger
    c is, and c = 2, for which nothing is rounded anew, shows the most: then nothing is known, and this is zero.

    Args:
        total: The score.
        leaves: The block's sites.
        compared: What of the gradient is compared.

    Returns:
        The largest difference.
    """
    gradient = compared(_gradient(total, leaves))

    def off(factor: float) -> float:
        return float((compared(_gradient(factor * total, leaves)) / factor - gradient).abs().max())

    found = max(map(off, _FACTORS))
    return found if off(2.0) <= found else 0.0


def _random_vectors(block: KroneckerBlock, run: ModelRun) -> Tensor:
    """Random vectors to multiply a block's matrix with, [n, _VECTORS]."""
    like, generator = run.latents[block.weight].value, torch.Generator().manual_seed(0)
    vectors = torch.randn(block.shape[-1], _VECTORS, generator=generator, dtype=like.dtype, device="cpu")
    return vectors.to(like.device)


def _from_rows(block: KroneckerBlock, pairs: Sequence[tuple[LinearUse, Tensor]], vectors: Tensor) -> Tensor:
    """The sum of g z^T over the rows that were seen, times some vectors; z ends in 1 where a bias is added."""
    weight, bias = vectors.split((block.shape[-1] - (block.bias is not None), int(block.bias is not None)))
    total = vectors.new_zeros(*block.shape[:-1], vectors.shape[-1])
    for use, grad in pairs:
        g, z = use.gradient_rows(grad), torch.cat(list(use.input_rows()), dim=-2)
        if use.transposed != block.transposed:
            g, z = z, g
        part = total if use.maps is None else total[use.maps]
        if use.transposed == block.transposed and use.bias is not None and use.bias == block.bias:
            part += g.sum(-2).unsqueeze(-1) * bias
        part += g.mT @ (z @ weight)
    return total


def _size_of_terms(pairs: Sequence[tuple[LinearUse, Tensor]], vectors: Tensor) -> float:
    """How large the products g z^T times a vector may be together, which may all but cancel in their sum."""
    length = float(vectors.norm(dim=0).max())
    return sum(
        float(use.gradient_rows(grad).norm()) * sum(float(z.square().sum()) for z in use.input_rows()) ** 0.5 * length
        for use, grad in pairs
    )


def agree(expected: Tensor, found: Tensor, terms: float = 0.0, eps: float = 0.0) -> bool:
    """Whether two sums are the same but for rounding.

    Args:
        expected: One.
        found: The other, of the same shape.
        terms: How large what was summed is, if it may be far larger than the sum.
        eps: The machine epsilon of the run that both are of, if it is coarser than their own.

    Returns:
        Whether they are, or cannot be compared.
    """
    scale = float(expected.abs().max()) + float(found.abs().max())
    gap = float((expected - found).abs().max())
    # Below this, products of gradients may have underflowed.
    limits = torch.finfo(found.dtype)
    # NaN is for others to find.
    rounding = max(_ROUNDINGS * limits.eps, _HALF_ROUNDINGS * eps if eps > _HALF else 0.0)
    return not gap > max(_TOLERANCE, rounding) * scale + rounding * terms + limits.tiny / limits.eps


def _compare(
    block: Block,
    expected: Tensor,
    found: Tensor,
    eps: float,
    terms: float = 0.0,
    rounding: Callable[[], float] = float,
) -> None:
    if agree(expected, found, terms, eps):
        return
    gap = float((expected - found).abs().max())
    if gap > _DRAWS * rounding():
        share = gap / (float(expected.abs().max()) + float(found.abs().max()))
        sites = ", ".join(f"'{site}'" for site in block.sites)
        raise UnsupportedUseError(
            f"What the Fisher saw of {sites} does not add up to its gradient (they differ by {share:.1%}): the "
            "model uses it in a way that cannot be seen, mixes the examples of a batch (batch normalisation, a plate "
            "of fixed size), or declares steps invalid that the likelihood depends on. Apply the weight with F.linear, "
            "x @ w or F.conv1d/2d/3d, to each example by itself."
        )
