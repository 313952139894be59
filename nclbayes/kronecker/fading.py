"""A precision that fades towards a prior, as one Kronecker product that never falls below it."""

from __future__ import annotations

import torch
from torch import Tensor

from nclbayes.kronecker.pencil import Pencil
from nclbayes.kronecker.precision import KroneckerPrecision


def fade(precision: KroneckerPrecision, prior: KroneckerPrecision, retention: float) -> KroneckerPrecision:
    """One Kronecker product for ``r A (x) G + (1 - r) A_0 (x) G_0``.

    Each side fades towards its own prior,

        X = A_0 + s (A - A_0),    Y = G_0 + s (G - G_0),

    so that in every direction the precision comes to lie between what it was and the prior's, if it was not below
    that before. (A sum by the rules "additive" and "bound" would add cross terms each time, and settle at 4 r / (1 - r)
    times the prior; one by "kl" or "mse" falls below it.) With a and g the mean eigenvalues of A and G relative to
    A_0 and G_0, s is such that the mean precision relative to the prior's fades exactly,

        (1 + s (a - 1)) (1 + s (g - 1)) = 1 + r (a g - 1).

    Only the product A (x) G is identified: the flatter side is scaled to touch its prior. Where it is a multiple of
    that, as where it is a single number, the result is exact, and s = r; the more both sides exceed their priors, the
    closer s is to the root of r.

    Args:
        precision: A (x) G.
        prior: A_0 (x) G_0, of the same shape.
        retention: r, above 0 and at most 1.

    Returns:
        X (x) Y, factorised.

    Example:
        >>> import torch
        >>> from nclbayes.kronecker import KroneckerPrecision, fade
        >>> prior = KroneckerPrecision.factorise(torch.eye(3), torch.eye(2))
        >>> learnt = KroneckerPrecision.factorise(torch.diag(torch.tensor([1.0, 5.0, 9.0])), torch.eye(2))
        >>> fade(learnt, prior, 0.75).dense().diagonal()[::2]
        tensor([1., 4., 7.])
    """
    A_0, G_0 = prior.input, prior.output
    left = Pencil.of(A_0, precision.input, ("the prior's input factor", "the input factor")).values
    right = Pencil.of(G_0, precision.output, ("the prior's output factor", "the output factor")).values
    a, g = left.mean(-1), right.mean(-1)
    scale = torch.where(a * right[..., 0] >= g * left[..., 0], right[..., 0], 1 / left[..., 0])
    s = _share(a * scale, g / scale, retention)
    A, G = (factor.to(left.dtype) for factor in (precision.input, precision.output))
    scale, s = scale[..., None, None], s[..., None, None]
    X, Y = torch.lerp(A_0.to(A), scale * A, s), torch.lerp(G_0.to(G), G / scale, s)
    dtype = precision.input.dtype
    return KroneckerPrecision.factorise(X.to(dtype), Y.to(dtype))


def _share(a: Tensor, g: Tensor, r: float) -> Tensor:
    """The s of :func:`fade`, in [r, sqrt(r)].

    With the share k = (a - 1) (g - 1) / (a g - 1) of the excess that both sides have together, k s^2 + (1 - k) s = r.
    A side whose mean is below its prior's has no excess: then s = r.
    """
    k = ((a - 1) * (g - 1) / (a * g - 1)).nan_to_num(0.0).clamp(0.0, 1.0)
    return 2 * r / (1 - k + ((1 - k).square() + 4 * k * r).sqrt())
