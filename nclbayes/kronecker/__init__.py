"""Kronecker-factored Gaussians: precisions, their sums and divergences, and the distribution itself."""

from nclbayes.kronecker.blockdiagonal import BlockDiagonal
from nclbayes.kronecker.divergence import SummedPrecision, gaussian_kl, scale_free_kl
from nclbayes.kronecker.fading import fade
from nclbayes.kronecker.finite import is_finite
from nclbayes.kronecker.normal import KroneckerNormal
from nclbayes.kronecker.precision import KroneckerPrecision
from nclbayes.kronecker.rules import SumRule
from nclbayes.kronecker.stiffening import stiffen
from nclbayes.kronecker.sums import KroneckerSum, kronecker_sum

__all__ = [
    "BlockDiagonal",
    "KroneckerNormal",
    "KroneckerPrecision",
    "KroneckerSum",
    "SumRule",
    "SummedPrecision",
    "fade",
    "gaussian_kl",
    "is_finite",
    "kronecker_sum",
    "scale_free_kl",
    "stiffen",
]
