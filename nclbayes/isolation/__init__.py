"""What runs a model without leaving traces in the process: random states, effect handlers, grad mode."""

from nclbayes.isolation.randomness import drawing_from, restored

__all__ = ["drawing_from", "restored"]
