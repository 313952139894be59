"""Tensors and settings in one file: safetensors under a seal, streamed out and put in place at once.

A file is the length of its header (8 bytes, little-endian), the header (JSON) and the tensors' bytes. The header begins
with the seal, the SHA-256 of length and header with the seal's own digits as zeros; in the header stands the SHA-256 of
the tensors' bytes. So every byte is covered, and the header is believed only after its seal has been checked.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from nclbayes.errors import FileError
from nclbayes.storage.reading import opened, reading
from nclbayes.storage.schema import Misfit, fitted, parsed, refused
from nclbayes.storage.writing import replacing

T = TypeVar("T")

FORMAT_VERSION = 3
_KEY = "nclbayes"
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_NAMED = {name: dtype for dtype, name in _DTYPES.items()}
# The limit of the safetensors format itself.
_LARGEST_HEADER = 100_000_000
_MOST_DIMENSIONS = 32
_BEFORE_SEAL = b'{"__metadata__":{"seal":"'
_NO_SEAL = b"0" * 64
# How a header of format 1 begins; its seal covers the settings, and its checksum the tensors' bytes.
_FORMAT_1 = b'{"__metadata__": {"nclbayes": "'


class Form(NamedTuple):
    """What is known of a tensor before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Entry:
    """A tensor in the header, in the words of safetensors."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, ...]


@dataclass(frozen=True)
class _Content:
    """What nclbayes itself has to say in the header."""

    kind: str
    version: int
    settings: dict[str, Any]
    digest: str = ""
    checksum: int = 0


class SealedFile:
    """A file whose header has been checked, and whose tensors have not been read yet.

    Args:
        path: Where it is.
        content: What its header says.
        forms: The tensors' dtypes and shapes, in the order of their bytes.
        file: The file, at the first tensor.

    Attributes:
        settings: What it holds besides tensors, as plain values.
        forms: The same.
        version: Its format.
    """

    def __init__(self, path: Path, content: _Content, forms: Mapping[str, Form], file: FileIO) -> None:
        self.settings, self.forms, self.version = content.settings, forms, content.version
        self._path, self._content, self._file = path, content, file

    def read(self) -> dict[str, Tensor]:
        """The tensors, in memory of their own: what happens to the file later does not touch them.

        Returns:
            By name, on the CPU.

        Raises:
            FileError: If they are not those that were written.
        """
        digest, checksum = hashlib.sha256(), 0
        tensors: dict[str, Tensor] = {}
        for name, form in self.forms.items():
            try:
                tensor = torch.empty(form.shape, dtype=form.dtype, device="cpu")
            except RuntimeError as error:
                raise Misfit(f"the tensor '{name}' of {form.shape} cannot be held in memory") from error
            memory = memory_of(tensor)
            _fill(memory, self._file, self._path)
            if self.version == 1:
                checksum = zlib.crc32(memory, checksum)
            else:
                digest.update(memory)
            tensors[name] = tensor
        is_old = self.version == 1
        if (self._content.checksum != checksum) if is_old else (self._content.digest != digest.hexdigest()):
            raise FileError(f"'{self._path}' is damaged: its tensors do not match their checksum.")
        for name, tensor in tensors.items():
            # Any other byte would be neither true nor false.
            if tensor.dtype is torch.bool and bool((tensor.view(torch.uint8) > 1).any()):
                raise Misfit(f"the tensor '{name}' holds other things than true and false")
        return tensors


def write_file(
    path: str | os.PathLike[str], kind: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> None:
    """Write a file that is either complete or not there.

    Tensors go out one by one, so that no second copy of all of them is ever made.

    Args:
        path: Where to.
        kind: What the file holds, such as "posterior".
        tensors: By name.
        settings: Anything that JSON can hold.

    Raises:
        FileError: If the file cannot be written; whatever was at `path` is still there.
    """
    target = Path(path)
    names = sorted(tensors)
    offset, entries = 0, {}
    digest = hashlib.sha256()
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            raise FileError(f"Could not write '{target}': '{name}' is a tensor of {tensor.dtype}, which no file holds.")
        size = tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
        digest.update(memory_of(tensor))
    content = {"kind": kind, "version": FORMAT_VERSION, "digest": digest.hexdigest(), "settings": settings}
    header = _sealed(_written({"__metadata__": {"seal": _NO_SEAL.decode(), _KEY: content}, **entries}, target))
    with replacing(target) as file:
        file.write(struct.pack("<Q", len(header)))
        file.write(header)
        for name in names:
            file.write(memory_of(tensors[name]))


@contextmanager
def open_sealed(path: str | os.PathLike[str], kind: str) -> Iterator[SealedFile]:
    """A file of nclbayes whose header and size have been checked; nothing else has been read.

    A :class:`~nclbayes.storage.Misfit` that is raised while it is open becomes an error that names the file.

    Args:
        path: Where it is.
        kind: What it must hold.

    Yields:
        The file.

    Raises:
        FileError: If the file is missing, truncated, damaged, foreign, of another kind or of a newer format.
    """
    target = Path(path)
    with opened(target) as (file, size), refused(target, f"a {kind} of nclbayes"):
        header = _header(file, size, target)
        content, entries = _judged(header, target)
        if content.version > FORMAT_VERSION:
            raise FileError(
                f"'{target}' has format {content.version}; this nclbayes reads up to {FORMAT_VERSION}. "
                "Update nclbayes to load it."
            )
        if content.kind != kind:
            raise FileError(f"'{target}' holds a {content.kind}, not a {kind}.")
        forms, end = _forms(entries)
        expected = 8 + len(header) + end
        if size != expected:
            cut = "it is truncated: " if size < expected else ""
            raise FileError(f"'{target}' is damaged: {cut}it has {size} bytes, and should have {expected}.")
        yield SealedFile(target, content, forms, file)


def read_file(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what :func:`write_file` wrote, and check that nothing has changed since.

    Args:
        path: Where from.
        kind: What the file must hold.

    Returns:
        Tensors by name (on the CPU), and the settings.

    Raises:
        FileError: If the file is missing, truncated, damaged, foreign, of another kind or of a newer format.
    """
    with open_sealed(path, kind) as file:
        return file.read(), file.settings


def memory_of(tensor: Tensor) -> Any:
    """A tensor's memory, whatever its dtype.

    Args:
        tensor: The tensor.

    Returns:
        Its bytes; not a copy if it is contiguous and on the CPU.
    """
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def under(tensors: Mapping[str, T], prefix: str) -> dict[str, T]:
    """The tensors whose names start with a prefix, without it.

    Args:
        tensors: By name.
        prefix: The prefix.

    Returns:
        Those that start with it.
    """
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _written(header: dict[str, Any], target: Path) -> bytes:
    """The header as JSON; what nclbayes has to say is text in it, as safetensors will have it."""
    try:
        about = header["__metadata__"]
        about[_KEY] = json.dumps(about[_KEY], ensure_ascii=False)
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise FileError(f"Could not write '{target}': its settings are no plain values ({error}).") from error
    if len(text) > _LARGEST_HEADER:
        raise FileError(f"Could not write '{target}': its settings take {len(text)} bytes, too many for a file.")
    return text + b" " * (-len(text) % 8)


def _sealed(header: bytes) -> bytes:
    """The header with its seal in place of zeros."""
    start, end = len(_BEFORE_SEAL), len(_BEFORE_SEAL) + len(_NO_SEAL)
    blank = header[:start] + _NO_SEAL + header[end:]
    seal = hashlib.sha256(struct.pack("<Q", len(header)) + blank).hexdigest().encode()
    return header[:start] + seal + header[end:]


def _header(file: FileIO, size: int, path: Path) -> bytes:
    """The header's bytes, if it is one of ours and nobody has touched it."""
    first = bytearray(8)
    cut = FileError(f"'{path}' is truncated, or not a file of nclbayes.")
    if size < 8:
        raise cut
    _fill(first, file, path)
    (length,) = struct.unpack("<Q", first)
    if length > min(size - 8, _LARGEST_HEADER):
        raise cut
    header = bytearray(length)
    _fill(header, file, path)
    found = bytes(header)
    if found.startswith(_BEFORE_SEAL):
        if found != _sealed(found):
            raise FileError(f"'{path}' is damaged: its header does not match its seal.")
    elif not found.startswith(_FORMAT_1):
        raise FileError(f"'{path}' is not a file of nclbayes, or its header is damaged.")
    return found


def _judged(header: bytes, path: Path) -> tuple[_Content, dict[str, _Entry]]:
    """What a header says, of either format."""
    plain = parsed(header)
    about = fitted(dict[str, str], plain.pop("__metadata__"), "__metadata__")
    entries = fitted(dict[str, _Entry], plain, "the header")
    is_old = header.startswith(_FORMAT_1)
    if set(about) != {"seal", _KEY}:
        raise Misfit("its header has other fields than a seal and what it seals")
    if is_old:
        # That seal leaves out what safetensors says of the tensors: at least it must be as it was written.
        again = json.dumps({"__metadata__": about, **plain}).encode()
        if about["seal"] != str(zlib.crc32(about[_KEY].encode())) or again + b" " * (-len(again) % 8) != header:
            raise FileError(f"'{path}' is damaged: its header does not match its checksum.")
    content = fitted(_Content, parsed(about[_KEY].encode()), "the header")
    if content.version < 1 or is_old != (content.version == 1):
        raise Misfit(f"format {content.version} does not begin as it does")
    return content, entries


def _forms(entries: Mapping[str, _Entry]) -> tuple[dict[str, Form], int]:
    """The tensors' forms, and where the last of them ends: each must begin where the one before ends."""
    forms, at = {}, 0
    for name, entry in entries.items():
        if entry.dtype not in _NAMED:
            raise Misfit(f"the tensor '{name}' has the dtype '{entry.dtype[:20]}', which nclbayes does not write")
        dtype, shape = _NAMED[entry.dtype], entry.shape
        if len(shape) > _MOST_DIMENSIONS or any(size < 0 for size in shape):
            raise Misfit(f"the tensor '{name}' has the shape {shape}, which no tensor has")
        end = at + math.prod(shape) * dtype.itemsize
        if entry.data_offsets != (at, end):
            raise Misfit(f"the tensor '{name}' lies at {entry.data_offsets}, and its form says {(at, end)}")
        forms[name], at = Form(dtype, shape), end
    return forms, at


def _fill(memory: Any, file: FileIO, path: Path) -> None:
    """Read so many bytes, straight to where they belong."""
    view = memoryview(memory)
    while len(view):
        with reading(path):
            count = file.readinto(view)
        if not count:
            raise FileError(f"'{path}' is truncated: it ended while it was being read.")
        view = view[count:]
