"""The processes that learn together, and what they tell each other."""

from nclbayes.ranks.agreeing import in_step, transaction
from nclbayes.ranks.group import ALONE, WHOLE, Ranks, Share, Stopped, present
from nclbayes.ranks.launching import is_launched, launched

__all__ = [
    "ALONE",
    "WHOLE",
    "Ranks",
    "Share",
    "Stopped",
    "in_step",
    "is_launched",
    "launched",
    "present",
    "transaction",
]
