"""What all ranks do, or none of them: begin alike, and end alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nclbayes.errors import RankError
from nclbayes.interrupts import deferred
from nclbayes.ranks.group import Ranks, Stopped

# The transactions that are open, one inside the other, and errors in them that all ranks have been told of.
_open: list[str] = []
_told: list[BaseException] = []


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
    differing = [
        f"their {name} ({', '.join(f'rank {r}: {own.get(name)}' for r, own in enumerate(all_marks))})"
        for name in marks
        if any(own.get(name) != all_marks[0].get(name) for own in all_marks)
    ]
    if differing:
        raise RankError(
            f"The ranks do not mean the same by {what}. They differ in {'; '.join(differing)}. Every rank must be "
            "given the same model, posterior, task and settings, and the same seeds."
        )


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
    is_over = False
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
        if is_over or _is_told(error):
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


def _is_told(error: BaseException | None) -> bool:
    """Whether the others know already: by a transaction inside, or since it came while this rank heard of theirs."""
    while error is not None:
        if isinstance(error, (Stopped, RankError)) or any(error is other for other in _told):
            return True
        error = error.__context__
    return False


def _why(what: str, said: list[Any]) -> str:
    failed = [f"rank {rank} failed with {one['error']}" for rank, one in enumerate(said) if one and "error" in one]
    return f"{what} is given up on all ranks: {'; '.join(failed) or 'one of them stopped'}"
