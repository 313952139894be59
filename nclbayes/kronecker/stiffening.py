"""A precision that counts by its shape alone: how much more firmly used directions are held than free ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nclbayes.kronecker.blockdiagonal import Matrix
from nclbayes.kronecker.pencil import AnyPencil, pencil
from nclbayes.kronecker.precision import KroneckerPrecision


def stiffen(precision: KroneckerPrecision, prior: KroneckerPrecision, stiffness: float) -> KroneckerPrecision:
    """One Kronecker product with the directions of a precision, and with a stiffness that does not depend on its size.

    Each side keeps its directions above its own prior, scaled so that the mean direction is `stiffness` times stiffer
    than a free one on the side of the inputs, and as stiff again as one on the side of the outputs:

        X = A_0 + stiffness (A - A_0) / mean(a - 1),    Y = G_0 + (G - G_0) / mean(g - 1),

    with a and g the eigenvalues of A and G relative to A_0 and G_0 (what is below its prior counts as free). Inputs
    count so much more because a change of weights that no input of earlier tasks meets leaves their outputs as they
    were, however large it is; one that their gradients do not show does so only as long as it is small. Only the
    product A (x) G is identified: the side of the outputs is scaled to touch its prior.

    Args:
        precision: A (x) G.
        prior: A_0 (x) G_0, of the same shape.
        stiffness: How many times stiffer than a free direction the mean one is, above 0.

    Returns:
        X (x) Y, factorised; the prior itself where the precision is that.

    Example:
        >>> import torch
        >>> from nclbayes.kronecker import KroneckerPrecision, stiffen
        >>> prior = KroneckerPrecision.factorise(torch.eye(3), torch.eye(2))
        >>> learnt = KroneckerPrecision.factorise(torch.diag(torch.tensor([1.0, 1.0, 7.0])), torch.eye(2))
        >>> stiffen(learnt, prior, 100.0).dense().diagonal()[::2]
        tensor([  1.,   1., 301.])
    """
    return stiffening(precision, prior)(stiffness)


def stiffening(precision: KroneckerPrecision, prior: KroneckerPrecision) -> Callable[[float], KroneckerPrecision]:
    """What :func:`stiffen` does at any stiffness, with the decompositions done once.

    Args:
        precision: A (x) G.
        prior: A_0 (x) G_0, of the same shape.

    Returns:
        A function from a stiffness to X (x) Y.
    """
    left = pencil(prior.input, precision.input, ("the prior's input factor", "the input factor"))
    right = pencil(prior.output, precision.output, ("the prior's output factor", "the output factor"))
    least, dtype = right.values[..., :1], precision.input.dtype
    Y = _held(right, 1 / least, 1.0).to(dtype)

    def held(stiffness: float) -> KroneckerPrecision:
        return KroneckerPrecision.factorise(_held(left, least, stiffness).to(dtype), Y)

    return held


def _held(side: AnyPencil, scale: Tensor, stiffness: float) -> Matrix:
    """The side whose directions exceed its prior as `scale` times it does, on average by `stiffness`, [..., k, k]."""

    def excess(values: Tensor) -> Tensor:
        return (values * scale - 1).clamp(min=0.0)

    mean = excess(side.values).mean(-1, keepdim=True)
    # What exceeds its prior by rounding alone has no shape.
    weight = torch.where(mean > 1e-9, stiffness / mean, torch.zeros_like(mean))
    return side.rebuilt(lambda values: 1 + weight * excess(values))
