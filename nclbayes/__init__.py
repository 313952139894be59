"""Bayesian continual learning for Pyro, with Kronecker-factored Gaussian posteriors."""

from nclbayes.fisher import DiagonalFisher, FisherAccumulator, FisherKind, KroneckerFisher, fisher
from nclbayes.kronecker import KroneckerNormal, KroneckerPrecision, KroneckerSum, SumRule, kronecker_sum
from nclbayes.watch import valid_steps

__version__ = "0.1.0"

__all__ = [
    "DiagonalFisher",
    "FisherAccumulator",
    "FisherKind",
    "KroneckerFisher",
    "KroneckerNormal",
    "KroneckerPrecision",
    "KroneckerSum",
    "SumRule",
    "__version__",
    "fisher",
    "kronecker_sum",
    "valid_steps",
]
