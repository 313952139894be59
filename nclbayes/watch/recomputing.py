"""Gradient checkpointing: parts of a model that will run again, when the weights of the posterior are gone from it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch.utils.checkpoint

from nclbayes.errors import UnsupportedUseError

if TYPE_CHECKING:
    from types import FrameType


def refuse_recomputation(sites: Iterable[str]) -> None:
    """Refuse the use of weights inside ``torch.utils.checkpoint``.

    The backward pass runs that part of the model again. A network then holds its own parameters and not those of the
    posterior, and a Pyro model draws others: gradients would be those of another network.

    Args:
        sites: The weights; none is no use.

    Raises:
        UnsupportedUseError: If this is such a use.
    """
    site = next(iter(sites), None)
    frame: FrameType | None = None if site is None else sys._getframe(1)
    while frame is not None:
        if frame.f_globals is vars(torch.utils.checkpoint):
            raise UnsupportedUseError(
                f"Site '{site}' is used under gradient checkpointing (torch.utils.checkpoint), which runs a part of "
                "the model again when it is differentiated: the posterior's weights are no longer in it then. Switch "
                "it off: gradient_checkpointing_disable() of a Hugging Face model, set_grad_checkpointing(False) of "
                "one of timm. What saves memory instead is accumulate=4 of the engine, which splits every batch."
            )
        frame = frame.f_back
