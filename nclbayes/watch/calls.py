"""What torch functions mean to a weight that enters them."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import resolve_name

PRODUCTS = {
    *(torch.matmul, torch.mm, torch.bmm, torch.mv, torch.linalg.matmul),
    *(Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.mv, Tensor.__matmul__),
    *(torch.addmm, torch.baddbmm, torch.addmv, Tensor.addmm, Tensor.baddbmm, Tensor.addmv),
}
CONVOLUTIONS = {F.conv1d, F.conv2d, F.conv3d}
ADDITIONS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__}
COPIES = {Tensor.contiguous, Tensor.clone, torch.clone, Tensor.to}

_FUSED = {
    *("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
    *("multi_head_attention_forward", "_native_multi_head_attention", "_transformer_encoder_layer_fwd"),
}
_ELEMENTWISE = {
    *("add", "radd", "iadd", "sub", "subtract", "rsub", "isub", "mul", "multiply", "rmul", "imul", "addcmul"),
    *("div", "divide", "true_divide", "truediv", "rdiv", "rtruediv", "itruediv", "reciprocal"),
    *("neg", "negative", "abs", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "square", "pow", "rpow"),
    *("sigmoid", "tanh", "relu", "softplus", "clamp", "where", "masked_fill"),
    *("layer_norm", "group_norm", "instance_norm", "batch_norm", "rms_norm", "prelu"),
}
_LOOKUPS = {"embedding", "embedding_bag"}
_INDEXING = {"getitem", "index_select", "take", "gather"}


class CallKind(Enum):
    """What a call that is no linear map does with a weight.

    Attributes:
        FUSED: It runs linear maps inside that nobody can see.
        ELEMENTWISE: It uses the weight entry by entry: as a gain, an offset, a scale.
        LOOKUP: It picks entries by an index tensor, as an embedding does.
        OPAQUE: Anything else.
    """

    FUSED = "fused"
    ELEMENTWISE = "elementwise"
    LOOKUP = "lookup"
    OPAQUE = "opaque"


def call_name(function: Callable[..., Any]) -> str:
    """A torch function's name as a user would write it.

    Args:
        function: The function that a TorchFunctionMode was handed.

    Returns:
        Such as ``torch.Tensor.mul``.
    """
    return resolve_name(function) or _bare_name(function)


def call_kind(function: Callable[..., Any], arguments: tuple[Any, ...]) -> CallKind:
    """What a call does with a weight, given that it is no linear map of it.

    Args:
        function: The torch function.
        arguments: Its positional arguments.

    Returns:
        The kind of the call.
    """
    name = _bare_name(function)
    if name in _FUSED:
        return CallKind.FUSED
    if name.strip("_") in _ELEMENTWISE:
        return CallKind.ELEMENTWISE
    indexed = name.strip("_") in _INDEXING and _has_tensor(arguments[1:])
    return CallKind.LOOKUP if indexed or name in _LOOKUPS else CallKind.OPAQUE


def _bare_name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", repr(function))


def _has_tensor(nested: Any) -> bool:
    if isinstance(nested, (tuple, list)):
        return any(_has_tensor(item) for item in nested)
    return isinstance(nested, Tensor)
