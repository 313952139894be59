"""The inference engines: one file each, one shared loop."""

from nclbayes.engines.base import ENGINES, Engine
from nclbayes.engines.laplace import LaplaceNCL
from nclbayes.engines.loop import Progress
from nclbayes.engines.settings import PAPER
from nclbayes.engines.variational import VariationalNCL

__all__ = ["ENGINES", "PAPER", "Engine", "LaplaceNCL", "Progress", "VariationalNCL"]
