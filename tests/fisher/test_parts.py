"""Products with parts of a weight, and grouped products: their factors against those of plain maps."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes import FisherAccumulator
from nclbayes.errors import DataError
from nclbayes.fisher import KroneckerFisher
from tests.zoo import inputs

GROUPED = getattr(torch, "_grouped_mm", None)
HOW = ["loop", pytest.param("grouped", marks=pytest.mark.skipif(GROUPED is None, reason="no grouped product"))]


def factors(net: nn.Module, x: Any, **settings: Any) -> dict[str, Any]:
    """The Fisher of a classifier; its draws are the same for networks that compute the same."""
    model = ncl.BayesianNetwork(net, ncl.Categorical())
    batch = (x, torch.zeros(len(x), dtype=torch.long))
    return ncl.fisher(model, model.initial_values(), batch, **{"kind": "model", "samples": 3, **settings})


def assert_same(found: KroneckerFisher, expected: KroneckerFisher) -> None:
    for one, other in ((found.input, expected.input), (found.output, expected.output)):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6 * float(torch.as_tensor(other).abs().max()))


class Attention(nn.Module):
    """Attention whose query, key and value are parts of one matrix."""

    def __init__(self, cut: bool, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cut = cut
        self.packed = nn.Linear(4, 12, bias=bias)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        if self.cut:
            offsets = (None,) * 3 if self.packed.bias is None else self.packed.bias.chunk(3)
            other = x if other is None else other
            read = (x, other, other)
            q, k, v = (F.linear(z, w, b) for z, w, b in zip(read, self.packed.weight.chunk(3), offsets, strict=True))
        else:
            q, k, v = self.packed(x).chunk(3, dim=-1)
        return self.head(F.scaled_dot_product_attention(q, k, v).tanh().sum(1))


@pytest.mark.parametrize("bias", [True, False])
def test_parts_that_read_the_same_are_the_product_with_the_whole(bias: bool) -> None:
    x = inputs(6, 5, 4)
    found, expected = (factors(Attention(cut, bias), x) for cut in (True, False))
    assert found["packed"].rows == expected["packed"].rows == 30
    assert_same(found["packed"], expected["packed"])
    assert_same(found["head"], expected["head"])


def test_they_do_wherever_the_same_numbers_are_read_from() -> None:
    """Views of one tensor, as of batches that are turned for each of the three."""

    class Turned(Attention):
        def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
            w = self.packed.weight
            q, k, v = (x.transpose(0, 1) @ w[i : i + 4].T for i in (0, 4, 8))
            out = F.scaled_dot_product_attention(*(part.transpose(0, 1) for part in (q, k, v)))
            return self.head(out.tanh().sum(1))

    x = inputs(6, 5, 4)
    found, expected = factors(Turned(True, False), x), factors(Attention(False, False), x)
    assert found["packed"].rows == 30
    assert_same(found["packed"], expected["packed"])


def test_parts_that_read_different_inputs_have_rows_of_their_own() -> None:
    """A is the mean over the rows of all, and G is zero between query and the two that read something else."""
    x, other = inputs(6, 5, 4), inputs(6, 7, 4, seed=5)

    class Crossed(Attention):
        def forward(self, x: Tensor, _: Tensor | None = None) -> Tensor:
            return super().forward(x[:, :5], x[:, 5:])

    found = factors(Crossed(True), torch.cat([x, other], 1))["packed"]
    rows = F.pad(torch.cat([x.flatten(0, 1), other.flatten(0, 1)]), (0, 1), value=1.0).double()
    assert found.rows == len(rows) == 72
    torch.testing.assert_close(found.input, rows.T @ rows / 72, rtol=1e-5, atol=1e-6)
    assert not found.output[:4, 4:].any()
    assert found.output[4:8, 8:].abs().max() > 1e-4

    class Apart(nn.Module):
        """The same with a matrix for the query alone."""

        def __init__(self) -> None:
            super().__init__()
            whole = Crossed(True)
            self.query, self.others, self.head = nn.Linear(4, 4), nn.Linear(4, 8), whole.head
            for layer, part in ((self.query, slice(0, 4)), (self.others, slice(4, 12))):
                layer.weight = nn.Parameter(whole.packed.weight[part].detach())
                layer.bias = nn.Parameter(whole.packed.bias[part].detach())

        def forward(self, x: Tensor) -> Tensor:
            k, v = self.others(x[:, 5:]).chunk(2, dim=-1)
            return self.head(F.scaled_dot_product_attention(self.query(x[:, :5]), k, v).tanh().sum(1))

    apart = factors(Apart(), torch.cat([x, other], 1))
    expected = torch.block_diag(apart["query"].output, apart["others"].output)
    torch.testing.assert_close(found.output, expected, rtol=1e-5, atol=1e-7)


def test_the_factors_of_one_part_are_the_fisher() -> None:
    """One row an example, and unit noise: against the sum of J^T J."""
    x, w = inputs(6, 3).double(), inputs(5, 3, seed=2).double()

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(5, 3).double(), 1.0).to_event(2))
        out = torch.cat([F.linear(x, w[3:]), 2 * F.linear(x, w[:2])], -1)
        pyro.sample("y", dist.Normal(out, 1.0).to_event(1), obs=y)

    found = ncl.fisher(model, {"w": w}, (x, torch.zeros(6, 4).double()), kind="exact")["w"]
    expected = torch.kron(x.T @ x, torch.diag(torch.tensor([4.0, 4.0, 0.0, 1.0, 1.0])).double())
    torch.testing.assert_close(torch.kron(found.input, found.output), expected)


def test_parts_of_the_inputs_have_the_fisher_of_the_whole_but_for_what_is_between_them() -> None:
    def model(x: Tensor, y: Tensor, cut: bool) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(5, 3), 1.0).to_event(2))
        out = x[:, :2] @ w[:2] + x[:, 2:] @ w[2:] if cut else x @ w
        pyro.sample("y", dist.Normal(out.tanh(), 1.0).to_event(1), obs=y)

    values, batch = {"w": inputs(5, 3, seed=2)}, (inputs(6, 5), torch.zeros(6, 3))
    found, whole = (ncl.fisher(model, values, batch, context={"cut": cut}, kind="exact")["w"] for cut in (True, False))
    between = torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).double()
    expected = torch.kron(whole.input * between, whole.output)
    torch.testing.assert_close(torch.kron(found.input, found.output), expected, rtol=1e-5, atol=1e-6)


class Experts(nn.Module):
    """A mixture of experts, of which each example meets one: as layers, a stack in a loop, or a grouped product."""

    def __init__(self, how: str, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(4, 8, bias=bias) for _ in range(3)]
        self.how, self.after, self.head = how, nn.Tanh(), nn.Linear(8, 3)
        if how == "layers":
            self.layers = nn.ModuleList(layers)
        else:
            self.w = nn.Parameter(torch.stack([layer.weight.detach() for layer in layers]))
            self.b = nn.Parameter(torch.stack([layer.bias.detach() for layer in layers])) if bias else None

    def choice(self, x: Tensor) -> Tensor:
        return (x[:, 0] > -0.5).long() + (x[:, 0] > 0.7).long()

    def forward(self, x: Tensor) -> Tensor:
        which = self.choice(x)
        if self.how == "grouped":
            order, ends = which.argsort(), which.bincount(minlength=3).cumsum(0).int()
            return self.head(self.after(GROUPED(x[order], self.w.mT, ends)[order.argsort()]))
        out = x.new_zeros(len(x), 8)
        for e in range(3) if self.how == "all" else which.unique():
            here = (which == e).nonzero().squeeze(-1)
            if self.how == "layers":
                made = self.layers[e](x[here])
            else:
                made = F.linear(x[here], self.w[e], None if self.b is None else self.b[e])
            out = out.index_copy(0, here, made)
        return self.head(self.after(out))


@pytest.mark.parametrize("how", [*HOW, "loop with bias"])
def test_a_stack_of_experts_has_the_factors_of_experts_as_layers(how: str) -> None:
    x, bias = inputs(20, 4), how.endswith("bias")
    found, layers = factors(Experts(how, bias), x), factors(Experts("layers", bias), x)
    stack = found["w"]
    rows = [layers[f"layers.{e}"].rows for e in range(3)]
    assert len(set(rows)) > 1
    assert stack.rows == max(rows)
    for e in range(3):
        expected = layers[f"layers.{e}"]
        torch.testing.assert_close(stack.input[e], expected.input, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(stack.output[e], expected.output, rtol=1e-5, atol=1e-6)
    assert_same(found["head"], layers["head"])


@pytest.mark.parametrize("how", [*HOW, "all"])
def test_an_expert_without_examples_has_no_fisher(how: str) -> None:
    x = inputs(20, 4)
    x = x[x[:, 0] > -0.5]
    found = factors(Experts(how), x)["w"]
    assert not found.input[0].any()
    assert not found.output[0].any()
    assert found.output[1].trace() > 0
    assert found.output[2].trace() > 0


@pytest.mark.parametrize("how", HOW)
def test_experts_with_linear_outputs_have_the_exact_fisher(how: str) -> None:
    """One row an example, and unit noise: the sum of x x^T over the examples of each, and the identity."""
    net, x = Experts(how), inputs(20, 4)
    net.after, net.head = nn.Identity(), nn.Identity()
    model = ncl.BayesianNetwork(net, ncl.Normal(1.0))
    found = ncl.fisher(model, model.initial_values(), (x, torch.zeros(20, 8)), kind="exact")["w"]
    which = net.choice(x)
    for e in range(3):
        z = x[which == e].double()
        expected = torch.kron(z.T @ z, torch.eye(8).double())
        torch.testing.assert_close(torch.kron(found.input[e], found.output[e]), expected, rtol=1e-5, atol=1e-5)


def test_experts_that_leave_examples_out_need_drawn_targets() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3, 4, 2), 1.0).to_event(3))
        out = torch.cat([x[:2] @ w[0], x[2:3] @ w[2], torch.zeros(3, 2)])
        pyro.sample("y", dist.Normal(out, 1.0).to_event(1), obs=y)

    values, batch = {"w": inputs(3, 4, 2)}, (inputs(6, 4), torch.zeros(6, 2))
    with pytest.raises(DataError, match="3 rows for 6 examples"):
        ncl.fisher(model, values, batch, kind="exact")
    assert ncl.fisher(model, values, batch, kind="model")["w"].rows == 2


def test_a_part_that_the_likelihood_does_not_depend_on_adds_no_rows() -> None:
    def model(x: Tensor, y: Tensor, dead: bool) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3, 2, 4), 1.0).to_event(3))
        if dead:
            F.linear(100 * x, w[1])
        pyro.sample("y", dist.Normal(F.linear(x, w[0]) + F.linear(x, w[1]), 1.0).to_event(1), obs=y)

    values, batch = {"w": inputs(3, 2, 4)}, (inputs(6, 4), torch.zeros(6, 2))
    found, plain = (ncl.fisher(model, values, batch, context={"dead": dead})["w"] for dead in (True, False))
    assert_same(found, plain)


def test_padded_rows_of_parts_are_left_out() -> None:
    """Against the same sequences, cut where they end."""
    x, valid = inputs(6, 5, 4), torch.arange(5) < torch.tensor([5, 3, 4, 1, 2, 5])[:, None]

    def model(x: Tensor, y: Tensor, packed: bool) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(6, 4), 1.0).to_event(2))
        with ncl.valid_steps(valid):
            a, b = F.linear(x, w).chunk(2, -1) if packed else (F.linear(x, part) for part in w.chunk(2))
        out = torch.where(valid[..., None], a.tanh() * b, torch.zeros(())).sum(1)
        pyro.sample("y", dist.Normal(out, 1.0).to_event(1), obs=y)

    values, batch = {"w": inputs(6, 4, seed=4)}, (x, torch.zeros(6, 3))
    found, plain = (ncl.fisher(model, values, batch, context={"packed": packed})["w"] for packed in (False, True))
    assert found.rows == int(valid.sum())
    assert_same(found, plain)


def test_a_stack_of_which_maps_have_different_valid_rows() -> None:
    """Each map is divided by the number of its own rows."""
    x, valid = inputs(6, 2, 4), torch.arange(6)[:, None] < torch.tensor([2, 6])

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2, 4, 3), 1.0).to_event(3))
        with ncl.valid_steps(valid[..., None]):
            out = (x.unsqueeze(2) @ w).squeeze(2)
        out = torch.where(valid[..., None], out, torch.zeros(())).flatten(1)
        pyro.sample("y", dist.Normal(out, 1.0).to_event(1), obs=y)

    found = ncl.fisher(model, {"w": inputs(2, 4, 3, seed=4)}, (x, torch.zeros(6, 6)), kind="exact")["w"]
    for e in range(2):
        z = x[valid[:, e], e].double()
        expected = torch.kron(z.T @ z, torch.eye(3).double())
        torch.testing.assert_close(torch.kron(found.input[e], found.output[e]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", HOW)
def test_sums_of_a_stack_are_restored_exactly(how: str) -> None:
    model = ncl.BayesianNetwork(Experts(how), ncl.Categorical())
    batch = inputs(20, 4), torch.zeros(20, dtype=torch.long)
    first, second = (FisherAccumulator(model, model.initial_values()) for _ in range(2))
    first.update(batch)
    second.restore(first.tensors(), first.blocks, {name: torch.zeros(()) for name in first.blocks})
    assert_same(second.factors()["w"], first.factors()["w"])
    assert torch.equal(second.factors()["w"].input, first.factors()["w"].input)


@pytest.mark.parametrize("engine", [ncl.LaplaceNCL, ncl.VariationalNCL])
@pytest.mark.parametrize("how", HOW)
def test_a_mixture_of_stacked_experts_learns(engine: Any, how: str) -> None:
    """Tasks that reach some of the experts only, each with a rule of its own."""
    net = Experts(how)
    posterior = ncl.OnlinePosterior(ncl.BayesianNetwork(net, ncl.Categorical()), engine(steps=200, batch_size=20))
    x = inputs(300, 4)
    y = torch.where(x[:, 0] > -0.5, (x[:, 1] > 0).long(), (x[:, 2] > 0).long())
    known = x[:, 0] > -0.5
    for name, here in (("two of them", known), ("the other", ~known)):
        posterior.update(ncl.Task((x[here], y[here]), name=name), progress=False)
    assert all(block.kind.startswith("Kronecker") for block in posterior.blocks.values())
    right = posterior.predict(x).logits.argmax(-1) == y
    assert float(right[known].float().mean()) > 0.9
    assert float(right[~known].float().mean()) > 0.9
