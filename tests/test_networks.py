"""A few networks that others wrote, where their packages are: ``.[zoo-small]`` has those of the short form."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.benchmarks.networks import NETWORKS, Verdict, kept, row, tried

SHORT = (
    "transformers: BERT",
    "transformers: GPT-2",
    "transformers: Mixtral",
    "transformers: ViT",
    "transformers: ConvNeXt",
    "peft: LoRA",
    "peft: IA3",
    "x_transformers: Encoder",
    "tab_transformer_pytorch: FTTransformer",
    "rtdl_revisiting_models: FTTransformer",
)
OTHERS = ("vit_pytorch: ViT", "timm: ViT", "torch: weight_norm")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", [*SHORT, *OTHERS])
def test_it_is_learnt_by_both_engines(name: str) -> None:
    package = name.partition(":")[0]
    if find_spec(package) is None:
        pytest.skip(f"no {package} here: install the extra {'zoo-small' if name in SHORT else 'zoo'}")
    found = tried(name)
    assert found.said == "learnt"
    assert not found.notices
    assert found.kronecker + found.diagonal > 0


def test_the_small_extra_has_what_the_short_form_needs() -> None:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    (listed,) = re.findall(r"^zoo-small = \[(.*?)^\]", text, flags=re.MULTILINE | re.DOTALL)
    packages = {name.partition(":")[0] for name in SHORT}
    assert set(re.findall(r'"([\w-]+)>=', listed)) == {package.replace("_", "-") for package in packages}
    assert len(SHORT) >= 8


def test_what_was_measured_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    rows = {name: row(name, Verdict("learnt", 3, 2, 9, 1.1, 2.2, 3.3, 10.0)) for name in SHORT}
    assert kept(path) == {}
    path.write_text("\n".join(["| a | b |", "| --- | --- |", *rows.values()]) + "\n")
    assert kept(path) == rows


def test_every_network_names_its_package() -> None:
    assert len(NETWORKS) >= 30
    assert len({name.partition(":")[0] for name in NETWORKS}) >= 8


def test_a_refusal_is_a_row_of_the_table() -> None:
    assert row("torch: LSTM", Verdict("x" * 200, weights=1200, memory=10.0)).startswith("| torch: LSTM | xxx")
    assert "| 3 + 2 | 1.1 | 2.2 | 3.3 | 10 |" in row("any", Verdict("learnt", 3, 2, 9, 1.1, 2.2, 3.3, 10.0))
