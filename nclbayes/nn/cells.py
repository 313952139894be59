"""One step of a recurrent network, its two linear maps in the open; and torch's cells written with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nclbayes.nn.showing import must_show

State = tuple[Tensor, ...]
# From W_ih x_t + b_ih, the last state, W_hh, b_hh and a projection of h_t (or None) to the next state, h_t first.
Step = Callable[[Tensor, State, Tensor, Tensor | None, Tensor | None], State]


def lstm_step(
    driven: Tensor, state: State, weight: Tensor, bias: Tensor | None, projection: Tensor | None = None
) -> State:
    """One step of an LSTM.

        (i, f, g, o) = driven + W_hh h + b_hh,   c' = sigma(f) c + sigma(i) tanh(g),   h' = W_hr sigma(o) tanh(c')

    Args:
        driven: W_ih x + b_ih, [..., 4 units].
        state: h and c.
        weight: W_hh.
        bias: b_hh.
        projection: W_hr; None for h' as it is.

    Returns:
        h' and c'.
    """
    h, c = state
    i, f, g, o = (driven + F.linear(h, weight, bias)).chunk(4, dim=-1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return (h if projection is None else F.linear(h, projection)), c


def gru_step(driven: Tensor, state: State, weight: Tensor, bias: Tensor | None, _: Tensor | None = None) -> State:
    """One step of a GRU.

        r = sigma(d_r + u_r),   z = sigma(d_z + u_z),   n = tanh(d_n + r u_n),   h' = n + z (h - n)

    Args:
        driven: d = W_ih x + b_ih, [..., 3 units].
        state: h.
        weight: W_hh, of which u = W_hh h + b_hh.
        bias: b_hh.

    Returns:
        h'.
    """
    (h,) = state
    d_r, d_z, d_n = driven.chunk(3, dim=-1)
    u_r, u_z, u_n = F.linear(h, weight, bias).chunk(3, dim=-1)
    n = torch.tanh(d_n + torch.sigmoid(d_r + u_r) * u_n)
    return (n + torch.sigmoid(d_z + u_z) * (h - n),)


def tanh_step(driven: Tensor, state: State, weight: Tensor, bias: Tensor | None, _: Tensor | None = None) -> State:
    """One step of a plain recurrent network, ``h' = tanh(driven + W_hh h + b_hh)``.

    Args:
        driven: W_ih x + b_ih.
        state: h.
        weight: W_hh.
        bias: b_hh.

    Returns:
        h'.
    """
    return (torch.tanh(driven + F.linear(state[0], weight, bias)),)


def relu_step(driven: Tensor, state: State, weight: Tensor, bias: Tensor | None, _: Tensor | None = None) -> State:
    """One step of a plain recurrent network, ``h' = relu(driven + W_hh h + b_hh)``.

    Args:
        driven: W_ih x + b_ih.
        state: h.
        weight: W_hh.
        bias: b_hh.

    Returns:
        h'.
    """
    return (torch.relu(driven + F.linear(state[0], weight, bias)),)


class _Cell(nn.RNNCellBase):
    """What torch's cells have in common, with the two maps of their step in the open."""

    _states = 1

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """The next state, as torch's cell computes it.

        Args:
            input: x_t, [batch, input_size] or [input_size].
            hx: The last state; None: zeros.

        Returns:
            The next state.
        """
        if not must_show():
            return super().forward(input, hx)
        if hx is None:
            hx = (input.new_zeros(*input.shape[:-1], self.hidden_size),) * self._states
        state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        driven = F.linear(input, self.weight_ih, self.bias_ih)
        found = self._next()(driven, state, self.weight_hh, self.bias_hh, None)
        return found if self._states > 1 else found[0]

    def _next(self) -> Step:
        raise NotImplementedError


class LSTMCell(_Cell, nn.LSTMCell):
    """`torch.nn.LSTMCell` whose linear maps the Fisher can see; everything else is torch's.

    Example:
        >>> import torch
        >>> import nclbayes as ncl
        >>> h, c = ncl.nn.LSTMCell(3, 4)(torch.zeros(5, 3))
        >>> h.shape, c.shape
        (torch.Size([5, 4]), torch.Size([5, 4]))
    """

    _states = 2

    def _next(self) -> Step:
        return lstm_step


class GRUCell(_Cell, nn.GRUCell):
    """`torch.nn.GRUCell` whose linear maps the Fisher can see; everything else is torch's.

    Example:
        >>> import torch
        >>> import nclbayes as ncl
        >>> ncl.nn.GRUCell(3, 4)(torch.zeros(5, 3)).shape
        torch.Size([5, 4])
    """

    def _next(self) -> Step:
        return gru_step


class RNNCell(_Cell, nn.RNNCell):
    """`torch.nn.RNNCell` whose linear maps the Fisher can see; everything else is torch's.

    Example:
        >>> import torch
        >>> import nclbayes as ncl
        >>> ncl.nn.RNNCell(3, 4, nonlinearity="relu")(torch.zeros(5, 3)).shape
        torch.Size([5, 4])
    """

    def _next(self) -> Step:
        return relu_step if self.nonlinearity == "relu" else tanh_step
