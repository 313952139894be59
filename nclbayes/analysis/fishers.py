"""The exact Fisher of a small linear recurrent network, and dense matrices to compare with it.

The network is, with states r_0 = 0 and outputs that are independent given the inputs,

    h_t = W z_t + xi_t,   z_t = (r_{t-1}; x_t),   r_t = h_t,   y_t ~ p(y_t | C r_t).

All matrices are dense, in the order of column-stacking vec: for networks of some ten units.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nclbayes.errors import SettingError

Curvature = Callable[[Tensor], Tensor]
"""From the outputs C r_t, [..., m], to the Fisher of p(y_t | C r_t) with respect to them, [..., m, m]."""


@dataclass(frozen=True)
class LinearRNN:
    """A linear recurrent network with a linear readout.

    Attributes:
        W: Recurrent and input weights side by side, [units, units + inputs].
        C: The readout, [outputs, units].

    Raises:
        SettingError: If the shapes do not fit.

    Example:
        >>> import torch
        >>> from nclbayes.analysis.fishers import LinearRNN
        >>> rnn = LinearRNN(torch.tensor([[0.5, 1.0]]), torch.tensor([[2.0]]))
        >>> z, r = rnn.run(torch.ones(1, 3, 1))
        >>> r.flatten().tolist()
        [1.0, 1.5, 1.75]
    """

    W: Tensor
    C: Tensor

    def __post_init__(self) -> None:
        if self.W.ndim != 2 or self.C.ndim != 2 or self.W.shape[0] >= self.W.shape[1]:
            raise SettingError("W must be [units, units + inputs] and C [outputs, units].")
        if self.C.shape[1] != self.W.shape[0]:
            raise SettingError(f"C reads {self.C.shape[1]} units, but W has {self.W.shape[0]}.")

    def run(self, x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The inputs of both maps at every step.

        Args:
            x: [batch, time, inputs].
            noise: xi, [batch, time, units]; None: no noise.

        Returns:
            z [batch, time, units + inputs] and r [batch, time, units].
        """
        r = x.new_zeros(x.shape[0], self.W.shape[0])
        inputs, states = [], []
        for t, x_t in enumerate(x.unbind(1)):
            z = torch.cat([r, x_t], dim=-1)
            r = z @ self.W.mT
            if noise is not None:
                r = r + noise[:, t]
            inputs.append(z)
            states.append(r)
        return torch.stack(inputs, dim=1), torch.stack(states, dim=1)

    def fishers(self, x: Tensor, curvature: Curvature, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The exact Fishers of W and of C, averaged over sequences.

        With S_t = d r_t / d vec(W), which is z_t^T (x) I + H S_{t-1} for recurrent weights H, and M_t the curvature at
        C r_t, they are the means of

            sum_t S_t^T C^T M_t C S_t   and   sum_t (r_t r_t^T) (x) M_t.

        Args:
            x: [batch, time, inputs].
            curvature: That of the likelihood.
            noise: xi, [batch, time, units]; None: no noise.

        Returns:
            F_W [units (units + inputs), the same] and F_C [outputs units, the same].
        """
        z, r = self.run(x, noise)
        (batch, time), (units, width) = x.shape[:2], self.W.shape
        recurrent, eye = self.W[:, :units], torch.eye(units, dtype=x.dtype, device=x.device)
        M = curvature(r @ self.C.mT)  # [batch, time, m, m]
        S = x.new_zeros(batch, units, width * units)
        F_W = x.new_zeros(width * units, width * units)
        for t in range(time):
            direct = torch.einsum("bj,ik->bijk", z[:, t], eye).reshape(batch, units, width * units)
            S = direct + recurrent @ S
            J = self.C @ S  # [batch, m, units width]
            F_W += torch.einsum("bkp,bkq->pq", J, M[:, t] @ J)
        F_C = torch.einsum("bti,btj,btkl->ikjl", r, r, M).reshape(2 * (r.shape[-1] * M.shape[-1],))
        return F_W / batch, F_C / batch


def gaussian_curvature(covariance: Tensor) -> Curvature:
    """The curvature of Normal outputs: Sigma^-1, whatever the mean.

    Args:
        covariance: Sigma, [m, m].

    Returns:
        The curvature.
    """
    inverse = torch.linalg.inv(covariance)
    return lambda output: inverse.expand(*output.shape[:-1], *inverse.shape)


def categorical_curvature(logits: Tensor) -> Tensor:
    """The curvature of class labels: diag(p) - p p^T.

    Args:
        logits: [..., m].

    Returns:
        [..., m, m].
    """
    p = logits.softmax(-1)
    return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)


def owm_factors(inputs: Tensor, outputs: int, alpha: float) -> tuple[Tensor, Tensor]:
    """The precision that the projection of OWM implies: (E[z z^T] + alpha I) (x) I.

    Args:
        inputs: E[z z^T], [n, n].
        outputs: m.
        alpha: What is added before OWM inverts.

    Returns:
        Its factors, [n, n] and [m, m].
    """
    return _plus(inputs, alpha), torch.eye(outputs, dtype=inputs.dtype, device=inputs.device)


def dowm_factors(inputs: Tensor, weight: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """The precision that the projections of DOWM imply: (E[z z^T] + alpha I) (x) (W E[z z^T] W^T + alpha I).

    Args:
        inputs: E[z z^T], [n, n].
        weight: W, [m, n].
        alpha: What is added before DOWM inverts.

    Returns:
        Its factors, [n, n] and [m, m].
    """
    return _plus(inputs, alpha), _plus(weight @ inputs @ weight.mT, alpha)


def damped(matrix: Tensor, damping: float) -> Tensor:
    """A matrix scaled to a mean diagonal of 1, plus a multiple of the identity.

    Scaled first, matrices of different units are damped alike.

    Args:
        matrix: [d, d], positive semi-definite.
        damping: The multiple.

    Returns:
        [d, d].
    """
    return _plus(matrix / matrix.diagonal().mean(), damping)


def random_rotation(size: int, generator: torch.Generator) -> Tensor:
    """A rotation drawn uniformly.

    Args:
        size: d.
        generator: Decides the draw.

    Returns:
        An orthogonal matrix of determinant 1, [d, d], float64.
    """
    gaussian = torch.randn(size, size, dtype=torch.float64, generator=generator, device=generator.device)
    Q, R = torch.linalg.qr(gaussian)
    # The signs of R's diagonal are the algorithm's: taken out, Q is uniform over orthogonal matrices.
    Q = Q * R.diagonal().sign()
    Q[:, 0] *= torch.linalg.det(Q).sign()
    return Q


def _plus(matrix: Tensor, value: float) -> Tensor:
    return matrix + value * torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
