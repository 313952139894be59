"""Snapshots of a running update, from which the same call goes on."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nclbayes.errors import FileError
from nclbayes.storage import fitted, memory_of, open_sealed, under, write_file

# To be raised whenever snapshots hold other things, or go on in another way, than before.
_LAYOUT = 8
# By how much, relative to the largest number, two machines may differ in what they compute for the same model.
_ROUNDING = 1e-3


@dataclass(frozen=True)
class Checkpoint:
    """Where an update keeps its snapshots, how often, and which update they are of.

    Attributes:
        path: The file.
        every: Write one after so many steps.
        identity: What must agree for a snapshot to be taken up.
        probe: What the model computes for a few examples at the start, which must agree up to rounding.
    """

    path: Path
    every: int
    identity: str
    probe: Mapping[str, Tensor] = field(default_factory=dict)

    def save(self, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
        """Write a snapshot; the file holds the last one, whole, at any time.

        Args:
            tensors: The loop's tensors.
            settings: The rest.
        """
        probe = {f"probe.{name}": tensor for name, tensor in self.probe.items()}
        write_file(self.path, "checkpoint", {**tensors, **probe}, {"identity": self.identity, **settings})

    @contextmanager
    def load(self) -> Iterator[tuple[dict[str, Tensor], dict[str, Any]] | None]:
        """The last snapshot of this very update, if there is one.

        Yields:
            Its tensors and its other settings; what does not fit while they are taken up is an error of the file.

        Raises:
            FileError: If the file is of another update, or damaged.
        """
        if not os.path.lexists(self.path):
            yield None
            return
        with open_sealed(self.path, "checkpoint") as file:
            if fitted(str, file.settings.pop("identity", None), "identity") != self.identity:
                raise FileError(
                    f"'{self.path}' is a checkpoint of another update: another task, other settings, another "
                    "posterior, or another version of nclbayes. Delete it to start anew, or pass another path."
                )
            tensors = file.read()
            probe = under(tensors, "probe.")
            if probe.keys() != self.probe.keys() or not all(_agree(probe[name], self.probe[name]) for name in probe):
                raise FileError(
                    f"'{self.path}' is a checkpoint of an update of another model: this one computes something else "
                    "for the same examples. Bring its frozen weights, its likelihood and its layers back to what they "
                    "were, or delete the file to start anew."
                )
            rest = {name: tensor for name, tensor in tensors.items() if not name.startswith("probe.")}
            yield rest, file.settings

    def clear(self) -> None:
        """Remove the file, once the update is done.

        Raises:
            FileError: If it cannot be removed.
        """
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise FileError(f"The checkpoint '{self.path}' cannot be removed: {error.strerror or error}.") from error


def _agree(saved: Tensor, own: Tensor) -> bool:
    if (saved.dtype, saved.shape) != (own.dtype, own.shape):
        return False
    finite = own[own.isfinite()].abs()
    tolerance = _ROUNDING * float(finite.max()) if finite.numel() else 0.0
    return bool(torch.allclose(saved, own, rtol=0.0, atol=tolerance, equal_nan=True))


def identity(settings: object, tensors: Mapping[str, Tensor]) -> str:
    """What tells one update from another.

    Args:
        settings: Plain values that decide it.
        tensors: Tensors that decide it.

    Returns:
        A string that is equal for equal updates.
    """
    return json.dumps([_LAYOUT, settings, checksum(tensors)], sort_keys=True)


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """A number that is equal for equal tensors.

    Args:
        tensors: By name.

    Returns:
        A number of 32 bits.
    """
    found = 0
    for name in sorted(tensors):
        found = zlib.crc32(name.encode(), found)
        found = zlib.crc32(memory_of(tensors[name]), found)
    return found
