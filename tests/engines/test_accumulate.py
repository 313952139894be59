"""`accumulate`: a batch in parts gives the steps of the whole batch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.data.mixture import TaskMixture
from nclbayes.engines import Engine
from nclbayes.errors import SettingError
from nclbayes.gaussians.gradients import RowGradient, summed
from nclbayes.methods import VCL, PlainTraining
from nclbayes.posterior.saving import describe, engine_from

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
