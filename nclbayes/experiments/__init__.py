"""Task sets with their networks and settings, runs and comparisons of methods on them."""

from nclbayes.experiments.comparison import compare, run_all
from nclbayes.experiments.config import RunConfig
from nclbayes.experiments.runs import reopen, reopen_each, run
from nclbayes.experiments.setup import Setup
from nclbayes.experiments.setups import SETUPS, find_setup

__all__ = ["SETUPS", "RunConfig", "Setup", "compare", "find_setup", "reopen", "reopen_each", "run", "run_all"]
