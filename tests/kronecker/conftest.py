"""Fixtures that the tests of Kronecker-factored Gaussians share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def meta_default() -> Iterator[None]:
    """Make meta the default device, so that a tensor created without asking for a device is useless."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)
