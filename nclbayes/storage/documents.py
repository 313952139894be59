"""Small files of JSON: records, configurations, results. Written whole, and read by their schema."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from nclbayes.errors import FileError
from nclbayes.storage.reading import opened, reading
from nclbayes.storage.schema import Misfit, fitted, parsed, refused
from nclbayes.storage.writing import write_text

T = TypeVar("T")

# In bytes: the losses of ten million steps.
_LARGEST = 2**28


def write_document(path: str | os.PathLike[str], values: Mapping[str, Any], version: int) -> None:
    """Write a file of JSON that is complete or not there.

    Args:
        path: Where to.
        values: What it holds.
        version: Its format.

    Raises:
        FileError: If it cannot be written, or the values are not plain ones.
    """
    try:
        text = json.dumps({"format": version, **values}, indent=1)
    except (TypeError, ValueError) as error:
        raise FileError(f"Could not write '{os.fspath(path)}': {error}.") from error
    write_text(path, f"{text}\n")


def read_document(
    path: str | os.PathLike[str],
    kind: type[T],
    what: str,
    version: int,
    *,
    finite: bool = True,
    upgrade: Callable[[T, int], T] = lambda found, version: found,
) -> T:
    """Read what :func:`write_document` wrote.

    Args:
        path: Where from.
        kind: The dataclass that it holds.
        what: What the file is, with its article, such as "a record of nclbayes".
        version: The newest format that can be read.
        finite: Whether NaN and infinity are refused.
        upgrade: Says what a file of an earlier format means.

    Returns:
        What it holds.

    Raises:
        FileError: If the file is missing, damaged, foreign, or of a newer format.
    """
    name = what.removeprefix("a ").removeprefix("the ")
    with opened(path, name) as (file, size), refused(Path(path), what):
        if size > _LARGEST:
            raise Misfit(f"it has {size} bytes")
        with reading(path):
            text = file.read()
        content = parsed(text)
        if not isinstance(content, dict):
            raise Misfit("it holds no fields")
        found = fitted(int, content.pop("format", None), "format")
        if found > version:
            raise FileError(
                f"'{Path(path)}' was written by a newer nclbayes (format {found}; this one reads up to {version}): "
                "upgrade to read it."
            )
        return upgrade(fitted(kind, content, finite=finite), found)
