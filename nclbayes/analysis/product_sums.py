"""How far one Kronecker product is from a sum of many.

Only the log determinant of the sum needs the dense matrix; everything else is traces of factors.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from nclbayes.kronecker import KroneckerPrecision
from nclbayes.kronecker.blockdiagonal import whole
from nclbayes.kronecker.precision import cholesky


@dataclass(frozen=True)
class Closeness:
    """How close a Kronecker product is to a sum of them.

    Attributes:
        correlation: Between the entries of the two matrices.
        kl: KL( N(mu, product^-1) || N(mu, sum^-1) ) in nats.
        scale_free_kl: The smallest such KL over multiples of the product.
    """

    correlation: float
    kl: float
    scale_free_kl: float

    def to_dict(self) -> dict[str, float]:
        """The numbers by name."""
        return asdict(self)


class ProductSum:
    """The exact sum of Kronecker products A_k (x) G_k, for blocks of up to some thousand weights.

    Args:
        A: Input factor of the first product, [n, n], positive definite.
        G: Output factor of the first product, [m, m], positive definite.

    Example:
        >>> import torch
        >>> from nclbayes.analysis.product_sums import ProductSum
        >>> from nclbayes.kronecker import KroneckerPrecision
        >>> I2, I3 = torch.eye(2), torch.eye(3)
        >>> total = ProductSum(I3, I2)
        >>> total.add(3 * I3, I2)
        >>> exact = KroneckerPrecision.factorise(2 * I3, 2 * I2)
        >>> round(total.closeness(exact).kl, 6)
        0.0
    """

    def __init__(self, A: Tensor, G: Tensor) -> None:
        self._terms: list[tuple[Tensor, Tensor]] = []
        self._dense = torch.zeros((), dtype=torch.float64, device=A.device)
        self._logdet: Tensor | None = None
        self.add(A, G)

    def add(self, A: Tensor, G: Tensor) -> None:
        """Add a product.

        Args:
            A: [n, n], positive semi-definite.
            G: [m, m], positive semi-definite.
        """
        A, G = A.double(), G.double()
        self._terms.append((A, G))
        self._dense = self._dense + torch.kron(A, G)
        self._logdet = None

    def dense(self) -> Tensor:
        """The sum, [mn, mn] in float64, in the order of column-stacking vec."""
        return self._dense

    @property
    def logdet(self) -> Tensor:
        """Its log determinant.

        Raises:
            MatrixError: If the sum is not positive definite.
        """
        if self._logdet is None:
            self._logdet = 2 * cholesky("the sum of Kronecker products", self._dense).diagonal().log().sum()
        return self._logdet

    def closeness(self, product: KroneckerPrecision) -> Closeness:
        """How close a Kronecker product is to the sum.

        Args:
            product: The product.

        Returns:
            Correlation and divergences.
        """
        d, ratio = product.size, self._inner(whole(product.input_inverse), whole(product.output_inverse))
        logs = product.logdet.double() - self.logdet
        return Closeness(
            self._correlation(whole(product.input).double(), whole(product.output).double()),
            float((ratio - d + logs) / 2),
            float((logs + d * (ratio / d).log()) / 2),
        )

    def _correlation(self, X: Tensor, Y: Tensor) -> float:
        """Of the entries of X (x) Y with those of the sum, from sums of entries and inner products."""
        count = (X.shape[-1] * Y.shape[-1]) ** 2
        mean = X.sum() * Y.sum() / count
        own_mean = sum(A.sum() * G.sum() for A, G in self._terms) / count
        covariance = self._inner(X, Y) / count - mean * own_mean
        variance = X.square().sum() * Y.square().sum() / count - mean**2
        own_variance = sum(self._inner(A, G) for A, G in self._terms) / count - own_mean**2
        return float(covariance) / math.sqrt(float(variance) * float(own_variance))

    def _inner(self, X: Tensor, Y: Tensor) -> Tensor:
        """The sum over terms of tr(X A_k) tr(Y G_k)."""
        X, Y = X.double(), Y.double()
        return torch.stack([(X * A).sum() * (Y * G).sum() for A, G in self._terms]).sum()
