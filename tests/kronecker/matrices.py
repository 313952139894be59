"""Random matrices of a given condition number or rank, and the dense algebra that serves as an oracle."""

import numpy as np
import scipy.linalg
import torch
from torch import Tensor


def orthogonal(rng: np.random.Generator, k: int) -> Tensor:
    """A random orthogonal matrix, [k, k]."""
    q, r = torch.linalg.qr(torch.from_numpy(rng.standard_normal((k, k))))
    return q * r.diagonal().sign()


def psd(rng: np.random.Generator, k: int, rank: int, condition: float = 10.0, scale: float = 1.0) -> Tensor:
    """A random positive semi-definite matrix whose largest eigenvalue is `scale`, [k, k], float64.

    Its `rank` positive eigenvalues run log-uniformly from `scale` down to `scale / condition`, in a random basis.
    """
    basis = orthogonal(rng, k)[:, :rank]
    values = torch.from_numpy(scale * np.logspace(0, -np.log10(condition), rank))
    matrix = (basis * values) @ basis.mT
    return (matrix + matrix.mT) / 2


def spd(rng: np.random.Generator, k: int, condition: float = 10.0, scale: float = 1.0) -> Tensor:
    """A random positive definite matrix of that condition number, [k, k], float64."""
    return psd(rng, k, k, condition, scale)


def vec(matrix: Tensor) -> Tensor:
    """The columns of a matrix, one under the other, [..., m, n] -> [..., mn]."""
    return torch.cat([matrix[..., j] for j in range(matrix.shape[-1])], dim=-1)


def kron(input: Tensor, output: Tensor) -> np.ndarray:
    """A (x) G in float64 for unbatched factors, the matrix of V -> G V A in column-stacking order."""
    return np.kron(input.double().numpy(), output.double().numpy())


def dense_kl(first: np.ndarray, second: np.ndarray) -> float:
    """KL( N(0, first^-1) || N(0, second^-1) ) of dense precisions, by the textbook formula."""
    logdets = np.linalg.slogdet(first)[1] - np.linalg.slogdet(second)[1]
    return float(np.trace(np.linalg.solve(first, second)) - len(first) + logdets) / 2


def ratios(X: Tensor, Y: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> np.ndarray:
    """The eigenvalues of A (x) B + C (x) D relative to X (x) Y, [nm]: all one where the product is exact.

    X and Y whiten the four factors before the sum is formed densely, which keeps rounding errors small.
    """

    def whiten(precision: Tensor, matrix: Tensor) -> np.ndarray:
        root = np.linalg.cholesky(precision.double().numpy())
        half = scipy.linalg.solve_triangular(root, matrix.double().numpy(), lower=True)
        return scipy.linalg.solve_triangular(root, half.T, lower=True)

    total = np.kron(whiten(X, A), whiten(Y, B)) + np.kron(whiten(X, C), whiten(Y, D))
    return np.linalg.eigvalsh(total)


def sum_kl(X: Tensor, Y: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> float:
    """KL( N(0, (X (x) Y)^-1) || N(0, (A (x) B + C (x) D)^-1) ), dense."""
    r = ratios(X, Y, A, B, C, D)
    return float(np.sum(r - 1 - np.log(r)) / 2)


def inverse_error(matrix: Tensor, inverse: Tensor) -> float:
    """The largest entry of M M^-1 - I, in absolute value."""
    return float((matrix @ inverse - torch.eye(len(matrix), dtype=matrix.dtype)).abs().amax())
