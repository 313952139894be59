"""What a file must hold, said by types: plain values from outside become the dataclasses that they claim to be.

A dataclass is its own schema. Whatever does not fit is a :class:`Misfit` that names the field; what reads a file
makes a :class:`~nclbayes.errors.FileError` of it, which names the file too.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from nclbayes.errors import FileError, NCLError

T = TypeVar("T")

# Deeper than anything that is written, and far from Python's limit of recursion.
_DEEPEST = 32
_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}


class Misfit(Exception):
    """What a file holds is not what its schema says; the message names field or tensor, and the reason."""


@contextmanager
def refused(path: object, what: str) -> Iterator[None]:
    """Turn whatever does not fit into an error that names the file.

    Args:
        path: The file.
        what: What it should be, such as "a record of nclbayes".

    Yields:
        Nothing.

    Raises:
        FileError: In place of a :class:`Misfit`.
    """
    try:
        yield
    except Misfit as error:
        raise FileError(f"'{path}' is not {what}: {error}.") from error


def parsed(content: bytes) -> Any:
    """JSON as plain values.

    Args:
        content: The text, in UTF-8.

    Returns:
        Its value.

    Raises:
        Misfit: If it is not JSON, names a field twice, or is nested too deeply.
    """
    try:
        return json.loads(content.decode(), object_pairs_hook=_without_twins)
    except RecursionError:
        raise Misfit("it is nested too deeply") from None
    except ValueError as error:
        raise Misfit(f"it is not JSON ({error})") from None


def fitted(kind: Any, value: Any, where: str = "it", *, finite: bool = True) -> Any:
    """A plain value as the type that it should be of.

    Args:
        kind: A dataclass, an enumeration, a plain type, a union, or a list, tuple or mapping of those. Sequences become
            lists, or tuples where the type says so.
        value: What a file holds.
        where: What an error calls it.
        finite: Whether NaN and infinity are refused.

    Returns:
        The value, of that type.

    Raises:
        Misfit: If it does not fit.
    """
    if kind in _NAMES:
        return _plain(kind, value, where, finite)
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _first_that_fits(inner, value, where, finite)
    if is_dataclass(kind):
        return _dataclass(kind, value, where, finite)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _member(kind, value, where)
    if origin in (list, tuple, Sequence):
        if not isinstance(value, list):
            raise Misfit(f"{where} is {_shown(value)}, not a list")
        if inner[0] is float and all(type(item) is float and (math.isfinite(item) or not finite) for item in value):
            return tuple(value) if origin is tuple else value  # There may be millions of losses.
        items = [fitted(inner[0], item, f"{where}[{i}]", finite=finite) for i, item in enumerate(value)]
        return tuple(items) if origin is tuple else items
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            raise Misfit(f"{where} is {_shown(value)}, not a mapping")
        named = ((fitted(str, name, f"a name in {where}"), item) for name, item in value.items())
        return {name: fitted(inner[1], item, _inside(where, name), finite=finite) for name, item in named}
    _check_depth(value, where)
    return value


def _plain(kind: type, value: Any, where: str, finite: bool) -> Any:
    """A value of one of JSON's own types; a whole number will do as a number, but true is no number."""
    right = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    if not right:
        raise Misfit(f"{where} is {_shown(value)}, not {_NAMES[kind]}")
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Misfit(f"{where} is {_shown(value)}, which no text can hold") from None
    if kind in (int, float) and isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise Misfit(f"{where} is a number of more than 64 bits")
    if kind is float:
        value = float(value)
        if finite and not math.isfinite(value):
            raise Misfit(f"{where} is {value}, not a finite number")
    return value


def _dataclass(kind: Any, value: Any, where: str, finite: bool) -> Any:
    if not isinstance(value, dict):
        raise Misfit(f"{where} is {_shown(value)}, not a mapping")
    known = {f.name: f for f in fields(kind) if f.init}
    for name in value:
        if name not in known:
            raise Misfit(f"{where} has a field {_shown(name)}, which this version of nclbayes does not know")
    for name, field in known.items():
        if name not in value and field.default is MISSING and field.default_factory is MISSING:
            raise Misfit(f"{where} has no field '{name}'")
    hints = _hints(kind)
    found = {name: fitted(hints[name], item, _inside(where, name), finite=finite) for name, item in value.items()}
    try:
        return kind(**found)
    except NCLError as error:
        raise Misfit(f"{where} is refused ({str(error).rstrip('.')})") from error


def _first_that_fits(kinds: tuple[Any, ...], value: Any, where: str, finite: bool) -> Any:
    """Of dataclasses the one that has the value's fields; else the first kind that fits."""
    if isinstance(value, dict):
        names = {kind: {f.name for f in fields(kind)} for kind in kinds if is_dataclass(kind)}
        kinds = tuple(kind for kind, own in names.items() if own >= set(value)) or kinds
    complaints = []
    for kind in kinds:
        try:
            return fitted(kind, value, where, finite=finite)
        except Misfit as error:
            complaints.append(str(error))
    # Of a value that may be null, what else it may be says more.
    raise Misfit(next((said for said in complaints if not said.endswith("not null")), complaints[0]))


def _member(kind: type[Enum], value: Any, where: str) -> Enum:
    for member in kind:
        if type(value) is type(member.value) and value == member.value:
            return member
    raise Misfit(f"{where} is {_shown(value)}, not one of {', '.join(repr(member.value) for member in kind)}")


def _check_depth(value: Any, where: str, depth: int = 0) -> None:
    if depth > _DEEPEST:
        raise Misfit(f"{where} is nested too deeply")
    if isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            _check_depth(item, where, depth + 1)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise Misfit("it names a field twice")
    return found


@lru_cache(maxsize=64)
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _inside(where: str, name: str) -> str:
    return name if where == "it" else f"{where}.{name}"


def _shown(value: Any) -> str:
    """A value in a message: short, and on one line."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "a mapping"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**63:
        return "a number of more than 64 bits"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
