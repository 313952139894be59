"""An update that is killed goes on from its last snapshot, and ends bit for bit where it would have ended."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import nclbayes as ncl
from nclbayes.errors import FileError
from tests.engines.test_laplace import classification_task, classifier
from tests.processes import run_apart

ENGINES = {
    "laplace": ncl.LaplaceNCL(steps=24, batch_size=16),
    "fading": ncl.LaplaceNCL(steps=24, batch_size=16, retention=0.8),
    "variational": ncl.VariationalNCL(steps=24, batch_size=16, particles=2, refresh_every=7, beta=0.3),
}


def source(kind: str, data: tuple[Tensor, ...]) -> Any:
    if kind == "loader":
        return DataLoader(TensorDataset(*data), batch_size=16, shuffle=True)
    if kind == "sampler":
        return lambda count, g: tuple(t[torch.randint(60, (count,), generator=g)] for t in data)
    return data


def learn_second(engine: str, kind: str, kill_at: int, checkpoint: Path | None, out: Path) -> None:
    """Learn two tasks, the second with snapshots; the process kills itself at one of its steps."""
    torch.set_num_threads(1)
    posterior = ncl.OnlinePosterior(classifier(), ENGINES[engine], generator=torch.Generator().manual_seed(3))
    posterior.update(classification_task(1), engine=ncl.LaplaceNCL(steps=4, batch_size=20, fisher_samples=1))

    def kill(progress: ncl.engines.Progress) -> None:
        if progress.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    task = ncl.Task(source(kind, classification_task(7).train), name="second", size=60)
    posterior.update(task, checkpoint=checkpoint, checkpoint_every=4, callbacks=[kill])
    posterior.save(out)


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        ("laplace", "tensors"),
        ("laplace", "loader"),
        ("fading", "tensors"),
        ("variational", "tensors"),
        ("variational", "sampler"),
    ],
)
def test_a_killed_update_goes_on_and_ends_in_the_same_posterior(tmp_path: Path, engine: str, kind: str) -> None:
    def child(kill_at: int, checkpoint: Path | None, out: Path) -> int:
        return run_apart(learn_second, engine, kind, kill_at, checkpoint, out)

    assert child(0, None, tmp_path / "whole") == 0
    assert child(15, tmp_path / "snapshot", tmp_path / "first") == -signal.SIGKILL
    assert (tmp_path / "snapshot").exists()
    assert not (tmp_path / "first").exists()
    assert child(21, tmp_path / "snapshot", tmp_path / "second") == -signal.SIGKILL
    assert child(0, tmp_path / "snapshot", tmp_path / "third") == 0
    assert not (tmp_path / "snapshot").exists()
    assert_same(tmp_path / "whole", tmp_path / "third")


def learn_on(path: Path, engine: str, *seeds: int) -> None:
    """Learn tasks, from the posterior of a file if it is there, and leave it there."""
    torch.set_num_threads(1)
    if path.exists():
        posterior = ncl.OnlinePosterior.load(path, classifier())
    else:
        posterior = ncl.OnlinePosterior(classifier(), ENGINES[engine], generator=torch.Generator().manual_seed(3))
    for seed in seeds:
        posterior.update(classification_task(seed))
    posterior.save(path)


@pytest.mark.parametrize("engine", list(ENGINES))
def test_tasks_learnt_in_a_process_each_make_the_posterior_of_one_process(tmp_path: Path, engine: str) -> None:
    assert run_apart(learn_on, tmp_path / "one", engine, 1, 7) == 0
    assert run_apart(learn_on, tmp_path / "two", engine, 1) == 0
    assert run_apart(learn_on, tmp_path / "two", engine, 7) == 0
    assert_same(tmp_path / "one", tmp_path / "two")


def assert_same(*paths: Path) -> None:
    """Bit for bit, in two files."""
    first, second = (ncl.OnlinePosterior.load(path, classifier()) for path in paths)
    assert first.tasks == second.tasks
    for name, state in first.blocks.items():
        assert torch.equal(state.loc, second.blocks[name].loc)
        assert torch.equal(state.precision.input, second.blocks[name].precision.input)
        assert torch.equal(state.precision.output, second.blocks[name].precision.output)
    assert torch.equal(first.generator.get_state(), second.generator.get_state())


class Stop(Exception):
    pass


def interrupted(path: Path) -> ncl.OnlinePosterior:
    def stop(progress: ncl.engines.Progress) -> None:
        if progress.step == 25:
            raise Stop

    posterior = ncl.OnlinePosterior(classifier(), ncl.LaplaceNCL(steps=40, batch_size=20))
    with pytest.raises(Stop):
        posterior.update(classification_task(1), checkpoint=path, checkpoint_every=10, callbacks=[stop])
    return posterior


def test_losses_are_kept_over_an_interruption(tmp_path: Path) -> None:
    posterior = interrupted(tmp_path / "c")
    posterior.generator.manual_seed(0)
    report = posterior.update(classification_task(1), checkpoint=tmp_path / "c")
    assert report.steps == len(report.losses) == 40


def test_a_checkpoint_of_another_update_is_refused(tmp_path: Path) -> None:
    posterior = interrupted(tmp_path / "c")
    with pytest.raises(FileError, match="checkpoint of another update"):
        posterior.update(classification_task(2), checkpoint=tmp_path / "c")
    with pytest.raises(FileError, match="checkpoint of another update"):
        posterior.update(classification_task(1), engine=ncl.LaplaceNCL(steps=41), checkpoint=tmp_path / "c")
    with pytest.raises(FileError, match="holds a checkpoint, not a posterior"):
        ncl.OnlinePosterior.load(tmp_path / "c", classifier())
    assert not posterior.blocks


@pytest.mark.parametrize("change", ["network", "generator", "labels"])
def test_a_checkpoint_from_another_start_is_refused(tmp_path: Path, change: str) -> None:
    interrupted(tmp_path / "c")
    model = classifier(seed=1) if change == "network" else classifier()
    generator = torch.Generator().manual_seed(1 if change == "generator" else 0)
    posterior = ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=40, batch_size=16), generator=generator)
    x, y = classification_task(1).train
    task = ncl.Task((x, 2 - y if change == "labels" else y), name=classification_task(1).name)
    with pytest.raises(FileError, match="checkpoint of another update"):
        posterior.update(task, checkpoint=tmp_path / "c")


def test_an_update_that_had_stopped_early_takes_no_further_step(tmp_path: Path) -> None:
    engine = ncl.LaplaceNCL(steps=40, batch_size=60, lr=1e-9, patience=5)
    whole = ncl.OnlinePosterior(classifier(), engine).update(classification_task(1))
    assert whole.steps == 6

    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    posterior = ncl.OnlinePosterior(classifier(), engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nclbayes.engines.laplace.task_fisher", stop)
        with pytest.raises(Stop):
            posterior.update(classification_task(1), checkpoint=tmp_path / "c", checkpoint_every=6)
    assert posterior.update(classification_task(1), checkpoint=tmp_path / "c").steps == 6


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c"
    posterior = interrupted(path)
    good = path.read_bytes()
    path.write_bytes(good[: len(good) // 2])
    with pytest.raises(FileError, match="truncated"):
        posterior.update(classification_task(1), checkpoint=path)
    flipped = bytearray(good)
    flipped[-9] ^= 1
    path.write_bytes(bytes(flipped))
    with pytest.raises(FileError, match="damaged"):
        posterior.update(classification_task(1), checkpoint=path)


def test_a_checkpoint_that_cannot_be_removed_leaves_the_posterior_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resist(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(f"cannot remove {path}")

    posterior, other = (ncl.OnlinePosterior(classifier(), ncl.LaplaceNCL(steps=6, batch_size=20)) for _ in range(2))
    path = tmp_path / "update.ckpt"
    task = classification_task()
    with monkeypatch.context() as patched:
        patched.setattr("nclbayes.engines.checkpoint.Path.unlink", resist)
        with pytest.raises(FileError, match=r"update\.ckpt' cannot be removed"):
            posterior.update(task, checkpoint=path, checkpoint_every=2)
    assert posterior.tasks == ()
    posterior.update(task, checkpoint=path, checkpoint_every=2)
    assert not path.exists()
    other.update(task)
    for name, value in other.mean().items():
        assert torch.equal(value, posterior.mean()[name])
