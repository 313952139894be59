"""Taking up what a snapshot holds: only what the loop itself could have left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from nclbayes.data.task import Batches
from nclbayes.errors import NCLError
from nclbayes.storage import Misfit
from nclbayes.storage.generators import set_state


class Restorable(Protocol):
    """What gives its tensors, and takes them up again."""

    def tensors(self) -> dict[str, Tensor]:
        """Everything that changes with the steps."""

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what `tensors` gave."""


def take_up(stepper: Restorable, tensors: Mapping[str, Tensor]) -> None:
    """Have a stepper take up its tensors, and see that it then holds them, bit for bit.

    Args:
        stepper: The stepper.
        tensors: What a file holds of it.

    Raises:
        Misfit: If they are not finite, not those that such a stepper has, or not of their forms.
    """
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise Misfit(f"the tensor 'stepper.{name}' has NaN or infinite entries")
        if not tensor.is_floating_point() and bool((tensor < 0).any()):
            raise Misfit(f"the tensor 'stepper.{name}' counts something below zero")
    try:
        stepper.restore(tensors)
    except KeyError as error:
        raise Misfit(f"the tensor 'stepper.{error.args[0]}' is missing") from error
    except (NCLError, RuntimeError, ValueError, TypeError, IndexError, OverflowError) as error:
        raise Misfit(f"its tensors are not those of this update ({error})") from error
    _check_same(tensors, stepper.tensors(), "stepper")


def seek(batches: Batches, place: Mapping[str, Tensor], generator: torch.Generator, steps: int) -> None:
    """Go to a place in the batches, and see that it is that place.

    Args:
        batches: The batches.
        place: What a file holds of it.
        generator: What decides their order; in which state it is left is for the caller to decide.
        steps: How many have been taken, at most as many as lie before the place.

    Raises:
        Misfit: If there is no such place.
    """
    groups: dict[str, set[str]] = {}
    for name, tensor in place.items():
        part = name.rpartition(".")[2]
        groups.setdefault(name.removesuffix(part), set()).add(part)
        if part == "position":
            if tensor.dtype is not torch.int64 or tensor.ndim or not 0 <= int(tensor) <= steps:
                raise Misfit(f"the tensor 'batches.{name}' is no place that {steps} steps lead to")
        else:
            like = generator.clone_state() if part == "epoch" else torch.Generator()
            set_state(like, tensor, f"batches.{name}")
    for prefix, parts in groups.items():
        if not {"epoch", "position"} <= parts <= {"epoch", "position", "loader", "stream"}:
            raise Misfit(f"the tensors 'batches.{prefix}...' are no place in the data")
    try:
        batches.seek(place)
    except KeyError as error:
        raise Misfit(f"the tensor 'batches...{error.args[0]}' is missing") from error
    except AttributeError as error:
        if error.name not in ("generator", "set_state"):
            raise
        raise Misfit("it is of a loader with a generator of its own") from error
    _check_same(place, batches.place(), "batches")


def _check_same(given: Mapping[str, Tensor], held: Mapping[str, Tensor], what: str) -> None:
    for name in sorted(set(given) | set(held)):
        if name not in held or name not in given:
            raise Misfit(f"the tensor '{what}.{name}' is {'missing' if name in held else 'not one of this update'}")
        left, right = given[name], held[name]
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            raise Misfit(
                f"the tensor '{what}.{name}' is {tuple(left.shape)}, {left.dtype}; it should be {tuple(right.shape)}, "
                f"{right.dtype}"
            )
        if not torch.equal(left, right.cpu()):
            raise Misfit(f"the tensor '{what}.{name}' is none that this update can have")
