"""Uses of a weight that are no linear map, and yet tell the gradients of a batch's examples apart.

Where a weight is an offset, a gain, or a table that rows are looked up in, the gradient of the call's output has the
examples along its first dimension, and so has the weight's own gradient before it is summed over them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge

from nclbayes.errors import NCLError

Parts = Callable[[Tensor, slice], Tensor]
"""From the gradient of a call's output, and which examples are meant, to that of a weight, [examples, *weight]."""


@dataclass(frozen=True)
class Separable:
    """How the gradient of a weight falls into those of examples.

    Attributes:
        edge: Where the gradient of the call's output passes.
        shape: The shape of that output, examples along its first dimension.
        parts: The gradients of some examples, from that of the output of these, ``[examples, *site]``.
        index: Which rows of a table the output holds, if it holds nothing else.

    Example:
        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from nclbayes.watch import watch
        >>> def model(x, y):
        ...     gain = pyro.sample("gain", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        ...     pyro.sample("y", dist.Normal(x * gain, 1.0).to_event(1), obs=y)
        >>> (use,) = watch(model, (torch.ones(5, 2), torch.zeros(5, 2))).others
        >>> use.separable.parts(torch.ones(3, 2), slice(0, 3)).shape  # the gradients of the first three examples
        torch.Size([3, 2])
    """

    edge: GradientEdge
    shape: torch.Size
    parts: Parts
    index: Tensor | None = None


def parts_of(func: Callable[..., Any], weight: Tensor, out: Tensor, args: Sequence[Any], kwargs: Any) -> Parts | None:
    """How a call's gradient with respect to one of its arguments falls into those of examples.

    Args:
        func: The torch function.
        weight: The argument.
        out: The call's output.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        None if that is not known.
    """
    name = getattr(func, "__name__", "").strip("_")
    if name in _NORMS:
        return _NORMS[name](weight, *args, **kwargs)
    if name in _MAPS:
        return _offset(weight, out, *args, **kwargs)
    if kwargs or not _broadcasts(weight, out):
        return None
    first, *others = args
    if name in ("expand", "expand_as"):
        return lambda g, _: _reduced(g, weight)
    if len(others) != 1 or (first is weight) == (others[0] is weight):
        return None
    (second,) = others
    if name in ("add", "radd", "iadd"):
        return lambda g, _: _reduced(g, weight)
    if name in ("sub", "rsub") and isinstance(first, Tensor):
        # Tensor.__rsub__(a, b) is b - a.
        sign = 1.0 if (first is weight) == (name == "sub") else -1.0
        return lambda g, _: _reduced(sign * g, weight)
    if name in ("mul", "rmul", "multiply", "imul"):
        other = second if first is weight else first
        return _times(other, weight, out)
    return None


def looked_up(func: Callable[..., Any], weight: Tensor, args: Sequence[Any], kwargs: Any) -> Tensor | None:
    """Which rows of a table a call looks up; -1 where what it finds has no gradient.

    Args:
        func: The torch function.
        weight: The table.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        The index; None if it is another call.
    """
    if func is F.embedding:
        return _embedded(weight, *args, **kwargs)
    is_index = getattr(func, "__name__", "") == "__getitem__" and args[0] is weight and isinstance(args[1], Tensor)
    if not is_index or args[1].dtype not in (torch.int64, torch.int32):
        return None
    return torch.where(args[1] < 0, args[1] + weight.shape[0], args[1])


def _embedded(
    table: Tensor,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    if weight is not table or max_norm is not None or scale_grad_by_freq:
        return None
    if padding_idx is None:
        return input
    return torch.where(input == padding_idx % weight.shape[0], torch.full_like(input, -1), input)


def rows_of(index: Tensor, weight: Tensor) -> Parts:
    """The gradients of a table of which each example looks some rows up.

    Args:
        index: Which rows, [examples, ...]; -1: none.
        weight: The table, [rows, ...].

    Returns:
        From the gradient of what was found to that of the table.
    """

    def parts(g: Tensor, which: slice) -> Tensor:
        keys, rows = keyed(index[which], g, weight.shape[0])
        found = g.new_zeros(len(g) * weight.shape[0], *weight.shape[1:])
        return found.index_add_(0, keys, rows.reshape(-1, *weight.shape[1:])).view(len(g), *weight.shape)

    return parts


def keyed(index: Tensor, g: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Gradients of looked-up rows, with a number for each pair of example and row.

    Args:
        index: Which rows, [examples, ...]; -1: none.
        g: The gradient of what was found, [examples, ..., *row].
        size: How many rows the table has.

    Returns:
        The numbers, [R], example times size plus row; and the gradients, [R, numbers of a row].
    """
    at = index.reshape(len(index), -1).long()
    keys = (at + size * torch.arange(len(at), device=at.device).unsqueeze(-1)).flatten()
    rows, found = g.reshape(keys.numel(), -1), at.flatten() >= 0
    return (keys, rows) if bool(found.all()) else (keys[found], rows[found])


def products_of(input: Tensor, weight: Tensor) -> Parts:
    """The gradients of the weight of ``F.linear``.

    Args:
        input: Its input, [examples, ..., n].
        weight: The weight, [m, n].

    Returns:
        From the gradient of the output to that of the weight.
    """
    held, version = input.detach(), input._version

    def parts(g: Tensor, which: slice) -> Tensor:
        _check_unchanged(input, version)
        m, n = weight.shape
        return g.reshape(len(g), -1, m).mT @ held[which].to(g.dtype).reshape(len(g), -1, n)

    return parts


def chained(parts: Parts, derived: Tensor, value: Tensor) -> Parts:
    """The gradients of what a tensor was computed from, and nothing else.

    Args:
        parts: Those of the tensor.
        derived: The tensor.
        value: What it was computed from.

    Returns:
        Those of that.
    """
    if derived is value:
        return parts

    def back(g: Tensor, which: slice) -> Tensor:
        outer = parts(g, which).to(derived.dtype)
        (found,) = torch.autograd.grad(
            derived, value, outer, retain_graph=True, is_grads_batched=True, allow_unused=True
        )
        return g.new_zeros(len(g), *value.shape) if found is None else found

    return back


def _times(other: Any, weight: Tensor, out: Tensor) -> Parts | None:
    if not isinstance(other, Tensor):
        return None
    held, version = other.detach(), other._version

    def parts(g: Tensor, which: slice) -> Tensor:
        _check_unchanged(other, version)
        spread = held.expand(out.shape)
        return _reduced(g * spread[which], weight)

    return parts


def _layer_norm(
    site: Tensor, input: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Parts | None:
    return _normalised(site, input, weight, bias, lambda x: F.layer_norm(x, tuple(shape), eps=eps), first=False)


def _rms_norm(site: Tensor, input: Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> Parts | None:
    return _normalised(site, input, weight, None, lambda x: F.rms_norm(x, list(shape), eps=eps), first=False)


def _group_norm(
    site: Tensor, input: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Parts | None:
    return _normalised(site, input, weight, bias, lambda x: F.group_norm(x, groups, eps=eps), first=True)


def _batch_norm(
    site: Tensor,
    input: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Parts | None:
    if training:
        return None
    return _normalised(
        site, input, weight, bias, lambda x: F.batch_norm(x, mean, variance, training=False, eps=eps), first=True
    )


_NORMS: dict[str, Callable[..., Parts | None]] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
}


_MAPS = {"linear", *(f"conv{kind}{d}d" for kind in ("", "_transpose") for d in (1, 2, 3))}


def _offset(
    site: Tensor, out: Tensor, input: Tensor, weight: Tensor, bias: Any = None, *_: Any, **__: Any
) -> Parts | None:
    """The bias of a map whose weight is not learnt, or whose rows are not its outputs."""
    positions = max(weight.ndim - 2, 0)
    if bias is not site or input is site or weight is site or out.ndim < 2 + positions:
        return None
    like = site.detach().reshape(-1, *(1,) * positions)
    return lambda g, _: _reduced(g, like).reshape(len(g), *site.shape)


def _normalised(
    site: Tensor, input: Tensor, weight: Any, bias: Any, normalise: Callable[[Tensor], Tensor], *, first: bool
) -> Parts | None:
    """Gain and offset of a normalisation; of channels, which come right after the examples, or of the last ones."""
    if input is site or (weight is site) == (bias is site) or input.ndim < 2:
        return None
    held, version = input.detach(), input._version
    # As a weight that broadcasts against the input.
    like = site.detach().reshape(-1, *(1,) * (input.ndim - 2)) if first else site

    def parts(g: Tensor, which: slice) -> Tensor:
        _check_unchanged(input, version)
        if bias is not site:
            g = g * normalise(held[which])
        return _reduced(g, like).reshape(len(g), *site.shape)

    return parts


def _broadcasts(weight: Tensor, out: Tensor) -> bool:
    """Whether each example, along the first dimension of a call's output, meets the whole weight."""
    if out.ndim == 0 or weight.ndim > out.ndim:
        return False
    return weight.ndim < out.ndim or weight.shape[0] == 1


def _reduced(g: Tensor, weight: Tensor) -> Tensor:
    """A gradient summed over what a weight was broadcast over, but for the examples."""
    shape = (1,) * (g.ndim - weight.ndim) + tuple(weight.shape)
    over = [d for d in range(1, g.ndim) if shape[d] == 1 and g.shape[d] != 1]
    return (g.sum(over, keepdim=True) if over else g).reshape(len(g), *weight.shape)


def _check_unchanged(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise NCLError(
            "A tensor that was multiplied by a weight, or normalised, was modified in place after the call. Autograd "
            "could not differentiate this model either: use an out-of-place operation."
        )
