"""The matrix-valued Gaussian with a Kronecker-factored precision, as a Pyro distribution."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Size, Tensor
from torch.distributions import Independent, Normal, constraints, register_kl

from nclbayes.errors import MatrixError
from nclbayes.kronecker.blockdiagonal import Matrix, blocks_of, whole
from nclbayes.kronecker.precision import KroneckerPrecision, check_symmetric, cholesky, inverse_root, kronecker_logdet


class KroneckerNormal(TorchDistribution):
    """A Gaussian over m-by-n matrices: ``vec(theta) ~ N(vec(loc), (A (x) G)^-1)``.

    A sample is ``loc + S_G eps S_A^T`` with standard normal eps, where ``S_A S_A^T = A^-1`` and ``S_G S_G^T = G^-1``.
    Pass the roots (a :class:`KroneckerPrecision` has them: see :meth:`from_precision`) and nothing is factorised.

    Args:
        loc: The mean, [..., m, n].
        input_precision: A, [..., n, n], positive definite.
        output_precision: G, [..., m, m], positive definite.
        input_root: S_A, [..., n, n], if known.
        output_root: S_G, [..., m, m], if known.
        logdet: log|A (x) G|, [...], if known.
        validate_args: Whether to check the arguments; the factors are checked only where no root is given.

    Raises:
        MatrixError: If the shapes do not fit, or a factor given without its root is not positive definite.

    Example:
        >>> import torch
        >>> from nclbayes import KroneckerNormal
        >>> q = KroneckerNormal(torch.zeros(2, 3), 4 * torch.eye(3), torch.eye(2))
        >>> q.event_shape, float(q.variance[0, 0])
        (torch.Size([2, 3]), 0.25)
        >>> q.rsample((5,)).shape
        torch.Size([5, 2, 3])
    """

    arg_constraints = {"loc": constraints.independent(constraints.real, 2)}  # noqa: RUF012
    support = constraints.independent(constraints.real, 2)
    has_rsample = True

    def __init__(
        self,
        loc: Tensor,
        input_precision: Matrix,
        output_precision: Matrix,
        *,
        input_root: Matrix | None = None,
        output_root: Matrix | None = None,
        logdet: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if loc.ndim < 2:
            raise MatrixError(f"loc must be a matrix [..., m, n], not {tuple(loc.shape)}.")
        m, n = loc.shape[-2:]
        given = {
            "input_precision": (input_precision, n),
            "output_precision": (output_precision, m),
            "input_root": (input_root, n),
            "output_root": (output_root, m),
        }
        for name, (matrix, k) in given.items():
            if matrix is not None and matrix.shape[-2:] != (k, k):
                raise MatrixError(
                    f"{name} must be [..., {k}, {k}] to go with loc {tuple(loc.shape)}, not {tuple(matrix.shape)}."
                )
        batch_shape = torch.broadcast_shapes(
            *(x.shape[:-2] for x in (loc, *(t for t, _ in given.values() if t is not None)))
        )
        self.loc = loc.expand(*batch_shape, m, n)
        self.input_precision: Matrix = input_precision.expand(*batch_shape, n, n)
        self.output_precision: Matrix = output_precision.expand(*batch_shape, m, m)
        if input_root is not None:
            self.__dict__["input_root"] = input_root.expand(*batch_shape, n, n)
        if output_root is not None:
            self.__dict__["output_root"] = output_root.expand(*batch_shape, m, m)
        if logdet is not None:
            self.logdet = logdet.expand(batch_shape)
        super().__init__(batch_shape, Size((m, n)), validate_args=validate_args)
        if self._validate_args:
            for side, root in (("input", input_root), ("output", output_root)):
                if root is None:
                    check_symmetric(f"{side}_precision", getattr(self, f"{side}_precision"))
                    getattr(self, f"{side}_root")

    @classmethod
    def from_precision(cls, loc: Tensor, precision: KroneckerPrecision) -> KroneckerNormal:
        """The Gaussian around `loc` whose precision is already factorised.

        Args:
            loc: The mean, [..., m, n].
            precision: The factorised A (x) G.

        Returns:
            The distribution; it shares the precision's tensors.
        """
        return cls(
            loc,
            precision.input,
            precision.output,
            input_root=precision.input_root,
            output_root=precision.output_root,
            logdet=precision.logdet,
        )

    @cached_property
    def _input_cholesky(self) -> Tensor:
        return cholesky("input_precision", whole(self.input_precision).double())

    @cached_property
    def _output_cholesky(self) -> Tensor:
        return cholesky("output_precision", whole(self.output_precision).double())

    @cached_property
    def input_root(self) -> Matrix:
        """S_A, [..., n, n], with S_A S_A^T = A^-1."""
        return inverse_root(self._input_cholesky).to(self.loc.dtype)

    @cached_property
    def output_root(self) -> Matrix:
        """S_G, [..., m, m], with S_G S_G^T = G^-1."""
        return inverse_root(self._output_cholesky).to(self.loc.dtype)

    @cached_property
    def logdet(self) -> Tensor:
        """log|A (x) G|, [...]."""
        m, n = self._event_shape
        a, g = (L.diagonal(dim1=-2, dim2=-1).log().sum(-1) for L in (self._input_cholesky, self._output_cholesky))
        return (2 * kronecker_logdet(a, g, n, m)).to(self.loc.dtype)

    @property
    def mean(self) -> Tensor:
        """The mean, [..., m, n]."""
        return self.loc

    @property
    def mode(self) -> Tensor:
        """The mode, which is the mean, [..., m, n]."""
        return self.loc

    @property
    def variance(self) -> Tensor:
        """The variance of each entry, (G^-1)_ii (A^-1)_jj, [..., m, n]."""
        rows = self.output_root.square().sum(-1)
        columns = self.input_root.square().sum(-1)
        return rows.unsqueeze(-1) * columns.unsqueeze(-2)

    def rsample(self, sample_shape: Size | tuple[int, ...] = ()) -> Tensor:
        """Draw reparameterised matrices.

        Args:
            sample_shape: How many.

        Returns:
            [*sample_shape, ..., m, n].
        """
        shape = self._extended_shape(Size(sample_shape))
        eps = torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)
        return self.transform(eps)

    def transform(self, eps: Tensor) -> Tensor:
        """The matrix that standard normal noise becomes, loc + S_G eps S_A^T.

        Args:
            eps: [..., m, n].

        Returns:
            [..., m, n].
        """
        return self.loc + self.output_root @ eps @ self.input_root.mT

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of matrices.

        Args:
            value: [..., m, n].

        Returns:
            [...].
        """
        if self._validate_args:
            self._validate_sample(value)
        m, n = self._event_shape
        v = value - self.loc
        quadratic = (v * (self.output_precision @ v @ self.input_precision)).sum((-2, -1))
        return (self.logdet - m * n * math.log(2 * math.pi) - quadratic) / 2

    def entropy(self) -> Tensor:
        """Differential entropy in nats, [...]."""
        m, n = self._event_shape
        return (m * n * (1 + math.log(2 * math.pi)) - self.logdet) / 2

    def expand(self, batch_shape: Any, _instance: KroneckerNormal | None = None) -> KroneckerNormal:
        """The same distribution with a larger batch shape; memory is shared.

        Args:
            batch_shape: The new batch shape.
            _instance: The object to fill in, for subclasses.

        Returns:
            The expanded distribution.
        """
        new = self._get_checked_instance(KroneckerNormal, _instance)
        batch_shape = Size(batch_shape)
        # What is cached expands along; what is not stays lazy.
        for name in ("loc", "input_precision", "output_precision", "input_root", "output_root",
                     "_input_cholesky", "_output_cholesky"):  # fmt: skip
            if name in self.__dict__:
                tensor = self.__dict__[name]
                new.__dict__[name] = tensor.expand(batch_shape + tensor.shape[-2:])
        if "logdet" in self.__dict__:
            new.__dict__["logdet"] = self.__dict__["logdet"].expand(batch_shape)
        super(KroneckerNormal, new).__init__(batch_shape, self._event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new


@register_kl(KroneckerNormal, KroneckerNormal)
def _kl_kronecker_kronecker(p: KroneckerNormal, q: KroneckerNormal) -> Tensor:
    m, n = p.event_shape
    shift = q.loc - p.loc
    quadratic = (shift * (q.output_precision @ shift @ q.input_precision)).sum((-2, -1))
    # tr(A_p^-1 A_q) = ||R_q^T S_p||^2, so that no inverse is formed.
    trace = _trace(p.input_root, q.input_precision) * _trace(p.output_root, q.output_precision)
    return (trace - m * n + p.logdet - q.logdet + quadratic) / 2


def _trace(root: Matrix, precision: Matrix) -> Tensor:
    """tr(S S^T P)."""
    if blocks_of(root) != blocks_of(precision):
        root, precision = whole(root), whole(precision)
    return (root * (precision @ root)).sum((-2, -1))


@register_kl(KroneckerNormal, Independent)
def _kl_kronecker_independent(p: KroneckerNormal, q: Independent[Any]) -> Tensor:
    base = _matrix_normal_base(q, p)
    m, n = p.event_shape
    precision = base.variance.reciprocal()
    trace = (precision * (p.variance + (p.loc - base.loc).square())).sum((-2, -1))
    return (trace - m * n + p.logdet + base.variance.log().sum((-2, -1))) / 2


@register_kl(Independent, KroneckerNormal)
def _kl_independent_kronecker(p: Independent[Any], q: KroneckerNormal) -> Tensor:
    base = _matrix_normal_base(p, q)
    m, n = q.event_shape
    shift = q.loc - base.loc
    quadratic = (shift * (q.output_precision @ shift @ q.input_precision)).sum((-2, -1))
    rows = q.output_precision.diagonal(dim1=-2, dim2=-1)
    columns = q.input_precision.diagonal(dim1=-2, dim2=-1)
    trace = (rows.unsqueeze(-1) * base.variance * columns.unsqueeze(-2)).sum((-2, -1))
    return (trace - m * n - base.variance.log().sum((-2, -1)) - q.logdet + quadratic) / 2


def _matrix_normal_base(distribution: Independent[Any], other: KroneckerNormal) -> Normal:
    """The Normal under an Independent whose event is a matrix of the other's shape."""
    base = distribution.base_dist
    if not isinstance(base, Normal) or len(distribution.event_shape) != 2:
        raise NotImplementedError("KL with a KroneckerNormal is known for Independent(Normal, 2) only.")
    if distribution.event_shape != other.event_shape:
        raise MatrixError(
            "KL between matrices of different shapes: "
            f"KroneckerNormal {tuple(other.event_shape)}, Independent {tuple(distribution.event_shape)}."
        )
    return base
