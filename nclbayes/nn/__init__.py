"""Networks as Pyro models: priors, likelihoods, and modules that the Fisher sees through."""

from nclbayes.nn.likelihoods import Bernoulli, Categorical, Likelihood, Normal, Poisson
from nclbayes.nn.multihead import MultiHead
from nclbayes.nn.network import BayesianNetwork
from nclbayes.nn.rnn import RNN

__all__ = ["RNN", "BayesianNetwork", "Bernoulli", "Categorical", "Likelihood", "MultiHead", "Normal", "Poisson"]
