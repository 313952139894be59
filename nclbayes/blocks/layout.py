"""What a block is: the sites of one linear map as a matrix, or one other site as a vector of independent weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from pyro.distributions import Independent, Normal
from torch import Tensor
from torch.distributions import Normal as TorchNormal

from nclbayes.errors import PriorError, ValuesError
from nclbayes.kronecker import KroneckerNormal
from nclbayes.watch import Latent
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
        widths: How wide the blocks along the diagonals of A and of G may be; 0: as wide as the factor.
    """

    name: str
    weight: str
    weight_shape: tuple[int, ...]
    view: tuple[int, ...]
    transposed: bool
    bias: str | None = None
    bias_shape: tuple[int, ...] = ()
    widths: tuple[int, int] = (0, 0)

    @property
    def sites(self) -> tuple[str, ...]:
        """The block's sites."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def site_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the block's sites."""
        found = {self.weight: self.weight_shape}
        return found if self.bias is None else found | {self.bias: self.bias_shape}

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

    @property
    def is_split(self) -> bool:
        """Whether a factor is held in blocks."""
        return any(self.widths)

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

    def separated(self, latents: Mapping[str, Latent]) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and precisions of the weights before any data, the latter as those of columns times those of rows.

        Args:
            latents: The sites as a run met them.

        Returns:
            The mean, [..., m, n], and the diagonals of A and G, [..., n] and [..., m], float64 (G = I where the scale
            is constant for each site).

        Raises:
            PriorError: If the prior's precisions are not a row factor times a column factor.
        """
        loc, scale = self.moments(latents)
        log_precision = scale.double().log().mul(-2)
        # log P_ij = log g_i + log a_j, with mean log g = 0
        columns = log_precision.mean(-2, keepdim=True)
        rows = (log_precision - columns).mean(-1, keepdim=True)
        if bool(((log_precision - columns - rows).abs() > 1e-5).any()):
            raise PriorError(
                f"The prior scales of {quoted(self.sites)} do not separate into a row scale times a column scale, so "
                "no Kronecker-factored Gaussian has them. Use a constant scale for each site, or one that separates."
            )
        return loc, columns.squeeze(-2).exp(), rows.squeeze(-1).exp()

    def prior(self, latents: Mapping[str, Latent]) -> KroneckerNormal:
        """The block's Gaussian before any data: the model's prior.

        Args:
            latents: The sites as a run met them.

        Returns:
            A Gaussian with diagonal A and G.
        """
        loc, columns, rows = self.separated(latents)
        return KroneckerNormal(loc, torch.diag_embed(columns).to(loc.dtype), torch.diag_embed(rows).to(loc.dtype))


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
    is_split: ClassVar[bool] = False

    @property
    def sites(self) -> tuple[str, ...]:
        """The block's only site."""
        return (self.name,)

    @property
    def site_shapes(self) -> dict[str, tuple[int, ...]]:
        """The site's shape."""
        return {self.name: self.shape}

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


def _normal(latent: Latent) -> TorchNormal:
    """The Normal under a latent's prior, expanded to the site's shape."""
    return base_normal(latent.name, latent.fn).expand(latent.value.shape)


def _lookup(values: Mapping[str, Tensor], site: str, shape: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
    if site not in values:
        raise ValuesError(f"There is no value for site '{site}'; the values given are {quoted(values)}.")
    return values[site], _leading(f"The value of site '{site}'", values[site], shape)


def _leading(what: str, tensor: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    lead = tensor.ndim - len(shape)
    if lead < 0 or tuple(tensor.shape[lead:]) != shape:
        raise ValuesError(f"{what} must end in shape {shape}, not {tuple(tensor.shape)}.")
    return tuple(tensor.shape[:lead])


def quoted(names: object) -> str:
    """Names in quotation marks, for a message.

    Args:
        names: The names.

    Returns:
        One line.
    """
    return ", ".join(f"'{name}'" for name in names)  # type: ignore[attr-defined]
