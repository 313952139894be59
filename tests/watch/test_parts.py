"""Products with parts of a weight, however these were cut out, are maps of the whole."""

from __future__ import annotations

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nclbayes.blocks import DiagonalBlock, KroneckerBlock, find_blocks
from nclbayes.watch import ModelRun, watch
from tests.zoo import inputs, normal, random_values

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
GROUPED = getattr(torch, "_grouped_mm", None)


def run_of(call: Call, x: Tensor, w: tuple[int, ...], b: tuple[int, ...]) -> ModelRun:
    def model(x: Tensor, y: Tensor) -> None:
        out = call(x, pyro.sample("w", normal(w)), pyro.sample("b", normal(b)))
        pyro.sample("y", dist.Normal(torch.tanh(out).reshape(len(x), -1).sum(-1), 1.0), obs=y)

    return watch(model, (x, inputs(len(x), seed=3)), random_values({"w": w, "b": b}))


def from_rows(run: ModelRun, block: KroneckerBlock) -> tuple[Tensor, Tensor]:
    """The sum of g z^T over rows, and autograd's gradient, as block matrices."""
    total = run.observed["y"].fn.log_prob(run.observed["y"].value).sum()
    leaves = {site: run.latents[site].value for site in block.sites}
    found = torch.autograd.grad(total, list(leaves.values()), retain_graph=True)
    summed = torch.zeros(block.shape)
    for use in run.linear:
        (grad,) = torch.autograd.grad(total, [use.edge], retain_graph=True)
        z, g = torch.cat(list(use.input_rows()), dim=-2), use.gradient_rows(grad)
        if use.transposed != block.transposed:
            z, g = g, z
        if block.bias is not None:
            z = F.pad(z, (0, 1), value=float(use.bias == block.bias))
        summed[slice(None) if use.maps is None else use.maps] += g.mT @ z
    return summed, block.pack(dict(zip(leaves, found, strict=True)))


def chunks(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.cat([(i + 1) * F.linear(x, part) for i, part in enumerate(w.chunk(3))], -1)


def experts(x: Tensor, parts: list[Tensor], offsets: list[Tensor] | None = None) -> Tensor:
    """Two examples for each matrix of a stack of three."""
    pieces = x.split(2)
    return torch.cat(
        [F.linear(pieces[e], part, None if offsets is None else offsets[e]) for e, part in enumerate(parts)]
    )


# The call, and the shapes of its input, its weight and another; and how many columns the block has.
PARTS: dict[str, tuple[Call, tuple[int, ...], tuple[int, ...], tuple[int, ...], int]] = {
    "chunk": (chunks, (6, 4), (9, 4), (1,), 4),
    "split": (lambda x, w, b: F.linear(x, w.split([2, 7])[1]), (6, 4), (9, 4), (1,), 4),
    "tensor_split": (lambda x, w, b: F.linear(x, w.tensor_split((2, 5))[1]), (6, 4), (9, 4), (1,), 4),
    "narrow": (lambda x, w, b: F.linear(x, w.narrow(0, 3, 4)), (6, 2, 4), (9, 4), (1,), 4),
    "slice": (lambda x, w, b: F.linear(x, w[:3]) * F.linear(x, w[-3:]), (6, 4), (9, 4), (1,), 4),
    "slice of a slice": (lambda x, w, b: F.linear(x, w[2:][1:4]), (6, 4), (9, 4), (1,), 4),
    "slice of a transpose": (lambda x, w, b: x @ w.T[:, 2:5], (6, 4), (9, 4), (1,), 4),
    "transpose of a slice": (lambda x, w, b: x @ w[2:5].T, (6, 4), (9, 4), (1,), 4),
    "columns": (lambda x, w, b: x @ w[:, 5:], (6, 4), (4, 9), (1,), 4),
    "some inputs": (lambda x, w, b: F.linear(x, w[:, 1:5]), (6, 4), (3, 9), (1,), 9),
    "inputs in two parts": (lambda x, w, b: x @ w[:4] + x.tanh() @ w[4:], (6, 4), (8, 3), (1,), 8),
    "a square of a matrix": (lambda x, w, b: x @ w[2:6, 1:3], (6, 4), (7, 5), (1,), 7),
    "on the left": (lambda x, w, b: (w[3:] @ x.T).T, (6, 4), (9, 4), (1,), 4),
    "copied": (lambda x, w, b: F.linear(x, w.clone()[3:].contiguous()), (6, 4), (9, 4), (1,), 4),
    "a row": (lambda x, w, b: x @ w[2], (6, 4), (9, 4), (1,), 4),
    "a column": (lambda x, w, b: F.linear(x, w[:, 2]), (6, 4), (4, 9), (1,), 4),
    "rows, unbound": (lambda x, w, b: torch.stack([x @ row for row in w], -1).cumsum(-1), (6, 4), (3, 4), (1,), 4),
    "a row and its offset": (lambda x, w, b: x @ w[2] + b[2], (6, 4), (9, 4), (9,), 5),
    "with a part of a bias": (lambda x, w, b: F.linear(x, w[3:5], b[3:5]), (6, 4), (9, 4), (9,), 5),
    "bias added": (lambda x, w, b: x @ w[3:5].T + b.narrow(0, 3, 2), (6, 4), (9, 4), (9,), 5),
    "turned as well": (lambda x, w, b: F.linear(F.linear(x, w[:3]), w[:3].T), (6, 4), (9, 4), (1,), 4),
    "stack, selected": (lambda x, w, b: experts(x, [w[e] for e in range(3)]), (6, 4), (3, 5, 4), (1,), 4),
    "stack, by a tensor": (lambda x, w, b: experts(x, [w[e] for e in torch.arange(3)]), (6, 4), (3, 5, 4), (1,), 4),
    "stack, unbound": (lambda x, w, b: experts(x, list(w)), (6, 4), (3, 5, 4), (1,), 4),
    "stack, with bias": (lambda x, w, b: experts(x, list(w), list(b)), (6, 4), (3, 5, 4), (3, 5), 5),
    "stack, one alone": (lambda x, w, b: x @ w[1], (6, 4), (3, 4, 5), (1,), 4),
    "stack, parts of one": (
        lambda x, w, b: F.linear(x, w[1][:2]).sum(-1) * F.linear(x, w[1][2:]).sum(-1),
        (6, 4),
        (3, 5, 4),
        (1,),
        4,
    ),
    "some of a stack": (lambda x, w, b: torch.bmm(x, w[1:3]), (2, 6, 4), (3, 4, 5), (1,), 4),
    "stack, einsum": (lambda x, w, b: torch.einsum("bd,od->bo", x, w[2]), (6, 4), (3, 5, 4), (1,), 4),
}


@pytest.mark.parametrize("name", PARTS)
def test_the_rows_of_parts_add_up_to_the_gradient_of_the_whole(name: str) -> None:
    call, x, w, b, n = PARTS[name]
    run = run_of(call, inputs(*x), w, b)
    block = find_blocks(run)["w"]
    assert isinstance(block, KroneckerBlock)
    assert block.shape[-1] == n
    summed, autograd = from_rows(run, block)
    assert autograd.abs().max() > 1e-3
    torch.testing.assert_close(summed, autograd, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(GROUPED is None, reason="this torch has no grouped product")
@pytest.mark.parametrize("ends", [(1, 4, 6), (0, 6, 6), (2, 2, 4)], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_the_rows_of_a_grouped_product_add_up_to_the_gradient(ends: tuple[int, ...], turned: bool) -> None:
    """Rows after the last group belong to none."""

    def call(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        out = GROUPED(x, w.mT if turned else w, torch.tensor(ends, dtype=torch.int32))
        return torch.cat([out[: ends[-1]], torch.zeros_like(out[ends[-1] :])])

    run = run_of(call, inputs(6, 4), (3, 8, 4) if turned else (3, 4, 8), (1,))
    (block,) = find_blocks(run).values()
    assert isinstance(block, KroneckerBlock)
    assert block.shape == (3, 8, 4)
    (use,) = run.linear
    assert use.count().tolist() == [b - a for a, b in zip((0, *ends), ends, strict=False)]
    summed, autograd = from_rows(run, block)
    torch.testing.assert_close(summed, autograd, rtol=1e-5, atol=1e-5)


OTHERS: dict[str, tuple[Call, tuple[int, ...], tuple[int, ...]]] = {
    "every other row": (lambda x, w, b: F.linear(x, w[::2]), (6, 4), (9, 4)),
    "rows by a list": (lambda x, w, b: F.linear(x, w[[0, 3]]), (6, 4), (9, 4)),
    "reshaped": (lambda x, w, b: F.linear(x, w.view(3, 3, 4)[0]), (6, 4), (9, 4)),
    "a diagonal": (lambda x, w, b: x @ w.diagonal(), (6, 4), (4, 4)),
    "a part of a vector": (lambda x, w, b: x @ w[:4], (6, 4), (9,)),
    "one row of each matrix": (lambda x, w, b: x @ w[:, 0].T, (6, 4), (3, 5, 4)),
    "a part of a kernel": (lambda x, w, b: F.conv1d(x, w[:2]), (6, 3, 5), (4, 3, 2)),
    "a part as a gain": (lambda x, w, b: F.linear(x, w[1:]).sum(-1) * (x * w[0]).sum(-1), (6, 4), (9, 4)),
    "a part as a bias": (lambda x, w, b: F.linear(x, w[:4], w[4]), (6, 4), (5, 4)),
    "a part added as a bias": (lambda x, w, b: x @ w[:4] + w[4], (6, 4), (5, 4)),
    "a part with a part": (lambda x, w, b: x @ (w[:4] @ w[4:]), (6, 4), (8, 4)),
    "a kernel, and a part": (
        lambda x, w, b: F.conv1d(x, w).sum((1, 2)) + (x.mT @ w[0]).sum((1, 2)),
        (6, 3, 5),
        (4, 3, 2),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_part_is_diagonal(name: str) -> None:
    call, x, w = OTHERS[name]
    (block,) = find_blocks(run_of(call, inputs(*x), w, (1,))).values()
    assert isinstance(block, DiagonalBlock)


@pytest.mark.parametrize("bias", [(3,), (9,)], ids=["one of its own", "all of it"])
def test_a_bias_of_other_outputs_is_not_the_parts(bias: tuple[int, ...]) -> None:
    run = run_of(lambda x, w, b: F.linear(x, w[:3]) + b[-3:], inputs(6, 4), (9, 4), bias)
    blocks = find_blocks(run)
    assert isinstance(blocks["w"], KroneckerBlock)
    assert isinstance(blocks["b"], DiagonalBlock)


def test_a_call_that_returns_its_argument_is_no_use() -> None:
    run = run_of(lambda x, w, b: F.linear(x, F.dropout(w, training=False)), inputs(6, 4), (9, 4), (1,))
    assert not run.others
    assert len(run.linear) == 1


def test_parts_that_are_not_used_change_nothing() -> None:
    run = run_of(lambda x, w, b: F.linear(x, w.chunk(3)[1]), inputs(6, 4), (9, 4), (1,))
    assert not run.others
    (block,) = find_blocks(run).values()
    assert isinstance(block, KroneckerBlock)
