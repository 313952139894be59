"""Every error that nclbayes raises on purpose, in one family.

Catch :class:`NCLError` to catch them all. Each message says what was wrong, where, and what to do.

Example:
    >>> from nclbayes.errors import MatrixError, NCLError
    >>> issubclass(MatrixError, NCLError)
    True
"""


class NCLError(Exception):
    """Base class of all errors raised by nclbayes."""


class MatrixError(NCLError, ValueError):
    """A matrix has the wrong shape, is not finite, or is not (semi-)definite; the message names it."""


class SettingError(NCLError, ValueError):
    """An argument has a value outside its range; the message lists what is allowed."""


class ModelError(NCLError):
    """The Pyro model cannot be turned into Gaussian blocks; the message names the site and the remedy."""


class LearnableParameterError(ModelError):
    """The model uses a learnable parameter that has no prior."""


class LatentError(ModelError):
    """A latent site is not a global Gaussian: another distribution, or local to the data plate."""


class PriorError(ModelError):
    """A block's prior scales do not separate into a row scale times a column scale."""


class UnsupportedUseError(ModelError):
    """A weight enters a call that hides its linear map from the Fisher, such as a fused LSTM kernel."""


class ValuesError(NCLError, ValueError):
    """The values handed in do not fit the model's latent sites: one is missing or misshapen."""


class DataError(NCLError, ValueError):
    """A batch is empty, has the wrong form, or is not what the requested kind of Fisher can use."""


class NonFiniteError(NCLError, ArithmeticError):
    """NaN or infinity appeared; the message says in which site and on which side."""


class FileError(NCLError, OSError):
    """A saved file is truncated, damaged, foreign, of a newer format, or of another model."""


class RankError(NCLError):
    """Processes that learn together are out of step, or one of them failed; the message names its rank and cause."""


class UnreachableError(NCLError, ConnectionError):
    """A cluster, or the server that keeps the trials of a search, cannot be reached; the message says what to start."""
