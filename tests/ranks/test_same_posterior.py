"""However many processes learn together, they come to the same posterior, and each does its share of the work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import nclbayes as ncl
from nclbayes.methods import METHODS
from nclbayes.storage import read_file, write_file
from tests.ranks.cases import CASES, classifier, learn, learn_all, learner, network, tasks, tensors
from tests.ranks.group import failures, together

# Sums over examples are rounded in another order, in single precision: 1e-7 of each, which steps and inverses of small
# matrices let grow. What another draw, or an example more or less, would change is 1e-2 and more.
TOLERANCE = 1e-5
# Of wide maps that are held by few examples: one process that splits its batches in two differs by 1.3e-5 from itself.
WIDE_TOLERANCE = 1e-4
SHORT = ["laplace", "variational", "sequences", "images", "heads", "experts", "stacked", "counts"]
SHORT += ["ewc", "owm", "replay", "wide laplace", "parts", "parts, variational"]


def compare(count: int, names: list[str], folder: Path) -> None:
    assert together(count, learn_all, folder, names) == [0] * count, failures(folder)
    for name in names:
        alone = tensors(learn(name))
        found = [read_file(folder / f"{name}-{rank}", "tensors")[0] for rank in range(count)]
        for other in found:
            assert other.keys() == alone.keys()
            for part, tensor in other.items():
                assert torch.equal(tensor, found[0][part]), (name, part)
        assert torch.equal(found[0]["generator"], alone["generator"]), name
        for part, tensor in alone.items():
            away = (tensor.double() - found[0][part].double()).norm() / tensor.double().norm().clamp(min=1e-30)
            assert float(away) < (WIDE_TOLERANCE if "wide" in name else TOLERANCE), (name, part, float(away))


def test_two_processes_come_to_the_posterior_of_one(tmp_path: Path) -> None:
    compare(2, SHORT, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 4])
def test_so_do_more(count: int, tmp_path: Path) -> None:
    compare(count, SHORT, tmp_path)


@pytest.mark.slow
def test_so_does_every_method_and_every_source(tmp_path: Path) -> None:
    names = [name for name in CASES if name not in SHORT]
    assert set(METHODS) <= {*names, *SHORT}
    compare(2, names, tmp_path)


class Counting(torch.nn.Module):
    """A network that counts the examples that go through it."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = network(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.net(x)


def count(engine: ncl.LaplaceNCL | ncl.VariationalNCL) -> int:
    net = Counting()
    posterior = learner(engine, classifier(net))
    for task in tasks():
        posterior.update(task, progress=False)
    return net.seen


ENGINES = {
    "laplace": ncl.LaplaceNCL(steps=60, batch_size=24, stiffness=50.0),
    "variational": ncl.VariationalNCL(steps=60, batch_size=24, stiffness=50.0),
}


def count_all(rank: int, folder: Path) -> None:
    for name, engine in ENGINES.items():
        write_file(folder / f"{name}-{rank}", "counts", {"seen": torch.tensor(count(engine))}, {})


def test_each_runs_its_share_of_the_examples_and_no_more(tmp_path: Path) -> None:
    assert together(2, count_all, tmp_path) == [0, 0], failures(tmp_path)
    for name, engine in ENGINES.items():
        alone = count(engine)
        shares = [int(read_file(tmp_path / f"{name}-{rank}", "counts")[0]["seen"]) for rank in range(2)]
        # Before the first step a few examples show every rank what the model is like.
        assert max(shares) < 0.56 * alone, (name, shares, alone)
        assert alone <= sum(shares) < 1.12 * alone, (name, shares, alone)
