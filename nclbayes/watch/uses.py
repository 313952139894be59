"""What a run did with a weight: linear maps of it, and other uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from nclbayes.errors import NCLError
from nclbayes.watch.calls import call_name
from nclbayes.watch.einsum import EinsumRows
from nclbayes.watch.grouped import GroupedRows
from nclbayes.watch.parts import PartRows
from nclbayes.watch.rows import ConvolutionRows, ProductRows, TransposedConvolutionRows, only_valid, single
from nclbayes.watch.separable import Separable

Rows = ProductRows | ConvolutionRows | TransposedConvolutionRows | EinsumRows | GroupedRows | PartRows
"""How the input of a map, and the gradient of its output, turn into rows."""


@dataclass
class LinearUse:
    """One application of a weight as a linear map, possibly to many rows.

    Attributes:
        weight: The weight's site.
        bias: The site that is added to the map's output, if any.
        function: The torch function.
        transposed: Whether the map's m-by-n matrix is the transpose of the site's (last two) dimensions.
        input: The map's input.
        edge: Where the gradient of the map's output passes.
        rows: How input and gradient turn into rows.
        mask: Which rows are valid, [R] or [k, R]; None for all.
        shape: The shape of the map's output.

    Example:
        >>> import torch, pyro.distributions as dist
        >>> import nclbayes as ncl
        >>> model = ncl.BayesianNetwork(torch.nn.Linear(3, 2), ncl.Normal(1.0), prior=dist.Normal(0.0, 1.0))
        >>> run = ncl.watch.watch(model, (torch.ones(5, 3), torch.zeros(5, 2)))
        >>> (use,) = run.linear
        >>> [rows.shape for rows in use.input_rows()]
        [torch.Size([5, 3])]
    """

    weight: str
    bias: str | None
    function: Callable[..., Any]
    transposed: bool
    input: Tensor
    edge: GradientEdge
    rows: Rows
    mask: Tensor | None
    shape: torch.Size
    _version: int = field(init=False)

    def __post_init__(self) -> None:
        self._version = self.input._version

    @property
    def call(self) -> str:
        """The torch function's name, for messages."""
        return call_name(self.function)

    @property
    def maps(self) -> slice | None:
        """Which maps of a stack have rows, if not all do."""
        found = self.rows.maps if isinstance(self.rows, PartRows) else None
        return None if found is None else slice(found.start, found.stop)

    def input_rows(self) -> Iterator[Tensor]:
        """Valid input rows (zeros in place of padding), in bounded pieces, in float32 at least.

        Yields:
            [R', n] or [k, R', n].

        Raises:
            NCLError: If the input was changed in place after the map had read it.
        """
        if self.input._version != self._version:
            raise NCLError(
                f"The input of {self.call} with weight '{self.weight}' was modified in place after the call. "
                "Autograd could not differentiate this model either: use an out-of-place operation."
            )
        start = 0
        for piece in self.rows.inputs(self.input.detach()):
            stop = start + piece.shape[-2]
            yield only_valid(single(piece), None if self.mask is None else self.mask[..., start:stop])
            start = stop

    def gradient_rows(self, grad: Tensor) -> Tensor:
        """Valid gradient rows (zeros in place of padding), in float32 at least.

        Args:
            grad: The gradient of the map's output.

        Returns:
            [R, m] or [k, R, m].
        """
        grad = grad if grad.shape == self.shape else grad.reshape(self.shape)
        return only_valid(self.rows.gradients(single(grad)), self.mask)

    def count(self) -> Tensor | int:
        """The number of valid rows; [k] where the maps of a stack need not have the same."""
        if self.mask is not None:
            return self.mask.sum(-1, dtype=torch.float64)
        rows = self.rows.rows if isinstance(self.rows, PartRows) else self.rows
        return rows.counts(self.input.device) if isinstance(rows, GroupedRows) else rows.count


@dataclass(frozen=True)
class OtherUse:
    """A differentiable use of a site that is no linear map.

    Attributes:
        site: The site.
        call: The torch function, for messages.
        is_fused: Whether the call runs linear maps of the site inside that nobody can see.
        separable: How its gradient falls into those of examples, where that is known.
        idle: Whether what was computed from it was not used any more, unless by a distribution.

    Example:
        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from nclbayes.watch import watch
        >>> def model(x, y):
        ...     gain = pyro.sample("gain", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        ...     pyro.sample("y", dist.Normal(x * gain, 1.0).to_event(1), obs=y)
        >>> (use,) = watch(model, (torch.ones(5, 2), torch.zeros(5, 2))).others
        >>> use.site, use.call
        ('gain', 'torch.Tensor.mul')
    """

    site: str
    call: str
    is_fused: bool = False
    separable: Separable | None = None
    idle: bool = False
