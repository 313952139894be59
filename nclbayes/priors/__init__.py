"""Priors that fit a network: what is believed of its weights before any task."""

from nclbayes.priors.centred import Centred, centred
from nclbayes.priors.scaled import Scaled, fan_in, scaled

__all__ = ["Centred", "Scaled", "centred", "fan_in", "scaled"]
