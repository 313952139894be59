"""Values that are not what was asked for, and tensors that are not what they seem."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor


class MineError(Exception):
    """What the tester's own data sets, networks and callbacks raise: it must come through as it is."""


ODD_NUMBERS: list[Any] = [
    None,
    math.nan,
    math.inf,
    -math.inf,
    -1,
    0,
    0.5,
    2.5,
    1e300,
    10**400,
    1e-320,
    "3",
    "",
    True,
    False,
    [],
    (1,),
    {},
    object(),
    1 + 2j,
    torch.tensor(3.0),
    torch.tensor([2.0, 3.0]),
    np.int64(2),
    np.float32(0.5),
    np.array([1.0]),
]
"""For a setting that is a number; some of them are right for some."""

ODD_THINGS: list[Any] = [None, 3, 2.5, "text", [], {}, (), object(), int, torch.zeros(2), lambda *args: None]
"""For an argument that is no number."""


def with_bad_value(tensor: Tensor, where: int, value: float) -> Tensor:
    """A copy with one value, somewhere, that does not belong there."""
    changed = tensor.clone()
    if changed.numel():
        changed.view(-1)[where % changed.numel()] = value
    return changed


def floating(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_floating_point() else tensor.float()


MUTATIONS: dict[str, Callable[[Tensor, random.Random], Any]] = {
    "sparse": lambda t, r: t.to_sparse(),
    "sparse rows": lambda t, r: t.to_sparse_csr() if t.ndim == 2 else t.to_sparse(),
    "boolean": lambda t, r: t > 0,
    "complex": lambda t, r: torch.complex(floating(t), floating(t)),
    "bytes": lambda t, r: t.to(torch.uint8),
    "small integers": lambda t, r: t.to(torch.int16),
    "half": lambda t, r: t.half(),
    "bfloat16": lambda t, r: t.bfloat16(),
    "double": lambda t, r: t.double(),
    "integers": lambda t, r: t.long(),
    "nan": lambda t, r: with_bad_value(floating(t), r.randrange(1000), math.nan),
    "infinity": lambda t, r: with_bad_value(floating(t), r.randrange(1000), math.inf),
    "huge": lambda t, r: with_bad_value(floating(t), r.randrange(1000), 3e38),
    "denormal": lambda t, r: floating(t) * 1e-42,
    "late label": lambda t, r: with_bad_value(t, -1, 99),
    "negative label": lambda t, r: with_bad_value(t, r.randrange(1000), -1),
    "fraction": lambda t, r: with_bad_value(floating(t), r.randrange(1000), 0.5),
    "no columns": lambda t, r: t.reshape(len(t), -1)[:, :0],
    "no rows": lambda t, r: t[:0],
    "one row less": lambda t, r: t[:-1],
    "one more axis": lambda t, r: t.unsqueeze(-1),
    "axis in front": lambda t, r: t.unsqueeze(0),
    "flat": lambda t, r: t.flatten(),
    "no axis": lambda t, r: t.flatten()[0],
    "transposed": lambda t, r: t.mT if t.ndim > 1 else t,
    "strided": lambda t, r: torch.stack([t, t], -1)[..., 0],
    "expanded": lambda t, r: t[:1].expand(t.shape),
    "requires grad": lambda t, r: floating(t).clone().requires_grad_(),
    "result of a graph": lambda t, r: floating(t).clone().requires_grad_() * 2,
    "no data": lambda t, r: t.to("meta"),
    "conjugate": lambda t, r: torch.complex(floating(t), floating(t)).conj(),
    "array": lambda t, r: t.numpy(),
    "list": lambda t, r: t.tolist(),
    "nothing": lambda t, r: None,
    "text": lambda t, r: "x",
    "parameter": lambda t, r: torch.nn.Parameter(floating(t).clone()),
    "frozen parameter": lambda t, r: torch.nn.Parameter(t.clone(), requires_grad=False),
    "quantized": lambda t, r: torch.quantize_per_tensor(floating(t), 0.1, 0, torch.qint8),
    "nested": lambda t, r: torch.nested.nested_tensor(list(t), layout=torch.jagged) if t.ndim > 1 else t,
}
"""What may be wrong, or merely unusual, with a tensor of inputs or of targets."""


def mutated(name: str, tensor: Tensor, rng: random.Random) -> Any:
    """A tensor with something about it changed, if torch can do that to it."""
    try:
        return MUTATIONS[name](tensor, rng)
    except (RuntimeError, TypeError, IndexError):
        return tensor


def as_mine(function: Callable[..., Any]) -> Callable[..., Any]:
    """The tester's own code: whatever goes wrong in it is the tester's error."""

    @wraps(function)
    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except (MineError, StopIteration):
            raise
        except Exception as error:
            raise MineError(str(error)) from error

    return call
