"""Tests share the cores; examples in docstrings that read data are skipped where those are not."""

from __future__ import annotations

import os

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # One thread for each process of the tests, and for those that they start; before torch is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from nclbayes.tasks.files import status

DATA = {
    "nclbayes.tasks.mnist.split_mnist": "mnist",
    "nclbayes.tasks.mnist.split_fashion_mnist": "fashion-mnist",
    "nclbayes.tasks.mnist.permuted_mnist": "mnist",
    "nclbayes.tasks.mnist.rotated_mnist": "mnist",
    "nclbayes.tasks.cifar.split_cifar10": "cifar10",
    "nclbayes.tasks.cifar.split_cifar100": "cifar100",
    "nclbayes.tasks.stroke_mnist.stroke_mnist": "stroke-mnist",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip them."""
    missing = {entry.dataset for entry in status() if not entry.found}
    for item in items:
        if DATA.get(item.name) in missing and isinstance(item, pytest.DoctestItem):
            item.add_marker(pytest.mark.skip(reason=f"no {DATA[item.name]} here: set NCLBAYES_DATA"))
