"""A precision that fades towards a prior, as one Kronecker product that never falls below it."""

from __future__ import annotations

import torch
from torch import Tensor

from nclbayes.kronecker.blockdiagonal import each
from nclbayes.kronecker.pencil import pencil
from nclbayes.kronecker.precision import KroneckerPrecision


def fade(precision: KroneckerPrecision, prior: KroneckerPrecision, retention: float) -> KroneckerPrecision:
    """One Kronecker product for ``phi A (x) G + (1 - phi) A_0 (x) G_0``.

    Each side fades towards its own prior,

        X = A_0 + s (A - A_0),    Y = G_0 + s (G - G_0),

    so that in every direction the precision comes to lie between what it was and the prior's, if it was not below
    that before. With a and g the mean eigenvalues of A and G relative to A_0 and G_0, s is such that the mean precision
    relative to the prior's fades exactly,

        (1 + s (a - 1)) (1 + s (g - 1)) = 1 + phi (a g - 1).

    Only the product A (x) G is identified: the flatter side is scaled to touch its prior. Where it is a multiple of
    that, as where it is a single number, the result is exact, and s = phi; the more both sides exceed their priors,
    the closer s is to the root of phi.

    The rules of :func:`~nclbayes.kronecker.kronecker_sum` do not serve here. With "additive" and "bound" each fading
    adds cross terms, so that it settles at about 4 phi / (1 - phi) times the prior; with "kl" and "mse" it falls below.

    Args:
        precision: A (x) G.
        prior: A_0 (x) G_0, of the same shape.
        retention: phi, above 0 and at most 1.

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
    left = pencil(A_0, precision.input, ("the prior's input factor", "the input factor")).values
    right = pencil(G_0, precision.output, ("the prior's output factor", "the output factor")).values
    a, g = left.mean(-1), right.mean(-1)
    scale = torch.where(a * right[..., 0] >= g * left[..., 0], right[..., 0], 1 / left[..., 0])
    s = _share(a * scale, g / scale, retention)
    scale, s = scale[..., None, None], s[..., None, None]
    X = each(torch.add, (1 - s) * A_0.double(), (s * scale) * precision.input)
    Y = each(torch.add, (1 - s) * G_0.double(), (s / scale) * precision.output)
    dtype = precision.input.dtype
    return KroneckerPrecision.factorise(X.to(dtype), Y.to(dtype))


def _share(a: Tensor, g: Tensor, phi: float) -> Tensor:
    """The s of :func:`fade`, in [phi, sqrt(phi)].

    With the share k = (a - 1) (g - 1) / (a g - 1) of the excess that both sides have together, k s^2 + (1 - k) s = phi.
    A side whose mean is below its prior's has no excess: then s = phi.
    """
    k = ((a - 1) * (g - 1) / (a * g - 1)).nan_to_num(0.0).clamp(0.0, 1.0)
    return 2 * phi / (1 - k + ((1 - k).square() + 4 * k * phi).sqrt())
