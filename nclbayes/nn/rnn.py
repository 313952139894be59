"""A recurrent network whose every step the Fisher can see."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nclbayes.errors import DataError, SettingError
from nclbayes.nn.recurrence import NONLINEARITIES, recur
from nclbayes.watch import is_watched, valid_steps


class RNN(nn.Module):
    """A leaky recurrent network, written so that every time step is a row of its Fisher.

        h_t = W z_t + b + noise xi_t,   z_t = (r_{t-1}; x_t),   r_t = (1 - leak) r_{t-1} + leak phi(h_t)

    Recurrent and input weights are one matrix W = (H, G), as in the paper. Steps beyond a sequence's length repeat its
    last state; they are no rows of the Fisher.

    Args:
        input_size: The number of inputs.
        hidden_size: The number of units.
        leak: 1 for no memory but the recurrent weights'.
        nonlinearity: "relu", "tanh" or "linear".
        noise: The standard deviation of the process noise xi.
        bias: Whether there is a bias b.

    Raises:
        SettingError: If a setting is out of range.

    Example:
        >>> import torch
        >>> import nclbayes as ncl
        >>> rnn = ncl.nn.RNN(3, 16, leak=0.2)
        >>> rnn(torch.zeros(5, 7, 3), lengths=torch.tensor([7, 3, 1, 2, 7])).shape
        torch.Size([5, 7, 16])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        leak: float = 1.0,
        nonlinearity: str = "relu",
        noise: float = 0.0,
        bias: bool = False,
    ) -> None:
        super().__init__()
        if not 0 < leak <= 1:
            raise SettingError(f"leak must be above 0 and at most 1, not {leak}.")
        if nonlinearity not in NONLINEARITIES:
            allowed = ", ".join(map(repr, NONLINEARITIES))
            raise SettingError(f"nonlinearity is {nonlinearity!r}; choose one of {allowed}.")
        if not noise >= 0:
            raise SettingError(f"noise must be at least 0, not {noise}.")
        self.input_size, self.hidden_size = input_size, hidden_size
        self.leak, self.nonlinearity, self.noise = leak, nonlinearity, noise
        self.weight = nn.Parameter(torch.empty(hidden_size, hidden_size + input_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Recurrent weights half an orthogonal matrix, input weights of variance 1 / input_size."""
        with torch.no_grad():
            recurrent = torch.empty_like(self.weight[:, : self.hidden_size])
            self.weight[:, : self.hidden_size] = 0.5 * nn.init.orthogonal_(recurrent)
            self.weight[:, self.hidden_size :].normal_(0.0, self.input_size**-0.5)

    def forward(self, x: Tensor, lengths: Tensor | None = None, state: Tensor | None = None) -> Tensor:
        """The states at every step.

        Args:
            x: Inputs, [batch, time, input_size].
            lengths: How many steps of each sequence are valid, [batch]; None: all.
            state: r_0, [batch, hidden_size]; None: zeros.

        Returns:
            r_1 .. r_T, [batch, time, hidden_size].

        Raises:
            DataError: If the inputs are of the wrong shape.
        """
        if x.ndim != 3 or x.shape[-1] != self.input_size:
            raise DataError(f"RNN inputs must be [batch, time, {self.input_size}], not {tuple(x.shape)}.")
        steps = x.transpose(0, 1)  # Time first from here on.
        valid = None
        if lengths is not None:
            valid = (torch.arange(len(steps), device=x.device).unsqueeze(-1) < lengths).unsqueeze(-1)
            steps = torch.where(valid, steps, 0.0)
        start = x.new_zeros(len(x), self.hidden_size) if state is None else state
        noise = None
        if self.noise > 0:
            shape = (len(steps), len(x), self.hidden_size)
            noise = torch.randn(shape, dtype=x.dtype, device=x.device).mul_(self.noise)
        states = self._visible_states if is_watched() else self._states
        return states(steps, valid, start, noise).transpose(0, 1)

    def _states(self, x: Tensor, valid: Tensor | None, start: Tensor, noise: Tensor | None) -> Tensor:
        recurrent, feed = self.weight.split((self.hidden_size, self.input_size), dim=1)
        driven = F.linear(x, feed, self.bias)
        driven = driven if noise is None else driven + noise
        gate = x.new_full((len(x), 1, 1), self.leak) if valid is None else self.leak * valid.to(x.dtype)
        return recur(recurrent, driven, gate, start, self.nonlinearity)

    def _visible_states(self, x: Tensor, valid: Tensor | None, r: Tensor, noise: Tensor | None) -> Tensor:
        """The same step by step, each one product with the whole matrix W for the Fisher to see."""
        phi = NONLINEARITIES[self.nonlinearity].value
        states = []
        for t, x_t in enumerate(x):
            here = None if valid is None else valid[t]
            with valid_steps(None if here is None else here.squeeze(-1)):
                h = F.linear(torch.cat([r, x_t], dim=-1), self.weight, self.bias)
            h = h if noise is None else h + noise[t]
            new = torch.lerp(r, phi(h), self.leak)
            r = new if here is None else torch.where(here, new, r)
            states.append(r)
        return torch.stack(states)
