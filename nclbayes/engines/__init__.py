"""The inference engines: one file each, one shared loop."""

from nclbayes.engines.base import Engine
from nclbayes.engines.laplace import LaplaceNCL
from nclbayes.engines.loop import Progress

__all__ = ["Engine", "LaplaceNCL", "Progress"]
