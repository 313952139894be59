"""Diagonal Fishers of weights that are no linear map: against a loop over examples, and without running any again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.blocks import DiagonalBlock, find_blocks
from nclbayes.fisher import FisherAccumulator
from nclbayes.watch import watch
from tests.zoo import inputs, normal, random_values

EXAMPLES = 6
X = inputs(EXAMPLES, 4)
SEQUENCE = inputs(EXAMPLES, 5, 4)
IMAGE = inputs(EXAMPLES, 4, 3, 3)
TOKENS = torch.randint(7, (EXAMPLES, 5), generator=torch.Generator().manual_seed(0))

Shapes = dict[str, tuple[int, ...]]
Call = Callable[..., Tensor]

# What a call does with its weights, the shapes of these, and its input: no example is run again.
TOLD: dict[str, tuple[Call, Shapes, Tensor]] = {
    "offset": (lambda x, b: x + b, {"b": (4,)}, X),
    "offset of a step": (lambda x, b: x + b, {"b": (5, 1)}, SEQUENCE),
    "offset, subtracted": (lambda x, b: x - b, {"b": (4,)}, X),
    "subtracted from an offset": (lambda x, b: b - x, {"b": (4,)}, X),
    "gain": (lambda x, w: w * x, {"w": (4,)}, SEQUENCE),
    "gain on a mask": (lambda x, w: x * w * (x > 0), {"w": (1, 5, 4)}, SEQUENCE),
    "in place": (lambda x, w: x.clone().mul(2).add_(w), {"w": (4,)}, X),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), {"w": (4,), "b": (4,)}, SEQUENCE),
    "layer norm of two dimensions": (
        lambda x, w, b: F.layer_norm(x, (5, 4), w, b),
        {"w": (5, 4), "b": (5, 4)},
        SEQUENCE,
    ),
    "rms norm": (lambda x, w: F.rms_norm(x, (4,), w), {"w": (4,)}, SEQUENCE),
    "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b), {"w": (4,), "b": (4,)}, IMAGE),
    "batch norm": (
        lambda x, w, b: F.batch_norm(x, torch.zeros(4), torch.full((4,), 2.0), w, b),
        {"w": (4,), "b": (4,)},
        IMAGE,
    ),
    "embedding": (lambda x, w: F.embedding(x, w), {"w": (7, 3)}, TOKENS),
    "embedding with padding": (lambda x, w: F.embedding(x, w, padding_idx=2), {"w": (7, 3)}, TOKENS),
    "looked up by an index": (lambda x, w: w[x - 7], {"w": (7, 3)}, TOKENS),
    "the same rows for all": (lambda x, w: x + F.embedding(torch.arange(5), w), {"w": (8, 4)}, SEQUENCE),
    "positions in a row": (lambda x, w: x + w[torch.arange(5)], {"w": (8, 4)}, SEQUENCE),
    "positions, cut": (lambda x, w: x + w[:, :5], {"w": (1, 9, 4)}, SEQUENCE),
    "class token": (lambda x, c: torch.cat([c.expand(len(x), -1, -1), x], 1), {"c": (1, 1, 4)}, SEQUENCE),
    "class token and positions": (
        lambda x, c, p: torch.cat([c.expand(len(x), -1, -1), x], 1) + p,
        {"c": (1, 1, 4), "p": (1, 6, 4)},
        SEQUENCE,
    ),
    "positive gain": (lambda x, w: x * F.softplus(w), {"w": (4,)}, X),
    "two gains in one": (lambda x, a, b: x * (a * b.exp()), {"a": (4,), "b": (1,)}, SEQUENCE),
    "used twice": (lambda x, w: (x * w).tanh() * w + w, {"w": (4,)}, X),
    "weight norm": (
        lambda x, v, g: F.linear(x, g * v / v.norm(dim=1, keepdim=True)),
        {"v": (3, 4), "g": (3, 1)},
        SEQUENCE,
    ),
    "a part, and a gain": (lambda x, w: F.linear(x[:, :2], w[:, :2]) * w[0, 3], {"w": (3, 4)}, X),
    "a weight put together": (lambda x, w: F.linear(x, torch.cat([w, w])), {"w": (3, 4)}, X),
    "chunks, and a gain": (
        lambda x, w: F.linear(x, w.chunk(3)[1]) * F.linear(x, w[:1]) * w[0, 0],
        {"w": (9, 4)},
        SEQUENCE,
    ),
    "every other row": (lambda x, w: F.linear(x, w[::2]), {"w": (9, 4)}, SEQUENCE),
    "shared bias": (
        lambda x, w, v, b: F.linear(F.linear(x, w, b).tanh(), v, b),
        {"w": (4, 4), "v": (4, 4), "b": (4,)},
        SEQUENCE,
    ),
    "tied": (lambda x, w: F.linear(F.embedding(x, w).tanh(), w), {"w": (7, 3)}, TOKENS),
}
# These are known to autograd alone.
RUN_AGAIN: dict[str, tuple[Call, Shapes, Tensor]] = {
    "einsum": (lambda x, w: torch.einsum("bi,oi,oi->bo", x, w, w), {"w": (3, 4)}, X),
    "tensordot": (lambda x, w: torch.tensordot(x, w, dims=([1], [1])), {"w": (3, 4)}, X),
    "reshaped": (lambda x, w: x @ w.reshape(4, 3), {"w": (3, 4)}, X),
    "a changed copy": (lambda x, w: F.linear(x, _without_first_column(w)), {"w": (3, 4)}, X),
    "a changed part of a copy": (lambda x, w: F.linear(x, _doubled(w, slice(2))), {"w": (3, 4)}, X),
    "a changed view of a copy": (lambda x, w: x @ _doubled(w.T, slice(None)), {"w": (3, 4)}, X),
    "stack of one": (lambda x, w: (x[:, None] @ w)[:, 0], {"w": (1, 4, 3)}, X),
    "transposed convolution": (
        lambda x, w: F.conv_transpose2d(x, w, dilation=2, output_padding=1),
        {"w": (4, 2, 2, 2)},
        IMAGE,
    ),
    "bilinear": (lambda x, w: F.bilinear(x, x, w), {"w": (3, 4, 4)}, X),
}


def _without_first_column(w: Tensor) -> Tensor:
    copy = w.clone()
    copy[:, 0] = 0.0
    return copy


def _doubled(w: Tensor, which: slice) -> Tensor:
    copy = w.clone()
    copy[which].mul_(2.0)
    return copy


def model_of(call: Call, shapes: Shapes) -> Any:
    def model(x: Tensor, y: Tensor) -> None:
        out = call(x, *(pyro.sample(name, normal(shape)) for name, shape in shapes.items()))
        pyro.sample("y", dist.Normal(out.flatten(1).cumsum(-1), 1.0).to_event(1), obs=y)

    return model


def looped(call: Call, values: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Squared gradients of one example after the other, in double precision."""
    found = {name: torch.zeros(value.shape).double() for name, value in values.items()}
    for xi, yi in zip(x.split(1), y.split(1), strict=True):
        leaves = {name: value.double().requires_grad_() for name, value in values.items()}
        xi = xi.double() if xi.is_floating_point() else xi
        out = call(xi, *leaves.values()).flatten(1).cumsum(-1)
        total = dist.Normal(out, 1.0).log_prob(yi.double()).sum()
        for name, g in zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True):
            found[name] += g.square()
    return found


def case(call: Call, shapes: Shapes, x: Tensor) -> tuple[Any, dict[str, Tensor], Tensor]:
    values = random_values(shapes)
    with torch.no_grad():
        y = inputs(EXAMPLES, call(x, *values.values()).flatten(1).shape[1])
    return model_of(call, shapes), values, y


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", [*TOLD, *RUN_AGAIN])
def test_the_diagonal_is_that_of_a_loop_over_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, shapes, x = {**TOLD, **RUN_AGAIN}[name]
    model, values, y = case(call, shapes, x)
    expected = looped(call, values, x, y) if name != "batch norm" else looped(_of_doubles(call), values, x, y)
    again = []
    per_example = sys.modules["nclbayes.fisher.per_example"]
    pieces = per_example.ExampleGradients._pieces
    monkeypatch.setattr(per_example.ExampleGradients, "_pieces", lambda *a: again.append(a) or pieces(*a))
    found = ncl.fisher(model, values, (x, y), kind="empirical")
    diagonal = {block.name for block in find_blocks(watch(model, (x, y), values)).values() if _is_diagonal(block)}
    assert diagonal
    for site in diagonal:
        torch.testing.assert_close(found[site].diagonal, expected[site], rtol=1e-5, atol=1e-5)
    assert bool(again) is (name in RUN_AGAIN)


def _is_diagonal(block: object) -> bool:
    return isinstance(block, DiagonalBlock)


def _of_doubles(call: Call) -> Call:
    def called(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return x / 2**0.5 / (1 + 1e-5 / 2) ** 0.5 * w[:, None, None] + b[:, None, None]

    return called


def test_a_dimension_that_is_as_long_as_the_batch_by_chance_is_not_taken_for_the_examples() -> None:
    """Time comes first, and there are as many steps as examples."""
    steps = EXAMPLES

    def call(x: Tensor, w: Tensor) -> Tensor:
        return ((x.transpose(0, 1) * w).cumsum(0)).transpose(0, 1)

    x = inputs(EXAMPLES, steps, 4)
    model, values, y = case(call, {"w": (4,)}, x)
    found = ncl.fisher(model, values, (x, y), kind="empirical")
    torch.testing.assert_close(found["w"].diagonal, looped(call, values, x, y)["w"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("numbers", [1, 20])
def test_sums_do_not_depend_on_how_many_examples_are_held_at_a_time(
    numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, values, y = case(*TOLD["tied"])
    expected = ncl.fisher(model, values, (TOKENS, y), kind="empirical")
    monkeypatch.setattr(sys.modules["nclbayes.fisher.separate"], "NUMBERS", numbers)
    found = ncl.fisher(model, values, (TOKENS, y), kind="empirical")
    torch.testing.assert_close(found["w"].diagonal, expected["w"].diagonal, rtol=1e-6, atol=1e-6)


def test_a_noisy_model_needs_no_example_again_where_uses_tell() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", normal((4,)))
        pyro.sample("y", dist.Normal(F.dropout(x * w, 0.5).sum(-1), 1.0), obs=y)

    fisher = FisherAccumulator(model, {"w": torch.ones(4)}, samples=4)
    for _ in range(2000):
        fisher.update((X, torch.zeros(EXAMPLES)))
    # The gradient of an example is a drawn residual of variance 1 times x, half of it doubled and half of it 0.
    expected = 2 * X.double().square().sum(0)
    torch.testing.assert_close(fisher.factors(EXAMPLES)["w"].diagonal, expected, rtol=0.05, atol=0)


def test_a_weight_that_is_a_part_of_the_distribution_alone_is_not_lost() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        s = pyro.sample("s", normal((1,)))
        pyro.sample("y", dist.Normal(x.sum(-1), s.exp()), obs=y)

    found = ncl.fisher(model, {"s": torch.zeros(1)}, (X, torch.zeros(EXAMPLES)), kind="exact")
    assert float(found["s"].diagonal) == pytest.approx(2 * EXAMPLES, rel=1e-5)


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_parametrised_layers_learn(norm: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(norm(nn.Linear(4, 16)), nn.Tanh(), nn.Linear(16, 2)).eval()
    x = inputs(80, 4)
    task = ncl.Task((x, (x[:, 0] > 0).long()), name="sign")
    posterior = ncl.OnlinePosterior(ncl.BayesianNetwork(net, ncl.Categorical()), ncl.LaplaceNCL(steps=200))
    posterior.update(task, progress=False)
    assert float((posterior.predict(x).logits.argmax(-1) == task.train[1]).float().mean()) > 0.95
    assert any(_is_diagonal(state.block) for state in posterior.blocks.values())


def test_a_check_changes_no_draw_of_a_noisy_model() -> None:
    """An accumulator that has met a form before, and one that takes it up, draw the same."""

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", normal((4,)))
        pyro.sample("y", dist.Normal(F.dropout(x * w, 0.5).sum(-1), 1.0), obs=y)

    found = []
    for checks in (1, 2):
        fisher = FisherAccumulator(model, {"w": torch.ones(4)}, generator=torch.Generator().manual_seed(3))
        for k in range(2):
            if k == checks - 1:
                fisher._forms.clear()
            fisher.update((X, torch.zeros(EXAMPLES)))
        found.append(fisher.factors()["w"].diagonal)
    assert torch.equal(*found)
