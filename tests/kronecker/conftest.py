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


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on busy cores take a hundred times as long as one does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
