"""A few networks that others wrote, where their packages are: ``.[zoo-small]`` has those of the short form."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

import nclbayes as ncl
from nclbayes.blocks import DiagonalBlock
from nclbayes.fisher import DiagonalFisher
from tests.benchmarks.networks import NETWORKS, Verdict, kept, row, tried
from tests.benchmarks.operators import declare_operators

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


def part(inputs: object, index: slice) -> object:
    """Some examples, in double precision."""
    if isinstance(inputs, dict):
        return {name: part(value, index) for name, value in inputs.items()}
    assert isinstance(inputs, Tensor)
    return inputs[index].double() if inputs.is_floating_point() else inputs[index]


# And the map that each example passes once.
TRUE = {
    "transformers: BERT": "classifier",
    "transformers: GPT-2": "score",
    "transformers: ViT": "classifier",
    "x_transformers: Encoder": "net.to_logits",
    "rtdl_revisiting_models: FTTransformer": "net.backbone.output.linear",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", TRUE)
def test_its_fisher_is_that_of_a_loop_over_examples(name: str) -> None:
    """Diagonals are. Of Kronecker factors the traces are, as far as rows do not depend on each other.

    They do for keys and values, which attention sums over all places of an example; others stay within a third.
    """
    package = name.partition(":")[0]
    if find_spec(package) is None:
        pytest.skip(f"no {package} here: install the extra zoo-small")
    declare_operators()
    torch.manual_seed(0)
    net, inputs = NETWORKS[name]()
    net.eval().double()
    count = 16
    target = torch.randint(2, (count,))
    weights = dict(net.named_parameters())
    values = {site: value.detach() for site, value in weights.items()}
    accumulator = ncl.FisherAccumulator(ncl.BayesianNetwork(net, ncl.Categorical()), values, kind="empirical")
    accumulator.update((part(inputs, slice(count)), target))
    found = accumulator.factors()
    gradients = []
    for i in range(count):
        one = part(inputs, slice(i, i + 1))
        out = net(**one) if isinstance(one, dict) else net(one)
        loss = torch.nn.functional.cross_entropy(getattr(out, "logits", out), target[i : i + 1])
        each = torch.autograd.grad(loss, list(weights.values()), allow_unused=True, materialize_grads=True)
        gradients.append(dict(zip(weights, each, strict=True)))
    ratios = {}
    for block in accumulator.blocks.values():
        squares = torch.stack([block.pack(gradient) for gradient in gradients]).square().sum(0)
        its = found[block.name]
        if isinstance(its, DiagonalFisher):
            torch.testing.assert_close(its.diagonal, squares, rtol=1e-9, atol=1e-12 * float(squares.max()))
        else:
            traces = (side.diagonal(dim1=-2, dim2=-1).sum() for side in (its.input, its.output))
            ratios[block.name] = float(torch.stack(list(traces)).prod() / squares.sum())
    assert sum(isinstance(block, DiagonalBlock) for block in accumulator.blocks.values()) >= 7
    assert ratios[TRUE[name]] == pytest.approx(1.0, abs=0.05)
    mixing = re.compile(r"(key|value|[kv]_proj|W_[kv]|to_[kv]|c_attn)$")
    for block, ratio in ratios.items():
        assert (0.2 if mixing.search(block) else 0.66) < ratio < (2.5 if mixing.search(block) else 1.5), block


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
