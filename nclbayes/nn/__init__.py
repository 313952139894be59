"""Networks as Pyro models: priors, likelihoods, and modules that the Fisher sees through."""

from nclbayes.nn.attention import MultiheadAttention, TransformerEncoderLayer
from nclbayes.nn.cells import GRUCell, LSTMCell, RNNCell
from nclbayes.nn.likelihoods import Bernoulli, Categorical, Likelihood, Normal, Poisson
from nclbayes.nn.multihead import MultiHead
from nclbayes.nn.network import BayesianNetwork
from nclbayes.nn.recurrent import GRU, LSTM, ElmanRNN
from nclbayes.nn.rnn import RNN
from nclbayes.nn.swapping import visible

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "BayesianNetwork",
    "Bernoulli",
    "Categorical",
    "ElmanRNN",
    "GRUCell",
    "LSTMCell",
    "Likelihood",
    "MultiHead",
    "MultiheadAttention",
    "Normal",
    "Poisson",
    "RNNCell",
    "TransformerEncoderLayer",
    "visible",
]
