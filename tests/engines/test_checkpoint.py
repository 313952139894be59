"""An update that is killed goes on from its last snapshot, and ends bit for bit where it would have ended."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import nclbayes as ncl
from nclbayes.errors import FileError
from tests.engines.test_laplace import classification_task, classifier

ENGINES = {
    "laplace": "ncl.LaplaceNCL(steps=60, batch_size=16)",
    "fading": "ncl.LaplaceNCL(steps=60, batch_size=16, retention=0.8)",
    "variational": "ncl.VariationalNCL(steps=60, batch_size=16, particles=2, refresh_every=7, beta=0.3)",
}
SOURCES = {
    "tensors": "data",
    "loader": "DataLoader(TensorDataset(*data), batch_size=16, shuffle=True)",
    "sampler": "lambda count, g: tuple(t[torch.randint(60, (count,), generator=g)] for t in data)",
}

SCRIPT = """
    import os, signal, sys, torch
    torch.set_num_threads(1)
    from torch.utils.data import DataLoader, TensorDataset
    import nclbayes as ncl
    from tests.engines.test_laplace import classification_task, classifier

    kill_at, path, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    posterior = ncl.OnlinePosterior(classifier(), {engine}, generator=torch.Generator().manual_seed(3))
    posterior.update(classification_task(1), engine=ncl.LaplaceNCL(steps=10, batch_size=20))
    data = classification_task(7).train

    def kill(progress):
        if progress.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    task = ncl.Task({source}, name="second", size=60)
    checkpoint = None if path == "none" else path
    posterior.update(task, checkpoint=checkpoint, checkpoint_every=10, callbacks=[kill])
    posterior.save(out)
"""


@pytest.mark.parametrize(
    ("engine", "source"),
    [
        ("laplace", "tensors"),
        ("laplace", "loader"),
        ("fading", "tensors"),
        ("variational", "tensors"),
        ("variational", "sampler"),
    ],
)
def test_a_killed_update_goes_on_and_ends_in_the_same_posterior(tmp_path: Path, engine: str, source: str) -> None:
    script = textwrap.dedent(SCRIPT).format(engine=ENGINES[engine], source=SOURCES[source])

    def child(kill_at: int, checkpoint: Path | str, out: Path) -> int:
        command = [sys.executable, "-c", script, str(kill_at), str(checkpoint), str(out)]
        return subprocess.run(command, cwd=Path(__file__).parents[2], check=False).returncode

    assert child(0, "none", tmp_path / "whole") == 0
    assert child(37, tmp_path / "snapshot", tmp_path / "first") == -signal.SIGKILL
    assert (tmp_path / "snapshot").exists()
    assert not (tmp_path / "first").exists()
    assert child(52, tmp_path / "snapshot", tmp_path / "second") == -signal.SIGKILL
    assert child(0, tmp_path / "snapshot", tmp_path / "third") == 0
    assert not (tmp_path / "snapshot").exists()
    assert_same(tmp_path / "whole", tmp_path / "third")


ONE_AFTER_THE_OTHER = """
    import sys, torch
    from pathlib import Path
    torch.set_num_threads(1)
    import nclbayes as ncl
    from tests.engines.test_laplace import classification_task, classifier

    path, *seeds = sys.argv[1:]
    if Path(path).exists():
        posterior = ncl.OnlinePosterior.load(path, classifier())
    else:
        posterior = ncl.OnlinePosterior(classifier(), {engine}, generator=torch.Generator().manual_seed(3))
    for seed in seeds:
        posterior.update(classification_task(int(seed)))
    posterior.save(path)
"""


@pytest.mark.parametrize("engine", list(ENGINES))
def test_tasks_learnt_in_a_process_each_make_the_posterior_of_one_process(tmp_path: Path, engine: str) -> None:
    script = textwrap.dedent(ONE_AFTER_THE_OTHER).format(engine=ENGINES[engine])

    def learn(path: Path, *seeds: int) -> None:
        command = [sys.executable, "-c", script, str(path), *map(str, seeds)]
        subprocess.run(command, cwd=Path(__file__).parents[2], check=True)

    learn(tmp_path / "one", 1, 7)
    learn(tmp_path / "two", 1)
    learn(tmp_path / "two", 7)
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
        with pytest.raises(PermissionError, match=r"update\.ckpt"):
            posterior.update(task, checkpoint=path, checkpoint_every=2)
    assert posterior.tasks == ()
    posterior.update(task, checkpoint=path, checkpoint_every=2)
    assert not path.exists()
    other.update(task)
    for name, value in other.mean().items():
        assert torch.equal(value, posterior.mean()[name])
