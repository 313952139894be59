"""The posterior: what it believes, how a task updates it, what it predicts, and its file."""

from nclbayes.posterior.online import OnlinePosterior
from nclbayes.posterior.updating import UpdateReport

__all__ = ["OnlinePosterior", "UpdateReport"]
