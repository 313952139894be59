"""Settings and prior scales sought on pilot tasks."""

from nclbayes.tuning.pilot import held_out
from nclbayes.tuning.ranges import Range
from nclbayes.tuning.search import Tuning, tune

__all__ = ["Range", "Tuning", "held_out", "tune"]
