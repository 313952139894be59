"""What goes wrong on one rank goes wrong on all of them, in words, and changes nothing."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import nclbayes as ncl
from nclbayes.errors import NCLError, RankError
from nclbayes.ranks import present
from nclbayes.storage import read_file, write_file
from tests.ranks.cases import SETTINGS, blobs, classifier, learner, tasks, tensors
from tests.ranks.group import failures, together


class Raising:
    """A callback that raises at a step."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, progress: Any) -> None:
        if progress.step == 5:
            raise self.error


def _nan_task() -> ncl.Task:
    """Every batch has all examples, of which one rank gets the bad one."""
    x, y = blobs(2)
    x[-1] = torch.nan
    return ncl.Task((x, y), name="task 2")


class Drifting(Sampler[int]):
    """The same examples first on all ranks, and others then."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        yield from range(11)
        yield from (11 + (k + self.rank) % 50 for k in range(50))

    def __len__(self) -> int:
        return 61


def _go_wrong(what: str, rank: int) -> Any:
    """The second update of a posterior, with something wrong on rank 1."""
    is_wrong, (first, second) = rank == 1, tasks()
    posterior, call = learner(ncl.LaplaceNCL(**SETTINGS)), dict[str, Any]()
    if what == "callback":
        call["callbacks"] = [Raising(OSError("the disk is full"))] if is_wrong else []
    elif what == "interrupt":
        call["callbacks"] = [Raising(KeyboardInterrupt())] if is_wrong else []
    elif what == "memory":
        call["callbacks"] = [Raising(torch.OutOfMemoryError("no memory is left"))] if is_wrong else []
    elif what == "data" and is_wrong:
        second = ncl.Task((torch.full((61, 5), torch.nan), blobs(2)[1]), name="task 2")
    elif what == "task" and is_wrong:
        second = ncl.Task(blobs(3), name="another")
    elif what == "settings" and is_wrong:
        call["engine"] = ncl.LaplaceNCL(**{**SETTINGS, "steps": 13})
    elif what == "model" and is_wrong:
        posterior = learner(ncl.LaplaceNCL(**SETTINGS), classifier(torch.nn.Linear(5, 3)))
    elif what == "factors":
        posterior.factors = "shard" if is_wrong else "replicate"
    elif what == "posterior" and is_wrong:
        posterior.generator.manual_seed(5)
    elif what == "shard":
        second = _nan_task()
        call["engine"] = ncl.LaplaceNCL(**{**SETTINGS, "batch_size": 61})
    elif what == "sampler":
        data = TensorDataset(*blobs(2))
        loader = DataLoader(data, batch_size=11, sampler=DistributedSampler(data))
        second = ncl.Task(loader, name="task 2", size=61)
    elif what == "drifting":
        loader = DataLoader(TensorDataset(*blobs(2)), batch_size=11, sampler=Drifting(rank))
        second = ncl.Task(loader, name="task 2")
    elif what == "shuffling":
        data, own = TensorDataset(*blobs(2)), torch.Generator().manual_seed(rank)
        second = ncl.Task(DataLoader(data, batch_size=11, shuffle=True, generator=own), name="task 2")
    return posterior, first, second, call


# After which the same posterior learns the right task.
GO_ON = ("callback", "shard")


def fail(rank: int, folder: Path, what: str) -> None:
    posterior, first, second, call = _go_wrong(what, rank)
    said = "nothing"
    try:
        posterior.update(first, progress=False)
        before = tensors(posterior)
        posterior.update(second, progress=False, **call)
    except NCLError as error:
        said = f"{type(error).__name__}: {error}"
    except KeyboardInterrupt:
        said = "KeyboardInterrupt"
    is_same = what in ("model", "posterior", "factors") or all(
        torch.equal(tensor, before[name]) for name, tensor in tensors(posterior).items()
    )
    (folder / f"{what}-{rank}").write_text(json.dumps({"said": said, "same": is_same}))
    if what in GO_ON:
        posterior.update(tasks()[1], progress=False)
        write_file(folder / f"{what}-after-{rank}", "tensors", tensors(posterior), {})


WRONG: dict[str, list[str]] = {
    "callback": ["RankError", "rank 1 failed with OSError: the disk is full"],
    "interrupt": ["RankError", "rank 1 failed with KeyboardInterrupt"],
    "memory": ["RankError", "rank 1 failed with OutOfMemoryError: no memory is left"],
    "data": ["RankError", "rank 1 failed with NonFiniteError"],
    "shard": ["RankError", " failed with NonFiniteError: NaN or infinity in the inputs", "at step 1"],
    "task": ["RankError", "their task (rank 0: ['task 2', 61, 1], rank 1: ['another', 61, 1])"],
    "settings": ["RankError", "their engine"],
    "model": ["RankError", "their model"],
    "posterior": ["RankError", "their generator"],
    "factors": ["RankError", "their place of factors (rank 0: replicate, rank 1: shard)"],
    "sampler": ["DataError", "has a DistributedSampler"],
    "shuffling": ["RankError", "their first examples"],
    "drifting": ["RankError", "out of step", "a batch of 11 examples with the checksum"],
}
"""What goes wrong, and what is said of it."""


def fail_all(rank: int, folder: Path) -> None:
    """One after the other, in one group: after each it is in step again."""
    for what in WRONG:
        fail(rank, folder, what)


def test_every_rank_says_which_rank_failed_and_why(tmp_path: Path) -> None:
    assert together(2, fail_all, tmp_path) == [0, 0], failures(tmp_path)
    for what, words in WRONG.items():
        for rank in range(2):
            found = json.loads((tmp_path / f"{what}-{rank}").read_text())
            is_interrupted = (what, rank) == ("interrupt", 1)
            expected = ["KeyboardInterrupt"] if is_interrupted else words
            assert all(word in found["said"] for word in expected), (what, found["said"])
            assert found["same"], what
    for what in GO_ON:
        after = [read_file(tmp_path / f"{what}-after-{rank}", "tensors")[0] for rank in range(2)]
        assert all(torch.equal(tensor, after[1][name]) for name, tensor in after[0].items())


def die(rank: int, folder: Path) -> None:
    posterior, (first, second) = learner(ncl.LaplaceNCL(**SETTINGS)), tasks()
    posterior.update(first, progress=False)
    before = tensors(posterior)

    def killed(progress: Any) -> None:
        if rank == 1 and progress.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    started = time.monotonic()
    try:
        posterior.update(second, progress=False, callbacks=[killed])
    except NCLError as error:
        is_same = all(torch.equal(tensor, before[name]) for name, tensor in tensors(posterior).items())
        seconds = time.monotonic() - started
        (folder / f"said-{rank}").write_text(json.dumps({"said": str(error), "same": is_same, "seconds": seconds}))


def test_a_rank_that_is_killed_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    codes = together(3, die, tmp_path, seconds=20.0)
    assert codes[1] == -signal.SIGKILL
    for rank in (0, 2):
        found = json.loads((tmp_path / f"said-{rank}").read_text())
        assert "cannot reach the other processes any more" in found["said"]
        assert found["same"]
        assert found["seconds"] < 30


class Stop(Exception):
    pass


ENGINES = {"laplace": ncl.LaplaceNCL(**SETTINGS), "variational": ncl.VariationalNCL(**SETTINGS)}


def interrupted(rank: int, folder: Path, stops: bool) -> None:
    """Learn a second task with each engine, from a checkpoint, or to the middle of it."""

    def stop(progress: Any) -> None:
        if progress.step == 9:
            raise Stop

    for name in ENGINES:
        posterior = ncl.OnlinePosterior.load(folder / f"{name}-first", classifier())
        where: dict[str, Any] = {"checkpoint": folder / f"{name}-checkpoint", "checkpoint_every": 4}
        with pytest.raises(Stop) if stops else nullcontext():
            posterior.update(tasks()[1], progress=False, callbacks=[stop] if stops else [], **where)
        write_file(folder / f"{name}-{rank}", "tensors", tensors(posterior), {})


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), pytest.param(2, 3, marks=pytest.mark.slow)])
def test_an_update_goes_on_with_another_number_of_processes(before: int, after: int, tmp_path: Path) -> None:
    def run(count: int, stops: bool) -> None:
        if count == 1:
            interrupted(0, tmp_path, stops)
        else:
            codes = together(count, interrupted, tmp_path, stops)
            (tmp_path / "meeting").unlink(missing_ok=True)
            assert codes == [0] * count, failures(tmp_path)

    def found(name: str, rank: int) -> dict[str, Tensor]:
        return read_file(tmp_path / f"{name}-{rank}", "tensors")[0]

    for name, engine in ENGINES.items():
        first = learner(engine)
        first.update(tasks()[0], progress=False)
        first.save(tmp_path / f"{name}-first")
    run(1, stops=False)
    alone = {name: found(name, 0) for name in ENGINES}
    run(before, stops=True)
    assert all((tmp_path / f"{name}-checkpoint").exists() for name in ENGINES)
    run(after, stops=False)
    for name in ENGINES:
        assert not (tmp_path / f"{name}-checkpoint").exists()
        for rank in range(after):
            for part, tensor in alone[name].items():
                other = found(name, rank)[part].double()
                away = (tensor.double() - other).norm() / tensor.double().norm().clamp(min=1e-30)
                assert float(away) < 1e-5, (name, part, float(away))


def test_a_group_of_one_is_told_so(tmp_path: Path) -> None:
    assert together(1, warned, tmp_path) == [0], failures(tmp_path)


def warned(rank: int, folder: Path) -> None:
    posterior = learner(ncl.LaplaceNCL(**SETTINGS))
    with pytest.warns(UserWarning, match="The process group has one process"):
        posterior.update(tasks()[0], progress=False)
    assert len(posterior.tasks) == 1


def test_a_backend_of_gpus_is_not_for_a_posterior_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    with pytest.raises(RankError, match=r"backend is nccl.*the posterior is on the cpu: move it.*'gloo'"):
        present(torch.device("cpu"))
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    assert (present(torch.device("cpu")).rank, present().count) == (1, 2)
