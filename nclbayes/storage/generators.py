"""The state of a random generator, as a file holds it."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from nclbayes.storage.schema import Misfit

# Of torch's Mersenne twister: how many numbers are left of its table, and which is next (at bytes 8 and 16).
_TABLE = 624


def set_state(generator: torch.Generator, state: Tensor, name: str) -> None:
    """Put a generator into a state that a file holds.

    Args:
        generator: The generator.
        state: The state.
        name: What an error calls the tensor.

    Raises:
        Misfit: If it is no state of such a generator.
    """
    like = generator.get_state()
    if (state.dtype, state.shape) != (like.dtype, like.shape):
        raise Misfit(f"the tensor '{name}' is {tuple(state.shape)}, {state.dtype}, not a generator's state")
    if generator.device.type == "cpu":
        left, _, following = struct.unpack_from("<iiQ", state.numpy().tobytes(), 8)
        # torch checks the two by themselves only, and would read on behind its table.
        if (left, following) != (1, 0) and left + following != _TABLE + 1:
            raise Misfit(f"the tensor '{name}' is a generator's state that cannot be")
    try:
        generator.set_state(state)
    except RuntimeError as error:
        raise Misfit(f"the tensor '{name}' is no generator's state ({error})") from error
