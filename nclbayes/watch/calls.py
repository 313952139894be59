"""What torch functions mean to a weight that enters them."""

from __future__ import annotations

from collections.abc import Callable
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
TRANSPOSED_CONVOLUTIONS = {F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}
# By names that a release of torch may not have.
_GROUPED = (getattr(torch, "_grouped_mm", None), getattr(F, "grouped_mm", None))
GROUPED_PRODUCTS = {function for function in _GROUPED if function is not None}
ADDITIONS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__}
COPIES = {Tensor.contiguous, Tensor.clone, torch.clone, Tensor.to}

_FUSED = {
    *("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
    *("multi_head_attention_forward", "_native_multi_head_attention", "_transformer_encoder_layer_fwd"),
}


def call_name(function: Callable[..., Any]) -> str:
    """A torch function's name as a user would write it.

    Args:
        function: The function that a TorchFunctionMode was handed.

    Returns:
        Such as ``torch.Tensor.mul``.
    """
    return resolve_name(function) or _bare_name(function)


def is_fused(function: Callable[..., Any]) -> bool:
    """Whether a call runs linear maps inside that nobody can see.

    Args:
        function: The torch function.

    Returns:
        Whether it does.
    """
    return _bare_name(function) in _FUSED


def _bare_name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", repr(function))
