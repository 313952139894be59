"""A recurrence over all steps of a batch, with a backward pass that multiplies out the weights' gradient only once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap


@dataclass(frozen=True)
class Nonlinearity:
    """A function phi of a unit's input.

    Attributes:
        value: From h to phi(h).
        value_: The same in place.
        slope: From phi(h) to phi'(h).
    """

    value: Callable[[Tensor], Tensor]
    value_: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


NONLINEARITIES = {
    "relu": Nonlinearity(torch.relu, torch.relu_, torch.sign),
    "tanh": Nonlinearity(torch.tanh, torch.tanh_, lambda value: 1 - value * value),
    "linear": Nonlinearity(lambda h: h, lambda h: h, torch.ones_like),
}


def recur(weight: Tensor, driven: Tensor, gate: Tensor, start: Tensor, nonlinearity: str) -> Tensor:
    """The states ``r_t = r_{t-1} + gate_t (phi(weight r_{t-1} + driven_t) - r_{t-1})``.

    It can be differentiated any number of times, and transformed by torch.func's vmap, grad, vjp and jacrev.

    Args:
        weight: [units, units].
        driven: What else enters the units, [time, batch, units].
        gate: How far a state moves, from 0 to 1, [time, batch or 1, 1].
        start: r_0, [batch, units].
        nonlinearity: One of `NONLINEARITIES`.

    Returns:
        r_1 .. r_T, [time, batch, units].

    Example:
        >>> import torch
        >>> from nclbayes.nn.recurrence import recur
        >>> driven, gate = torch.ones(3, 1, 1), torch.full((3, 1, 1), 0.5)
        >>> recur(torch.zeros(1, 1), driven, gate, torch.zeros(1, 1), "relu").flatten()
        tensor([0.5000, 0.7500, 0.8750])
    """
    states: Tensor = _Recurrence.apply(weight, driven, gate, start, nonlinearity)[0]  # type: ignore[no-untyped-call]
    return states


class _Recurrence(torch.autograd.Function):
    """r_1 .. r_T, and phi at every step, which the backward pass needs.

    Both passes work in few large buffers, as fresh memory takes a good part of a step's time.
    """

    @staticmethod
    def forward(
        weight: Tensor, driven: Tensor, gate: Tensor, start: Tensor, nonlinearity: str
    ) -> tuple[Tensor, Tensor]:
        phi_, transposed = NONLINEARITIES[nonlinearity].value_, weight.mT.contiguous()
        active = driven.clone(memory_format=torch.contiguous_format)
        states = torch.empty_like(active)
        r = start
        for a, g, new in zip(active.unbind(), gate.unbind(), states.unbind(), strict=True):
            phi_(a.addmm_(r, transposed))
            r = torch.lerp(r, a, g, out=new)
        return states, active

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.nonlinearity = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # Or zeros would be made for it all the same.

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None, None
        weight, driven, gate, start, states, active = ctx.saved_tensors
        if torch.is_grad_enabled():
            # Whoever differentiates this again needs it as operations that autograd knows.
            pull = vjp(lambda w, d, r: _unrolled(w, d, gate, r, ctx.nonlinearity)[0], weight, driven, start)[1]
            to_weight, to_driven, to_start = pull(grad)
            return to_weight, to_driven, None, to_start, None
        to_driven = NONLINEARITIES[ctx.nonlinearity].slope(active).mul_(gate)
        to_state = torch.zeros_like(start)
        steps = zip(to_driven.unbind(), (1 - gate).unbind(), grad.unbind(), strict=True)
        for slope, kept, g in reversed(list(steps)):
            # The slope becomes the gradient of what enters the units.
            slope.mul_(to_state.add_(g))
            to_state.mul_(kept).addmm_(slope, weight)
        to_weight = to_driven[0].mT @ start
        to_weight.addmm_(to_driven[1:].flatten(0, 1).mT, states[:-1].flatten(0, 1))
        return to_weight, to_driven, None, to_state, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, int]:
        *tensors, nonlinearity = inputs
        unrolled = partial(_unrolled, nonlinearity=nonlinearity)
        return vmap(unrolled, in_dims[:-1], randomness=info.randomness)(*tensors), 0


def _unrolled(weight: Tensor, driven: Tensor, gate: Tensor, start: Tensor, nonlinearity: str) -> tuple[Tensor, Tensor]:
    """The same, as torch would do it."""
    phi = NONLINEARITIES[nonlinearity].value
    states, active, r = [], [], start
    for d, g in zip(driven.unbind(), gate.unbind(), strict=True):
        active.append(phi(d + r @ weight.mT))
        r = torch.lerp(r, active[-1], g)
        states.append(r)
    return torch.stack(states), torch.stack(active)
