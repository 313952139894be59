"""What is said when code of the user's fails: its own errors pass, and those of Python and torch are given a frame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from nclbayes.errors import DataError, ModelError, NCLError

_PLAIN = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError)


def is_plain(error: BaseException) -> bool:
    """Whether an error is one that Python or torch raises when things do not fit, and of no class of the user's.

    Args:
        error: The error.

    Returns:
        Whether it is; a lack of memory is not.
    """
    return isinstance(error, _PLAIN) and type(error).__module__ == "builtins"


def first_line(error: BaseException) -> str:
    """The beginning of an error's message: torch's may show whole tensors.

    Args:
        error: The error.

    Returns:
        Its first line, or the name of its class.
    """
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".:") if text else type(error).__name__


@contextmanager
def running(batch: Sequence[Any], what: str = "The model") -> Iterator[None]:
    """Around a call of a model: what does not fit is said with the batch that it does not fit.

    Args:
        batch: What the model is called with.
        what: Who is called.

    Yields:
        Nothing.

    Raises:
        DataError: If the model raised a plain error of Python's or torch's. Errors of any other class pass.
        ModelError: If it raised StopIteration, which would end a loop of the caller's.
    """
    try:
        yield
    except (StopIteration, GeneratorExit) as error:
        raise ModelError(f"{what} raised {type(error).__name__}: raise another error, or catch it there.") from error
    except Exception as error:
        if isinstance(error, NCLError) or not is_plain(error):
            raise
        remedy = " Make both of one dtype: x.float(), or net.double()." if "dtype" in str(error) else ""
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise DataError(f"{what} cannot take inputs of shape {_shapes(batch)}: {reason}.{remedy}") from error


def _shapes(batch: Sequence[Any]) -> str:
    found = (f"{tuple(i.shape)} and {i.dtype}" if isinstance(i, Tensor) else f"({type(i).__name__})" for i in batch)
    return ", ".join(found) or "(nothing)"


@contextmanager
def of_task(name: str, where: str = "") -> Iterator[None]:
    """Let every error of nclbayes that leaves say which task it is about.

    Args:
        name: The task's name.
        where: Where in the task, such as "batch 3".

    Yields:
        Nothing.
    """
    try:
        yield
    except NCLError as error:
        if f"'{name}'" not in str(error):
            error.args = (f"Task '{name}'{where and ', '}{where}: {error}",)
        raise
