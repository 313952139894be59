"""Snapshots under a right seal that no update can have left: refused, and the posterior stays as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import nclbayes as ncl
from nclbayes.methods import EWC, VCL, PlainTraining
from nclbayes.storage import read_file, write_file
from tests.engines.paper import laplace
from tests.storage.hostile import objection, variants, with_value
from tests.storage.small import model, task

ENGINES = {
    "laplace": ncl.LaplaceNCL(steps=8, batch_size=4),
    "variational": ncl.VariationalNCL(steps=8, batch_size=4),
    "adam": EWC(steps=8, batch_size=4),
    "vcl": VCL(steps=8, batch_size=4),
    "plain": PlainTraining(steps=8, batch_size=4),
}


Crafted = tuple[str, dict[str, Tensor], Any]


class Stop(Exception):
    pass


def stop(progress: ncl.engines.Progress) -> None:
    if progress.step == 5:
        raise Stop


def odd_places(tensors: dict[str, Tensor], settings: dict[str, Any]) -> Iterator[Crafted]:
    """What is said beside the tensors, which is the same for every engine."""
    for where, wrong in variants(settings):
        if where and where[0] != "identity":
            yield f"{where} {str(wrong)[:20]}", tensors, with_value(settings, where, wrong)
    place = settings["place"]
    wrong_numbers = ({"halvings": -1}, {"halvings": 9}, {"misses": -1}, {"misses": 3}, {"learnt": 9}, {"learnt": -1})
    for changes in (
        *({"step": 0}, {"step": 3}, {"step": 8}, {"step": -4}, {"best_step": 9}, {"seconds": -1.0}),
        *wrong_numbers,
    ):
        yield f"{changes}", tensors, {**settings, "place": {**place, **changes}}
    yield "more losses", tensors, {**settings, "place": {**place, "losses": [*place["losses"], 1.0]}}
    yield "a field too many", tensors, {**settings, "surprise": 1}


def odd_tensors(tensors: dict[str, Tensor], settings: dict[str, Any]) -> Iterator[Crafted]:
    def changed(name: str, what: str, change: Callable[[Tensor], Tensor]) -> tuple[str, dict[str, Tensor], Any]:
        return f"{name} {what}", {**tensors, name: change(tensors[name].clone())}, settings

    for name, tensor in tensors.items():
        if not tensor.numel():
            continue
        yield f"{name} missing", {k: t for k, t in tensors.items() if k != name}, settings
        yield changed(name, "longer", lambda t: torch.cat([t.reshape(-1), t.reshape(-1)[:1], t.reshape(-1)[:1]]))
        yield changed(name, "in another dtype", lambda t: t.to(torch.int16))
        if tensor.is_floating_point():
            for bad in (torch.nan, torch.inf):
                yield changed(name, f"with {bad}", lambda t, bad=bad: torch.full_like(t, bad))
        elif tensor.dtype is torch.int64:
            yield changed(name, "below zero", lambda t: -t - 1)
            yield changed(name, "far away", lambda t: t + 10**15)
    yield "a tensor too many", {**tensors, "stepper.more": torch.zeros(1)}, settings
    yield "a place too many", {**tensors, "batches.7.position": torch.tensor(1)}, settings
    yield "a loader's generator", {**tensors, "batches.loader": torch.Generator().get_state()}, settings
    for name in ("generator", "noise", "batches.epoch"):
        yield changed(name, "of zeros", torch.zeros_like)


@pytest.mark.parametrize(
    ("name", "crafted"),
    [
        ("laplace", odd_places),
        *(pytest.param(name, odd_places, marks=pytest.mark.exhaustive) for name in ENGINES if name != "laplace"),
        *((name, odd_tensors) for name in ENGINES),
    ],
)
def test_crafted_checkpoints_are_refused(tmp_path: Path, name: str, crafted: Callable[..., Iterator[Crafted]]) -> None:
    path, engine = tmp_path / "c", ENGINES[name]
    posterior = ncl.OnlinePosterior(model(), engine)
    settings: dict[str, Any] = {"checkpoint": path, "checkpoint_every": 4, "progress": False}
    with pytest.raises(Stop):
        posterior.update(task(), callbacks=[stop], **settings)
    good = read_file(path, "checkpoint")
    before = posterior.generator.get_state()
    count, wrong = 0, []
    for what, tensors, said in crafted(*good):
        # A likelihood need not depend on every block; and one count is as good as another.
        if what in ("stepper.fisher.diagonal.gain missing", "stepper.taken far away"):
            continue
        count += 1

        def taken_up(tensors: dict[str, Tensor] = tensors, said: Any = said) -> None:
            write_file(path, "checkpoint", tensors, said)
            posterior.update(task(), **settings)

        if found := objection(path, taken_up):
            wrong.append(f"{what}: {found}")
        if posterior.tasks or not torch.equal(posterior.generator.get_state(), before):
            wrong.append(f"{what}: the posterior has changed")
    assert wrong == []
    assert count > 40
    write_file(path, "checkpoint", *good)
    assert posterior.update(task(), **settings).steps == 8
    whole = ncl.OnlinePosterior(model(), engine)
    whole.update(task(), progress=False)
    assert all(torch.equal(value, posterior.mean()[site]) for site, value in whole.mean().items())


def test_errors_of_a_data_set_pass_while_a_place_is_sought(tmp_path: Path) -> None:
    class Failing(TensorDataset):
        fails = False

        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            if self.fails:
                raise KeyError("mine")
            return super().__getitem__(index)

    data = Failing(*task().train)
    source = ncl.Task(DataLoader(data, batch_size=4, shuffle=True), name="loaded")
    posterior = ncl.OnlinePosterior(model(), ENGINES["laplace"])
    with pytest.raises(Stop):
        posterior.update(source, checkpoint=tmp_path / "c", checkpoint_every=4, callbacks=[stop])
    Failing.fails = True
    with pytest.raises(KeyError, match="mine"):
        posterior.update(source, checkpoint=tmp_path / "c")


def test_numbers_that_are_not_finite_are_not_kept(tmp_path: Path) -> None:
    """The next step says what went wrong; a snapshot of it could not be taken up."""
    engine = laplace(steps=8, batch_size=4, lr=1e30)
    with pytest.raises(ncl.errors.NonFiniteError):
        ncl.OnlinePosterior(model(), engine).update(task(), checkpoint=tmp_path / "c", checkpoint_every=1)
    if (tmp_path / "c").exists():
        tensors, _ = read_file(tmp_path / "c", "checkpoint")
        assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
