"""What is said when code of the user's fails: its own errors pass, and those of Python and torch are given a frame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from nclbayes.errors import DataError, ModelError, NCLError

_PLAIN = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError)
_REMEDIES = {
    "dtype": " Make both of one dtype: x.float(), or net.double().",
    "Tensor.requires_grad_()": " Gradient checkpointing does so: call gradient_checkpointing_disable().",
}
# What torch says in a plain RuntimeError when the memory of the CPU does not suffice.
_NO_MEMORY = ("can't allocate memory", "not enough memory")


def is_plain(error: BaseException) -> bool:
    """Whether an error is one that Python or torch raises when things do not fit, and of no class of the user's.

    Args:
        error: The error.

    Returns:
        Whether it is; a lack of memory is not.
    """
    is_known = isinstance(error, _PLAIN) and type(error).__module__ == "builtins"
    return is_known and not any(said in str(error) for said in _NO_MEMORY)


def first_line(error: BaseException) -> str:
    """The beginning of an error's message: torch's may show whole tensors.

    Args:
        error: The error.

    Returns:
        Its first line, or the name of its class.
    """
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".:") if text else type(error).__name__


class running:
    """Around a call of a model: what does not fit is said with the batch that it does not fit.

    No generator: one that is closed, since an interrupt came before its first line, would take that for an error of
    the model's.

    Args:
        batch: What the model is called with.
        what: Who is called.

    Raises:
        DataError: If the model raised a plain error of Python's or torch's. Errors of any other class pass.
        ModelError: If it raised StopIteration or GeneratorExit, which would end a loop of the caller's.
    """

    def __init__(self, batch: Sequence[Any], what: str = "The model") -> None:
        self._batch, self._what = batch, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (StopIteration, GeneratorExit)):
            said = f"{self._what} raised {type(error).__name__}: raise another error, or catch it there."
            raise ModelError(said) from error
        if error is None or isinstance(error, NCLError) or not is_plain(error):
            return
        remedy = next((remedy for said, remedy in _REMEDIES.items() if said in str(error)), "")
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise DataError(
            f"{self._what} cannot take inputs of shape {_shapes(self._batch)}: {reason}.{remedy}"
        ) from error


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
