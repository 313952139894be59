"""Tensors and settings in one file: safetensors with a checksum, streamed out and put in place at once."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nclbayes.errors import FileError

FORMAT_VERSION = 1
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


def write_file(
    path: str | os.PathLike[str], kind: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> None:
    """Write a file that is either complete or not there: a temporary one beside it is renamed at the end.

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
    checksum = 0
    for name in names:
        checksum = zlib.crc32(memory_of(tensors[name]), checksum)
    content = json.dumps({"kind": kind, "version": FORMAT_VERSION, "checksum": checksum, "settings": settings})
    seal = str(zlib.crc32(content.encode()))
    header = json.dumps({"__metadata__": {_KEY: content, "seal": seal}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    temporary = target.parent / f".{target.name}.{os.getpid()}"
    try:
        with temporary.open("wb") as file:
            file.write(struct.pack("<Q", len(header)))
            file.write(header)
            for name in names:
                file.write(memory_of(tensors[name]))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise FileError(f"Could not write '{target}': {error}. A file that was there before is untouched.") from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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
    target = Path(path)
    if not target.is_file():
        raise FileError(f"There is no file '{target}'.")
    try:
        with safe_open(target, framework="pt") as file:
            metadata = file.metadata() or {}
            if _KEY not in metadata:
                raise FileError(f"'{target}' is a safetensors file, but nclbayes did not write it.")
            if metadata.get("seal") != str(zlib.crc32(metadata[_KEY].encode())):
                raise FileError(f"'{target}' is damaged: its header does not match its checksum.")
            content = json.loads(metadata[_KEY])
            if content["version"] > FORMAT_VERSION:
                raise FileError(
                    f"'{target}' has format {content['version']}; this nclbayes reads up to {FORMAT_VERSION}. "
                    "Update nclbayes to load it."
                )
            if content["kind"] != kind:
                raise FileError(f"'{target}' holds a {content['kind']}, not a {kind}.")
            tensors, checksum = {}, 0
            for name in sorted(file.keys()):
                tensors[name] = file.get_tensor(name)
                checksum = zlib.crc32(memory_of(tensors[name]), checksum)
    except SafetensorError as error:
        raise FileError(f"'{target}' is truncated, damaged, or not a file of nclbayes: {error}.") from error
    if checksum != content["checksum"]:
        raise FileError(f"'{target}' is damaged: its tensors do not match their checksum.")
    return tensors, content["settings"]


def memory_of(tensor: Tensor) -> Any:
    """A tensor's memory, whatever its dtype.

    Args:
        tensor: The tensor.

    Returns:
        Its bytes; not a copy if it is contiguous and on the CPU.
    """
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with a prefix, without it.

    Args:
        tensors: By name.
        prefix: The prefix.

    Returns:
        Those that start with it.
    """
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
