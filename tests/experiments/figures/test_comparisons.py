"""The figures that compare methods, in their quick form."""

from __future__ import annotations

import math
from pathlib import Path

import pyro
import pytest
import torch

from nclbayes.analysis.evaluation import Score
from nclbayes.analysis.record import Record
from nclbayes.errors import DataError
from nclbayes.experiments.figures import FIGURES, Results, Workplace, make
from nclbayes.experiments.figures.feedforward import PUBLISHED, _statements
from nclbayes.experiments.figures.prior_weight import _statements as lambda_statements
from nclbayes.experiments.figures.prior_weight import diagonal_scale_free_kl
from nclbayes.experiments.figures.scores import least_losses, score_rows
from nclbayes.experiments.figures.sequences import NCL, WEAK_KFAC, _worst_ratio
from nclbayes.experiments.setups import find_setup
from nclbayes.kronecker.divergence import scale_free_kl
from nclbayes.nn import Normal


def quick(name: str, out: Path) -> Results:
    results = make(FIGURES[name], "quick", Workplace(out))
    assert list(out.glob("*.png"))
    assert list(out.glob("*.csv"))
    return results


@pytest.mark.slow
def test_feedforward_has_a_cell_for_each_method_and_goes_on_where_it_was(tmp_path: Path) -> None:
    results = quick("feedforward", tmp_path)
    assert [row["method"] for row in results.tables["accuracy"]] == ["none", "ewc", "owm", "laplace-ncl"]
    assert all(20 < row["accuracy"] <= 100 for row in results.tables["accuracy"])
    said: list[str] = []
    again = make(FIGURES["feedforward"], "quick", Workplace(tmp_path, say=said.append))
    assert again == results
    assert not any("split_digits" in line for line in said)


def test_a_cell_is_as_published_within_three_points_or_errors() -> None:
    row = {"set": "s", "scenario": "task", "method": "m", "published": 90.0, "published error": 0.5}
    cells = [(87.5, 0.1, True), (86.5, 0.1, False), (86.5, 2.0, True), (99.0, 0.1, True)]
    for accuracy, error, expected in cells:
        (found,) = _statements([{**row, "accuracy": accuracy, "standard error": error}])
        assert found.holds is expected
    assert set(PUBLISHED["split-mnist"]) == set(PUBLISHED["split-cifar100"])


def test_the_papers_order_of_methods_can_fail() -> None:
    def holds(scenario: str, **accuracy: float) -> bool:
        common = {"set": "s", "scenario": scenario, "published": 50.0, "published error": 1.0, "standard error": 1.0}
        methods = {"laplace-ncl": 70.0, "laplace-ncl (unit prior)": 99.0, "joint": 99.0, "owm": 60.0, "kfac": 50.0}
        rows = [{**common, "method": m, "accuracy": a} for m, a in {**methods, **accuracy}.items()]
        *_, order = _statements(rows)
        return order.holds

    assert holds("domain")
    assert not holds("domain", owm=71.0)
    assert holds("class", owm=71.0)
    assert not holds("class", kfac=65.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stimulus-response", "stroke-mnist"])
def test_recurrent_comparisons_score_every_task_from_when_it_was_learnt(name: str, tmp_path: Path) -> None:
    try:
        results = quick(name, tmp_path)
    except DataError as error:
        pytest.skip(str(error))
    tasks = FIGURES[name].scales["quick"]["tasks"]
    methods = list(FIGURES[name].scales["quick"]["variants"])
    assert len(results.tables["scores"]) == len(methods) * tasks * (tasks + 1) // 2
    assert len(results.tables["final"]) == len(methods) * tasks
    assert all(math.isfinite(row["loss"]) for row in results.tables["scores"])
    assert results.statements


def test_the_worst_task_decides_whether_tasks_are_retained() -> None:
    rows = [
        {"method": NCL, "seed": seed, "loss": loss, "loss when learnt": 1.0}
        for seed, losses in enumerate(([1.0, 1.2], [1.6, 0.9]))
        for loss in losses
    ]
    assert _worst_ratio([*rows, {**rows[0], "method": WEAK_KFAC, "loss": 9.0}], NCL) == pytest.approx(1.4)


def test_the_least_loss_is_that_of_the_targets_themselves() -> None:
    (task,) = find_setup("stimulus-response").make_tasks("", 0, 1)[:1]
    losses = []
    for _, lengths, weight, y in task.epoch(256, test=True):
        valid = torch.arange(y.shape[1]) < lengths.unsqueeze(-1)
        with pyro.poutine.trace() as trace:
            Normal(1.0).observe(y, y, mask=valid.unsqueeze(-1).expand_as(y), weight=weight.expand_as(y))
        losses.append(-trace.trace.log_prob_sum())
    total = sum(len(y) for *_, y in task.epoch(256, test=True))
    assert least_losses([task])[0] == pytest.approx(float(sum(losses)) / total, rel=1e-5)


@pytest.mark.slow
def test_lambda_compares_losses_and_preconditioners(tmp_path: Path) -> None:
    results = quick("lambda", tmp_path)
    assert {row["method"] for row in results.tables["scores"]} == {
        "laplace-ncl",
        "kfac",
        "decoupled-kfac",
        "reverse-decoupled-kfac",
    }
    assert len({row["block"] for row in results.tables["preconditioner"]}) == 2
    assert all(row["kl"] >= 0 for row in results.tables["preconditioner"])
    assert {row["task"] for row in results.tables["preconditioner"]} == {2}
    runs = len(list((tmp_path / "runs").glob("lambda-*/*/seed-0/record.json")))
    assert runs == 8
    assert len(results.tables["scores"]) == 3 * runs
    assert len(results.statements) == 7


def test_what_the_paper_says_of_lambda_can_fail() -> None:
    def claims(ncl: float, kfac: float, decoupled: float, reverse: float, kl: float) -> list[bool]:
        """At lambda = 1 NCL has the loss 1 and the others 10; the losses at lambda = 100 are given."""
        methods = ("laplace-ncl", "kfac", "decoupled-kfac", "reverse-decoupled-kfac")
        pairs = zip(methods, ((1.0, ncl), (10.0, kfac), (10.0, decoupled), (10.0, reverse)), strict=True)
        losses = {method: dict(zip((1.0, 100.0), found, strict=True)) for method, found in pairs}
        similarity = [{"method": "kfac", "lambda": weight, "kl": k} for weight, k in ((1.0, 2.0), (100.0, kl))]
        return [statement.holds for statement in lambda_statements(losses, similarity)]

    assert claims(1.5, 2.0, 3.0, 5.0, 1.0) == [True] * 7
    assert claims(1.5, 2.0, 3.0, math.inf, 1.0) == [True] * 7
    assert claims(20.0, 11.0, 12.0, 4.0, 3.0) == [True] + [False] * 6


@pytest.mark.slow
def test_that_learning_diverges_is_a_result_of_lambda(tmp_path: Path) -> None:
    # With so large a weight, steps that are not scaled down by it overshoot.
    changes = {"weights": [1.0, 1e12], "steps": 12, "rates": {"reverse-decoupled-kfac": 0.1}}
    results = make(FIGURES["lambda"], "quick", Workplace(tmp_path), changes)
    diverged = {(row["method"], row["lambda"]) for row in results.tables["diverged"]}
    assert diverged == {("laplace-ncl", 1e12), ("reverse-decoupled-kfac", 1e12)}
    assert len(results.tables["scores"]) == 3 * 6
    assert {path.stem for path in tmp_path.glob("*.png")} == {"lambda", "tasks"}


def test_scores_are_rows_from_when_a_task_was_learnt() -> None:
    record = Record(["a", "b"])
    for row in ([(0.5, 3.0), (0.1, 9.0)], [(0.4, 4.0), (0.9, 2.5)]):
        record.add([Score(accuracy, loss, 0.0, 8) for accuracy, loss in row])
    rows = score_rows(record, [1.0, 2.0])
    assert [(row["task"], row["tasks learnt"], row["loss"]) for row in rows] == [
        ("a", 1, 2.0),
        ("a", 2, 3.0),
        ("b", 2, 0.5),
    ]
    assert [row["accuracy"] for row in score_rows(record)] == [0.5, 0.4, 0.9]


def test_the_diagonal_divergence_is_the_dense_one() -> None:
    g = torch.Generator().manual_seed(0)
    a, b = (torch.rand(6, generator=g).double() + 0.1 for _ in range(2))
    expected = scale_free_kl(torch.diag(a), torch.diag(b))
    assert diagonal_scale_free_kl(a, b) == pytest.approx(float(expected))


@pytest.mark.slow
def test_nvcl_predicts_at_the_mean_and_with_samples(tmp_path: Path) -> None:
    results = quick("nvcl", tmp_path)
    assert {row["predictions"] for row in results.tables["summary"]} == {"mean", "4 samples"}
    assert len(results.statements) == 1
