"""What a block is: the sites of one linear map as a matrix, or one other site as a vector of independent weights."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from pyro.distributions import Independent, Normal
from torch import Tensor
from torch.distributions import Normal as TorchNormal

from nclbayes.errors import LatentError, PriorError, UnsupportedUseError, ValuesError
from nclbayes.kronecker import KroneckerNormal
from nclbayes.watch import Latent, LinearUse, ModelRun, OtherUse
from nclbayes.watch.calls import CallKind
from nclbayes.watch.rows import ConvolutionRows
from nclbayes.watch.sites import base_normal


@dataclass(frozen=True)
class KroneckerBlock:
    """One linear map: an m-by-n matrix whose last column is the bias, if the map has one.

    A stack of k maps (a batched product, a grouped convolution) is a block of k such matrices.

    Attributes:
        name: The block's name.
        weight: The weight's site.
        weight_shape: The site's shape.
        view: The site as a matrix [a, b], or a stack of them [k, a, b].
        transposed: Whether the map's matrix is the transpose of that view.
        bias: The bias's site, if any.
        bias_shape: The bias site's shape.
    """

    name: str
    weight: str
    weight_shape: tuple[int, ...]
    view: tuple[int, ...]
    transposed: bool
    bias: str | None = None
    bias_shape: tuple[int, ...] = ()

    @property
    def sites(self) -> tuple[str, ...]:
        """The block's sites."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the block's matrix, (m, n) or (k, m, n); n counts the bias."""
        *stack, a, b = self.view
        m, n = (b, a) if self.transposed else (a, b)
        return (*stack, m, n + (self.bias is not None))

    @property
    def size(self) -> int:
        """How many weights the block has."""
        return math.prod(self.shape)

    def pack(self, values: Mapping[str, Tensor]) -> Tensor:
        """Site values as the block's matrix.

        Args:
            values: The sites' values, ``[*samples, *site_shape]`` each.

        Returns:
            ``[*samples, m, n]`` or ``[*samples, k, m, n]``.

        Raises:
            ValuesError: If a site is missing or of the wrong shape.
        """
        weight, samples = _lookup(values, self.weight, self.weight_shape)
        matrix = weight.reshape(*samples, *self.view)
        matrix = matrix.mT if self.transposed else matrix
        if self.bias is None:
            return matrix
        bias, bias_samples = _lookup(values, self.bias, self.bias_shape)
        column = bias.reshape(*bias_samples, *self.shape[:-1], 1)
        return torch.cat([matrix, column.expand(*matrix.shape[:-1], 1)], dim=-1)

    def unpack(self, matrix: Tensor) -> dict[str, Tensor]:
        """The block's matrix as site values; the inverse of :meth:`pack`.

        Args:
            matrix: ``[*samples, m, n]`` or ``[*samples, k, m, n]``.

        Returns:
            The sites' values.

        Raises:
            ValuesError: If the matrix is of the wrong shape.
        """
        samples = _leading(f"The matrix of block '{self.name}'", matrix, self.shape)
        weight = matrix if self.bias is None else matrix[..., :-1]
        values = {self.weight: (weight.mT if self.transposed else weight).reshape((*samples, *self.weight_shape))}
        if self.bias is not None:
            values[self.bias] = matrix[..., -1].reshape((*samples, *self.bias_shape))
        return values

    def moments(self, latents: Mapping[str, Latent]) -> tuple[Tensor, Tensor]:
        """Means and standard deviations of the weights before any data: the model's prior.

        Args:
            latents: The sites as a run met them.

        Returns:
            Both of the block's shape.
        """
        priors = {site: _normal(latents[site]) for site in self.sites}
        loc = self.pack({site: prior.loc for site, prior in priors.items()})
        return loc, self.pack({site: prior.scale for site, prior in priors.items()})

    def prior(self, latents: Mapping[str, Latent]) -> KroneckerNormal:
        """The block's Gaussian before any data: the model's prior.

        Args:
            latents: The sites as a run met them.

        Returns:
            A Gaussian with diagonal A and G (G = I where the scale is constant for each site).

        Raises:
            PriorError: If the prior's precisions are not a row factor times a column factor.
        """
        loc, scale = self.moments(latents)
        log_precision = scale.log().mul(-2).double()
        # log P_ij = log g_i + log a_j, with mean log g = 0
        columns = log_precision.mean(-2, keepdim=True)
        rows = (log_precision - columns).mean(-1, keepdim=True)
        if bool(((log_precision - columns - rows).abs() > 1e-5).any()):
            raise PriorError(
                f"The prior scales of {_quoted(self.sites)} do not separate into a row scale times a column scale, so "
                "no Kronecker-factored Gaussian has them. Use a constant scale for each site, or one that separates."
            )
        A = torch.diag_embed(columns.squeeze(-2).exp()).to(loc.dtype)
        G = torch.diag_embed(rows.squeeze(-1).exp()).to(loc.dtype)
        return KroneckerNormal(loc, A, G)


@dataclass(frozen=True)
class DiagonalBlock:
    """A site that is no linear map (a gain, a scale, an embedding): independent weights.

    Attributes:
        name: The block's name, which is the site's.
        shape: The site's shape.
        reason: Why it is diagonal.
    """

    name: str
    shape: tuple[int, ...]
    reason: str

    @property
    def sites(self) -> tuple[str, ...]:
        """The block's only site."""
        return (self.name,)

    @property
    def size(self) -> int:
        """How many weights the block has."""
        return math.prod(self.shape)

    def pack(self, values: Mapping[str, Tensor]) -> Tensor:
        """The site's value.

        Args:
            values: Site values.

        Returns:
            ``[*samples, *shape]``.

        Raises:
            ValuesError: If the site is missing or of the wrong shape.
        """
        return _lookup(values, self.name, self.shape)[0]

    def unpack(self, matrix: Tensor) -> dict[str, Tensor]:
        """The site's value, by name.

        Args:
            matrix: ``[*samples, *shape]``.

        Returns:
            The site's value.

        Raises:
            ValuesError: If it is of the wrong shape.
        """
        _leading(f"The value of block '{self.name}'", matrix, self.shape)
        return {self.name: matrix}

    def moments(self, latents: Mapping[str, Latent]) -> tuple[Tensor, Tensor]:
        """Means and standard deviations of the weights before any data: the model's prior.

        Args:
            latents: The sites as a run met them.

        Returns:
            Both of the block's shape.
        """
        prior = _normal(latents[self.name])
        return prior.loc, prior.scale

    def prior(self, latents: Mapping[str, Latent]) -> Independent:
        """The site's Gaussian before any data: the model's prior.

        Args:
            latents: The sites as a run met them.

        Returns:
            Independent normals.
        """
        return Independent(Normal(*self.moments(latents)), len(self.shape))


Block = KroneckerBlock | DiagonalBlock


def find_blocks(run: ModelRun) -> dict[str, Block]:
    """The blocks of the sites that a run used.

    A weight whose every use is a linear map makes a Kronecker block, together with its bias if that serves no other
    map; what is used elementwise, as a gain, or as an embedding makes a diagonal block. A latent site that the run
    met but did not use makes none.

    Args:
        run: A watched run of the model.

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
        if site in others:
            continue
        block = _kronecker_block(run, site, uses, _own_bias(uses, linear, others, run))
        if block.name != site and block.name in run.latents:
            block = replace(block, name=site)
        blocks[block.name] = block
        taken.update(block.sites)
    biases = [use.bias for use in run.linear if use.bias is not None]
    for site in dict.fromkeys([*others, *biases]):
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
    if isinstance(first.rows, ConvolutionRows):
        outputs, inputs = shape[0], math.prod(shape[1:])
        groups = first.rows.groups
        view: tuple[int, ...] = (outputs, inputs) if groups == 1 else (groups, outputs // groups, inputs)
    else:
        view = (1, *shape) if first.rows.vector else shape
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


def _form(use: LinearUse) -> tuple[str, int]:
    if isinstance(use.rows, ConvolutionRows):
        return "convolution", use.rows.groups
    return "product", 1


def _diagonal_block(run: ModelRun, site: str, linear: list[LinearUse], others: list[OtherUse]) -> DiagonalBlock:
    shape = tuple(run.latents[site].value.shape)
    for use in others:
        if use.kind is CallKind.FUSED:
            raise UnsupportedUseError(
                f"Site '{site}' enters {use.call}, a fused kernel that hides its linear maps from the Fisher. "
                "Write the network with one F.linear (or x @ w) for each map: a recurrent network as a loop over "
                "time steps, attention with separate projections."
            )
        if len(shape) > 1 and use.kind is CallKind.OPAQUE:
            raise UnsupportedUseError(
                f"Site '{site}' enters {use.call}, which the Fisher cannot see as a linear map of that site. "
                "Apply the whole weight with F.linear, x @ w, torch.matmul or F.conv1d/2d/3d, or freeze it."
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
                f"The latent site '{latent.name}' lies inside the data plate {_quoted(sorted(local))}: it is local to "
                "the examples, and a posterior of this kind holds global weights only. Move it out of the plate, or "
                "marginalise it."
            )
        base_normal(latent.name, latent.fn)


def _normal(latent: Latent) -> TorchNormal:
    """The Normal under a latent's prior, expanded to the site's shape."""
    return base_normal(latent.name, latent.fn).expand(latent.value.shape)


def _lookup(values: Mapping[str, Tensor], site: str, shape: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
    if site not in values:
        raise ValuesError(f"There is no value for site '{site}'; the values given are {_quoted(values)}.")
    return values[site], _leading(f"The value of site '{site}'", values[site], shape)


def _leading(what: str, tensor: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    lead = tensor.ndim - len(shape)
    if lead < 0 or tuple(tensor.shape[lead:]) != shape:
        raise ValuesError(f"{what} must end in shape {shape}, not {tuple(tensor.shape)}.")
    return tuple(tensor.shape[:lead])


def _quoted(names: object) -> str:
    return ", ".join(f"'{name}'" for name in names)  # type: ignore[attr-defined]
