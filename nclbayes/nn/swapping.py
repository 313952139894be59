"""Fused modules of a network, made visible where they stand."""

from __future__ import annotations

from torch import nn

from nclbayes.nn.attention import MultiheadAttention, TransformerEncoderLayer
from nclbayes.nn.cells import GRUCell, LSTMCell, RNNCell
from nclbayes.nn.recurrent import GRU, LSTM, ElmanRNN

_VISIBLE: dict[type[nn.Module], type[nn.Module]] = {
    nn.LSTM: LSTM,
    nn.GRU: GRU,
    nn.RNN: ElmanRNN,
    nn.LSTMCell: LSTMCell,
    nn.GRUCell: GRUCell,
    nn.RNNCell: RNNCell,
    nn.MultiheadAttention: MultiheadAttention,
    nn.TransformerEncoderLayer: TransformerEncoderLayer,
}


def visible(net: nn.Module) -> nn.Module:
    """Let the Fisher see the linear maps of torch's fused modules in a network.

    Every `nn.LSTM`, `nn.GRU`, `nn.RNN`, their cells, `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` in it
    becomes the class of :mod:`nclbayes.nn` that computes the same in the open (`nn.RNN` becomes
    :class:`~nclbayes.nn.ElmanRNN`), in place: modules and parameters stay the very same objects, and so do names and
    state dict. An `nn.TransformerEncoder` does not turn padded sequences into nested tensors any more. Modules of other
    classes, subclasses of these too (so are parametrised ones: parametrise after this call), are left as they are.
    Calling it again changes nothing.

    Args:
        net: The network, or such a module itself.

    Returns:
        The same network.

    Example:
        >>> from torch import nn
        >>> import nclbayes as ncl
        >>> net = nn.ModuleDict({"core": nn.LSTM(3, 4), "out": nn.Linear(4, 2)})
        >>> type(ncl.nn.visible(net)["core"])
        <class 'nclbayes.nn.recurrent.LSTM'>
    """
    for module in net.modules():
        kind = _VISIBLE.get(type(module))
        if kind is not None:
            module.__class__ = kind
        elif type(module) is nn.TransformerEncoder:
            module.use_nested_tensor = False
    return net
