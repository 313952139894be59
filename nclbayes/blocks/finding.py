"""Which blocks the sites of a model make, as a run of it shows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace

from nclbayes.blocks.layout import Block, DiagonalBlock, KroneckerBlock, quoted
from nclbayes.errors import LatentError, UnsupportedUseError
from nclbayes.watch import LinearUse, ModelRun, OtherUse
from nclbayes.watch.einsum import EinsumRows
from nclbayes.watch.parts import PartRows
from nclbayes.watch.rows import ConvolutionRows, TransposedConvolutionRows
from nclbayes.watch.sites import base_normal


def find_blocks(run: ModelRun, diagonal: Collection[str] = ()) -> dict[str, Block]:
    """The blocks of the sites that a run used.

    A weight whose every use is a linear map makes a Kronecker block, together with its bias if that serves no other
    map; what is used in any other way (a gain, an embedding) makes a diagonal block. Products with parts of a matrix
    are maps of the whole; those with the matrices of a stack are maps of a stack. A latent site that the run met but
    did not use makes none.

    Args:
        run: A watched run of the model.
        diagonal: Sites that make diagonal blocks, however they are used.

    Returns:
        Blocks by name.

    Raises:
        ModelError: If a latent cannot be a Gaussian block: see :mod:`nclbayes.errors`.
    """
    _check_latents(run)
    linear, others = _by_site(run)
    blocks: dict[str, Block] = {}
    taken: set[str] = set()
    for site, uses in linear.items():
        if site in diagonal or site in others or _is_torn(uses):
            continue
        bias = _own_bias(uses, linear, others, run)
        block = _kronecker_block(run, site, uses, None if bias in diagonal else bias)
        if block.name != site and block.name in run.latents:
            block = replace(block, name=site)
        blocks[block.name] = block
        taken.update(block.sites)
    biases = [use.bias for use in run.linear if use.bias is not None]
    for site in dict.fromkeys([*others, *linear, *biases]):
        if site not in taken:
            blocks[site] = _diagonal_block(run, site, linear.get(site, []), others.get(site, []))
    return blocks


def _by_site(run: ModelRun) -> tuple[dict[str, list[LinearUse]], dict[str, list[OtherUse]]]:
    linear: dict[str, list[LinearUse]] = defaultdict(list)
    others: dict[str, list[OtherUse]] = defaultdict(list)
    for use in run.linear:
        linear[use.weight].append(use)
    for other in run.others:
        others[other.site].append(other)
    return dict(linear), dict(others)


def _own_bias(
    uses: list[LinearUse],
    linear: Mapping[str, list[LinearUse]],
    others: Mapping[str, list[OtherUse]],
    run: ModelRun,
) -> str | None:
    """The bias that belongs to this weight alone, if there is exactly one."""
    biases = {use.bias for use in uses if use.transposed == uses[0].transposed} - {None}
    if len(biases) != 1:
        return None
    bias = biases.pop()
    owners = {(use.weight, use.transposed) for use in run.linear if use.bias == bias}
    return bias if len(owners) == 1 and bias not in linear and bias not in others else None


def _kronecker_block(run: ModelRun, site: str, uses: list[LinearUse], bias: str | None) -> KroneckerBlock:
    shape = tuple(run.latents[site].value.shape)
    first = uses[0]
    if isinstance(first.rows, (ConvolutionRows, TransposedConvolutionRows)):
        # Outputs and inputs, or the other way round.
        rows, columns, groups = shape[0], math.prod(shape[1:]), first.rows.groups
        view: tuple[int, ...] = (rows, columns) if groups == 1 else (groups, rows // groups, columns)
    elif isinstance(first.rows, EinsumRows):
        view = first.rows.view
    else:
        view = (1, *shape) if len(shape) == 1 else shape
    if any(_form(use) != _form(first) for use in uses):
        calls = sorted({use.call for use in uses})
        raise UnsupportedUseError(
            f"Site '{site}' is used as linear maps of different forms ({', '.join(calls)}), which share no factors. "
            "Use one form of call for it everywhere."
        )
    return KroneckerBlock(
        name=site.removesuffix(".weight"),
        weight=site,
        weight_shape=shape,
        view=view,
        transposed=first.transposed,
        bias=bias,
        bias_shape=() if bias is None else tuple(run.latents[bias].value.shape),
    )


def _is_torn(uses: list[LinearUse]) -> bool:
    """Whether parts of a weight, and the whole of it, are maps of different forms, which share no factors."""
    return any(isinstance(use.rows, PartRows) for use in uses) and len({_form(use) for use in uses}) > 1


def _form(use: LinearUse) -> tuple[object, ...]:
    """What uses of one weight must share for their rows to be of one matrix, or one stack of them."""
    if isinstance(use.rows, ConvolutionRows):
        return "convolution", use.rows.groups
    if isinstance(use.rows, TransposedConvolutionRows):
        return "transposed convolution", use.rows.groups
    if isinstance(use.rows, EinsumRows) and use.rows.is_reshaped:
        return "einsum", use.rows.view
    return ("product",)


def _diagonal_block(run: ModelRun, site: str, linear: list[LinearUse], others: list[OtherUse]) -> DiagonalBlock:
    shape = tuple(run.latents[site].value.shape)
    for use in others:
        if use.is_fused:
            raise UnsupportedUseError(
                f"Site '{site}' enters {use.call}, a fused kernel that hides its linear maps from the Fisher. "
                "ncl.nn.visible(net) lets it see those of torch's recurrent networks and attention. In a module of "
                "your own, write one F.linear (or x @ w) for each map: a recurrent network as a loop over time steps."
            )
    if not others and not linear:
        reason = "a bias that belongs to no single map"
    else:
        calls = ", ".join(sorted({other.call for other in others} | {use.call for use in linear}))
        reason = f"used by {calls}"
    return DiagonalBlock(name=site, shape=shape, reason=reason)


def _check_latents(run: ModelRun) -> None:
    data_plates = {name for site in run.observed.values() for name, _, _ in site.plates}
    for latent in run.latents.values():
        local = latent.plates & data_plates
        if local:
            raise LatentError(
                f"The latent site '{latent.name}' lies inside the data plate {quoted(sorted(local))}: it is local to "
                "the examples, and a posterior of this kind holds global weights only. Move it out of the plate, or "
                "marginalise it."
            )
        base_normal(latent.name, latent.fn)
