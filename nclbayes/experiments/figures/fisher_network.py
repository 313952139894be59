"""The linear recurrent networks of the comparison of Fishers: drawn, run, and as Pyro models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor

from nclbayes.analysis.fishers import LinearRNN, categorical_curvature, gaussian_curvature, random_rotation
from nclbayes.experiments.figures.recipe import Settings
from nclbayes.fisher import KroneckerFisher, fisher

LIKELIHOODS = {"gaussian": "Gaussian", "rotated-gaussian": "rotated Gaussian", "categorical": "categorical"}
"""What the outputs are, with how that is written."""


@dataclass(frozen=True)
class Network:
    """A linear recurrent network with what it is shown.

    Attributes:
        rnn: The network.
        x: Inputs, [sequences, steps, inputs].
        noise: Process noise, [sequences, steps, units].
        covariance: That of the rotated Gaussian outputs, [outputs, outputs].
    """

    rnn: LinearRNN
    x: Tensor
    noise: Tensor
    covariance: Tensor

    @classmethod
    def drawn(cls, settings: Settings, generator: torch.Generator) -> Network:
        """A random network with random sequences.

        Args:
            settings: The recipe's.
            generator: Decides the draws.

        Returns:
            The network, in double precision.
        """
        units, inputs, outputs = settings["units"], settings["inputs"], settings["outputs"]

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

        W = torch.cat([0.5 * random_rotation(units, generator), normal(units, inputs) * inputs**-0.5], dim=1)
        Q = random_rotation(outputs, generator)
        covariance = (Q * torch.logspace(-1, 1, outputs, dtype=Q.dtype, device=Q.device)) @ Q.mT
        sequences = settings["sequences"], settings["steps"]
        return cls(
            LinearRNN(W, normal(outputs, units) * units**-0.5),
            normal(*sequences, inputs),
            settings["process_noise"] * normal(*sequences, units),
            (covariance + covariance.mT) / 2,
        )

    def exact(self, likelihood: str) -> dict[str, Tensor]:
        """The exact Fishers of W and of C.

        Args:
            likelihood: One of :data:`LIKELIHOODS`.

        Returns:
            Dense matrices by site.
        """
        curvature = {
            "gaussian": gaussian_curvature(torch.eye(len(self.covariance), dtype=torch.float64, device="cpu")),
            "rotated-gaussian": gaussian_curvature(self.covariance),
            "categorical": categorical_curvature,
        }[likelihood]
        return dict(zip("WC", self.rnn.fishers(self.x, curvature, self.noise), strict=True))

    def kfac(self, likelihood: str) -> dict[str, KroneckerFisher]:
        """The Kronecker-factored Fishers of W and of C, by the package's own way from a Pyro model.

        Args:
            likelihood: One of :data:`LIKELIHOODS`.

        Returns:
            Factors by site.
        """
        shape = self.x.shape[:2] if likelihood == "categorical" else (*self.x.shape[:2], len(self.rnn.C))
        target = torch.zeros(shape, dtype=torch.int64 if likelihood == "categorical" else torch.float64, device="cpu")
        values = {"W": self.rnn.W, "C": self.rnn.C}
        found = fisher(self._model(likelihood), values, (self.x, self.noise, target), size=1, kind="exact")
        return {site: block for site, block in found.items() if isinstance(block, KroneckerFisher)}

    def second_moment(self, site: str) -> Tensor:
        """The mean of z z^T, or of r r^T, over all steps.

        Args:
            site: "W" for z, "C" for r.

        Returns:
            [n, n].
        """
        z, r = self.rnn.run(self.x, self.noise)
        rows = (z if site == "W" else r).flatten(0, 1)
        return rows.mT @ rows / len(rows)

    def _model(self, likelihood: str) -> Callable[..., None]:
        rnn, covariance = self.rnn, self.covariance
        observed: dict[str, Callable[[Tensor], Any]] = {
            "gaussian": lambda output: dist.Normal(output, 1.0).to_event(2),
            "rotated-gaussian": lambda output: dist.MultivariateNormal(output, covariance).to_event(1),
            "categorical": lambda output: dist.Categorical(logits=output).to_event(1),
        }

        def model(x: Tensor, noise: Tensor, y: Tensor | None = None) -> None:
            W, C = (
                pyro.sample(site, dist.Normal(torch.zeros_like(weight), 1.0).to_event(2))
                for site, weight in (("W", rnn.W), ("C", rnn.C))
            )
            r, states = torch.zeros_like(noise[:, 0]), []
            for x_t, noise_t in zip(x.unbind(1), noise.unbind(1), strict=True):
                r = F.linear(torch.cat([r, x_t], dim=-1), W) + noise_t
                states.append(r)
            output = F.linear(torch.stack(states, dim=1), C)
            with pyro.plate("data", len(x)):
                pyro.sample("y", observed[likelihood](output), obs=y)

        return model
