"""The engines with the paper's steps, whose every one is known."""

from __future__ import annotations

from typing import Any

import nclbayes as ncl
from nclbayes.engines import PAPER


def laplace(**settings: Any) -> ncl.LaplaceNCL:
    """Laplace-NCL with the paper's steps, but for what is given."""
    return ncl.LaplaceNCL(**{**PAPER, **settings})


def variational(**settings: Any) -> ncl.VariationalNCL:
    """Variational NCL with the paper's steps, but for what is given."""
    return ncl.VariationalNCL(**{**PAPER, **settings})
