"""Files under a right seal that hold what no posterior can be: each is refused, in words, with the file's name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nclbayes as ncl
from nclbayes.errors import FileError
from nclbayes.methods import CoresetLearner
from nclbayes.storage import read_file, write_file
from tests.storage.hostile import objection, variants, with_value
from tests.storage.small import OLD, Parts, model, posterior, task

Case = tuple[str, dict[str, Tensor], Any]


def honest(path: Path, learner: ncl.OnlinePosterior) -> Parts:
    learner.save(path)
    return read_file(path, "posterior")


# An engine may do without these.
OPTIONAL = ("schedule", "stiffness", "enough")


def of_settings(tensors: dict[str, Tensor], settings: dict[str, Any]) -> Iterator[Case]:
    """Each field of another type, missing, or with another one beside it."""
    for where, wrong in variants(settings):
        # There need not be an evidence; and files of earlier versions have no weight but the engine's, a number.
        may_be_none = (("log_evidence",), *(("engine", name) for name in OPTIONAL))
        if where and not (wrong is None and where in may_be_none):
            yield f"{'.'.join(map(str, where))} = {str(wrong)[:20]}", tensors, with_value(settings, where, wrong)
    for name in ("blocks", "trained", "tasks", "outputs", "log_evidence", "engine"):
        yield f"no {name}", tensors, {k: v for k, v in settings.items() if k != name}
    for where in ((), ("blocks", "linear"), ("blocks", "linear", "block"), ("blocks", "gain", "block"), ("engine",)):
        yield f"an unknown field in {where}", tensors, with_value(settings, (*where, "surprise"), 1)


def of_values(tensors: dict[str, Tensor], settings: dict[str, Any]) -> Iterator[Case]:
    """Values of the right types that contradict each other, or themselves."""
    for where, wrong in (
        (("engine", "name"), "Nothing"),
        (("engine", "name"), "AdamEngine"),
        (("engine", "steps"), 0),
        (("engine", "steps"), -1),
        (("engine", "steps"), None),
        (("engine", "lr"), -1.0),
        (("engine", "momentum"), 1.0),
        (("engine", "fisher"), "none"),
        (("engine", "kronecker_sum"), "none"),
        (("engine", "schedule"), 1.0),
        (("generator",), "tpu"),
        (("trained",), ["nothing"]),
        (("memory",), ["nothing"]),
        (("initial",), ["linear.weight"]),
        (("learner",), {"keep": 1}),
        (("blocks", "linear", "kind"), "round"),
        (("blocks", "linear", "kind"), "diagonal"),
        (("blocks", "gain", "kind"), "kronecker"),
        (("blocks", "linear", "tensors"), ["loc"]),
        (("blocks", "linear", "tensors"), [*settings["blocks"]["linear"]["tensors"], "more"]),
        (("blocks", "linear", "block", "name"), "other"),
        (("blocks", "linear", "block", "view"), [4, 1]),
        (("blocks", "linear", "block", "view"), [2, 3]),
        (("blocks", "linear", "block", "view"), [2]),
        (("blocks", "linear", "block", "view"), [-2, -2]),
        (("blocks", "linear", "block", "weight_shape"), [2, 3]),
        (("blocks", "linear", "block", "weight_shape"), [0, 2]),
        (("blocks", "linear", "block", "bias"), None),
        (("blocks", "linear", "block", "bias"), "linear.weight"),
        (("blocks", "linear", "block", "bias_shape"), [3]),
        (("blocks", "linear", "block", "weight"), "gain"),
        (("blocks", "linear", "block", "widths"), [-1, 0]),
        (("blocks", "linear", "block", "widths"), [1, 0]),
        (("blocks", "linear", "block", "widths"), [3, 0]),
        (("blocks", "linear", "block", "widths"), [0, 1]),
        (("structure",), [["*"]]),
        (("structure",), [["*", "half", "dense"]]),
        (("structure",), [["*", "0", "dense"]]),
        (("blocks", "gain", "block", "shape"), [3]),
        (("blocks", "gain", "block", "shape"), [1, 2]),
        (("blocks", "gain", "block", "shape"), [0]),
        (("blocks", "gain", "block", "shape"), [2**62, 2**62]),
        (("blocks", "gain", "block", "name"), "linear.weight"),
    ):
        yield f"{'.'.join(where)} = {wrong}", tensors, with_value(settings, where, wrong)


def of_tensors(tensors: dict[str, Tensor], settings: dict[str, Any]) -> Iterator[Case]:
    """Each tensor missing, of another dtype or shape, or with numbers that cannot be."""

    def changed(name: str, what: str, change: Callable[[Tensor], Tensor]) -> Case:
        return f"{name} {what}", {**tensors, name: change(tensors[name].clone())}, settings

    for name, tensor in tensors.items():
        yield f"{name} missing", {k: t for k, t in tensors.items() if k != name}, settings
        yield changed(name, "longer", lambda t: torch.cat([t.reshape(-1), t.reshape(-1)[:1]]))
        yield changed(name, "with one dimension more", lambda t: t.unsqueeze(0))
        yield changed(name, "as truth", lambda t: t.bool())
        yield changed(name, "as whole numbers", lambda t: t.to(torch.int32))
        yield changed(name, "empty", lambda t: t.reshape(-1)[:0])
        if not tensor.is_floating_point():
            continue
        if name.rpartition("/")[2] != "loc":
            yield changed(name, "in float32", lambda t: t.float())
            if not name.endswith("root/upper"):  # That of the same precision.
                yield changed(name, "negative", lambda t: -t - (t == 0).double())
            yield changed(name, "zero", torch.zeros_like)
        if not name.endswith(("loc", "precision", "put/upper")):  # Other ones would be as good.
            yield changed(name, "foreign", lambda t: t + torch.ones_like(t))
        if name.endswith("root/upper"):
            yield changed(name, "doubled", lambda t: 2 * t)
            yield changed(name, "slightly larger", lambda t: t * (1 + 1e-6))
            yield changed(name, "turned", lambda t: t.flip(0))
        for bad in (torch.nan, torch.inf, -torch.inf):
            yield changed(
                name, f"with {bad}", lambda t, bad=bad: t.index_fill(0, torch.tensor([0]), bad) if t.ndim else t + bad
            )
    yield "a tensor too many", {**tensors, "more": torch.zeros(1)}, settings
    state = tensors["generator"]
    yield "a generator of zeros", {**tensors, "generator": torch.zeros_like(state)}, settings
    yield "a generator of ones", {**tensors, "generator": torch.full_like(state, 255)}, settings
    for left, following in ((0, 0), (625, 0), (624, 624), (1, 625), (-1, 626)):
        beyond = state.clone()
        beyond[8:12] = torch.tensor(list(left.to_bytes(4, "little", signed=True)), dtype=torch.uint8)
        beyond[16:24] = torch.tensor(list(following.to_bytes(8, "little")), dtype=torch.uint8)
        yield f"a generator at {left}, {following}", {**tensors, "generator": beyond}, settings


def refused(path: Path, cases: Iterator[Case], load: Callable[[Path], object]) -> tuple[int, list[str]]:
    """How many files were made, and which of them were not refused as they should be."""
    count, wrong = 0, []
    for what, tensors, settings in cases:
        count += 1

        def written_and_read(tensors: dict[str, Tensor] = tensors, settings: Any = settings) -> None:
            write_file(path, "posterior", tensors, settings)
            load(path)

        if found := objection(path, written_and_read):
            wrong.append(f"{what}: {found}")
    return count, wrong


@pytest.mark.parametrize("has_roots", [False, True])
def test_crafted_files_are_refused(tmp_path: Path, has_roots: bool) -> None:
    path, net = tmp_path / "p", model()
    # Of a file of format 2 the roots are kept.
    parts = honest(path, ncl.OnlinePosterior.load(OLD / "laplace-2.ncl", net) if has_roots else posterior())
    assert ("linear/input_root/upper" in parts[0]) is has_roots
    ncl.OnlinePosterior.load(path, net)
    total = 0
    for make in (of_settings, of_values, of_tensors):
        count, wrong = refused(path, make(*parts), lambda p: ncl.OnlinePosterior.load(p, net))
        assert wrong == []
        total += count
    assert total >= 300


def test_initial_values_are_checked(tmp_path: Path) -> None:
    path, net = tmp_path / "p", model()
    start = {"linear.weight": torch.zeros(2, 2), "linear.bias": torch.zeros(2)}
    tensors, settings = honest(path, posterior(initial=start))
    name = "/initial/linear.weight"
    for wrong in (torch.zeros(2, 3), torch.full((2, 2), torch.nan), torch.zeros(4)):
        write_file(path, "posterior", {**tensors, name: wrong}, settings)
        with pytest.raises(FileError, match=r"'/initial/linear\.weight'"):
            ncl.OnlinePosterior.load(path, net)


def coreset() -> CoresetLearner:
    learner = CoresetLearner(model(), ncl.LaplaceNCL(steps=2, batch_size=4), keep=2)
    learner.update(task(), engine=ncl.LaplaceNCL(steps=3, batch_size=4), progress=False)
    return learner


def as_bytes(value: Any) -> Tensor:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return torch.tensor(list(text), dtype=torch.uint8)


def of_kept(tensors: dict[str, Tensor], settings: dict[str, Any]) -> Iterator[Case]:
    """What a learner keeps besides the Gaussians."""
    about = json.loads(bytes(tensors["/memory/kept/0/about"].tolist()))
    engine = json.loads(bytes(tensors["/memory/coreset/engine"].tolist()))
    for where, wrong in variants(about):
        if where and (where, wrong) != (("context",), {"a": 1}):  # Which may be anything plain.
            yield (
                f"about {where} {wrong}",
                {**tensors, "/memory/kept/0/about": as_bytes(with_value(about, where, wrong))},
                settings,
            )
    for size in (0, -1):
        yield f"size {size}", {**tensors, "/memory/kept/0/about": as_bytes({**about, "size": size})}, settings
    for where, wrong in variants(engine):
        if where and not (wrong is None and where in {(name,) for name in OPTIONAL}):
            changed = as_bytes(with_value(engine, where, wrong))
            yield f"engine {where} {wrong}", {**tensors, "/memory/coreset/engine": changed}, settings
    for name in ("/memory/kept/0/about", "/memory/coreset/engine"):
        for text in (b"{", b"[]", b"\xff", b"[" * 100_000, b'{"name": "LaplaceNCL", "name": "LaplaceNCL"}'):
            yield f"{name} {text[:10]!r}", {**tensors, name: as_bytes(text)}, settings
        yield f"{name} in float", {**tensors, name: tensors[name].float()}, settings
        yield f"{name} as a table", {**tensors, name: tensors[name].unsqueeze(0)}, settings
    yield "shorter", {**tensors, "/memory/kept/0/1": tensors["/memory/kept/0/1"][:1]}, settings
    yield "empty", {**tensors, "/memory/kept/0/0": tensors["/memory/kept/0/0"][:0]}, settings
    yield "scalar", {**tensors, "/memory/kept/0/0": torch.tensor(1.0)}, settings
    missing = {name: tensor for name, tensor in tensors.items() if name != "/memory/kept/0/1"}
    memory = [name for name in settings["memory"] if name != "kept/0/1"]
    yield (
        "no inputs",
        {k: t for k, t in missing.items() if k != "/memory/kept/0/0"},
        {
            **settings,
            "memory": [name for name in memory if name != "kept/0/0"],
        },
    )
    renamed = {**missing, "/memory/kept/0/x": tensors["/memory/kept/0/1"]}
    yield "renamed", renamed, {**settings, "memory": [*memory, "kept/0/x"]}
    for keep in (0, -1, 1.5, True, "2", None, 10**30):
        yield f"keep {keep}", tensors, {**settings, "learner": {"keep": keep}}


def test_crafted_memories_are_refused(tmp_path: Path) -> None:
    path, net = tmp_path / "p", model()
    tensors, settings = honest(path, coreset())
    again = CoresetLearner.load(path, net)
    assert again.refined().engine.steps == 3
    count, wrong = refused(path, of_kept(tensors, settings), lambda p: CoresetLearner.load(p, net))
    assert wrong == []
    assert count > 100
