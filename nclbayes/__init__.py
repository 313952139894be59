"""Bayesian continual learning for Pyro, with Kronecker-factored Gaussian posteriors."""

from nclbayes.interrupts import leave_quietly

leave_quietly()  # The imports below take seconds, in which the command line may be interrupted.

from nclbayes import nn, priors, tasks
from nclbayes.analysis import Record, Score, evaluate
from nclbayes.data import Task, TaskMixture
from nclbayes.engines import LaplaceNCL, VariationalNCL
from nclbayes.fisher import DiagonalFisher, FisherAccumulator, FisherKind, KroneckerFisher, fisher
from nclbayes.kronecker import KroneckerNormal, KroneckerPrecision, KroneckerSum, SumRule, kronecker_sum
from nclbayes.nn import BayesianNetwork, Bernoulli, Categorical, MultiHead, Normal, Poisson
from nclbayes.posterior import OnlinePosterior, UpdateReport
from nclbayes.stream import Stream
from nclbayes.tuning import tune
from nclbayes.watch import valid_steps

__version__ = "0.1.0"

__all__ = [
    "BayesianNetwork",
    "Bernoulli",
    "Categorical",
    "DiagonalFisher",
    "FisherAccumulator",
    "FisherKind",
    "KroneckerFisher",
    "KroneckerNormal",
    "KroneckerPrecision",
    "KroneckerSum",
    "LaplaceNCL",
    "MultiHead",
    "Normal",
    "OnlinePosterior",
    "Poisson",
    "Record",
    "Score",
    "Stream",
    "SumRule",
    "Task",
    "TaskMixture",
    "UpdateReport",
    "VariationalNCL",
    "__version__",
    "evaluate",
    "fisher",
    "kronecker_sum",
    "nn",
    "priors",
    "tasks",
    "tune",
    "valid_steps",
]
