"""Settings sought on pilot tasks: what is held out, what is found, and that a search goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import nclbayes as ncl
from nclbayes.errors import DataError, FileError, NonFiniteError, SettingError
from nclbayes.methods import PlainTraining, ReplayLearner
from nclbayes.tuning import Range, held_out
from nclbayes.tuning.pilot import Pilot


def classifier() -> ncl.BayesianNetwork:
    torch.manual_seed(0)
    return ncl.BayesianNetwork(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), ncl.Categorical())


def pilots(count: int = 2, examples: int = 50) -> list[ncl.Task]:
    x = torch.randn(examples, 3, generator=torch.Generator().manual_seed(0))
    unseen = (torch.full((5, 3), torch.nan), torch.zeros(5, dtype=torch.long))
    return [ncl.Task((x, (x[:, k] > 0).long()), unseen, name=f"sign {k}") for k in range(count)]


def endless(batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(batch_size, 3, generator=generator)
    return x, x[:, :1]


def test_what_is_held_out_is_not_learnt_from_and_test_data_are_not_looked_at() -> None:
    x = torch.arange(50.0)
    given = ncl.Task((x[:, None], x), (torch.zeros(3, 1), torch.zeros(3)), name="numbers", context={"head": 0})
    task = held_out(given, 0.2)
    learnt, kept = (set(part[1].tolist()) for part in (task.train, task.test))
    assert len(kept) == 10
    assert learnt | kept == set(x.tolist())
    assert not learnt & kept
    assert (task.size, task.name, task.context) == (40, "numbers", {"head": 0})
    assert set(held_out(given, 0.2).test[1].tolist()) == kept
    assert set(held_out(given, 0.2, seed=1).test[1].tolist()) != kept
    data = TensorDataset(x[:, None], x)
    split = held_out(ncl.Task(data, name="set"), 0.5)
    assert sorted(float(y) for part in (split.train, split.test) for _, y in part) == x.tolist()


def test_of_endless_data_examples_are_drawn_and_what_cannot_be_taken_apart_is_refused() -> None:
    task = held_out(ncl.Task(endless, name="endless", size=1_000_000), 0.2)
    assert len(task.test[0]) == 1000
    assert task.size == 1_000_000
    loader = DataLoader(TensorDataset(torch.zeros(4, 1), torch.zeros(4)))
    with pytest.raises(DataError, match=r"'loaded' cannot be taken apart .* give tensors or a data set"):
        held_out(ncl.Task(loader, name="loaded"), 0.2)
    with pytest.raises(DataError, match="one example"):
        held_out(ncl.Task((torch.zeros(1, 1), torch.zeros(1)), name="single"), 0.2)


def test_a_setting_and_a_prior_are_found_that_learn_best() -> None:
    engine = ncl.LaplaceNCL(steps=60, batch_size=40, enough=None)
    found = ncl.tune(classifier(), pilots(1), engine, {"lr": (1e-6, 0.1), "prior_scale": (1e-4, 1.0)})
    assert len(found.trials) == 6 * 5
    assert found.values["lr"] >= 1e-2
    assert found.values["prior_scale"] == 1.0
    assert found.engine == ncl.LaplaceNCL(steps=60, batch_size=40, enough=None, lr=found.values["lr"])
    assert found.prior == ncl.priors.scaled(1.0)
    # The narrowest prior pulls so hard that steps diverge.
    assert found.score == max(trial["score"] for trial in found.trials if trial["score"] is not None) > 0.8
    learnt = ncl.OnlinePosterior(classifier().with_prior(found.prior), found.engine)
    learnt.update(pilots(1)[0], progress=False)


def test_without_classes_the_likelihood_counts_and_metrics_are_ones_own() -> None:
    model = ncl.BayesianNetwork(nn.Linear(3, 1), ncl.Normal(0.1))
    tasks = [ncl.Task(endless, name="slope", size=500)]
    engine = ncl.LaplaceNCL(steps=30, batch_size=20)
    found = ncl.tune(model, tasks, engine, {"lr": (1e-7, 1e-2)}, trials=3)
    assert len(found.trials) == 3
    assert found.values["lr"] == max(trial["lr"] for trial in found.trials)
    worst = ncl.tune(model, tasks, engine, {"lr": (1e-7, 1e-2)}, metric=lambda p, b: (p.mean - b[-1]).square().sum(-1))
    assert worst.values["lr"] < 1e-5
    assert worst.prior is None


def test_any_model_and_learners_with_a_memory() -> None:
    def model(x: Tensor, y: Tensor | None = None) -> Any:
        w = pyro.sample("w", dist.Normal(torch.zeros(2, 3), 1.0).to_event(2))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Categorical(logits=x @ w.mT), obs=y)

    engine = ncl.VariationalNCL(steps=5, batch_size=10)
    assert ncl.tune(model, pilots(), engine, {"beta": (0.01, 0.1)}).prior is None
    with pytest.raises(SettingError, match="Only for a BayesianNetwork"):
        ncl.tune(model, pilots(), engine, {"prior_scale": (0.1, 1.0)})
    found = ncl.tune(
        classifier(),
        pilots(),
        PlainTraining(steps=5),
        [Range("keep", 1.0, 9.0, factor=3.0)],
        learner=ReplayLearner,
        learner_settings={"keep": 4},
    )
    assert sorted(trial["keep"] for trial in found.trials) == [1, 3, 9]
    assert found.engine == PlainTraining(steps=5)


def test_classes_that_were_seen_later_are_asked_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(ncl.OnlinePosterior, "update", lambda *args, **rest: None)
    monkeypatch.setattr(
        "nclbayes.tuning.pilot.evaluate",
        lambda posterior, tasks, **rest: asked.append(tasks) or [ncl.Score(0.5, 0.0, 0.0, 1)],
    )
    tasks = ncl.tasks.split_digits("class", active="seen")[:3]
    Pilot(classifier(), tuple(tasks), ncl.LaplaceNCL(), ncl.priors.scaled).score({})
    assert [task.context for task in asked[0]] == [{"active": 6}] * 3


def test_a_search_goes_on_in_its_folder_and_in_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []
    score = Pilot.score

    def counted(self: Pilot, values: dict[str, float]) -> float | None:
        if len(tried) == 2:
            raise KeyboardInterrupt
        tried.append(values["stiffness"])
        return score(self, values)

    engine, said = ncl.LaplaceNCL(steps=3), []
    monkeypatch.setattr(Pilot, "score", counted)
    with pytest.raises(KeyboardInterrupt):
        ncl.tune(classifier(), pilots(), engine, folder=tmp_path)
    monkeypatch.setattr(Pilot, "score", lambda self, values: tried.append(values["stiffness"]) or score(self, values))
    found = ncl.tune(classifier(), pilots(), engine, folder=tmp_path, say=said.append)
    assert sorted(tried) == [20.0, 200.0, 2000.0]
    assert len(said) == 1
    assert ncl.tune(classifier(), pilots(), engine, folder=str(tmp_path)).values == found.values
    assert len(tried) == 3
    for other in (
        {"tasks": pilots(examples=60)},
        {"engine": ncl.LaplaceNCL(steps=4)},
        {"seed": 1},
        {"share": 0.3},
        {"trials": 2},
        {"model": classifier().with_prior(dist.Normal(0.0, 3.0))},
        {"metric": lambda predicted, batch: batch[-1].double()},
        {"prior": lambda scale: dist.Normal(0.0, scale)},
        {"engine": ncl.LaplaceNCL(steps=3, schedule=lambda done: 1.0)},
        {"tasks": [ncl.Task(task.train, name=task.name, context={"head": 0}) for task in pilots()]},
    ):
        changed = {"model": classifier(), "tasks": pilots(), "engine": engine, **other}
        with pytest.raises(FileError, match="holds another search"):
            ncl.tune(**changed, folder=tmp_path)  # type: ignore[arg-type]
    (tmp_path / "search.json").write_text("[]")
    with pytest.raises(FileError, match="not a search"):
        ncl.tune(classifier(), pilots(), engine, folder=tmp_path)


@pytest.mark.slow
def test_two_processes_find_what_one_finds(tmp_path: Path) -> None:
    engine = ncl.LaplaceNCL(steps=10)
    one, two = (ncl.tune(classifier(), pilots(), engine, jobs=jobs) for jobs in (1, 2))
    assert sorted(map(str, one.trials)) == sorted(map(str, two.trials))


@pytest.mark.slow
def test_a_script_may_search_as_it_stands_with_functions_of_its_own(tmp_path: Path) -> None:
    """Without `if __name__ == "__main__":`, and it is not run again by the other processes."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, nclbayes as ncl\n"
        "print('begun', flush=True)\n"
        "x = torch.randn(20, 2)\n"
        "def right(predicted, batch):\n"
        "    return (predicted.logits.argmax(-1) == batch[-1]).double()\n"
        "model = ncl.BayesianNetwork(torch.nn.Linear(2, 2), ncl.Categorical())\n"
        "task = ncl.Task((x, (x[:, 0] > 0).long()), name='a')\n"
        "print(len(ncl.tune(model, task, ncl.LaplaceNCL(steps=2), metric=right, jobs=2).trials))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["begun", "3"]), done.stderr


def test_what_cannot_be_handed_to_another_process_is_said() -> None:
    with pytest.raises(SettingError, match="cannot be handed to another process"):
        ncl.tune(classifier(), pilots(), ncl.LaplaceNCL(steps=3), metric=lambda p, b: b[-1].double(), jobs=2)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"ranges": {"stifness": (1, 2)}}, "has no setting 'stifness'"),
        ({"ranges": {"lr": 1.0}}, "each by its ends"),
        ({"ranges": {"lr": (0.1, 0.01)}}, "0 < low <= high"),
        ({"ranges": {}}, "name a range"),
        ({"ranges": ["lr"]}, "each by its ends"),
        ({"ranges": {"momentum": (0.5, 5.0)}}, "momentum must be at least 0 and below 1"),
        ({"ranges": {"kronecker_sum": (1.0, 2.0)}}, "kronecker_sum"),
        ({"sampler": "random"}, "choose 'grid' or 'tpe'"),
        ({"share": 1.0}, "share must be above 0 and below 1"),
        ({"jobs": 0}, "jobs must be a whole number"),
        ({"trials": 0}, "trials must be a whole number"),
        ({"tasks": []}, "at least one pilot task"),
        ({"engine": ncl.LaplaceNCL}, "not the class LaplaceNCL"),
    ],
)
def test_wrong_searches_are_refused_before_anything_is_written(
    wrong: dict[str, Any], said: str, tmp_path: Path
) -> None:
    given = {"model": classifier(), "tasks": pilots(), "engine": ncl.LaplaceNCL(steps=3), **wrong}
    with pytest.raises(SettingError, match=said):
        ncl.tune(**given, folder=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_search_that_only_diverges_says_so() -> None:
    engine = ncl.LaplaceNCL(**{**ncl.engines.PAPER, "steps": 20})
    with pytest.raises(NonFiniteError, match="diverged at every value"):
        ncl.tune(classifier(), pilots(), engine, {"lr": (1e30, 1e31)})
