"""What the arguments of a convolution say of its rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nclbayes.watch.rows import ConvolutionRows, TransposedConvolutionRows


def convolution_rows(
    out: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int
) -> ConvolutionRows:
    """The rows of ``F.conv1d``, ``F.conv2d`` or ``F.conv3d``.

    Args:
        out: Its output.
        weight: Its weight.
        stride: As it was given.
        padding: As it was given.
        dilation: As it was given.
        groups: As it was given.

    Returns:
        The rows.
    """
    kernel = tuple(weight.shape[2:])
    steps = _each(dilation, len(kernel))
    return ConvolutionRows(
        shape=tuple(out.shape),
        kernel=kernel,
        stride=_each(stride, len(kernel)),
        padding=_pads(padding, kernel, steps),
        dilation=steps,
        groups=groups,
    )


def transposed_convolution_rows(
    input: Tensor, weight: Tensor, stride: Any, padding: Any, output_padding: Any, groups: int, dilation: Any
) -> TransposedConvolutionRows | None:
    """The rows of ``F.conv_transpose1d``, ``F.conv_transpose2d`` or ``F.conv_transpose3d``.

    Args:
        input: Its input.
        weight: Its weight.
        stride: As it was given.
        padding: As it was given.
        output_padding: As it was given.
        groups: As it was given.
        dilation: As it was given.

    Returns:
        The rows; None if more is padded than a step, where positions of the output have no place among the patches.
    """
    count = weight.ndim - 2
    stride, padding, extra, dilation = (_each(s, count) for s in (stride, padding, output_padding, dilation))
    if any(more >= step for more, step in zip(extra, stride, strict=True)):
        return None
    shape, kernel, pads = tuple(input.shape), tuple(weight.shape[2:]), tuple((p, p) for p in padding)
    return TransposedConvolutionRows(shape, ConvolutionRows(shape, kernel, stride, pads, dilation, groups))


def _each(setting: Any, count: int) -> tuple[int, ...]:
    values = (setting,) if isinstance(setting, int) else tuple(setting)
    return values * count if len(values) == 1 else values


def _pads(padding: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding == "same":
        totals = [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((pad, pad) for pad in _each(padding, len(kernel)))
