"""A dense reference for Fishers: plain torch, per-example loops, no code of the package.

A model is given twice in the tests: as a Pyro model for the package, and here as a plain function
``log_prob(weights, x_i, y_i)`` of one example. ``weights`` is a dict of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

LogProb = Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]


def score(log_prob: LogProb, weights: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The gradient of one example's log likelihood, site by site."""
    leaves = {k: v.detach().double().requires_grad_() for k, v in weights.items()}
    grads = torch.autograd.grad(log_prob(leaves, x.double(), y), list(leaves.values()), allow_unused=True)
    return {k: torch.zeros_like(leaves[k]) if g is None else g for k, g in zip(leaves, grads, strict=True)}


def outer(gradients: dict[str, Tensor], pack: Callable[[dict[str, Tensor]], Tensor]) -> Tensor:
    """s s^T of the packed gradient, columns stacked."""
    s = pack(gradients).mT.reshape(-1)
    return torch.outer(s, s)


def enumerated_fisher(
    log_prob: LogProb,
    weights: dict[str, Tensor],
    xs: Tensor,
    outcomes: Sequence[Tensor],
    pack: Callable[[dict[str, Tensor]], Tensor],
) -> Tensor:
    """sum_i sum_y p(y | x_i) s(y) s(y)^T over a finite list of outcomes."""
    total: Tensor | float = 0.0
    for x in xs:
        for y in outcomes:
            probability = log_prob({k: v.double() for k, v in weights.items()}, x.double(), y).exp()
            total = total + probability * outer(score(log_prob, weights, x, y), pack)
    return total


def gaussian_fisher(
    mean: Callable[[dict[str, Tensor], Tensor], Tensor],
    weights: dict[str, Tensor],
    xs: Tensor,
    covariance: Tensor,
    pack: Callable[[dict[str, Tensor]], Tensor],
) -> Tensor:
    """sum_i J_i^T Sigma^-1 J_i for y ~ N(mean(x_i), Sigma), J by one backward pass an output."""
    total: Tensor | float = 0.0
    for x in xs:
        leaves = {k: v.detach().double().requires_grad_() for k, v in weights.items()}
        out = mean(leaves, x.double()).reshape(-1)
        rows = []
        for k in range(len(out)):
            grads = torch.autograd.grad(out[k], list(leaves.values()), retain_graph=True, allow_unused=True)
            filled = {
                n: torch.zeros_like(v) if g is None else g for (n, v), g in zip(leaves.items(), grads, strict=True)
            }
            rows.append(pack(filled).mT.reshape(-1))
        jacobian = torch.stack(rows)
        total = total + jacobian.T @ torch.linalg.solve(covariance.double(), jacobian)
    return total
