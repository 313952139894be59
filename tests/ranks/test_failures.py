"""What goes wrong on one rank goes wrong on all of them, in words, and changes nothing."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import nclbayes as ncl
from nclbayes.errors import DataError, NCLError, RankError
from nclbayes.experiments import RunConfig, run
from nclbayes.posterior import updating
from nclbayes.ranks import Ranks, present
from nclbayes.storage import read_file, write_file
from tests.processes import heed_interrupts
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


class Shift(torch.nn.Module):
    """Adds a buffer that is not the same everywhere."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.register_buffer("by", torch.tensor([float(by), 0.0, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


def at_step(step: int, then: Callable[[], None]) -> Callable[[Any], None]:
    return lambda progress: then() if progress.step == step else None


def _no_room(cat: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A `torch.cat` that has no memory left where ranks lay their tensors end to end, once."""

    def failing(*args: Any, **kwargs: Any) -> Tensor:
        # Until Python 3.12 a comprehension has a frame of its own.
        if Ranks.sum.__code__ in (sys._getframe(1).f_code, sys._getframe(2).f_code):
            torch.cat = cat
            raise torch.OutOfMemoryError("no memory is left")
        return cat(*args, **kwargs)

    return failing


def _fail_in_the_end() -> None:
    """Have the check of what was learnt fail, once, after the other rank is through with it."""
    check = updating.check_outcome

    def failing(*args: Any) -> None:
        updating.check_outcome = check
        time.sleep(0.5)
        raise torch.OutOfMemoryError("no memory is left")

    updating.check_outcome = failing


def _go_wrong(what: str, rank: int, folder: Path) -> Any:
    """The second update of a posterior, with something wrong on rank 1."""
    is_wrong, (first, second) = rank == 1, tasks()
    posterior, call = learner(ncl.LaplaceNCL(**SETTINGS)), dict[str, Any]()
    # A snapshot must outlive whatever goes wrong.
    call["checkpoint"], call["checkpoint_every"] = folder / f"{what}.ckpt", 3
    if what == "callback":
        call["callbacks"] = [Raising(OSError("the disk is full"))] if is_wrong else []
    elif what == "interrupt":
        call["callbacks"] = [Raising(KeyboardInterrupt())] if is_wrong else []
    elif what == "memory":
        call["callbacks"] = [Raising(torch.OutOfMemoryError("no memory is left"))] if is_wrong else []
    elif what == "room" and is_wrong:
        call["callbacks"] = [at_step(5, lambda: setattr(torch, "cat", _no_room(torch.cat)))]
    elif what == "end" and is_wrong:
        call["callbacks"] = [at_step(5, _fail_in_the_end)]
    elif what == "argument" and is_wrong:
        call["progress"] = "yes"
    elif what == "inputs" and is_wrong:
        # The first examples are alike, and so are all targets.
        x, y = blobs(2)
        second = ncl.Task((torch.cat([x[:20], x[20:] + 1]), y), name="task 2")
    elif what == "buffers":
        posterior = learner(
            ncl.LaplaceNCL(**SETTINGS), classifier(torch.nn.Sequential(torch.nn.Linear(5, 3), Shift(rank)))
        )
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
GO_ON = ("callback", "shard", "room", "argument")


def fail(rank: int, folder: Path, what: str) -> None:
    posterior, first, second, call = _go_wrong(what, rank, folder)
    said = "nothing"
    try:
        posterior.update(first, progress=False)
        before = tensors(posterior)
        posterior.update(second, **{"progress": False, **call})
    except NCLError as error:
        said = f"{type(error).__name__}: {error}"
    except KeyboardInterrupt:
        said = "KeyboardInterrupt"
    is_same = what in ("model", "posterior", "factors", "buffers") or all(
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
    "room": ["RankError", "rank 1 failed with OutOfMemoryError: no memory is left"],
    "end": ["RankError", "rank 1 failed with OutOfMemoryError: no memory is left"],
    "argument": ["RankError", "A call of update is given up", "rank 1 failed with SettingError", "progress must be"],
    "inputs": ["RankError", "out of step", "a batch of 22 examples with the checksum"],
    "buffers": ["RankError", "their weights"],
    "data": ["RankError", "rank 1 failed with NonFiniteError"],
    "shard": ["RankError", " failed with NonFiniteError: NaN or infinity in the inputs", "at step 1"],
    "task": ["RankError", "their task (rank 0: ['task 2', 61, 1], rank 1: ['another', 61, 1])"],
    "settings": ["RankError", "They differ in their engine.steps (rank 0: 12, rank 1: 13). Every rank"],
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
    for what in ("callback", "interrupt", "memory", "room", "end"):
        assert (tmp_path / f"{what}.ckpt").exists(), what
    for what in GO_ON:
        after = [read_file(tmp_path / f"{what}-after-{rank}", "tensors")[0] for rank in range(2)]
        assert all(torch.equal(tensor, after[1][name]) for name, tensor in after[0].items())


def press(rank: int, folder: Path, who: str) -> None:
    """Press Ctrl-C at odd moments, on one rank or on both at once, and learn again after it."""
    heed_interrupts()
    # A step takes less than a millisecond: mostly the ranks are somewhere in an exchange.
    posterior, (first, second) = learner(ncl.LaplaceNCL(**{**SETTINGS, "steps": 1_000_000, "enough": None})), tasks()
    posterior.update(first, engine=ncl.LaplaceNCL(**SETTINGS), progress=False)
    before = tensors(posterior)
    for trial in range(6):
        draw, said = Random(trial), list[str]()
        delay, hit = draw.uniform(0.05, 0.25), draw.randrange(2)
        torch.distributed.barrier()
        is_hit = who == "both" or rank == hit
        if is_hit:
            threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        started = time.monotonic()
        try:
            try:
                posterior.update(second, progress=False)
            except RankError as error:
                said.append(str(error))
            # Its own may come when the other's has ended the update.
            time.sleep(1.0 if is_hit else 0.0)
        except KeyboardInterrupt:
            said.append("KeyboardInterrupt")
        assert time.monotonic() - started < 15, said
        assert ("KeyboardInterrupt" in said) is is_hit, said
        assert is_hit or f"rank {hit} failed with KeyboardInterrupt" in said[0]
        assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(posterior).items())
    posterior.update(second, engine=ncl.LaplaceNCL(**SETTINGS), progress=False)
    assert len(posterior.tasks) == 2


@pytest.mark.parametrize("who", ["one", "both"])
def test_ctrl_c_at_any_moment_ends_the_update_on_all_ranks(who: str, tmp_path: Path) -> None:
    assert together(2, press, tmp_path, who, seconds=20.0) == [0, 0], failures(tmp_path)


def run_interrupted(rank: int, folder: Path) -> None:
    """A run is a transaction around that of each update."""
    config = RunConfig.of("split-digits", "laplace-ncl", "domain", tasks=2, settings={"steps": 12})

    def press(progress: Any) -> None:
        if rank == 1 and progress.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt if rank == 1 else RankError, match="" if rank == 1 else "KeyboardInterrupt"):
        run(config, folder / "run", progress=False, callbacks=[press])
    posterior = learner(ncl.LaplaceNCL(**SETTINGS))
    posterior.update(tasks()[0], progress=False)


def test_an_interrupt_passes_transactions_that_lie_one_in_the_other(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    assert together(2, run_interrupted, tmp_path, seconds=20.0) == [0, 0], failures(tmp_path)


def retry(rank: int, folder: Path) -> None:
    """Learn again where an error is still being handled, and fail again."""
    posterior, said = learner(ncl.LaplaceNCL(**SETTINGS)), list[str]()
    try:
        posterior.update(tasks()[0], progress=False, callbacks=[Raising(OSError("once"))] if rank == 1 else [])
    except RankError as error:
        said.append(str(error))
        try:
            posterior.update(tasks()[0], progress=False, callbacks=[Raising(OSError("twice"))] if rank == 1 else [])
        except RankError as another:
            said.append(str(another))
            posterior.update(tasks()[0], progress=False)
    for word, text in zip(("once", "twice"), said, strict=True):
        assert f"rank 1 failed with OSError: {word}" in text
    assert len(posterior.tasks) == 1


def test_an_update_may_be_called_where_the_error_of_another_is_handled(tmp_path: Path) -> None:
    assert together(2, retry, tmp_path, seconds=15.0) == [0, 0], failures(tmp_path)


def evaluate_oddly(rank: int, folder: Path) -> None:
    posterior, (first, _) = learner(ncl.LaplaceNCL(**SETTINGS)), tasks()
    posterior.update(first, progress=False)
    x, y = first.test
    data = TensorDataset(x, y)
    own = DataLoader(data, batch_size=11, sampler=DistributedSampler(data))
    with pytest.raises(DataError, match=r"The test loader of task 'own' has a DistributedSampler"):
        ncl.evaluate(posterior, ncl.Task((x, y), own, name="own"))
    other = DataLoader(data, batch_size=11, shuffle=True, generator=torch.Generator().manual_seed(rank))
    with pytest.raises(RankError, match=r"out of step.*a test batch of task 'other'"):
        ncl.evaluate(posterior, ncl.Task((x, y), other, name="other"))
    scores = {
        "few": ncl.evaluate(posterior, ncl.Task((x, y), (x[:2], y[:2]), name="few")),
        "single": ncl.evaluate(posterior, first, batch_size=2),
        "linearized": ncl.evaluate(posterior, first, method="linearized", generator=posterior.generator),
        "samples": ncl.evaluate(posterior, first, num_samples=3, generator=posterior.generator),
    }
    posterior.update(tasks()[1], progress=False)
    found = {name: [score.accuracy, score.loss, float(score.examples)] for name, (score,) in scores.items()}
    (folder / f"scores-{rank}").write_text(json.dumps(found))


def test_test_data_are_the_same_on_all_ranks_and_so_are_scores(tmp_path: Path) -> None:
    assert together(3, evaluate_oddly, tmp_path, seconds=20.0) == [0, 0, 0], failures(tmp_path)
    all_found = [json.loads((tmp_path / f"scores-{rank}").read_text()) for rank in range(3)]
    assert all_found[1] == all_found[0]
    assert all_found[2] == all_found[0]
    posterior, (first, _) = learner(ncl.LaplaceNCL(**SETTINGS)), tasks()
    posterior.update(first, progress=False)
    for name, how in {"single": {}, "linearized": {"method": "linearized"}, "samples": {"num_samples": 3}}.items():
        (score,) = ncl.evaluate(posterior, first, **how, generator=posterior.generator if how else None)
        assert all_found[0][name] == pytest.approx([score.accuracy, score.loss, score.examples], rel=1e-5), name


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
