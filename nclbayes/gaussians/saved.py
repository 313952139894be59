"""A Gaussian from a file: whether it can be one, and then the state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from nclbayes.blocks import Block, DiagonalBlock, KroneckerBlock
from nclbayes.errors import MatrixError
from nclbayes.gaussians.checking import check_forms, check_parts
from nclbayes.gaussians.diagonal import DiagonalState
from nclbayes.gaussians.kronecker import KroneckerState, precision_of, unfolded
from nclbayes.gaussians.state import State, Structure
from nclbayes.storage import Form, Misfit
from nclbayes.watch.rows import single


@dataclass(frozen=True)
class SavedState:
    """What a file says of a Gaussian: :meth:`State.settings`, and the names of its parts.

    Attributes:
        kind: Its form.
        block: The sites and their layout.
        log_scale: log tau.
        tensors: The names of its parts.
    """

    kind: Structure
    block: KroneckerBlock | DiagonalBlock
    log_scale: float
    tensors: list[str]

    def check(self, name: str, forms: Mapping[str, Form]) -> None:
        """Refuse a layout that is none, and tensors that do not have its shapes.

        Args:
            name: The name under which the file has the block.
            forms: The tensors' dtypes and shapes, by part.

        Raises:
            Misfit: If something does not fit.
        """
        check_layout(name, self.block)
        if self.kind is Structure.KRONECKER and not isinstance(self.block, KroneckerBlock):
            raise Misfit(f"the block '{name}' is no linear map, and has no Kronecker factors")
        check_forms(name, forms, self.kind, self.block)

    def state(self, tensors: Mapping[str, Tensor]) -> State:
        """The Gaussian.

        Args:
            tensors: By part, of the right shapes.

        Returns:
            The state.

        Raises:
            Misfit: If these are not the parts of one Gaussian.
        """
        tensors = unfolded(tensors)
        check_parts(self.block.name, tensors)
        # Files of earlier versions may have means of half precision.
        loc = single(tensors["loc"])
        if self.kind is Structure.DIAGONAL:
            return DiagonalState(self.block, loc, tensors["precision"], self.log_scale)
        assert isinstance(self.block, KroneckerBlock)
        try:
            precision = precision_of(tensors)
        except MatrixError as error:
            raise Misfit(f"the block '{self.block.name}' has no precision: {str(error).rstrip('.')}") from error
        return KroneckerState(self.block, loc, precision, self.log_scale)


def check_layout(name: str, block: Block) -> None:
    """Refuse a block whose sites and matrix are not of the same weights.

    Args:
        name: The name under which the file has it.
        block: The block.

    Raises:
        Misfit: If something does not fit.
    """
    if block.name != name:
        raise Misfit(f"the block '{name}' calls itself '{block.name}'")
    if isinstance(block, DiagonalBlock):
        if any(size < 1 for size in block.shape):
            raise Misfit(f"the block '{block.name}' has the shape {block.shape}")
        return
    if len(block.view) not in (2, 3) or any(size < 1 for size in block.view + block.weight_shape + block.bias_shape):
        raise Misfit(f"the block '{block.name}' has a site of {block.weight_shape} as a matrix of {block.view}")
    if math.prod(block.view) != math.prod(block.weight_shape):
        raise Misfit(f"the block '{block.name}' has a site of {block.weight_shape} as a matrix of {block.view}")
    if block.bias is None and block.bias_shape:
        raise Misfit(f"the block '{block.name}' has the shape of a bias, and no bias")
    if block.bias is not None and math.prod(block.bias_shape) != math.prod(block.shape[:-1]):
        raise Misfit(f"the block '{block.name}' has a bias of {block.bias_shape} for a matrix of {block.shape}")
    if block.bias == block.weight:
        raise Misfit(f"the block '{block.name}' has one site as weight and as bias")
    if any(not 0 <= width < size for width, size in zip(block.widths, reversed(block.shape), strict=False)):
        raise Misfit(f"the block '{block.name}' has factors in blocks of {block.widths}")
