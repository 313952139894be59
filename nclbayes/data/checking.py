"""What is handed in, checked in one place: numbers, tensors, batches, and the values of targets."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from nclbayes.errors import DataError, SettingError
from nclbayes.watch.nesting import tensors_of

# What torch can count to.
_LARGEST = 2**63 - 1


def number(name: str, value: Any, holds: Callable[[float], bool] | None = None, what: str = "a number") -> float:
    """A finite number.

    Args:
        name: What it is called, for the message.
        value: What was given; numbers of numpy are welcome, flags are not numbers.
        holds: Whether it lies in its range.
        what: That range in words, such as "positive".

    Returns:
        The number, of Python's own kind.

    Raises:
        SettingError: If it is anything else.
    """
    remedy = "; a tensor becomes a number by .item()" if isinstance(value, Tensor) else ""
    is_number = not isinstance(value, bool) and isinstance(value, Real)
    if not is_number:
        raise SettingError(f"{name} must be {what}, not {shown(value)}{remedy}.")
    try:
        found: float = value if type(value) in (int, float) else float(value)
        finite = math.isfinite(found)
    except OverflowError:
        finite = False
    if not finite:
        raise SettingError(f"{name} must be finite, not {shown(value)}.")
    if holds is not None and not holds(found):
        raise SettingError(f"{name} must be {what}, not {shown(value)}.")
    if 0 < abs(found) < sys.float_info.min:
        raise SettingError(f"{name} is too small to be told from 0: {shown(value)}.")
    return found


def whole_number(name: str, value: object, least: int = 1) -> int:
    """A whole number that torch can count to.

    Args:
        name: What it is called, for the message.
        value: What was given; 3.0 is a whole number too.
        least: The smallest that is allowed.

    Returns:
        The number as an int.

    Raises:
        SettingError: If it is anything else.
    """
    what = f"a whole number of at least {least}"
    return int(number(name, value, lambda v: v == int(v) and least <= v <= _LARGEST, what))


def flag(name: str, value: object) -> bool:
    """True or False.

    Args:
        name: What it is called, for the message.
        value: What was given.

    Returns:
        The same.

    Raises:
        SettingError: If it is anything else.
    """
    if not isinstance(value, bool):
        raise SettingError(f"{name} must be True or False, not {shown(value)}.")
    return value


def generator_or_none(value: object) -> torch.Generator | None:
    """A generator, if one was given.

    Args:
        value: What was given as `generator`.

    Returns:
        The same.

    Raises:
        SettingError: If it is anything else.
    """
    if value is not None and not isinstance(value, torch.Generator):
        raise SettingError(
            f"generator must be a torch.Generator, such as torch.Generator().manual_seed(0), not {shown(value)}."
        )
    return value


def shown(value: object) -> str:
    """A value as a message can show it, in few words.

    Args:
        value: Anything.

    Returns:
        At most one line.
    """
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value)
    return (
        text if len(text) <= 60 and "\n" not in text else f"a {type(value).__name__} ({text[:40].split(chr(10))[0]}...)"
    )


def checked_batch(batch: object) -> tuple[Any, ...]:
    """A batch as a tuple of a model's positional arguments.

    Args:
        batch: What a source gave; a tensor alone is a batch of one thing, the observed one.

    Returns:
        The batch.

    Raises:
        DataError: If it is no batch, is empty, or holds a tensor that cannot be learnt from.
    """
    if isinstance(batch, Mapping):
        raise DataError(
            f"A batch is a {type(batch).__name__} of {', '.join(map(repr, batch)) or 'nothing'}: say which of these is "
            'the target, as in Task(..., target="labels").'
        )
    if not isinstance(batch, (Tensor, tuple, list)):
        raise DataError(
            f"A batch is {shown(batch) if batch is None else f'a {type(batch).__name__}'}; it must be a tuple of "
            "tensors (x, y), which a model is called with. A collate function can make one."
        )
    items = (batch,) if isinstance(batch, Tensor) else tuple(batch)
    tensors = [item for item in items if isinstance(item, Tensor)]
    for _, tensor in tensors_of(items):
        check_tensor(tensor, "A tensor of a batch")
    if not tensors or tensors[-1].ndim == 0:
        held = ", ".join("a number" if isinstance(i, Tensor) else f"a {type(i).__name__}" for i in items) or "nothing"
        raise DataError(
            f"A batch must hold tensors with examples along the first dimension; this one holds {held}. Arrays become "
            "tensors by torch.as_tensor."
        )
    if tensors[-1].shape[0] == 0:
        raise DataError("A batch is empty: it has 0 examples.")
    check_targets(tensors[-1])
    return items


def check_tensor(tensor: Tensor, what: str) -> None:
    """Refuse a tensor that has no plain memory.

    Args:
        tensor: The tensor.
        what: What to call it.

    Raises:
        DataError: If it is sparse, quantized, nested, or without data.
    """
    if tensor.is_nested:
        raise DataError(f"{what} is nested, which cannot be learnt from: pass torch.nested.to_padded_tensor(x, 0.0).")
    if tensor.layout is not torch.strided:
        raise DataError(f"{what} has the layout {tensor.layout}, which cannot be learnt from: pass x.to_dense().")
    if tensor.is_quantized:
        raise DataError(f"{what} is quantized ({tensor.dtype}), which cannot be learnt from: pass x.dequantize().")
    if tensor.is_meta:
        raise DataError(f"{what} is on the device 'meta', and holds no data.")


def has_plain_memory(tensor: Tensor) -> bool:
    """Whether a tensor is one that :func:`check_tensor` lets pass.

    Args:
        tensor: The tensor.

    Returns:
        Whether it is.
    """
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)


def check_targets(target: Tensor, what: str = "The targets of a batch") -> None:
    """Refuse targets that hold nothing.

    Args:
        target: The targets.
        what: What to call them.

    Raises:
        DataError: If there is no number in them.
    """
    if target.numel() == 0:
        raise DataError(f"{what} have shape {tuple(target.shape)}: there is nothing in them to learn.")


@dataclass(frozen=True)
class AllowedTargets:
    """The values that targets may have; checked in every batch, where it was drawn.

    Attributes:
        low: The smallest.
        high: The largest.
        whole: Whether they are whole numbers.
        why: Why, for the message.

    Example:
        >>> import torch
        >>> from nclbayes.data.checking import AllowedTargets
        >>> AllowedTargets(0, 9, whole=True, why="there are ten digits").check(torch.tensor([0, 9]))
    """

    low: float = -math.inf
    high: float = math.inf
    whole: bool = False
    why: str = ""

    def check(self, target: Tensor) -> None:
        """Refuse targets of other values.

        Args:
            target: The targets.

        Raises:
            DataError: If one is NaN, infinite, out of range, or no whole number, or of a dtype that has no order.
        """
        if target.is_complex():
            raise DataError(f"The targets are complex ({target.dtype}): there is no likelihood of such.")
        try:
            lowest, highest = (float(end) for end in target.detach().aminmax())
        except NotImplementedError as error:
            remedy = "target.float()" if target.is_floating_point() else "target.long()"
            raise DataError(f"The targets are {target.dtype}, which torch cannot compare: use {remedy}.") from error
        # NaN is passed on by aminmax.
        if not (math.isfinite(lowest) and math.isfinite(highest)):
            raise DataError(
                "The targets hold NaN or infinity. Leave those examples out, or put a number there and mask it."
            )
        if lowest < self.low or highest > self.high:
            raise DataError(
                f"The targets range from {lowest:g} to {highest:g}, but {self.why}: they must lie in "
                f"[{self.low:g}, {self.high:g}]."
            )
        if self.whole and target.is_floating_point() and bool((target != target.round()).any()):
            raise DataError(f"The targets must be whole numbers: {self.why}.")
