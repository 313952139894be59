"""Torchvision beside a torch that it was not built for: its build from PyPI does not load beside the CPU build."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import torch

# Operators are known for as long as the library lives that declares them.
_declared: list[Any] = []


def declare_operators() -> None:
    """Let torchvision be imported without the operators that it brings compiled: no network of the table calls one.

    Packages that import torchvision where it is installed, such as transformers, come after this.
    """
    if find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)
        importlib.import_module("torchvision")
