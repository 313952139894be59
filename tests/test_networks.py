"""A few networks that others wrote, where their packages are installed (``.[zoo]``)."""

from __future__ import annotations

import pytest

from tests.benchmarks.networks import NETWORKS, Verdict, row, tried

SOME = (
    "transformers: BERT",
    "transformers: GPT-2",
    "transformers: Llama",
    "transformers: ViT",
    "peft: LoRA",
    "peft: IA3",
    "vit_pytorch: ViT",
    "timm: ViT",
    "torch: weight_norm",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_it_is_learnt_by_both_engines(name: str) -> None:
    pytest.importorskip(name.partition(":")[0])
    found = tried(name)
    assert found.said == "learnt"
    assert not found.notices
    assert found.kronecker + found.diagonal > 0


def test_every_network_names_its_package() -> None:
    assert len(NETWORKS) >= 30
    assert len({name.partition(":")[0] for name in NETWORKS}) >= 8


def test_a_refusal_is_a_row_of_the_table() -> None:
    assert row("torch: LSTM", Verdict("x" * 200, weights=1200, memory=10.0)).startswith("| torch: LSTM | xxx")
    assert "| 3 + 2 | 1.1 | 2.2 | 3.3 | 10 |" in row("any", Verdict("learnt", 3, 2, 9, 1.1, 2.2, 3.3, 10.0))
