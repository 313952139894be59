"""NCL with independent weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nclbayes.engines.laplace import TrustRegion
from nclbayes.gaussians import Structure


@dataclass(frozen=True, kw_only=True)
class DiagonalNCL(TrustRegion):
    """Laplace-NCL with a diagonal precision: the paper's suggestion for networks that are too wide for two factors.

    The step on each weight is ``lr [ g_i / Lambda_i - lambda (theta_i - mu_i) ]``, and sums of Fishers are exact.

    Example:
        >>> from nclbayes.methods import DiagonalNCL
        >>> DiagonalNCL(steps=100).structure.value
        'diagonal'
    """

    structure: ClassVar[Structure] = Structure.DIAGONAL
