"""Every way to write a linear map is seen: the rows reproduce autograd's gradient of the weight."""

from __future__ import annotations

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import nclbayes as ncl
from nclbayes.blocks import KroneckerBlock, find_blocks
from nclbayes.errors import DataError, NCLError
from nclbayes.watch import watch
from tests.zoo import ZOO, Case, inputs, normal, random_values


def gradient_from_rows(case: Case) -> list[tuple[str, Tensor, Tensor]]:
    """For each Kronecker block: its name, the sum of g z^T over rows, and autograd's gradient, as block matrices."""
    run = watch(case.model, case.batch, case.values, case.context)
    total = sum((site.fn.log_prob(site.value).sum() for site in run.observed.values()), torch.zeros(()))
    sites = list(run.latents)
    grads = torch.autograd.grad(total, [run.latents[s].value for s in sites], retain_graph=True, allow_unused=True)
    autograd = {
        s: torch.zeros_like(run.latents[s].value) if g is None else g for s, g in zip(sites, grads, strict=True)
    }
    results = []
    for block in find_blocks(run).values():
        if not isinstance(block, KroneckerBlock):
            continue
        uses = [use for use in run.linear if use.weight == block.weight]
        outs = torch.autograd.grad(total, [use.edge for use in uses], retain_graph=True, allow_unused=True)
        summed = torch.zeros(block.shape)
        for use, out in zip(uses, outs, strict=True):
            if out is None:
                continue
            exchanged = use.transposed != block.transposed
            z, g = torch.cat(list(use.input_rows()), dim=-2), use.gradient_rows(out)
            if block.bias is not None and not exchanged:
                z = F.pad(z, (0, 1), value=float(use.bias == block.bias))
            assert z.shape[-2] == g.shape[-2]
            if exchanged:
                z, g = F.pad(g, (0, block.bias is not None)), z
            summed = summed + g.mT @ z
        results.append((block.name, summed, block.pack(autograd)))
    return results


@pytest.mark.parametrize("name", ZOO)
def test_rows_reproduce_autograds_gradient_in_every_model(name: str) -> None:
    results = gradient_from_rows(ZOO[name]())
    assert results
    for block, summed, autograd in results:
        assert autograd.abs().max() > 1e-3, block
        torch.testing.assert_close(summed, autograd, rtol=1e-5, atol=1e-5 * float(autograd.abs().max()), msg=block)


Map = Callable[[Tensor, Tensor, Tensor], Tensor]
MAPS: dict[str, tuple[Map, tuple[int, ...], tuple[int, ...], tuple[int, ...], int]] = {
    # name: (map(x, w, b), shape of x, of w, of b, expected n)
    "linear": (lambda x, w, b: F.linear(x, w), (6, 5), (4, 5), (4,), 5),
    "linear with bias": (lambda x, w, b: F.linear(x, w, b), (6, 5), (4, 5), (4,), 6),
    "linear, keyword arguments": (lambda x, w, b: F.linear(input=x, weight=w, bias=b), (6, 5), (4, 5), (4,), 6),
    "linear plus bias": (lambda x, w, b: F.linear(x, w) + b, (6, 5), (4, 5), (4,), 6),
    "linear, many leading dims": (lambda x, w, b: F.linear(x, w, b), (6, 2, 3, 5), (4, 5), (4,), 6),
    "linear, transposed weight": (lambda x, w, b: F.linear(x, w.T, b), (6, 5), (5, 4), (4,), 6),
    "linear to one output": (lambda x, w, b: F.linear(x, w), (6, 5), (5,), (1,), 5),
    "x @ w": (lambda x, w, b: x @ w, (6, 5), (5, 4), (4,), 5),
    "x @ w + b": (lambda x, w, b: x @ w + b, (6, 5), (5, 4), (4,), 6),
    "b + x @ w": (lambda x, w, b: b + x @ w, (6, 5), (5, 4), (4,), 6),
    "x @ w += b": (lambda x, w, b: (x @ w).add_(b), (6, 5), (5, 4), (4,), 6),
    "x @ w.T": (lambda x, w, b: x @ w.T, (6, 5), (4, 5), (4,), 5),
    "x @ w.mT + b": (lambda x, w, b: x @ w.mT + b, (6, 3, 5), (4, 5), (4,), 6),
    "x @ w.t()": (lambda x, w, b: x @ w.t(), (6, 5), (4, 5), (4,), 5),
    "x @ transpose(w)": (lambda x, w, b: x @ torch.transpose(w, 0, 1), (6, 5), (4, 5), (4,), 5),
    "x @ w.permute(1, 0)": (lambda x, w, b: x @ w.permute(1, 0).contiguous(), (6, 5), (4, 5), (4,), 5),
    "square x @ w": (lambda x, w, b: x @ w + b, (6, 4), (4, 4), (4,), 5),
    "square x @ w.T.T": (lambda x, w, b: x @ w.T.T + b, (6, 4), (4, 4), (4,), 5),
    "torch.matmul": (lambda x, w, b: torch.matmul(x, w), (6, 2, 5), (5, 4), (4,), 5),
    "Tensor.matmul": (lambda x, w, b: x.matmul(w) + b, (6, 2, 5), (5, 4), (4,), 6),
    "torch.mm": (lambda x, w, b: torch.mm(x, w), (6, 5), (5, 4), (4,), 5),
    "torch.addmm": (lambda x, w, b: torch.addmm(b, x, w), (6, 5), (5, 4), (4,), 6),
    "Tensor.addmm": (lambda x, w, b: b.addmm(x, w.T), (6, 5), (4, 5), (4,), 6),
    "bmm, expanded": (lambda x, w, b: torch.bmm(x, w.expand(6, 5, 4)), (6, 3, 5), (5, 4), (4,), 5),
    "bmm, unsqueezed": (lambda x, w, b: torch.bmm(x, w.T.unsqueeze(0).expand(6, 5, 4)), (6, 3, 5), (4, 5), (4,), 5),
    "baddbmm": (lambda x, w, b: torch.baddbmm(b, x, w.expand(6, 5, 4)), (6, 3, 5), (5, 4), (4,), 6),
    "bmm, stack of weights": (
        lambda x, w, b: torch.bmm(x.movedim(1, 0), w).movedim(0, 1),
        (6, 3, 5),
        (3, 5, 4),
        (4,),
        5,
    ),
    "matmul, stack of weights": (
        lambda x, w, b: (x.unsqueeze(-2) @ w.mT).squeeze(-2),
        (6, 2, 3, 5),
        (3, 4, 5),
        (4,),
        5,
    ),
    "w @ x": (lambda x, w, b: (w @ x.T).T, (6, 5), (4, 5), (4,), 5),
    "w @ batched x": (lambda x, w, b: w @ x, (6, 5, 3), (4, 5), (4,), 5),
    "w.T @ x": (lambda x, w, b: (w.T @ x.T).T, (6, 5), (5, 4), (4,), 5),
    "mv with a vector weight": (lambda x, w, b: torch.mv(x, w), (6, 5), (5,), (1,), 5),
    "x @ vector + scalar": (lambda x, w, b: x @ w + b, (6, 5), (5,), (), 6),
    "vector @ x": (lambda x, w, b: w @ x.T, (6, 5), (5,), (), 5),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, 2, 1), (6, 3, 9), (4, 3, 3), (4,), 10),
    "conv1d, dilated": (lambda x, w, b: F.conv1d(x, w, dilation=2, padding=2), (6, 3, 9), (4, 3, 3), (4,), 9),
    "conv1d, same": (lambda x, w, b: F.conv1d(x, w, b, padding="same", dilation=3), (6, 3, 9), (4, 3, 3), (4,), 10),
    "conv1d, depthwise": (lambda x, w, b: F.conv1d(x, w, b, groups=3), (6, 3, 9), (6, 1, 3), (6,), 4),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b), (6, 3, 5, 6), (4, 3, 2, 3), (4,), 19),
    "conv2d, all options": (
        lambda x, w, b: F.conv2d(x, w, b, stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2),
        (6, 4, 6, 7),
        (4, 2, 3, 2),
        (4,),
        13,
    ),
    "conv2d, valid": (lambda x, w, b: F.conv2d(x, w, padding="valid"), (6, 3, 5, 6), (4, 3, 2, 3), (4,), 18),
    "conv3d": (
        lambda x, w, b: F.conv3d(x, w, b, stride=2, padding=1, groups=2),
        (6, 4, 4, 5, 4),
        (4, 2, 2, 3, 2),
        (4,),
        25,
    ),
}


@pytest.mark.parametrize("name", MAPS)
def test_rows_reproduce_autograds_gradient_for_every_map(name: str) -> None:
    function, x_shape, w_shape, b_shape, n = MAPS[name]

    def model(x: Tensor, y: Tensor) -> None:
        w, b = pyro.sample("w", normal(w_shape)), pyro.sample("b", normal(b_shape))
        out = torch.tanh(function(x, w, b)).reshape(len(x), -1)
        pyro.sample("y", dist.Normal(out.sum(-1), 1.0), obs=y)

    case = Case(model, random_values({"w": w_shape, "b": b_shape}), (inputs(*x_shape), inputs(x_shape[0], seed=3)))
    ((_, summed, autograd),) = gradient_from_rows(case)
    assert autograd.shape[-1] == n
    torch.testing.assert_close(summed, autograd, rtol=1e-5, atol=1e-5)


def test_an_output_changed_in_place_keeps_its_own_gradient() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", normal((4, 5)))
        h = F.linear(x, w)
        F.relu(h, inplace=True)
        pyro.sample("y", dist.Normal((3.0 * h).sum(-1), 1.0), obs=y)

    case = Case(model, random_values({"w": (4, 5)}), (inputs(6, 5), inputs(6, seed=3)))
    ((_, summed, autograd),) = gradient_from_rows(case)
    torch.testing.assert_close(summed, autograd, rtol=1e-5, atol=1e-5)


def test_an_input_changed_in_place_is_an_error() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", normal((5, 5)))
        h = x * 1.0
        out = F.linear(h, w)
        h.add_(1.0)
        pyro.sample("y", dist.Normal((h + out).sum(-1), 1.0), obs=y)

    with pytest.raises(NCLError, match=r"linear with weight 'w' was modified in place"):
        ncl.fisher(model, {"w": torch.ones(5, 5)}, (inputs(6, 5), inputs(6)))


def test_a_mask_that_does_not_fit_is_named() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", normal((4, 5)))
        with ncl.valid_steps(torch.ones(6, 2, dtype=torch.bool)):
            h = F.linear(x, w)
        pyro.sample("y", dist.Normal(h.sum((-1, -2)), 1.0), obs=y)

    with pytest.raises(DataError, match=r"mask of shape \(6, 2\).*weight 'w' has rows of shape \(6, 3\)"):
        ncl.fisher(model, {"w": torch.ones(4, 5)}, (inputs(6, 3, 5), inputs(6)))
    with pytest.raises(DataError, match="boolean"), ncl.valid_steps(torch.ones(3)):
        pass


def test_watching_leaves_what_the_model_computes_alone() -> None:
    case = ZOO["cnn"]()
    seen = {}

    def model(*batch: Tensor) -> None:
        seen["logits"] = case.model(*batch)

    watch(model, case.batch, case.values)
    watched = seen["logits"].detach()
    pyro.poutine.condition(model, data=case.values)(*case.batch)
    torch.testing.assert_close(watched, seen["logits"], rtol=0, atol=0)
