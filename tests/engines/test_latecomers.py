"""Weights that a task reaches only after it has begun: experts that the first examples are not sent to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.engines.latecomers import LatecomersError
from nclbayes.errors import FileError, NCLError
from nclbayes.methods import EWC, VCL, PlainTraining, SynapticIntelligence
from nclbayes.storage import read_file, write_file

EXPERTS = 4


class Mixture(nn.Module):
    """A mixture of experts of which each example meets one: that of its first input's quarter."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)) for _ in range(experts)
        )
        self.idle = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        choice = (x[:, 0].clamp(0, 0.999) * len(self.experts)).long()
        out = x.new_zeros(len(x), 2)
        for k, expert in enumerate(self.experts):
            here = (choice == k).nonzero().squeeze(-1)
            if len(here):
                out = out.index_copy(0, here, expert(x[here]))
        return out


def mixture(seed: int = 0) -> ncl.BayesianNetwork:
    torch.manual_seed(seed)
    return ncl.BayesianNetwork(Mixture(), ncl.Categorical())


def sorted_task(name: str = "sorted", examples: int = 400, seed: int = 0) -> ncl.Task:
    """Examples sorted by expert, each with a rule of its own: the first few are all of the first."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(examples, 4, generator=draw)
    x = x[x[:, 0].argsort()]
    x[:, 1:] = torch.randn(examples, 3, generator=draw)
    rule = (x[:, 0] * EXPERTS).long() % 3
    y = (x[:, 1:].gather(1, rule[:, None]).squeeze(1) > 0).long()
    return ncl.Task((x, y), name=name)


def expert_blocks(posterior: ncl.OnlinePosterior) -> set[str]:
    return {name for name in posterior.blocks if name.startswith("experts")}


ALL = {f"experts.{k}.{layer}" for k in range(EXPERTS) for layer in (0, 2)}


@pytest.mark.parametrize(
    "engine",
    [
        ncl.LaplaceNCL(steps=300, batch_size=64),
        ncl.VariationalNCL(steps=300, batch_size=64),
        EWC(steps=300, batch_size=64, lr=0.01),
        SynapticIntelligence(steps=300, batch_size=64, lr=0.01),
        PlainTraining(steps=300, batch_size=64, lr=0.1),
        VCL(steps=300, batch_size=64, lr=0.01),
    ],
    ids=lambda engine: type(engine).__name__,
)
@pytest.mark.filterwarnings("ignore:Sites .* cannot vectorise:UserWarning")
def test_every_expert_has_a_posterior_and_learns(engine: Any) -> None:
    task = sorted_task()
    posterior = ncl.OnlinePosterior(mixture(), engine)
    report = posterior.update(task, progress=False)
    assert expert_blocks(posterior) == ALL
    assert report.unused == ("idle.weight", "idle.bias")
    x, y = task.train
    right = posterior.predict(x).logits.argmax(-1) == y
    for half in right.chunk(2):
        assert float(half.float().mean()) > 0.95


def test_it_is_as_if_they_had_been_known_from_the_start() -> None:
    """The same examples in another order show all experts at once."""
    x, y = sorted_task().train
    spread = torch.arange(400).view(8, 50).T.flatten()
    found = []
    for order in (torch.arange(400), spread):
        # One batch holds all examples, so that their order is nothing but what is looked at first.
        posterior = ncl.OnlinePosterior(mixture(), ncl.LaplaceNCL(steps=20, batch_size=400))
        posterior.update(ncl.Task((x[order], y[order]), name="all"), progress=False)
        found.append(posterior)
    first, second = found
    assert set(first.blocks) == set(second.blocks) == ALL
    for site, value in first.mean().items():
        torch.testing.assert_close(value, second.mean()[site], rtol=1e-3, atol=1e-5)


def test_the_share_of_an_expert_in_the_fisher_is_that_of_its_examples() -> None:
    """Against the same expert as a network of its own, with nothing but its examples."""
    x, y = sorted_task().train
    model, last = mixture(), EXPERTS - 1
    here = (x[:, 0] * EXPERTS).long() == last
    expert = model.network.experts[last]
    alone = ncl.BayesianNetwork(expert, ncl.Categorical())
    settings = {"kind": "model", "samples": 300}
    part = ncl.fisher(alone, alone.initial_values(), (x[here], y[here]), **settings)
    whole = ncl.fisher(model, model.initial_values(), (x, y), **settings)
    for layer in (0, 2):
        mine, own = whole[f"experts.{last}.{layer}"], part[str(layer)]
        products = [torch.kron(found.output, found.input) for found in (mine, own)]
        assert float((products[0] - products[1]).norm() / products[1].norm()) < 0.03


def test_an_expert_that_an_earlier_task_has_trained_comes_late_too() -> None:
    posterior = ncl.OnlinePosterior(mixture(), ncl.LaplaceNCL(steps=60, batch_size=64))
    posterior.update(sorted_task("first"), progress=False)
    before = posterior.mean()
    posterior.update(sorted_task("second", seed=1), progress=False)
    last = f"experts.{EXPERTS - 1}.2.weight"
    assert not torch.equal(before[last], posterior.mean()[last])
    assert posterior.tasks == ("first", "second")


@pytest.mark.parametrize("engine", [ncl.LaplaceNCL, ncl.VariationalNCL, SynapticIntelligence])
def test_a_task_with_latecomers_that_was_interrupted_ends_where_it_would_have(engine: Any, tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def kill(progress: Any) -> None:
        if progress.step == 25:
            raise Killed

    made = engine(steps=40, batch_size=64)
    whole, path = ncl.OnlinePosterior(mixture(), made), tmp_path / "snapshot.ncl"
    losses = whole.update(sorted_task(), progress=False).losses
    halved = ncl.OnlinePosterior(mixture(), made)
    with pytest.raises(Killed):
        halved.update(sorted_task(), progress=False, checkpoint=path, checkpoint_every=10, callbacks=[kill])
    assert path.exists()
    again = ncl.OnlinePosterior(mixture(), made)
    assert again.update(sorted_task(), progress=False, checkpoint=path).losses == losses
    assert not path.exists()
    for site, value in whole.mean().items():
        assert torch.equal(value, again.mean()[site])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"experts.3.2": {"weight": "nowhere"}}, "nowhere"),
        ({"experts.3.2": {"weight_shape": [2, 17], "view": [2, 17]}}, "17"),
        ({"experts.3.2": {"name": "another"}}, "another"),
    ],
)
def test_a_crafted_snapshot_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def kill(progress: Any) -> None:
        if progress.step == 15:
            raise Killed

    path, made = tmp_path / "snapshot.ncl", ncl.LaplaceNCL(steps=40, batch_size=64)
    with pytest.raises(Killed):
        ncl.OnlinePosterior(mixture(), made).update(
            sorted_task(), progress=False, checkpoint=path, checkpoint_every=10, callbacks=[kill]
        )
    tensors, settings = read_file(path, "checkpoint")
    for name, fields in change.items():
        settings["late"][name] |= fields
    write_file(path, "checkpoint", tensors, settings)
    posterior = ncl.OnlinePosterior(mixture(), made)
    with pytest.raises(FileError, match=said):
        posterior.update(sorted_task(), progress=False, checkpoint=path)
    assert posterior.tasks == ()


@pytest.mark.parametrize(
    "engine", [ncl.LaplaceNCL(steps=5, batch_size=64), ncl.LaplaceNCL(steps=5, batch_size=64, schedule=None)]
)
def test_a_site_that_is_sampled_for_some_examples_only_is_an_error_that_names_it(engine: ncl.LaplaceNCL) -> None:
    def model(x: Tensor, y: Tensor | None = None) -> Any:
        w = pyro.sample("w", dist.Normal(torch.zeros(4, 2), 1.0).to_event(2))
        logits = x @ w
        if bool((x[:, 0] > 0.5).any()):
            logits = logits + pyro.sample("rare", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    posterior = ncl.OnlinePosterior(model, engine)
    with pytest.raises(NCLError, match=r"'rare'.*in every call"):
        posterior.update(sorted_task(), progress=False)
    assert not posterior.blocks


def test_nobody_sees_the_signal() -> None:
    assert not issubclass(LatecomersError, NCLError)
