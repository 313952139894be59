"""Networks that are followed over tasks: what is kept, what is compared, what is said of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nclbayes.errors import DataError, SettingError
from nclbayes.experiments import RunConfig
from nclbayes.experiments.figures import Results, Workplace, make
from nclbayes.experiments.figures.dynamics import METHODS, RECIPE, _statements, _times
from nclbayes.experiments.figures.dynamics_networks import Trials, follow
from nclbayes.experiments.runs import reopen_each
from nclbayes.tasks import stroke_mnist
from tests.tasks import fakes

pytest.importorskip("matplotlib", reason="pictures need matplotlib")
pytest.importorskip("sklearn", reason="factor analysis needs scikit-learn")

TASKS = 3
# Steps so large that the network changes within a few of them.
TINY = {"tasks": TASKS, "steps": 4, "size": None, "changes": {"batch_size": 8, "lr": 0.3, "fisher_size": 16}}


@pytest.fixture(scope="module", autouse=True)
def _made_up_digits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("data")
    fakes.write_strokes(folder / "stroke-mnist.npz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCLBAYES_DATA", str(folder))
        yield


def config(method: str = "laplace-ncl") -> RunConfig:
    settings = {"steps": TINY["steps"], **TINY["changes"]}  # type: ignore[dict-item]
    return RunConfig.of("stroke-mnist", method, settings=settings, tasks=TASKS, keep_each=True)


def states_by_hand(weight: Tensor, x: Tensor, lengths: Tensor) -> list[Tensor]:
    """The states at the valid steps of each example, from W = (H, G), with a leak of 0.2."""
    found = []
    for sequence, length in zip(x.double(), lengths.tolist(), strict=True):
        r = torch.zeros(len(weight), dtype=torch.float64)
        for x_t in sequence[:length]:
            r = 0.8 * r + 0.2 * torch.relu(weight.double() @ torch.cat([r, x_t]))
            found.append(r)
    return found


def test_every_task_is_compared_at_every_time(made: tuple[Results, Path]) -> None:
    rows = made[0].tables["r2"]
    keys = [(row["method"], row["number"], row["after"]) for row in rows]
    assert sorted(keys) == sorted((m, n, k) for m in METHODS for n in range(1, TASKS + 1) for k in range(TASKS + 1))
    for row in rows:
        assert row["since"] == row["after"] - row["number"]
        assert 0 <= row["accuracy"] <= 1
        if row["since"] == 0:
            assert row["r2"] == pytest.approx(1)
            assert row["explained variance"] == 1
        else:
            assert row["r2"] < 1


def test_the_similarity_is_that_of_the_kept_weights(made: tuple[Results, Path]) -> None:
    results, out = made
    learners = reopen_each(out / "runs" / "dowm" / "seed-0")[2]
    x, lengths, _ = stroke_mnist()[1].test
    a, b = (torch.stack(states_by_hand(learners[k].mean()["body.core.weight"], x, lengths)) for k in (1, 2))
    a, b = a - a.mean(0), b - b.mean(0)
    (row,) = [r for r in results.tables["r2"] if (r["method"], r["number"], r["after"]) == ("dowm", 2, 3)]
    assert row["r2"] == pytest.approx(float((a * b).sum() ** 2 / a.square().sum() / b.square().sum()), abs=1e-5)


def test_the_files_and_pictures(made: tuple[Results, Path]) -> None:
    results, out = made
    tables = {f"{name}.csv" for name in ("r2", "trajectories", "endpoints")}
    pictures = {f"{name}.png" for name in ("trajectories-2-4-5", "trajectories-3-1-7", "stability")}
    assert {path.name for path in out.iterdir()} == {"figure.json", "results.json", "runs", *tables, *pictures}
    # A mean trajectory ends where the examples end on average.
    ends, lines = results.tables["endpoints"], results.tables["trajectories"]
    for row in lines:
        if (row["example"], row["time"]) == ("mean", 1):
            same = [end for end in ends if all(end[key] == row[key] for key in ("method", "number", "after", "digit"))]
            assert len(same) == 4
            for factor in ("factor 1", "factor 2"):
                assert row[factor] == pytest.approx(sum(end[factor] for end in same) / len(same), abs=1e-9)
    assert {(row["number"], row["digit"]) for row in lines} == {(2, "4"), (2, "5"), (3, "1"), (3, "7")}


def test_what_was_learnt_is_read_and_heads_that_were_not_are_as_they_were(tmp_path: Path) -> None:
    said: list[str] = []
    for expected in (TASKS, 0):
        (run,) = follow([config("dowm")], Workplace(tmp_path, say=said.append))
        assert sum("average accuracy" in text for text in said) == expected
        said.clear()
    for k in range(TASKS):
        name = f"heads.{k}.weight"
        changed = [not torch.equal(run.weights[after][name], run.weights[0][name]) for after in range(TASKS + 1)]
        assert changed == [after > k for after in range(TASKS + 1)]


def test_the_trials_are_the_first_of_each_class() -> None:
    task = stroke_mnist()[0]
    x, lengths, y = task.test
    trials = Trials.of(task, 2)
    assert trials.labels.tolist() == [0, 0, 1, 1]
    first = [(y[:, 0] == label).nonzero().flatten()[:2].tolist() for label in (0, 1)]
    chosen = first[0] + first[1]
    assert trials.lengths.tolist() == lengths[chosen].tolist()
    assert torch.equal(trials.x, x[chosen][:, : int(lengths[chosen].max())])


def test_the_shown_times() -> None:
    assert _times(2, 6) == [1, 2, 3, 5, 6]
    assert _times(3, 15) == [2, 3, 7, 11, 15]
    assert _times(3, 4) == [2, 3, 4]
    assert _times(3, 3) == [2, 3]


def rows_with(early: dict[str, float], before: float = 0.3, apart: float = 2.0) -> list[dict[str, Any]]:
    """A table in which r^2 is given after a task was learnt and before."""
    return [
        {
            **{
                "task": f"stroke_mnist {number}/0 plain",
                "method": method,
                "number": number,
                "after": after,
                "since": after - number,
            },
            "r2": 1.0 if after == number else r2 if after > number else before,
            "separation": 0.5 if after < number else apart - (0.5 if method == "dowm" else 0.0),
        }
        for method, r2 in early.items()
        for number in range(1, 5)
        for after in range(5)
    ]


def test_statements_hold_and_fail_with_the_table() -> None:
    good = {"laplace-ncl": 0.9, "dowm": 0.99, "replay": 0.5}
    found = _statements(rows_with(good), [2, 3])
    assert len(found) == 9
    assert all(statement.holds for statement in found)

    def failing(**changes: Any) -> set[str]:
        return {
            s.claim for s in _statements(rows_with({**good, **changes.pop("r2", {})}, **changes), [2, 3]) if not s.holds
        }

    assert failing(r2={"laplace-ncl": 0.7}) == {"NCL keeps the representations of early tasks"}
    assert failing(r2={"replay": 0.95}) == {"replay's representations drift more than NCL's and DOWM's"}
    assert failing(r2={"dowm": 0.85}) == {"DOWM's representations of early tasks drift less than NCL's"}
    assert len(failing(before=0.999)) == 2
    assert len(failing(apart=0.1)) == 2


def test_a_task_that_is_not_learnt_cannot_be_shown(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="Task 3 cannot be shown"):
        make(RECIPE, "quick", Workplace(tmp_path), {**TINY, "tasks": 2})


def test_missing_data_are_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(dataset: str) -> None:
        raise DataError(f"{dataset} is not here")

    monkeypatch.setattr(import_module("nclbayes.tasks.stroke_mnist"), "find", find)
    with pytest.raises(DataError, match="stroke-mnist is not here"):
        make(RECIPE, "quick", Workplace(tmp_path))


@pytest.mark.slow
def test_runs_in_processes_of_their_own(tmp_path: Path, made: tuple[Results, Path]) -> None:
    make(RECIPE, "quick", Workplace(tmp_path, jobs=2), {**TINY, "shown": [2]})
    for method in METHODS:
        both = [reopen_each(out / "runs" / method / "seed-0")[2] for out in (tmp_path, made[1])]
        for ours, theirs in zip(*both, strict=True):
            for name, weights in ours.mean().items():
                torch.testing.assert_close(weights, theirs.mean()[name], rtol=1e-3, atol=1e-4)


REAL = os.environ.get("NCLBAYES_DATA", "")


@pytest.mark.slow
@pytest.mark.skipif(
    not (Path(REAL) / "stroke-mnist.npz").is_file(),
    reason="no real stroke MNIST here: set NCLBAYES_DATA to a folder that holds it",
)
def test_the_quick_recipe_on_real_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCLBAYES_DATA", REAL)
    results = make(RECIPE, "quick", Workplace(tmp_path))
    assert all(0 <= row["r2"] <= 1 + 1e-9 for row in results.tables["r2"])
    assert max(row["accuracy"] for row in results.tables["r2"]) > 0.55
