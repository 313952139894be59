"""What all ranks do, or none of them: begin alike, and end alike."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, takewhile
from typing import Any

from nclbayes.errors import RankError
from nclbayes.interrupts import deferred
from nclbayes.ranks.group import Ranks, Stopped

# The transactions that are open, one inside the other, and errors in them that all ranks have been told of.
_open: list[str] = []
_told: list[BaseException] = []
# How many entries in which ranks differ are said, and how many characters of what each has there.
_ENTRIES, _LENGTH = 5, 60
# Equal to no value.
_ABSENT = object()


def in_step(ranks: Ranks, what: str, marks: Mapping[str, Any]) -> None:
    """Refuse to begin something that the ranks do not all mean.

    Args:
        ranks: The ranks.
        what: What they begin.
        marks: What must be the same on each, in plain values by name.

    Raises:
        RankError: If something is not; it says what, and on which ranks.
    """
    if not ranks.are_many:
        return
    all_marks = ranks.gather("the beginning of an update", dict(marks))
    differing = [entry for name in marks for entry in _differing(name, [own.get(name) for own in all_marks])]
    if differing:
        more = [f"and {len(differing) - _ENTRIES} more"] if len(differing) > _ENTRIES else []
        raise RankError(
            f"The ranks do not mean the same by {what}. They differ in {'; '.join([*differing[:_ENTRIES], *more])}. "
            "Every rank must be given the same model, posterior, task and settings, and the same seeds."
        )


def _differing(name: str, values: Sequence[Any]) -> list[str]:
    """The entries in which the values of all ranks differ, each with what they have there."""
    first = values[0]
    if all(value == first for value in values):
        return []
    if all(isinstance(value, dict) for value in values):
        keys = dict.fromkeys(chain(*values))
        inner = [(f"{name}.{key}", [value.get(key, _ABSENT) for value in values]) for key in keys]
    elif all(isinstance(value, list) and len(value) == len(first) and _is_large(value) for value in values):
        inner = [(f"{name}[{k}]", list(entry)) for k, entry in enumerate(zip(*values, strict=True))]
    else:
        return [f"their {name} ({', '.join(f'rank {rank}: {text}' for rank, text in enumerate(_brief(values)))})"]
    return [entry for part, held in inner for entry in _differing(part, held)]


def _is_large(value: list[Any]) -> bool:
    return len(str(value)) > _LENGTH or any(isinstance(entry, dict | list) for entry in value)


def _brief(values: Sequence[Any]) -> list[str]:
    """Values as texts; of long ones what follows where they begin to differ."""
    texts = ["nothing" if value is _ABSENT else str(value) for value in values]
    if all(len(text) <= _LENGTH for text in texts):
        return texts
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    begin = max(sum(1 for _ in alike) - _LENGTH // 2, 0)
    return [
        f"{'...' if begin else ''}{text[begin : begin + _LENGTH]}{'...' if len(text) > begin + _LENGTH else ''}"
        for text in texts
    ]


@contextmanager
def transaction(ranks: Ranks, what: str, commit: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Whatever fails inside on one rank fails on all of them.

    Args:
        ranks: The ranks.
        what: What is done inside.
        commit: What makes it last; done on each rank, whatever interrupts it, once all of them have come to the end.

    Yields:
        Nothing.

    Raises:
        RankError: If a rank has failed; it says which, and why. What fails alike on all of them passes as it is, and so
            does an interrupt on the rank that was interrupted.
    """
    if not ranks.are_many:
        yield
        commit()
        return
    # What the caller is handling meanwhile has nothing to do with this.
    is_over, around = False, sys.exc_info()[1]
    _open.append(what)
    try:
        yield
        with deferred():
            ranks.meet(f"{what} is done")
            commit()
            is_over = True
    except Stopped as stopped:
        raise RankError(_why(what, stopped.said)) from None
    except RankError:
        raise
    except BaseException as error:
        if is_over or _is_told(error, around):
            raise
        _told.append(error)
        said = ranks.stop({"error": f"{type(error).__name__}: {error}".removesuffix(": ")})
        # What all fail with is what it is, and so is Ctrl-C where it was pressed.
        if all(one == said[0] for one in said) or not isinstance(error, Exception):
            raise
        raise RankError(_why(what, said)) from error
    finally:
        _open.pop()
        if not _open:
            _told.clear()


def _is_told(error: BaseException | None, around: BaseException | None) -> bool:
    """Whether the others know already: by a transaction inside, or since it came while this rank heard of theirs."""
    while error is not None and error is not around:
        if isinstance(error, (Stopped, RankError)) or any(error is other for other in _told):
            return True
        error = error.__context__
    return False


def _why(what: str, said: list[Any]) -> str:
    failed = [f"rank {rank} failed with {one['error']}" for rank, one in enumerate(said) if one and "error" in one]
    return f"{what} is given up on all ranks: {'; '.join(failed) or 'one of them stopped'}"
