"""The `kl` Kronecker sum against damped fixed-point iterations on the matrices themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from nclbayes.kronecker import KroneckerPrecision, SummedPrecision, gaussian_kl, kronecker_sum
from tests.benchmarks.timing import best_times, table


def damped_iterations(
    A: Tensor, B: Tensor, C: Tensor, D: Tensor, invert: object, count: int = 60, beta: float = 0.3
) -> tuple[Tensor, Tensor]:
    """X <- (1 - beta) X + beta (tr(B Y^-1) A + tr(D Y^-1) C) / m, and likewise Y, both at once."""
    n, m = A.shape[0], B.shape[0]
    X, Y = A + C, B + D
    for _ in range(count):
        X_inv, Y_inv = invert(X), invert(Y)  # type: ignore[operator]
        X_new = ((B * Y_inv).sum() * A + (D * Y_inv).sum() * C) / m
        Y_new = ((A * X_inv).sum() * B + (C * X_inv).sum() * D) / n
        X, Y = (1 - beta) * X + beta * X_new, (1 - beta) * Y + beta * Y_new
    return X, Y


def cholesky_inverse(matrix: Tensor) -> Tensor:
    return torch.cholesky_inverse(torch.linalg.cholesky(matrix))


def fisher_like(size: int, generator: torch.Generator) -> Tensor:
    """A covariance with a decaying spectrum, as activations have."""
    rows = torch.randn(3 * size, size, generator=generator, dtype=torch.float64)
    mixing = torch.randn(size, size, generator=generator, dtype=torch.float64) / size**0.5
    rows = rows * torch.logspace(0, -2, size, dtype=torch.float64) @ mixing
    return rows.T @ rows


def run(threads: str) -> str:
    rows = []
    for n, m in ((257, 256), (785, 400), (1025, 512)):
        g = torch.Generator().manual_seed(0)
        C, D = fisher_like(n, g), fisher_like(m, g)
        A, B = (
            fisher_like(n, g) + torch.eye(n, dtype=torch.float64),
            fisher_like(m, g) + torch.eye(m, dtype=torch.float64),
        )
        times = best_times(
            {
                "kl": lambda A=A, B=B, C=C, D=D: kronecker_sum(A, B, C, D),
                "inv": lambda A=A, B=B, C=C, D=D: damped_iterations(A, B, C, D, torch.linalg.inv),
                "cholesky": lambda A=A, B=B, C=C, D=D: damped_iterations(A, B, C, D, cholesky_inverse),
            },
            rounds=3,
        )
        exact = SummedPrecision.of(A, B, C, D)
        ours = kronecker_sum(A, B, C, D)
        theirs = gaussian_kl(KroneckerPrecision.factorise(*damped_iterations(A, B, C, D, torch.linalg.inv)), exact)
        rows.append(
            (
                f"{n} x {m}",
                threads,
                f"{times['kl']:.3f} s",
                f"{times['inv'] / times['kl']:.1f}",
                f"{times['cholesky'] / times['kl']:.1f}",
                f"{float(ours.kl):.6f}",
                f"{float(theirs):.6f}",
            )
        )
    return table(
        "Kronecker sum `kl` against 60 damped matrix iterations (beta = 0.3): how many times faster, KL reached",
        ("n x m", "threads", "kl", "vs torch.inv", "vs Cholesky inverse", "KL of kl", "KL of damped"),
        rows,
    )
