"""From a model, its weights and data to the Fisher's factors for every block."""

from nclbayes.fisher.accumulator import FisherAccumulator
from nclbayes.fisher.api import fisher
from nclbayes.fisher.diagonal import DiagonalFisher
from nclbayes.fisher.sums import KroneckerFisher
from nclbayes.fisher.targets import FisherKind

__all__ = ["DiagonalFisher", "FisherAccumulator", "FisherKind", "KroneckerFisher", "fisher"]
