"""Readers of the files that data come in: IDX, binary CIFAR, and strokes."""

from __future__ import annotations

import gzip
import hashlib
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from nclbayes.errors import FileError
from nclbayes.storage import replacing

Array = npt.NDArray[Any]
_GZIP = b"\x1f\x8b"
_UNREADABLE = (OSError, EOFError, ValueError, KeyError, zlib.error, zipfile.BadZipFile, tarfile.TarError)
_STROKE_FILE = re.compile(r"(?:.*/)?(train|test)img-(\d+)-inputdata\.txt")
_LABEL_FILE = re.compile(r"(?:.*/)?(train|test)labels\.txt")
_CIFAR_FILE = re.compile(r"(?:\./)?(cifar-10-batches-bin|cifar-100-binary)/(\w+\.bin)")


@dataclass(frozen=True)
class Strokes:
    """Digits as sequences of pen movements, one after the other.

    Attributes:
        steps: All steps of all digits: dx, dy, end of stroke, end of digit; int8 [steps, 4].
        offsets: Digit i is ``steps[offsets[i] : offsets[i + 1]]``; int64 [N + 1].
        labels: uint8 [N].
    """

    steps: Array
    offsets: Array
    labels: Array


def read_idx(path: Path) -> Array:
    """Read an IDX file of bytes (the format of MNIST), plain or gzipped.

    Args:
        path: Which file.

    Returns:
        uint8, of the shape that the file states.

    Raises:
        FileError: If it is not such a file, or is truncated, damaged or too long.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from nclbayes.tasks.formats import read_idx
        >>> path = Path(tempfile.mkdtemp(), "labels")
        >>> _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 5, 0, 4]))
        >>> read_idx(path)
        array([5, 0, 4], dtype=uint8)
    """
    data = _content(path)
    if len(data) < 4 or data[:3] != b"\x00\x00\x08":
        raise FileError(f"'{path}' is not an IDX file of bytes: it begins with {data[:4].hex(' ') or 'nothing'}.")
    dims = data[3]
    header = 4 + 4 * dims
    if len(data) < header:
        raise FileError(f"'{path}' is truncated: {len(data)} bytes, fewer than its header of {header}.")
    shape = tuple(int(n) for n in np.frombuffer(data, ">u4", dims, 4))
    expected = header + int(np.prod(shape, dtype=np.int64))
    if len(data) != expected:
        raise FileError(f"'{path}' has {len(data)} bytes, but its header {shape} asks for {expected}. Fetch it again.")
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def read_cifar(path: Path, label_bytes: int, classes: int) -> tuple[Array, Array]:
    """Read a binary CIFAR file: records of labels and 3,072 bytes of planar colour.

    Args:
        path: Which file.
        label_bytes: 1 for CIFAR-10; 2 for CIFAR-100 (coarse, fine).
        classes: How many classes the last label tells apart.

    Returns:
        Images, uint8 [N, 3, 32, 32], and the last label of each, uint8 [N].

    Raises:
        FileError: If the file is not a whole number of records, or a label is out of range.
    """
    data = np.frombuffer(_content(path), np.uint8)
    record = label_bytes + 3072
    if data.size == 0 or data.size % record:
        raise FileError(
            f"'{path}' has {data.size} bytes, which is no whole number of records of {record}: it is truncated, or of "
            "another CIFAR set. Fetch it again."
        )
    rows = data.reshape(-1, record)
    labels = rows[:, label_bytes - 1]
    if labels.max() >= classes:
        raise FileError(f"'{path}' is damaged: it has a label {labels.max()}, but there are {classes} classes.")
    return rows[:, label_bytes:].reshape(-1, 3, 32, 32), labels.copy()


def unpack_cifar(archive: Path, folder: Path) -> None:
    """Unpack the binary files of a published CIFAR archive.

    Args:
        archive: ``cifar-10-binary.tar.gz`` or ``cifar-100-binary.tar.gz``.
        folder: Where to; the archive's own folder is made inside.

    Raises:
        FileError: If the archive cannot be read.
    """
    with _reading(archive), tarfile.open(archive) as tar:
        for member in tar:
            # Only names that are expected, so that an archive cannot write elsewhere.
            match = _CIFAR_FILE.fullmatch(member.name)
            file = tar.extractfile(member) if match and member.isfile() else None
            if match and file is not None:
                target = folder / match[1] / match[2]
                target.parent.mkdir(parents=True, exist_ok=True)
                with replacing(target) as out:
                    while chunk := file.read(1 << 20):
                        out.write(chunk)


def read_strokes(path: Path, split: str) -> Strokes:
    """Read one split of the compact file of stroke MNIST.

    Args:
        path: An npz file with ``{train,test}_{steps,offsets,labels}``.
        split: "train" or "test".

    Returns:
        The digits.

    Raises:
        FileError: If the file is damaged, or its arrays do not fit together.
    """
    with _reading(path), path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        steps, offsets, labels = (arrays[f"{split}_{part}"] for part in ("steps", "offsets", "labels"))
    fits = (
        (steps.dtype, offsets.dtype, labels.dtype) == (np.int8, np.int64, np.uint8)
        and steps.ndim == 2
        and steps.shape[1] == 4
        and offsets.shape == (len(labels) + 1,)
        and offsets[0] == 0
        and offsets[-1] == len(steps)
    )
    if not fits:
        raise FileError(f"'{path}' is not a file of strokes: the arrays of its {split} split do not fit together.")
    if len(labels) == 0 or np.diff(offsets).min() < 2 or labels.max() > 9:
        raise FileError(f"'{path}' is damaged: its {split} split has no digits, one of a single step, or a label > 9.")
    return Strokes(steps, offsets, labels)


def unpack_strokes(source: Path, folder: Path) -> None:
    """Turn the official text files of stroke MNIST into the compact file ``stroke-mnist.npz``.

    Args:
        source: ``sequences.tar.gz``, or the folder that it unpacks to.
        folder: Where to write.

    Raises:
        FileError: If the texts cannot be read, or digits are missing.
    """
    digits: dict[str, dict[int, Array]] = {"train": {}, "test": {}}
    labels: dict[str, Array] = {}
    for name, text in tqdm(_texts(source), desc="stroke-mnist", unit=" files", disable=None):
        if match := _STROKE_FILE.fullmatch(name):
            digits[match[1]][int(match[2])] = _numbers(text, source, name, -128, 127)
        elif match := _LABEL_FILE.fullmatch(name):
            labels[match[1]] = _numbers(text, source, name, 0, 9)
    arrays: dict[str, Array] = {}
    for split, found in digits.items():
        if split not in labels or sorted(found) != list(range(len(labels[split]))):
            raise FileError(
                f"'{source}' is not complete: it has {len(found)} {split} digits and "
                f"{len(labels.get(split, ()))} labels of them, which must be as many, counted from 0."
            )
        steps = [found[i] for i in range(len(found))]
        for i, each in enumerate(steps):
            if each.size == 0 or each.size % 4:
                raise FileError(f"'{source}' is damaged: {split}img-{i}-inputdata.txt does not have four columns.")
        arrays[f"{split}_steps"] = np.concatenate(steps).reshape(-1, 4).astype(np.int8)
        arrays[f"{split}_offsets"] = np.cumsum([0, *(each.size // 4 for each in steps)], dtype=np.int64)
        arrays[f"{split}_labels"] = labels[split].astype(np.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "stroke-mnist.npz") as out:
        save: Any = np.savez_compressed
        save(out, **arrays)


def content_digest(path: Path) -> str:
    """The SHA-256 of what a file holds, however it is compressed.

    Args:
        path: A gzip file counts as what it unpacks to, an npz file as its arrays in order of their names.

    Returns:
        Hexadecimal digits.

    Raises:
        FileError: If the file cannot be read.
    """
    digest = hashlib.sha256()
    with _reading(path):
        if zipfile.is_zipfile(path):
            with path.open("rb") as packed, np.load(packed, allow_pickle=False) as arrays:
                for name in sorted(arrays):
                    array = arrays[name]
                    digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
                    digest.update(np.ascontiguousarray(array).tobytes())
        else:
            with _opened(path) as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
    return digest.hexdigest()


def file_digest(path: Path, algorithm: str) -> str:
    """The hash of a file as it lies.

    Args:
        path: Which file.
        algorithm: A name that hashlib knows.

    Returns:
        Hexadecimal digits.

    Raises:
        FileError: If the file cannot be read.
    """
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with _reading(path), path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileError:
        raise
    except _UNREADABLE as error:
        reason = str(error) or type(error).__name__
        raise FileError(f"'{path}' cannot be read: it is missing, truncated or damaged ({reason}).") from error


def _opened(path: Path) -> IO[bytes] | gzip.GzipFile:
    with path.open("rb") as file:
        zipped = file.read(2) == _GZIP
    return gzip.open(path) if zipped else path.open("rb")


def _content(path: Path) -> bytes:
    with _reading(path), _opened(path) as file:
        return file.read()


def _texts(source: Path) -> Iterator[tuple[str, bytes]]:
    """Names and texts of the files that matter, in any order."""
    with _reading(source):
        if source.is_dir():
            for path in source.iterdir():
                if _STROKE_FILE.fullmatch(path.name) or _LABEL_FILE.fullmatch(path.name):
                    yield path.name, path.read_bytes()
            return
        with tarfile.open(source) as tar:
            for member in tar:
                wanted = _STROKE_FILE.fullmatch(member.name) or _LABEL_FILE.fullmatch(member.name)
                file = tar.extractfile(member) if wanted and member.isfile() else None
                if file is not None:
                    yield member.name, file.read()


def _numbers(text: bytes, source: Path, name: str, low: int, high: int) -> Array:
    try:
        values = np.array(text.split(), dtype=np.int64)
    except ValueError as error:
        raise FileError(f"'{source}' is damaged: {name} holds something other than whole numbers ({error}).") from error
    if values.size and (values.min() < low or values.max() > high):
        raise FileError(f"'{source}' is damaged: a number in {name} is not between {low} and {high}.")
    return values
