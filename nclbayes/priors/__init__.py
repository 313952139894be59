"""Priors that fit a network: what is believed of its weights before any task."""

from nclbayes.priors.scaled import Scaled, fan_in, scaled

__all__ = ["Scaled", "fan_in", "scaled"]
