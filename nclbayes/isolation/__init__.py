"""What runs a model without leaving traces in the process: random states, effect handlers, grad mode."""

from nclbayes.isolation.process import Alone, Turn, as_found
from nclbayes.isolation.randomness import drawing_from, restored, stream_apart

__all__ = ["Alone", "Turn", "as_found", "drawing_from", "restored", "stream_apart"]
