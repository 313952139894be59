"""Settings sought by the evidence: what is found is what each run by hand has, and who has none is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import nclbayes as ncl
from nclbayes.errors import FileError, SettingError
from nclbayes.methods import EWC, OWM, CoresetLearner, JointLearner, PlainTraining, ReplayLearner
from nclbayes.tuning import held_out
from nclbayes.tuning.pilot import Pilot
from tests.tuning.test_tune import classifier, pilots

ENGINE = ncl.LaplaceNCL(steps=20, likelihood_weight=1.0)
SCALES = {"prior_scale": (0.1, 10.0)}


def by_hand(scale: float) -> float:
    """What is learnt of the same examples, one task after the other."""
    model = classifier().with_prior(ncl.priors.scaled(scale))
    posterior = ncl.OnlinePosterior(model, ENGINE)
    reports = [posterior.update(held_out(task, 0.2, k), progress=False) for k, task in enumerate(pilots())]
    return sum(report.log_evidence for report in reports if report.log_evidence is not None)


def test_the_setting_of_the_highest_evidence_is_found() -> None:
    found = ncl.tune(classifier(), pilots(), ENGINE, SCALES, objective="evidence")
    evidence = {scale: by_hand(scale) for scale in (0.1, 1.0, 10.0)}
    assert {trial["prior_scale"]: trial["score"] for trial in found.trials} == pytest.approx(evidence)
    best = max(evidence, key=lambda scale: evidence[scale])
    assert (found.values["prior_scale"], found.score) == (best, pytest.approx(evidence[best]))
    assert found.prior == ncl.priors.scaled(best)
    # Held-out examples are judged by the other objective, and say something else.
    assert ncl.tune(classifier(), pilots(), ENGINE, SCALES).score > 0


def test_the_objective_is_part_of_a_search_and_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []
    score = Pilot.score

    def counted(self: Pilot, values: dict[str, float]) -> float | None:
        if len(tried) == 2:
            raise KeyboardInterrupt
        tried.append(values["prior_scale"])
        return score(self, values)

    def search(**settings: Any) -> ncl.tuning.Tuning:
        return ncl.tune(classifier(), pilots(), ENGINE, SCALES, **settings)

    monkeypatch.setattr(Pilot, "score", counted)
    with pytest.raises(KeyboardInterrupt):
        search(folder=tmp_path, objective="evidence")
    monkeypatch.setattr(Pilot, "score", lambda self, values: tried.append(values["prior_scale"]) or score(self, values))
    found = search(folder=tmp_path, objective="evidence")
    assert sorted(tried) == pytest.approx([0.1, 1.0, 10.0])
    assert search(folder=tmp_path, objective="evidence").values == found.values
    with pytest.raises(FileError, match="holds another search"):
        search(folder=tmp_path)
    assert len(tried) == 3


def test_in_a_storage_each_objective_has_a_study_of_its_own(tmp_path: Path) -> None:
    said: list[str] = []
    storage = str(tmp_path / "trials.log")
    scores = [
        {trial["score"] for trial in ncl.tune(classifier(), pilots(), ENGINE, SCALES, **own).trials}
        for own in ({"storage": storage, "objective": o, "say": said.append} for o in ("accuracy", "evidence"))
    ]
    assert max(scores[1]) < 0 <= min(scores[0])
    names = [text for text in said if text.startswith("The study is")]
    assert len(set(names)) == 2
    again = ncl.tune(classifier(), pilots(), ENGINE, SCALES, storage=storage, objective="evidence", say=said.append)
    assert {trial["score"] for trial in again.trials} == scores[1]
    assert len(said) == 2 * (1 + 3) + 1


def test_a_search_of_before_there_were_objectives_goes_on(tmp_path: Path) -> None:
    """Its file says nothing of one."""
    found = ncl.tune(classifier(), pilots(), ENGINE, SCALES, folder=tmp_path)
    assert "objective" not in (tmp_path / "search.json").read_text()
    assert (
        ncl.tune(classifier(), pilots(), ENGINE, SCALES, folder=tmp_path, objective="accuracy").trials == found.trials
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"objective": "likelihood"}, "choose 'accuracy' or 'evidence'"),
        ({"engine": EWC(steps=3), "ranges": {"prior_weight": (1.0, 1.0)}}, "EWC gives no evidence"),
        ({"engine": ncl.VariationalNCL(steps=3)}, "VariationalNCL gives no evidence"),
        ({"engine": PlainTraining(steps=3), "ranges": {"lr": (0.1, 0.1)}}, "PlainTraining gives no evidence"),
        ({"engine": OWM(steps=3), "ranges": {"alpha": (0.1, 1.0)}}, "OWM gives no evidence"),
        ({"engine": ncl.LaplaceNCL(steps=3)}, "here likelihood_weight is 'auto'"),
        ({"ranges": {"likelihood_weight": (1.0, 10.0)}}, r"here likelihood_weight is 10\.0"),
        ({"ranges": {"prior_weight": (0.1, 1.0)}}, "with likelihood_weight, prior_weight and fisher_temperature 1"),
        ({"learner": JointLearner}, "JointLearner learns examples of earlier tasks again"),
        ({"learner": ReplayLearner}, "objective='accuracy'"),
        ({"learner": CoresetLearner}, "sets some apart"),
        ({"metric": lambda predicted, batch: batch[-1].double()}, "leave out metric and num_samples"),
        ({"num_samples": 2}, "leave out metric and num_samples"),
    ],
)
def test_who_has_no_evidence_is_told_before_anything_is_written(
    wrong: dict[str, Any], said: str, tmp_path: Path
) -> None:
    given = {"engine": ENGINE, "ranges": SCALES, "objective": "evidence", **wrong}
    with pytest.raises(SettingError, match=said):
        ncl.tune(classifier(), pilots(), **given, folder=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_an_engine_that_breaks_its_word_is_told_with_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncl.OnlinePosterior, "log_evidence", None)
    with pytest.raises(SettingError, match="LaplaceNCL gave no evidence of task 'sign 0'"):
        ncl.tune(classifier(), pilots(), ENGINE, SCALES, objective="evidence")
