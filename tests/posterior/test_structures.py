"""What is held of large factors: blocks along the diagonal, from the Fisher to the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes import FisherAccumulator
from nclbayes.blocks import KroneckerBlock
from nclbayes.blocks.structures import Structures
from nclbayes.engines import PAPER
from nclbayes.errors import SettingError
from nclbayes.gaussians import State
from nclbayes.kronecker import BlockDiagonal, KroneckerPrecision
from nclbayes.methods import GPM, OWM
from nclbayes.watch import watch

STRUCTURES = [7, "diagonal", ("dense", "diagonal"), (5, "dense"), (1, 3)]


def network(bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(11, 20, bias=bias), nn.Tanh(), nn.Linear(20, 7, bias=bias))


def tasks() -> list[ncl.Task]:
    generator = torch.Generator().manual_seed(0)
    x, teacher = torch.randn(300, 11, generator=generator), torch.randn(11, 7, generator=generator)
    y = (x @ teacher).argmax(-1)
    return [ncl.Task((x[i : i + 100], y[i : i + 100]), name=f"part {i}") for i in (0, 100, 200)]


def posterior_of(engine: Any, structure: Any, bias: bool = True) -> ncl.OnlinePosterior:
    return ncl.OnlinePosterior(
        ncl.BayesianNetwork(network(bias), ncl.Categorical()), engine, structure=structure, example=tasks()[0]
    )


def test_the_widths_of_a_block() -> None:
    block = KroneckerBlock("head", "head.weight", (30_000, 64), (30_000, 64), False, "head.bias", (30_000,))
    for given, expected in {
        "auto": (0, 260),
        "dense": (0, 0),
        "diagonal": (1, 1),
        100: (0, 100),
        ("dense", "diagonal"): (0, 1),
        (10, "auto"): (10, 260),
    }.items():
        assert Structures.of(given).applied(block).widths == expected
    named = {"*.bias": "diagonal", "*": "dense"}
    assert Structures.of(named).applied(block).widths == (1, 1)
    assert Structures.of({"other*": "diagonal"}).applied(block).widths == (0, 260)
    wide = replace(block, weight_shape=(512, 4608), view=(512, 4608), bias_shape=(512,))
    assert Structures().applied(wide).widths == (1024, 0)
    assert Structures().applied(wide, whole=True).widths == (0, 0)


@pytest.mark.parametrize("wrong", ["block", 0, -3, 2.5, True, None, (1, 2, 3), {"*": "half"}, {3: "dense"}])
def test_what_is_no_structure_is_refused(wrong: Any) -> None:
    with pytest.raises(SettingError, match="structure"):
        posterior_of(ncl.LaplaceNCL(steps=1), wrong)


@pytest.mark.parametrize("wrong", [np.ones(3), np.array(["auto", "dense"]), torch.ones(2, 2), ("dense", torch.ones(3))])
def test_an_array_is_no_structure(wrong: Any) -> None:
    with pytest.raises(SettingError, match="structure must be 'auto', 'dense', 'diagonal' or the width of blocks"):
        Structures.of(wrong)


class Tied(nn.Module):
    """A weight that is used straight and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) @ self.weight.T


def stacked(x: Tensor, y: Tensor | None = None) -> Tensor:
    w = pyro.sample("w", dist.Normal(torch.zeros(3, 6, 5), 1.0).to_event(3))
    with pyro.plate("data", x.shape[0]):
        return pyro.sample("y", dist.Normal(torch.bmm(x.mT, w).sum(1), 1.0).to_event(1), obs=y)


def cases() -> Mapping[str, tuple[Any, dict[str, Tensor], tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    x = torch.randn(40, 11)
    found = {}
    for bias in (True, False):
        model = ncl.BayesianNetwork(network(bias), ncl.Categorical())
        found[f"bias {bias}"] = model, model.initial_values(), (x, torch.randint(7, (40,)))
    tied = ncl.BayesianNetwork(Tied(), ncl.Categorical())
    found["tied"] = tied, tied.initial_values(), (torch.randn(40, 6), torch.randint(6, (40,)))
    conv = ncl.BayesianNetwork(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten()), ncl.Normal(1.0))
    found["convolution"] = conv, conv.initial_values(), (torch.randn(20, 3, 5, 5), torch.randn(20, 72))
    return found


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("case", ["bias True", "bias False", "tied", "convolution"])
def test_a_fisher_in_blocks_is_the_blocks_of_the_whole_one(case: str, structure: Any) -> None:
    model, values, batch = cases()[case]
    run = watch(model, batch, values, {})
    whole = FisherAccumulator(model, values)
    whole.update(batch)
    blocks = {name: Structures.of(structure).applied(block) for name, block in whole.blocks.items()}
    found = FisherAccumulator(model, values, blocks=blocks)
    found.update(batch)
    restored = FisherAccumulator(model, values, blocks=blocks)
    restored.restore(found.tensors(), blocks, {name: values[block.sites[0]] for name, block in blocks.items()})
    assert run.latents
    for name, factors in found.factors(50).items():
        assert isinstance(factors, ncl.KroneckerFisher)
        for side in ("input", "output"):
            expected, blocked = getattr(whole.factors(50)[name], side), getattr(factors, side)
            if isinstance(blocked, BlockDiagonal):
                mask = blocked.map(torch.ones_like).dense()
                torch.testing.assert_close(blocked.dense(), expected * mask, rtol=1e-5, atol=1e-6)
                again = getattr(restored.factors(50)[name], side)
                assert torch.equal(blocked.dense(), again.dense())
            else:
                assert torch.equal(blocked, expected)


def whole_state(state: State) -> State:
    """The same Gaussian with factors that are held whole."""
    p = state.precision
    sides = [m.dense() if isinstance(m, BlockDiagonal) else m for m in (p.input, p.output)]
    block = replace(state.block, widths=(0, 0))  # type: ignore[type-var]
    return replace(state, block=block, precision=KroneckerPrecision.factorise(*sides))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("engine", [ncl.LaplaceNCL, ncl.VariationalNCL])
def test_tasks_are_learnt_and_answers_are_those_of_the_whole_matrices(
    engine: Any, structure: Any, tmp_path: Path
) -> None:
    posterior = posterior_of(engine(steps=40, batch_size=50, lr=0.1), structure)
    for task in tasks():
        report = posterior.update(task, progress=False)
        assert sum(report.losses[-5:]) < sum(report.losses[:5])
    x = tasks()[0].train[0][:5]  # type: ignore[index]
    path = tmp_path / "posterior.ncl"
    posterior.save(path)
    again = ncl.OnlinePosterior.load(path, posterior.model)
    for name, state in posterior.blocks.items():
        for part, tensor in state.tensors().items():
            assert torch.equal(tensor, again.blocks[name].tensors()[part]), part
    assert torch.equal(again.predict(x, num_samples=4).probs, posterior.predict(x, num_samples=4).probs)
    states = {name: whole_state(state) for name, state in posterior.blocks.items()}
    again._belief = replace(again._belief, states=states)
    values = posterior.sample(3, torch.Generator().manual_seed(0))
    torch.testing.assert_close(posterior.log_prob(values), again.log_prob(values), rtol=1e-5, atol=1e-2)
    assert posterior.entropy() == pytest.approx(again.entropy(), rel=1e-9)
    linear = [p.predict(x, method="linearized").probs for p in (posterior, again)]
    torch.testing.assert_close(*linear, rtol=1e-4, atol=1e-5)


def test_engines_may_be_switched_and_updates_resumed(tmp_path: Path) -> None:
    first, second, third = tasks()
    one = posterior_of(ncl.LaplaceNCL(steps=30, batch_size=50), (4, "diagonal"))
    one.update(first, progress=False)
    one.save(tmp_path / "one.ncl")
    other = ncl.OnlinePosterior.load(tmp_path / "one.ncl", one.model)
    engine = ncl.VariationalNCL(steps=30, batch_size=50)
    one.update(second, engine=engine, progress=False)

    class Killed(Exception):
        pass

    def kill(progress: Any) -> None:
        if progress.step == 17:
            raise Killed

    with pytest.raises(Killed):
        other.update(
            second, engine=engine, progress=False, checkpoint=tmp_path / "c", checkpoint_every=10, callbacks=[kill]
        )
    other.update(second, engine=engine, progress=False, checkpoint=tmp_path / "c", checkpoint_every=10)
    for posterior in (one, other):
        posterior.update(third, progress=False)
    assert all(torch.equal(value, other.mean()[site]) for site, value in one.mean().items())
    assert one.blocks["0"].kind == "Kronecker, with bias, inputs in 3 blocks of 4, outputs diagonal"


def test_a_file_keeps_the_structure_of_blocks_that_are_yet_to_come(tmp_path: Path) -> None:
    model = ncl.BayesianNetwork(network(), ncl.Categorical())
    empty = ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=2), structure={"0*": 4, "*": ("auto", "diagonal")})
    empty.save(tmp_path / "empty.ncl")
    posterior = ncl.OnlinePosterior.load(tmp_path / "empty.ncl", model)
    posterior.update(tasks()[0], progress=False)
    assert "inputs in 3 blocks of 4" in posterior.blocks["0"].kind
    assert posterior.blocks["2"].kind.endswith("with bias, outputs diagonal")


@pytest.mark.parametrize("engine", [OWM, GPM])
def test_engines_that_need_all_of_a_factor_say_so(engine: Any) -> None:
    with pytest.raises(SettingError, match="needs its factors whole"):
        posterior_of(engine(steps=2), "diagonal")
    posterior = posterior_of(ncl.LaplaceNCL(**PAPER, steps=2), "diagonal")
    with pytest.raises(SettingError, match="structure='dense'"):
        posterior.update(tasks()[0], engine=engine(steps=2), progress=False)


def test_a_wide_head_is_never_held_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ncl.BayesianNetwork(nn.Linear(8, 5000), ncl.Categorical())
    posterior = ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=3, batch_size=20))
    for seed in range(2):
        data = torch.randn(40, 8), torch.randint(5000, (40,), generator=torch.Generator().manual_seed(seed))
        report = posterior.update(ncl.Task(data, name="words"), progress=False)
        assert report.structure == {"weight": "Kronecker, with bias, outputs in 139 blocks of 36"}
    (state,) = posterior.blocks.values()
    assert max(tensor.numel() for tensor in state.tensors().values()) <= 5000 * 36
    posterior.save(tmp_path / "p.ncl")
    # The mean, and half of each factor in float64.
    assert (tmp_path / "p.ncl").stat().st_size < 4 * 45_000 + 8 * 5000 * 20 + 20_000
