"""The processes that learn together, and what they tell each other."""

from nclbayes.ranks.agreeing import in_step, transaction
from nclbayes.ranks.group import ALONE, Ranks, Stopped, present
from nclbayes.ranks.launching import is_launched, launched

__all__ = ["ALONE", "Ranks", "Stopped", "in_step", "is_launched", "launched", "present", "transaction"]
