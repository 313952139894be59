"""What tests of methods share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nclbayes.methods import sampling


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every noise that weights are sampled with, in order."""
    found: list[Tensor] = []
    noise_like = sampling.noise_like

    def recorded(like: Tensor, generator: torch.Generator) -> Tensor:
        found.append(noise_like(like, generator))
        return found[-1]

    monkeypatch.setattr(sampling, "noise_like", recorded)
    return found
