"""Values that no file of ours holds, by what they stand in for."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from nclbayes.errors import FileError


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def wrong_values(value: Any) -> list[Any]:
    """What may stand in the place of a value, and is of another type or size."""
    wrong: list[Any] = [{"a": 1}, deep(60), float("nan"), -float("inf"), 10**30, True, "\ud800", [None]]
    if isinstance(value, bool):
        wrong.remove(True)
    if not isinstance(value, str):
        wrong.append("text")
    if value is not None:
        wrong.append(None)
    return wrong


def variants(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every place in plain values, with what does not belong there."""
    for wrong in wrong_values(value):
        yield where, wrong
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from variants(item, (*where, key))


def with_value(content: Any, where: tuple[Any, ...], value: Any) -> Any:
    """A copy of plain values with another value at a place."""
    if not where:
        return value
    made = copy.deepcopy(content)
    inner = made
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    return made


def objection(path: Path, load: Callable[[], object]) -> str:
    """What is wrong with how a file is refused: nothing, if it is by an error of one line that names it."""
    try:
        load()
    except FileError as error:
        return str(error) if str(path) not in str(error) or "\n" in str(error) else ""
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return "it is read"


class Failing(FileIO):
    """A file on a disk that fails; to stand in for ``os.fdopen``."""

    def __init__(self, descriptor: int, *_: object, **__: object) -> None:
        super().__init__(descriptor)

    def read(self, size: int = -1, /) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def readinto(self, buffer: Any, /) -> int:
        return len(self.read())


HOSTILE_TEXTS: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "null": b"null",
    "no UTF-8": b'{"format": 1, "a": "\xff\xfe"}',
    "a mark of byte order": b"\xef\xbb\xbf{}",
    "deep": b"[" * 100_000,
    "deep fields": b'{"a":' * 100_000,
    "a huge number": b'{"format": 1' + b"0" * 5000 + b"}",
    "a huge float": b'{"format": 1e999}',
    "a field twice": b'{"format": 1, "format": 1}',
    "no format": b"{}",
    "a format that is none": b'{"format": "1"}',
    "true as format": b'{"format": true}',
    "NaN as format": b'{"format": NaN}',
    "an unknown field": b'{"format": 1, "surprise": 1}',
}
