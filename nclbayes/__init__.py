"""Bayesian continual learning for Pyro, with Kronecker-factored Gaussian posteriors."""

from nclbayes.kronecker import KroneckerNormal, KroneckerPrecision, KroneckerSum, SumRule, kronecker_sum

__version__ = "0.1.0"

__all__ = [
    "KroneckerNormal",
    "KroneckerPrecision",
    "KroneckerSum",
    "SumRule",
    "__version__",
    "kronecker_sum",
]
