"""The Gaussian of one block: its precision, its sums, its samples, what it does to a gradient."""

from nclbayes.gaussians.diagonal import DiagonalState
from nclbayes.gaussians.kronecker import KroneckerState
from nclbayes.gaussians.making import prior_state
from nclbayes.gaussians.placing import Factors, Shards, placed
from nclbayes.gaussians.saved import SavedState
from nclbayes.gaussians.sharded import ShardedState
from nclbayes.gaussians.state import State, Structure

__all__ = [
    "DiagonalState",
    "Factors",
    "KroneckerState",
    "SavedState",
    "ShardedState",
    "Shards",
    "State",
    "Structure",
    "placed",
    "prior_state",
]
