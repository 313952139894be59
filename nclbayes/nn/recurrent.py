"""torch's recurrent networks, as loops over time steps while somebody must see their linear maps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from nclbayes.errors import DataError
from nclbayes.nn.cells import State, Step, gru_step, lstm_step, relu_step, tanh_step
from nclbayes.nn.showing import mask_of_steps, must_show
from nclbayes.watch import valid_steps


class _Stepwise(nn.RNNBase):
    """What the classes below have in common: torch's kernel, or the same step by step."""

    _states = 1

    def forward(self, input: Any, hx: Any = None) -> Any:
        """What torch's module computes; while it is watched, or transformed by torch.func, one step after the other.

        Args:
            input: [time, batch, input_size], with batch first if so set, or without a batch; or a `PackedSequence`.
            hx: The first state, as torch's module takes it; None: zeros.

        Returns:
            The outputs in the form of the input, and the last state.

        Raises:
            DataError: If shapes do not fit; while torch's kernel runs, the error is torch's.
        """
        if not must_show() and not self._lacks_gradient(input.data):
            return super().forward(input, hx)
        if isinstance(input, PackedSequence):
            return self._of_packed(input, hx)
        if input.ndim not in (2, 3):
            raise DataError(f"{type(self).__name__} takes an input of 2 or 3 dimensions, not {tuple(input.shape)}.")
        batched = input.ndim == 3
        time_first = not batched or not self.batch_first
        x = input if batched else input.unsqueeze(1)
        x = x.transpose(0, 1) if time_first else x
        start = self._start(x, hx if batched else _each(hx, lambda state: state.unsqueeze(1)))
        mask = mask_of_steps(len(x), x.shape[1], time_first)
        out, state = self._layers(x, start, None, mask)
        out = out.transpose(0, 1) if time_first else out
        if not batched:
            out, state = out.squeeze(1), _each(state, lambda last: last.squeeze(1))
        return out, self._returned(state)

    def _lacks_gradient(self, data: Tensor) -> bool:
        """Whether a gradient may be due where torch would run cuDNN's kernel, which has one in training mode only."""
        return not self.training and torch.is_grad_enabled() and torch.backends.cudnn.is_acceptable(data)

    def _of_packed(self, packed: PackedSequence, hx: Any) -> Any:
        index, valid = _positions(packed)
        x = packed.data[index]
        out, state = self._layers(x, self._start(x, hx), valid, valid)
        # The valid steps, in the order in which a packed sequence has them.
        n, t = valid.nonzero(as_tuple=True)
        order = index[valid].argsort()
        data = out[n[order], t[order]]
        return PackedSequence(data, *packed[1:]), self._returned(state)

    def _layers(self, x: Tensor, start: State, valid: Tensor | None, mask: Tensor | None) -> tuple[Tensor, State]:
        """All layers and directions.

        Args:
            x: [batch, time, input_size].
            start: First states, each [layers * directions, batch, size].
            valid: Which steps there are, [batch, time]; None: all.
            mask: Which of them are data to the Fisher, [batch, time]; None: as is said outside.

        Returns:
            The last layer's outputs, [batch, time, directions * size], and the last states.
        """
        suffixes = ("", "_reverse") if self.bidirectional else ("",)
        ends: list[State] = []
        for layer in range(self.num_layers):
            if layer and self.dropout > 0:
                x = F.dropout(x, self.dropout, self.training)
            outs = []
            for suffix in suffixes:
                first = tuple(state[len(ends)] for state in start)
                out, end = self._direction(x, first, valid, mask, f"_l{layer}{suffix}")
                outs.append(out)
                ends.append(end)
            x = torch.cat(outs, dim=-1)
        return x, tuple(torch.stack(states) for states in zip(*ends, strict=True))

    def _direction(
        self, x: Tensor, state: State, valid: Tensor | None, mask: Tensor | None, name: str
    ) -> tuple[Tensor, State]:
        b_ih, b_hh = (getattr(self, f"bias_{side}{name}") if self.bias else None for side in ("ih", "hh"))
        w_ih, w_hh = (getattr(self, f"weight_{side}{name}") for side in ("ih", "hh"))
        w_hr = getattr(self, f"weight_hr{name}") if self.proj_size > 0 else None
        step = self._step()
        with _seen(mask, slice(None)):
            driven = F.linear(x, w_ih, b_ih).unbind(1)
        outs: list[Tensor] = [x] * len(driven)
        times = range(len(driven))
        for t in reversed(times) if name.endswith("_reverse") else times:
            with _seen(mask, t):
                new = step(driven[t], state, w_hh, b_hh, w_hr)
            if valid is not None:
                here = valid[:, t].unsqueeze(-1)
                new = tuple(torch.where(here, after, before) for after, before in zip(new, state, strict=True))
            state = new
            outs[t] = state[0]
        return torch.stack(outs, dim=1), state

    def _start(self, x: Tensor, hx: Any) -> State:
        """The first states, zeros unless given."""
        if x.shape[-1] != self.input_size:
            raise DataError(f"{type(self).__name__} takes {self.input_size} inputs a step, not {x.shape[-1]}.")
        count = self.num_layers * (2 if self.bidirectional else 1)
        sizes = (self.proj_size or self.hidden_size, self.hidden_size)[: self._states]
        shapes = [(count, x.shape[0], size) for size in sizes]
        if hx is None:
            return tuple(x.new_zeros(shape) for shape in shapes)
        states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        found = [tuple(state.shape) for state in states]
        if found != shapes:
            raise DataError(f"The first state of {type(self).__name__} must have shapes {shapes}, not {found}.")
        return states

    def _returned(self, state: State) -> Any:
        return state if self._states > 1 else state[0]

    def _step(self) -> Step:
        raise NotImplementedError


class LSTM(_Stepwise, nn.LSTM):
    """`torch.nn.LSTM` whose linear maps the Fisher can see.

    The same arguments, the same state dict, the same outputs. While nobody watches, torch's own kernel runs; while a
    posterior looks at the network, and inside transforms of torch.func, it is a loop over time steps. Of each layer and
    direction, `weight_ih` and `bias_ih` make one Kronecker block, `weight_hh` and `bias_hh` another. Steps that a
    `PackedSequence` leaves out, or that :func:`~nclbayes.valid_steps` around the call declares invalid (a mask of the
    input's first two dimensions), are no rows of the Fisher. Dropout between layers draws other numbers in a loop than
    in the kernel.

    Example:
        >>> import torch
        >>> import nclbayes as ncl
        >>> lstm = ncl.nn.LSTM(3, 4, num_layers=2, batch_first=True)
        >>> out, (h, c) = lstm(torch.zeros(5, 7, 3))
        >>> out.shape, h.shape
        (torch.Size([5, 7, 4]), torch.Size([2, 5, 4]))
    """

    _states = 2

    def _step(self) -> Step:
        return lstm_step


class GRU(_Stepwise, nn.GRU):
    """`torch.nn.GRU` whose linear maps the Fisher can see; see :class:`~nclbayes.nn.LSTM`.

    Example:
        >>> import torch
        >>> import nclbayes as ncl
        >>> out, h = ncl.nn.GRU(3, 4, batch_first=True)(torch.zeros(5, 7, 3))
        >>> out.shape, h.shape
        (torch.Size([5, 7, 4]), torch.Size([1, 5, 4]))
    """

    def _step(self) -> Step:
        return gru_step


class ElmanRNN(_Stepwise, nn.RNN):
    """`torch.nn.RNN` whose linear maps the Fisher can see; see :class:`~nclbayes.nn.LSTM`.

    :class:`ncl.nn.RNN <nclbayes.nn.RNN>` is another network, the paper's, with one matrix and a leak.

    Example:
        >>> import torch
        >>> import nclbayes as ncl
        >>> out, h = ncl.nn.ElmanRNN(3, 4, nonlinearity="relu", batch_first=True)(torch.zeros(5, 7, 3))
        >>> out.shape, h.shape
        (torch.Size([5, 7, 4]), torch.Size([1, 5, 4]))
    """

    def _step(self) -> Step:
        return relu_step if self.nonlinearity == "relu" else tanh_step


@contextmanager
def _seen(mask: Tensor | None, steps: int | slice) -> Iterator[None]:
    """Declare which rows of the maps of some steps are data, if a mask says so."""
    if mask is None:
        yield
    else:
        with valid_steps(mask[:, steps]):
            yield


def _each(states: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """One state, or several, changed in the same way."""
    if states is None or isinstance(states, Tensor):
        return None if states is None else change(states)
    return tuple(map(change, states))


def _positions(packed: PackedSequence) -> tuple[Tensor, Tensor]:
    """Where the step of each sequence lies in a packed one, and whether there is one; both [batch, time]."""
    device = packed.data.device
    sizes = packed.batch_sizes.to(device)
    rank = packed.unsorted_indices
    rank = torch.arange(int(packed.batch_sizes[0]), device=device) if rank is None else rank
    valid = rank.unsqueeze(1) < sizes
    return torch.where(valid, sizes.cumsum(0) - sizes + rank.unsqueeze(1), 0), valid
