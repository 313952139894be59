"""The frame around the user's own code."""

from __future__ import annotations

import gc
import sys

import pytest
import torch

from nclbayes.errors import ModelError
from nclbayes.isolation.failures import running


def test_a_frame_that_is_dropped_takes_that_for_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when an interrupt comes between its beginning and the model's."""
    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    frame = running(())
    frame.__enter__()
    del frame
    gc.collect()
    assert not ignored


@pytest.mark.parametrize("error", [StopIteration, GeneratorExit])
def test_what_would_end_a_loop_of_the_callers_is_an_error(error: type[BaseException]) -> None:
    with pytest.raises(ModelError, match=f"The model raised {error.__name__}"), running(()):
        raise error


def test_a_lack_of_memory_passes_as_it_is() -> None:
    with pytest.raises(RuntimeError, match=r"allocate memory|not enough memory") as error, running(()):
        torch.empty(2**58, dtype=torch.uint8, device="cpu")
    assert type(error.value) is RuntimeError
