"""What cannot be seen is refused, not missed: adversarial models."""

from __future__ import annotations

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
from nclbayes.errors import DataError, LatentError, PriorError, UnsupportedUseError
from nclbayes.fisher.per_example import Moments
from nclbayes.fisher.verify import _rounding, agree, verify_uses
from nclbayes.watch import watch
from tests.zoo import inputs, normal, random_values

Call = Callable[..., Tensor]


def factors(call: Call, shapes: dict[str, tuple[int, ...]], x: Tensor, kind: str = "exact") -> dict[str, Any]:
    def model(x: Tensor, y: Tensor) -> None:
        sites = [pyro.sample(name, normal(shape)) for name, shape in shapes.items()]
        pyro.sample("y", dist.Normal(call(x, *sites), 1.0).to_event(1), obs=y)

    values = random_values(shapes)
    with torch.no_grad():
        y = torch.zeros_like(call(x, *values.values()))
    return ncl.fisher(model, values, (x, y), kind=kind)


@pytest.mark.parametrize("inplace", [False, True])
def test_an_in_place_change_of_a_viewed_output_loses_no_block(inplace: bool) -> None:
    def call(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
        return F.linear(F.relu(F.linear(x, w, b), inplace=inplace), v).sum(1)

    def untouched(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
        return F.linear(F.linear(x, w, b).clamp(min=0), v).sum(1)

    shapes = {"w": (5, 3), "b": (5,), "v": (4, 5)}
    found, plain = (factors(c, shapes, inputs(6, 2, 3)) for c in (call, untouched))
    assert list(found) == ["w", "v"]
    torch.testing.assert_close(found["w"].output, plain["w"].output)


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w.T, x.T @ grad


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: Hidden.apply(x, w),
        lambda x, w: torch.vmap(lambda row: row @ w)(x),
    ],
    ids=["autograd function", "vmap"],
)
def test_a_call_that_cannot_be_seen_is_refused(call: Call) -> None:
    with pytest.raises(UnsupportedUseError, match=r"'w'.*cannot be seen"):
        factors(call, {"w": (3, 4)}, inputs(6, 3))


def test_a_product_that_is_used_again_keeps_its_bias_apart() -> None:
    def call(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        h = x @ w
        return (h + b) + 9 * h

    found = factors(call, {"w": (3, 4), "b": (4,)}, inputs(6, 3))
    torch.testing.assert_close(found["b"].diagonal, torch.full((4,), 6.0).double())
    assert found["w"].input.shape == (3, 3)


def test_a_product_that_is_changed_in_place_has_no_bias() -> None:
    found = factors(lambda x, w, b: F.relu(x @ w, inplace=True) + b, {"w": (3, 4), "b": (4,)}, inputs(6, 3))
    torch.testing.assert_close(found["b"].diagonal, torch.full((4,), 6.0).double())


def test_operands_are_bound_by_name() -> None:
    plain = factors(lambda x, w: x @ w, {"w": (3, 3)}, inputs(6, 3))
    named = factors(lambda x, w: torch.matmul(other=w, input=x), {"w": (3, 3)}, inputs(6, 3))
    torch.testing.assert_close(plain["w"].input, named["w"].input)


@pytest.mark.parametrize(
    ("call", "shape", "x"),
    [
        (lambda x, w: (w @ x[0]).reshape(1, -1).expand(6, -1), (2, 4, 3), inputs(6, 3)),
    ],
    ids=["stack on a vector"],
)
def test_shapes_that_hide_the_rows_are_refused(call: Call, shape: tuple[int, ...], x: Tensor) -> None:
    with pytest.raises(UnsupportedUseError, match="'w'"):
        factors(call, {"w": shape}, x)


def test_a_bias_that_is_not_one_number_an_output_is_diagonal() -> None:
    found = factors(lambda x, w, b: F.linear(x, w, b), {"w": (4, 3), "b": (1,)}, inputs(6, 3))
    torch.testing.assert_close(found["b"].diagonal, torch.tensor([24.0]).double())


def test_examples_that_are_mixed_are_refused() -> None:
    with pytest.raises(UnsupportedUseError, match="mixes the examples"):
        factors(lambda x, g: (x - x.mean(0)) * g, {"g": (3,)}, inputs(6, 3))


def test_a_time_plate_of_the_batchs_size_is_not_taken_for_the_examples() -> None:
    def model(x: Tensor, y: Tensor, plate: bool = True) -> None:
        w = pyro.sample("w", normal((3,)))
        fn = dist.Normal((x @ w).cumsum(1), 1.0)
        if plate:
            with pyro.plate("time", 4, dim=-1):
                pyro.sample("y", fn, obs=y)
        else:
            pyro.sample("y", fn.to_event(1), obs=y)

    values, batch = random_values({"w": (3,)}), (inputs(4, 4, 3), inputs(4, 4))
    with_plate, without = (
        ncl.fisher(model, values, batch, kind="exact", context={"plate": plate})["w"] for plate in (True, False)
    )
    torch.testing.assert_close(with_plate.output, without.output)


def test_rows_that_examples_share_need_drawn_targets() -> None:
    def call(x: Tensor, w: Tensor) -> Tensor:
        return x[:, :1] * 0 + torch.ones(3) @ w

    with pytest.raises(DataError, match=r"1 rows for 6 examples.*kind='model'"):
        factors(call, {"w": (3, 4)}, inputs(6, 3))
    assert "w" in factors(call, {"w": (3, 4)}, inputs(6, 3), kind="model")


def test_a_use_that_the_likelihood_does_not_depend_on_adds_no_rows() -> None:
    def dead(x: Tensor, w: Tensor) -> Tensor:
        F.linear(100 * x, w)
        return F.linear(x, w)

    found, plain = (factors(call, {"w": (4, 3)}, inputs(6, 3)) for call in (dead, lambda x, w: F.linear(x, w)))
    torch.testing.assert_close(found["w"].input, plain["w"].input)
    assert found["w"].rows == 6


def test_an_expanded_value_is_told_from_its_transpose() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", normal((3, 3)))
        pyro.sample("y", dist.Normal(x @ w.T, 1.0).to_event(1), obs=y)

    run = watch(model, (inputs(6, 3), inputs(6, 3)), {"w": torch.tensor(0.5).expand(3, 3)})
    assert not find_blocks(run)["w"].transposed


def test_a_prior_that_depends_on_a_latent_is_refused() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        t = pyro.sample("t", dist.Normal(0.0, 1.0))
        w = pyro.sample("w", dist.Normal(torch.zeros(3), t.exp()).to_event(1))
        pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    with pytest.raises(PriorError, match="'w' depends on another latent"):
        find_blocks(watch(model, (inputs(6, 3), inputs(6))))


def test_a_local_latent_in_a_loop_over_the_data_is_refused() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", normal((3,)))
        for i in pyro.plate("data", len(x)):
            z = pyro.sample(f"z{i}", dist.Normal(0.0, 1.0))
            pyro.sample(f"y{i}", dist.Normal(x[i] @ w + z, 1.0), obs=y[i])

    with pytest.raises(LatentError, match="'z0' lies inside the data plate 'data'"):
        find_blocks(watch(model, (inputs(6, 3), inputs(6))))


def test_names_that_collide_are_kept_apart() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        a, b = pyro.sample("h", normal((3, 3))), pyro.sample("h.weight", normal((3, 3)))
        pyro.sample("y", dist.Normal(x @ a @ b, 1.0).to_event(1), obs=y)

    assert set(find_blocks(watch(model, (inputs(6, 3), inputs(6, 3))))) == {"h", "h.weight"}


def test_a_likelihood_without_weights_adds_nothing() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", normal((3,)))
        pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)
        pyro.sample("z", dist.Normal(torch.zeros(len(x)), 1.0), obs=y)

    found = ncl.fisher(model, random_values({"w": (3,)}), (inputs(6, 3), inputs(6)), kind="exact")
    torch.testing.assert_close(found["w"].output, torch.tensor([[6.0]]).double())


def test_a_fully_padded_batch_adds_no_rows() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", normal((3, 4)))
        with ncl.valid_steps(torch.zeros(len(x), dtype=torch.bool)):
            h = x @ w
        pyro.sample("y", dist.Normal(h, 1.0).to_event(1).mask(torch.tensor(False)), obs=y)

    found = ncl.fisher(model, random_values({"w": (3, 4)}), (inputs(6, 3), inputs(6, 4)))
    assert float(found["w"].output.abs().max()) == 0.0


def test_attention_kernels_are_refused_by_name() -> None:
    net = nn.MultiheadAttention(4, 2, batch_first=True)
    model = ncl.BayesianNetwork(Attend(net), ncl.Normal(1.0), prior=dist.Normal(0.0, 1.0))
    with pytest.raises(UnsupportedUseError, match="multi_head_attention_forward"):
        ncl.fisher(model, model.initial_values(), (inputs(3, 5, 4), inputs(3, 4)))


class Attend(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0].sum(1)


def test_a_mixed_use_is_a_diagonal_block() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        table = pyro.sample("table", normal((5, 3)))
        pyro.sample("y", dist.Normal(F.linear(F.embedding(x, table), table), 1.0).to_event(1), obs=y)

    run = watch(model, (torch.tensor([0, 4, 2]), inputs(3, 5)))
    assert isinstance(find_blocks(run)["table"], DiagonalBlock)


def test_sums_are_compared_by_the_size_of_what_was_summed() -> None:
    """Terms of 1e4 that all but cancel leave sums that are rounding, and in another order others."""
    first, second = torch.tensor([1e-3, -2e-3]), torch.tensor([-1e-3, 1e-3])
    assert not agree(first, second)
    assert agree(first, second, terms=1e4)
    assert not agree(1e3 * first, 1e3 * second, terms=1e4)


def balanced(x: Tensor, w: Tensor) -> Tensor:
    """Sinkhorn's iterations, which undo whatever `w` multiplies rows by: its gradient is rounding alone."""
    a = torch.einsum("bij,ik->bij", (3 * x.unsqueeze(-1) * x.unsqueeze(-2)).exp(), w.exp())
    for _ in range(20):
        a = F.normalize(F.normalize(a, p=1.0, dim=-1), p=1.0, dim=-2)
    return a.flatten(1)


def test_a_gradient_that_is_rounding_alone_may_differ_by_as_much_and_by_no_more() -> None:
    def model(x: Tensor) -> None:
        w = pyro.sample("w", normal((4, 1)))
        pyro.sample("y", dist.Normal(balanced(x, w), 1.0).to_event(1), obs=x.new_zeros(len(x), 16))

    x, w = inputs(6, 4), torch.randn(4, 1, generator=torch.Generator().manual_seed(0))

    def gradient(x: Tensor, w: Tensor) -> Tensor:
        return torch.autograd.grad(-balanced(x, w).square().sum() / 2, w)[0]

    single, double = gradient(x, w.requires_grad_()), gradient(x.double(), w.detach().double().requires_grad_())
    run = watch(model, (x,), {"w": w})
    (block,) = find_blocks(run).values()
    assert isinstance(block, DiagonalBlock)
    total = run.observed["y"].fn.log_prob(run.observed["y"].value).sum()
    assert not agree(single, double.float()), "they have not one digit in common"
    verify_uses(run, [block], {}, {"w": Moments(double.float(), double.square())}, total)
    with pytest.raises(UnsupportedUseError, match=r"'w'.*does not add up"):
        verify_uses(run, [block], {}, {"w": Moments(double.float() + 1e-4, double.square())}, total)


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.5, 0.5)


def test_rounding_is_told_from_a_backward_pass_that_clips() -> None:
    x, w = inputs(6, 4), torch.randn(4, 1, generator=torch.Generator().manual_seed(0)).requires_grad_()
    size = {
        call: _rounding(call(x, w).square().sum(), {"w": w}, lambda gradient: gradient["w"])
        for call in (balanced, lambda x, w: x @ w, lambda x, w: x @ Clipped.apply(w))
    }
    rounding, product, clipped = size.values()
    (gradient,) = torch.autograd.grad(balanced(x, w).square().sum(), w)
    assert float(gradient.abs().max()) / 20 < rounding < 1e-5
    assert product < 1e-5
    assert clipped == 0
