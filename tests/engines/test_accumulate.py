"""`accumulate`: a batch in parts gives the steps of the whole batch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.data.mixture import TaskMixture
from nclbayes.engines import Engine
from nclbayes.engines.base import Part, Problem
from nclbayes.errors import SettingError
from nclbayes.gaussians.gradients import RowGradient, summed
from nclbayes.methods import VCL, PlainTraining
from nclbayes.posterior.saving import describe, engine_from
from nclbayes.ranks import Ranks

X = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] * X[:, 1] > 0).long()
ENGINES = [
    ncl.LaplaceNCL(steps=8, batch_size=16, fisher="exact"),
    ncl.VariationalNCL(steps=8, batch_size=16, fisher="exact", particles=2),
    VCL(steps=8, batch_size=16),
    PlainTraining(steps=8, batch_size=16),
]


def network(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, width), nn.LayerNorm(width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)
    )


def learnt(engine: Engine, width: int = 8) -> ncl.OnlinePosterior:
    posterior = ncl.OnlinePosterior(ncl.BayesianNetwork(network(width), ncl.Categorical()), engine)
    for name, y in (("a", Y), ("b", 1 - Y)):
        posterior.update(ncl.Task((X, y), name=name))
    return posterior


@cache
def whole(engine: Engine) -> ncl.OnlinePosterior:
    """What is learnt of whole batches; not to be changed."""
    return learnt(engine)


def same(one: ncl.OnlinePosterior, other: ncl.OnlinePosterior) -> None:
    for name, state in one.blocks.items():
        torch.testing.assert_close(other.blocks[name].loc, state.loc, rtol=1e-3, atol=1e-5)
        assert other.blocks[name].logdet == pytest.approx(state.logdet, rel=1e-4, abs=1e-3)
    assert torch.equal(one.generator.get_state(), other.generator.get_state())


@pytest.mark.parametrize("count", [3, 1000])
@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: type(engine).__name__)
def test_parts_give_the_steps_of_the_whole(engine: Engine, count: int) -> None:
    same(whole(engine), learnt(replace(engine, accumulate=count)))


DRAWN = {
    "laplace": ncl.LaplaceNCL(steps=8, batch_size=16),
    "laplace by signs": ncl.LaplaceNCL(steps=8, batch_size=16, fisher="signs"),
    "laplace, several draws": ncl.LaplaceNCL(steps=8, batch_size=16, fisher_samples=3),
    "variational": ncl.VariationalNCL(steps=8, batch_size=16, particles=2, fisher_samples=2),
}
# Sums are rounded in another order; another target changes this by 1e-2.
ROUNDING = 1e-5


def same_to_rounding(one: ncl.OnlinePosterior, other: ncl.OnlinePosterior) -> None:
    for name, state in one.blocks.items():
        found = other.blocks[name].tensors()
        for part, tensor in state.tensors().items():
            away = (found[part].double() - tensor.double()).norm() / tensor.double().norm()
            assert float(away) < ROUNDING, (name, part, float(away))
    assert torch.equal(one.generator.get_state(), other.generator.get_state())


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", DRAWN)
def test_parts_draw_the_targets_of_the_whole(name: str, count: int) -> None:
    same_to_rounding(whole(DRAWN[name]), learnt(replace(DRAWN[name], accumulate=count)))


class Outputs(nn.Module):
    """Of each example a sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).unflatten(-1, (5, 2))


@pytest.mark.parametrize("engine", [DRAWN["laplace"], DRAWN["variational"]], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("likelihood", [ncl.Normal(0.5), ncl.Bernoulli()], ids=lambda each: type(each).__name__)
def test_parts_of_sequences_and_mixtures_draw_the_targets_of_the_whole(likelihood: Any, engine: Engine) -> None:
    y = (X[:, :5, None] * X[:, None, :2] > 0).float()
    tasks = [ncl.Task((X, y), name="a"), TaskMixture([ncl.Task((X, y), name=n) for n in "bc"], name="both")]
    found = []
    for count in (1, 3):
        model = ncl.BayesianNetwork(Outputs(), likelihood)
        found.append(ncl.OnlinePosterior(model, replace(engine, accumulate=count, lr=0.01)))
        for task in tasks:
            found[-1].update(task)
    same_to_rounding(*found)


@pytest.mark.parametrize("engine", [DRAWN["laplace"], DRAWN["variational"]], ids=lambda e: type(e).__name__)
def test_parts_in_a_stream_draw_the_targets_of_the_whole(engine: Engine) -> None:
    found = []
    for count in (1, 3):
        model = ncl.BayesianNetwork(network(), ncl.Categorical())
        found.append(ncl.OnlinePosterior(model, replace(engine, accumulate=count)))
        stream = ncl.Stream(found[-1], segment_size=50)
        for batch in zip(X.split(16), Y.split(16), strict=True):
            stream.observe(*batch)
        stream.consolidate()
    same_to_rounding(*found)


@pytest.mark.parametrize("name", ["laplace", "variational"])
def test_each_part_has_noise_of_its_own(name: str) -> None:
    """Though all draw their targets from the same stream: what dropout leaves of the same inputs differs."""
    masks: list[Tensor] = []
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 2))
    net[0].register_forward_hook(lambda _, inputs, out: masks.append(out != 0))
    engine = replace(DRAWN[name], steps=1, accumulate=2)
    posterior = ncl.OnlinePosterior(ncl.BayesianNetwork(net, ncl.Categorical()), engine)
    posterior.update(ncl.Task((torch.ones(16, 6), Y[:16]), name="a"))
    halves = [mask for mask in masks if len(mask) == 8]
    assert len(halves) >= 4
    assert not any(torch.equal(*pair) for pair in zip(halves[::2], halves[1::2], strict=True))


@pytest.mark.parametrize(("ranks", "count", "examples"), [*product((1, 2, 3), (1, 2, 4), (3, 7, 16)), (4, 2, 3)])
def test_parts_know_where_they_lie(ranks: int, count: int, examples: int) -> None:
    def parts_of(rank: int) -> list[Part]:
        problem: Any = SimpleNamespace(ranks=Ranks(rank, ranks), accumulate=count)
        return Problem.parts(problem, (torch.arange(examples),))

    is_shared, seen, at_once = ranks <= examples, list[int](), dict[int, list[int]]()
    for parts in map(parts_of, range(ranks)):
        assert len(parts) == len(parts_of(0))
        for (rows,), weight, share in parts:
            assert rows.tolist() == list(range(share.start, share.start + len(rows)))
            assert share.examples == (examples if len(parts) > 1 or (ranks > 1 and is_shared) else 0)
            assert weight == (1.0 if is_shared else 1 / ranks)
            if is_shared:
                assert share.ahead == len(at_once.setdefault(share.part, []))
                at_once[share.part] += rows.tolist()
            seen += rows.tolist()
    assert sorted(seen) == sorted([*range(examples)] * (1 if is_shared else ranks))


@pytest.mark.parametrize("engine", ENGINES[:2], ids=lambda engine: type(engine).__name__)
def test_rows_of_wide_layers_are_added_up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    # Any saving is worth the watching: gradients of the second task are left as rows.
    monkeypatch.setattr("nclbayes.gaussians.preconditioners._WORTH", 0.0)
    added: list[int] = []

    def counted(first: Any, second: Any) -> Any:
        found = summed(first, second)
        added.extend(len(g.pieces) for g in found.values() if isinstance(g, RowGradient))
        return found

    for module in ("likelihood", "variational"):
        monkeypatch.setattr(f"nclbayes.engines.{module}.summed", counted)
    same(learnt(engine, width=40), learnt(replace(engine, accumulate=4), width=40))
    assert max(added) >= 4


def test_rows_and_matrices_are_added_up() -> None:
    g = torch.Generator().manual_seed(0)
    z, out, matrix = (torch.randn(shape, generator=g) for shape in ((5, 3), (5, 2), (2, 4)))
    rows = RowGradient(((z, out, True),))
    expected = matrix + out.mT @ torch.cat([z, torch.ones(5, 1)], dim=1)
    for total in (summed({"a": rows}, {"a": matrix}), summed({"a": matrix}, {"a": rows})):
        assert isinstance(total["a"], Tensor)
        torch.testing.assert_close(total["a"], expected)


def test_batches_that_are_mappings_and_mixtures_of_tasks() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = network()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    engine = ncl.LaplaceNCL(steps=8, batch_size=16, fisher="exact")
    tasks = [ncl.Task({"x": X, "labels": y}, name=name, target="labels") for name, y in (("a", Y), ("b", 1 - Y))]
    found = []
    for count in (1, 3):
        model = ncl.BayesianNetwork(Named(), ncl.Categorical())
        found.append(ncl.OnlinePosterior(model, replace(engine, accumulate=count)))
        found[-1].update(tasks[0])
        found[-1].update(TaskMixture(tasks, name="both"))
    same(*found)


def test_less_is_held_at_once() -> None:
    """Only parts of a batch go through the network."""
    sizes: list[int] = []
    net = network()
    net.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    engine = ncl.LaplaceNCL(steps=3, batch_size=48, accumulate=6)
    ncl.OnlinePosterior(ncl.BayesianNetwork(net, ncl.Categorical()), engine).update(ncl.Task((X, Y), name="a"))
    assert max(sizes) == 8


@pytest.mark.parametrize("value", [0, -1, 1.5, "two", None])
def test_anything_but_a_whole_number_is_refused(value: Any) -> None:
    with pytest.raises(SettingError, match="accumulate"):
        ncl.LaplaceNCL(accumulate=value)


def test_it_is_in_files_and_need_not_be() -> None:
    described = describe(ncl.LaplaceNCL(accumulate=4))
    assert engine_from(described).accumulate == 4
    del described["accumulate"]
    assert engine_from(described).accumulate == 1
