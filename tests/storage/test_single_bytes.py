"""No byte of a file can change without being noticed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch

from nclbayes.errors import FileError
from nclbayes.posterior.saving import read_posterior
from nclbayes.storage import open_sealed, write_file
from tests.storage.small import OLD, posterior


def silent(path: Path, kind: str, places: Iterable[int], changes: Iterable[int]) -> tuple[int, list[tuple[int, int]]]:
    """How many changes were tried, and those with which a file could still be read; any error but one is raised."""
    good = path.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    changes, count, unseen = list(changes), 0, []

    def read_anew() -> None:
        with open_sealed(path, kind) as sealed:
            sealed.read()

    with path.open("r+b", buffering=0) as file, open_sealed(path, kind) as whole:

        def read_on() -> None:
            # The header is as it was: the tensors are all that can tell.
            whole._file.seek(header)
            whole.read()

        for at in places:
            for change in changes:
                os.pwrite(file.fileno(), bytes([good[at] ^ change]), at)
                count += 1
                try:
                    read_anew() if at < header else read_on()
                except FileError:
                    continue
                unseen.append((at, change))
            os.pwrite(file.fileno(), good[at : at + 1], at)
        read_on()
    assert path.read_bytes() == good
    return count, unseen


def a_small_file(folder: Path) -> Path:
    tensors = {"a": torch.arange(3.0), "b": torch.ones(2, 2, dtype=torch.float64), "c": torch.tensor(True)}
    write_file(folder / "f", "thing", tensors, {"lr": 0.1, "names": ["x"], "none": None})
    return folder / "f"


def test_every_byte_of_a_small_file_counts(tmp_path: Path) -> None:
    path = a_small_file(tmp_path)
    count, unseen = silent(path, "thing", range(path.stat().st_size), (0x01, 0x20, 0xFF))
    assert unseen == []
    assert count > 1000


def test_bytes_all_over_a_posterior_count(tmp_path: Path) -> None:
    posterior().save(tmp_path / "p")
    size = (tmp_path / "p").stat().st_size
    assert silent(tmp_path / "p", "posterior", range(0, size, 7), (0x01, 0xFF))[1] == []


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param((0x01, 0x02, 0x10, 0x20, 0x40, 0x80, 0xFF), marks=pytest.mark.slow, id="some"),
        pytest.param(range(1, 256), marks=pytest.mark.exhaustive, id="all"),
    ],
)
def test_every_change_of_every_byte_is_seen(tmp_path: Path, changes: Sequence[int]) -> None:
    folder = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    path = folder / f"nclbayes-single-bytes-{os.getpid()}"
    try:
        posterior().save(path)
        size = path.stat().st_size
        count, unseen = silent(path, "posterior", range(size), changes)
    finally:
        path.unlink(missing_ok=True)
    assert unseen == []
    assert count == len(changes) * size


def test_bytes_that_are_missing_or_too_many_are_seen(tmp_path: Path) -> None:
    path = a_small_file(tmp_path)
    good = path.read_bytes()
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(FileError, match=r"truncated|damaged"), open_sealed(path, "thing") as file:
            file.read()
    path.write_bytes(good + b"\0")
    with pytest.raises(FileError, match=r"is damaged: it has \d+ bytes, and should have"):
        open_sealed(path, "thing").__enter__()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["laplace", "ewc"])
def test_a_changed_header_of_the_old_format_never_loads_as_something_else(tmp_path: Path, name: str) -> None:
    """Its seal leaves out dtypes and shapes: what these must be, the blocks say."""
    path = tmp_path / "p"
    good = (OLD / f"{name}-1.ncl").read_bytes()
    path.write_bytes(good)
    header = 8 + int.from_bytes(good[:8], "little")
    for at in range(header):
        for value in {*b"FIU48", good[at] ^ 1} - {good[at]}:
            path.write_bytes(good[:at] + bytes([value]) + good[at + 1 :])
            with pytest.raises(FileError):
                read_posterior(path)
