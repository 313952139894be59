"""Sums of Kronecker products over tasks: the rule kl is closest; Fishers are made once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nclbayes.errors import FileError
from nclbayes.experiments.figures import Results, Workplace, kronecker_sums, make
from nclbayes.experiments.figures.kronecker_sums import RECIPE, RULES, accumulate
from nclbayes.experiments.figures.task_fishers import random_fishers, stroke_fishers
from nclbayes.fisher import KroneckerFisher
from nclbayes.kronecker import kronecker_sum
from nclbayes.storage import read_file, write_file
from tests.tasks.fakes import write_strokes

pytest.importorskip("matplotlib", reason="pictures need matplotlib")

QUICK = RECIPE.scales["quick"]


@pytest.fixture(autouse=True)
def _no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees data of this machine."""
    for variable in ("HOME", "XDG_CACHE_HOME", "LOCALAPPDATA", "NCLBAYES_DATA"):
        monkeypatch.setenv(variable, str(tmp_path / "none"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Path]:
    out = tmp_path_factory.mktemp("sums")
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("HOME", "XDG_CACHE_HOME", "LOCALAPPDATA", "NCLBAYES_DATA"):
            patch.setenv(variable, str(out / "none"))
        return make(RECIPE, "quick", Workplace(out, progress=False)), out


def test_kl_is_closest_at_every_step(made: tuple[Results, Path]) -> None:
    results, _ = made
    claims = {statement.claim: statement.holds for statement in results.statements}
    for title in ("random RNNs", "stimulus-response"):
        assert claims[f"{title}: of all rules for the sum of the same two terms, kl has the lowest KL at every step"]
        assert claims[f"{title}: kl has the lowest KL from the exact sum of all Fishers, after every task"]
    best: dict[tuple[object, ...], float] = {}
    for row in results.tables["steps"]:
        key = row["source"], row["tasks"], row["before"]
        best[key] = min(best.get(key, float("inf")), row["kl"])
    assert len(best) == len(RULES) * sum(QUICK[source]["tasks"] for source in ("random", "stimulus-response"))
    for row in results.tables["steps"]:
        if row["rule"] == "kl":
            assert row["kl"] <= best[row["source"], row["tasks"], row["before"]] + 1e-9


def test_the_files_hold_every_rule_after_every_task(made: tuple[Results, Path]) -> None:
    results, out = made
    found = {(row["source"], row["tasks"], row["rule"]) for row in results.tables["accumulated"]}
    assert found == {
        (source, k, rule)
        for source in ("random", "stimulus-response")
        for k in range(1, QUICK[source]["tasks"] + 1)
        for rule in RULES
    }
    names = {path.name for path in out.iterdir()}
    assert {"accumulated.csv", "steps.csv", "kronecker-sums.png", "kronecker-steps.png"} <= names
    assert "left out" in results.facts["stroke-mnist"]


def test_fishers_are_made_once(made: tuple[Results, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    results, out = made
    for name in ("random_fishers", "stimulus_fishers"):
        monkeypatch.delattr(kronecker_sums, name)
    again = RECIPE.compute(QUICK, Workplace(out))
    assert again.tables == results.tables


def test_fishers_of_a_file_are_not_believed(made: tuple[Results, Path], tmp_path: Path) -> None:
    _, out = made
    name = "random-fishers.safetensors"
    tensors, settings = read_file(out / name, "fishers")
    count, *others = settings["counts"]
    for parts in (
        (tensors, {}),
        (tensors, {"counts": 3}),
        (tensors, {"counts": []}),
        (tensors, {"counts": others}),
        (tensors, {"counts": [{**count, "rtol": None}, *others]}),
        (tensors, {"counts": [{**count, "input": 1.0}, *others]}),
        ({k: t for k, t in tensors.items() if k != "0.input"}, settings),
        ({**tensors, "0.input": torch.zeros(())}, settings),
        ({**tensors, "1.input": tensors["1.input"][:-1]}, settings),
        ({**tensors, "1.output": tensors["1.output"].float()}, settings),
        ({**tensors, "1.output": torch.nan * tensors["1.output"]}, settings),
    ):
        write_file(tmp_path / name, "fishers", *parts)
        with pytest.raises(FileError, match=f"{name}' is not a fishers of nclbayes"):
            RECIPE.compute(QUICK, Workplace(tmp_path))


def test_what_is_accumulated_is_the_rule_applied_over_and_over() -> None:
    fishers = list(random_fishers(QUICK["random"], seed=3))
    own: list[dict[str, float]] = []
    for rows, _ in accumulate(fishers, prior=0.5):
        own = [dict(row) for row in rows]
    dense = 0.5 * torch.eye(6 * 9, dtype=torch.float64)
    for fisher in fishers:
        dense = dense + torch.kron(fisher.input, fisher.output)
    for row in own:
        X, Y = 0.5 * torch.eye(9, dtype=torch.float64), torch.eye(6, dtype=torch.float64)
        for fisher in fishers:
            total = kronecker_sum(X, Y, fisher.input, fisher.output, str(row["rule"]), rtol=fisher.rtol)
            X, Y = total.input, total.output
        product = torch.kron(X, Y)
        ratio = torch.linalg.solve(product, dense)
        expected = (ratio.trace() - len(dense) - torch.logdet(ratio)) / 2
        assert row["kl"] == pytest.approx(float(expected), rel=1e-6)


def test_multiples_of_the_prior_are_summed_exactly_by_kl_and_mse_and_up_to_scale_by_all() -> None:
    unit = KroneckerFisher(torch.eye(3).double(), 2 * torch.eye(2).double(), rows=1, examples=1, rtol=1e-12)
    for k, (own, _) in enumerate(accumulate([unit] * 3, prior=1.0), start=1):
        for row in own:
            assert (abs(row["kl"]) < 1e-9) == (row["rule"] in ("kl", "mse")), (k, row)
            assert row["scale_free_kl"] == pytest.approx(0, abs=1e-9)
            assert row["correlation"] == pytest.approx(1)


def test_random_fishers_are_decided_by_the_seed_alone() -> None:
    before = torch.get_rng_state()
    first, second, other = (list(random_fishers(QUICK["random"], seed)) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(first) == QUICK["random"]["tasks"]
    for a, b, c in zip(first, second, other, strict=True):
        assert torch.equal(a.input, b.input)
        assert torch.equal(a.output, b.output)
        assert not torch.equal(a.output, c.output)
    # Each network is another.
    assert not torch.equal(first[0].output, first[1].output)


def test_where_stroke_mnist_is_found_it_is_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_strokes(tmp_path / "stroke-mnist.npz")
    monkeypatch.setenv("NCLBAYES_DATA", str(tmp_path))
    settings = QUICK["stroke-mnist"]
    fishers = list(stroke_fishers(settings, 0, Workplace(tmp_path, progress=False)))
    units = settings["units"]
    assert [(len(fisher.input), len(fisher.output)) for fisher in fishers] == 3 * [(units + 4, units)]
    assert all(fisher.examples == settings["trials"] for fisher in fishers)
