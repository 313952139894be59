"""The networks of the paper's experiments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nclbayes.nn.multihead import MultiHead
from nclbayes.nn.rnn import RNN
from nclbayes.watch import valid_steps


def perceptron(inputs: int, hidden: tuple[int, ...], outputs: int, heads: int | None = None) -> nn.Module:
    """A feedforward network of ReLU layers.

    Args:
        inputs: The number of inputs; images are flattened.
        hidden: The widths of the hidden layers.
        outputs: The number of outputs (of each head).
        heads: One head for each of so many tasks; None: a single output layer.

    Returns:
        The network. With a single output layer it takes ``active=n`` to use its first n outputs only.

    Example:
        >>> import torch
        >>> from nclbayes.experiments.networks import perceptron
        >>> perceptron(64, (100, 100), 10)(torch.zeros(5, 1, 8, 8), active=4).shape
        torch.Size([5, 4])
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in zip((inputs, *hidden), hidden, strict=False):
        layers += [nn.Linear(before, after), nn.ReLU()]
    body = nn.Sequential(*layers)
    if heads is None:
        return ActiveOutputs(body, nn.Linear(hidden[-1], outputs))
    return MultiHead(body, [nn.Linear(hidden[-1], outputs) for _ in range(heads)])


class ActiveOutputs(nn.Module):
    """A body and one output layer of which a call may use the first outputs only.

    Args:
        body: Maps inputs to features.
        out: Maps features to outputs.
    """

    def __init__(self, body: nn.Module, out: nn.Module) -> None:
        super().__init__()
        self.body, self.out = body, out

    def forward(self, x: Tensor, active: int | None = None) -> Tensor:
        """The outputs, or the first of them.

        Args:
            x: The inputs.
            active: How many; None: all.

        Returns:
            [batch, outputs].
        """
        return self.out(self.body(x))[..., :active]


class SequenceRegressor(nn.Module):
    """A recurrent network with a linear readout at every step.

    Args:
        inputs: The number of inputs.
        units: The number of recurrent units.
        outputs: The number of outputs.
        **settings: Those of :class:`~nclbayes.nn.RNN`.
    """

    def __init__(self, inputs: int, units: int, outputs: int, **settings: Any) -> None:
        super().__init__()
        self.core = RNN(inputs, units, **settings)
        self.out = nn.Linear(units, outputs, bias=False)

    def forward(self, x: Tensor, lengths: Tensor, weight: Tensor | None = None) -> Tensor:
        """The readout at every step.

        Args:
            x: [batch, time, inputs].
            lengths: How many steps of each sequence are valid.
            weight: What each target counts, which the network does not need.

        Returns:
            [batch, time, outputs].
        """
        states = self.core(x, lengths)
        steps = torch.arange(x.shape[1], device=x.device)
        with valid_steps(steps < lengths.unsqueeze(-1)):
            return self.out(states)


class SequenceFeatures(nn.Module):
    """A recurrent network's states at the last steps of each sequence: the body of a classifier of sequences.

    Args:
        inputs: The number of inputs.
        units: The number of recurrent units.
        last: How many steps.
        **settings: Those of :class:`~nclbayes.nn.RNN`.
    """

    def __init__(self, inputs: int, units: int, last: int, **settings: Any) -> None:
        super().__init__()
        self.core = RNN(inputs, units, **settings)
        self.last = last

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """The states at the last valid steps.

        Args:
            x: [batch, time, inputs].
            lengths: How many steps of each sequence are valid.

        Returns:
            [batch, last, units].
        """
        states = self.core(x, lengths)
        steps = lengths.unsqueeze(-1) - self.last + torch.arange(self.last, device=x.device)
        return states.gather(1, steps.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
