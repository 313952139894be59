"""Factors that the ranks have together: the same posterior as if each had them all, and less to hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.errors import RankError, SettingError
from nclbayes.gaussians import Factors, ShardedState, State
from nclbayes.methods import FOOVB, KFAC
from nclbayes.storage import read_file, write_file
from tests.ranks.cases import SETTINGS, blobs, classifier, learner, tasks, tensors
from tests.ranks.group import failures, together
from tests.ranks.test_same_posterior import TOLERANCE

ENGINES: dict[str, Any] = {
    "laplace": ncl.LaplaceNCL(**SETTINGS),
    "variational": ncl.VariationalNCL(**SETTINGS),
    "adam": ncl.LaplaceNCL(steps_by="adam", lr=1e-3, **SETTINGS),
    "fixed": ncl.LaplaceNCL(**{**ncl.engines.PAPER, **SETTINGS}, retention=0.9, trust_radius=5.0),
    "kfac": KFAC(**SETTINGS),
    "foo-vb": FOOVB(**SETTINGS, init_scale=0.3),
}


def learnt(name: str, factors: str = "replicate") -> ncl.OnlinePosterior:
    posterior = learner(ENGINES[name], factors=factors)
    for task in tasks():
        posterior.update(task, progress=False)
    return posterior


def size(state: State) -> int:
    here = state.here()
    return 0 if here is None else sum(t.nbytes for name, t in here.tensors().items() if name != "loc")


def learn_sharded(rank: int, folder: Path, names: list[str]) -> None:
    """Each engine; what it comes to, what this rank holds of it, and all that a posterior is asked."""
    for name in names:
        posterior = learnt(name, "shard")
        states = [state for state in posterior.blocks.values() if isinstance(state, ShardedState)]
        assert len(states) == 2
        assert all("held by rank" in state.kind for state in states)
        held = {"own": sum(map(size, states)), "all": sum(size(state.whole()) for state in states)}
        (folder / f"held-{name}-{rank}").write_text(json.dumps(held))
        write_file(folder / f"{name}-{rank}", "tensors", tensors(posterior) | answers(posterior), {})
        posterior.save(folder / f"{name}.ncl")
        # Other tasks may be learnt with all factors everywhere.
        posterior.factors = "replicate"
        posterior.update(ncl.Task(blobs(3), name="task 3"), progress=False)
        assert not any(isinstance(state, ShardedState) for state in posterior.blocks.values())
        write_file(folder / f"third-{name}-{rank}", "tensors", tensors(posterior), {})


def answers(posterior: ncl.OnlinePosterior) -> dict[str, Tensor]:
    draw, x = torch.Generator().manual_seed(3), blobs(5)[0]
    weights = posterior.sample(2, generator=draw)
    found = {f"sample/{site}": value for site, value in weights.items()}
    found["log_prob"] = posterior.log_prob(weights)
    found["entropy"] = torch.tensor(posterior.entropy())
    found["samples"] = posterior.predict(x, num_samples=2, generator=draw).probs
    found["linearized"] = posterior.predict(x, method="linearized", generator=draw).probs
    found["guide"] = torch.tensor(sum(float(value.sum()) for value in seeded_guide(posterior).values()))
    return found


def seeded_guide(posterior: ncl.OnlinePosterior) -> dict[str, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return posterior.guide()


def close(found: dict[str, Tensor], alone: dict[str, Tensor], what: str) -> None:
    assert found.keys() == alone.keys()
    for part, tensor in alone.items():
        away = (tensor.double() - found[part].double()).norm() / tensor.double().norm().clamp(min=1e-30)
        # What is asked of a posterior, linearised above all, is a function of it that is less smooth than a step.
        assert float(away) < (TOLERANCE if "/" in part else 1e-4), (what, part, float(away))


def compare(names: list[str], tmp_path: Path) -> None:
    assert together(2, learn_sharded, tmp_path, names) == [0, 0], failures(tmp_path)
    for name in names:
        alone = learnt(name)
        held = [json.loads((tmp_path / f"held-{name}-{rank}").read_text()) for rank in range(2)]
        assert 0 < held[0]["own"] < held[0]["all"]
        assert held[0]["own"] + held[1]["own"] == held[0]["all"]
        found = [read_file(tmp_path / f"{name}-{rank}", "tensors")[0] for rank in range(2)]
        assert all(torch.equal(found[0][part], found[1][part]) for part in found[0])
        close(found[0], tensors(alone) | answers(alone), name)
        # One process goes on from the file, and comes to where the two go on to.
        loaded = ncl.OnlinePosterior.load(tmp_path / f"{name}.ncl", classifier())
        third = [read_file(tmp_path / f"third-{name}-{rank}", "tensors")[0] for rank in range(2)]
        assert all(torch.equal(third[0][part], third[1][part]) for part in third[0])
        loaded.update(ncl.Task(blobs(3), name="task 3"), progress=False)
        close(third[0], tensors(loaded), f"{name}, third task")


def test_it_is_the_posterior_of_one_process_and_each_holds_its_share(tmp_path: Path) -> None:
    compare(["laplace", "variational"], tmp_path)


@pytest.mark.slow
def test_so_it_is_with_other_settings_and_methods(tmp_path: Path) -> None:
    compare(["adam", "fixed", "kfac", "foo-vb"], tmp_path)


class Stop(Exception):
    """The update ends here."""


def interrupted(rank: int, folder: Path) -> None:
    def stop(progress: ncl.engines.Progress) -> None:
        if progress.step == 9:
            raise Stop

    # Its snapshots have factors too.
    posterior = learner(ENGINES["variational"], factors="shard")
    first, second = tasks()
    posterior.update(first, progress=False)
    snapshots: dict[str, Any] = {"checkpoint": folder / "update.ckpt", "checkpoint_every": 4, "progress": False}
    with pytest.raises(Stop):
        posterior.update(second, callbacks=[stop], **snapshots)
    assert posterior.tasks == ("task 1",)
    posterior.update(second, **snapshots)
    write_file(folder / f"found-{rank}", "tensors", tensors(posterior), {})


def test_an_interrupted_update_goes_on(tmp_path: Path) -> None:
    assert together(2, interrupted, tmp_path) == [0, 0], failures(tmp_path)
    close(read_file(tmp_path / "found-1", "tensors")[0], tensors(learnt("variational")), "resumed")


def failing(rank: int, folder: Path) -> None:
    posterior = learner(ENGINES["laplace"], factors="shard")
    first, second = tasks()
    posterior.update(first, progress=False)
    before = tensors(posterior)

    def fail(progress: ncl.engines.Progress) -> None:
        if rank == 1 and progress.step == 3:
            raise ValueError("no more")

    with pytest.raises(RankError, match="rank 1 failed with ValueError: no more"):
        posterior.update(second, callbacks=[fail], progress=False)
    after = tensors(posterior)
    assert all(torch.equal(before[part], after[part]) for part in before)
    # A file that cannot be written is an error on both.
    with pytest.raises(RankError, match="rank 0 failed with FileError"):
        posterior.save(folder / "no folder" / "posterior.ncl")
    posterior.update(second, progress=False)
    torch.distributed.destroy_process_group()
    # The mean needs nobody else; the factors are gone with the others.
    posterior.predict(blobs(5)[0])
    with pytest.raises(RankError, match="cannot reach the other processes"):
        posterior.sample(1)
    with pytest.raises(RankError, match="another process group"):
        posterior.update(second, progress=False)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'again'}", rank=rank, world_size=2)
    # Whoever leaves before the other is there breaks its connection.
    torch.distributed.barrier()


def test_a_failure_leaves_it_as_it_was_and_without_the_others_there_are_words(tmp_path: Path) -> None:
    assert together(2, failing, tmp_path) == [0, 0], failures(tmp_path)


def test_one_process_holds_all_factors_whatever_is_said() -> None:
    posterior = learnt("laplace", "shard")
    assert posterior.factors is Factors.SHARD
    assert not any(isinstance(state, ShardedState) for state in posterior.blocks.values())
    with pytest.raises(SettingError, match="factors must be 'replicate' or 'shard', not 'split'"):
        ncl.OnlinePosterior(ncl.BayesianNetwork(nn.Linear(2, 2), ncl.Categorical()), ncl.LaplaceNCL(), factors="split")
