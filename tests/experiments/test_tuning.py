"""The search for hyperparameters: its grid, its file, and that it goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nclbayes import OnlinePosterior, Score, Task
from nclbayes.cli import run_command_line
from nclbayes.errors import FileError, MatrixError, NonFiniteError, SettingError
from nclbayes.experiments import RunConfig
from nclbayes.experiments.search import PAPER_RANGES, Search
from nclbayes.experiments.tuning import Tuned, tune
from nclbayes.storage.locking import sole_use
from nclbayes.tuning import Range, pilot
from nclbayes.tuning.pilot import Pilot


def test_ranges_are_the_papers_unless_given() -> None:
    assert Search(RunConfig.of("split-digits", "owm")).count == 19
    assert Search(RunConfig.of("split-digits", "laplace-ncl", paper=True)).count == 10
    assert Search(RunConfig.of("split-digits", "laplace-ncl")).ranges[0].name == "stiffness"
    assert PAPER_RANGES["si"].grid()[0] == 1e-5
    assert PAPER_RANGES["si"].grid()[-1] == pytest.approx(1e8)
    assert Search(RunConfig.of("split-digits", "owm"), sampler="tpe").count == 20
    assert Range.parse("alpha=1e-3:0.1").grid() == pytest.approx([1e-3, 1e-2, 1e-1])
    assert Range.parse("alpha=2:30").grid() == pytest.approx([2, 20, 30])
    assert Range.parse("alpha=2:2").grid() == [2.0]


@pytest.mark.parametrize(("method", "name"), [("owm", "batch_size"), ("replay", "keep")])
def test_settings_that_are_whole_numbers_are_sought_among_whole_numbers(
    method: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Any] = []

    def fake(self: Pilot, values: dict[str, float]) -> float:
        tried.append(values[name])
        return 0.5

    monkeypatch.setattr(Pilot, "score", fake)
    base, values = RunConfig.of("split-digits", method), (Range(name, 5.0, 123.0),)
    tune(Search(base, values), tmp_path / "grid")
    assert sorted(tried) == [5, 50, 123]
    tune(Search(base, values, trials=3, sampler="tpe"), tmp_path / "tpe")
    assert len(tried) == 6
    assert all(isinstance(value, int) for value in tried)
    with pytest.raises(SettingError, match=f"{name} is a whole number of at least 1"):
        Search(base, (Range(name, 0.1, 5.0),))


def test_a_range_is_checked_at_both_ends_and_given_once(tried: list[float], tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="momentum must be at least 0 and below 1"):
        tune(Search(RunConfig.of("split-digits", "owm"), (Range("momentum", 0.5, 5.0),)), tmp_path / "new")
    with pytest.raises(SettingError, match="one range only"):
        Search(RunConfig.of("split-digits", "owm"), (Range("alpha", 1.0, 1.0), Range("alpha", 2.0, 20.0)))
    assert not (tmp_path / "new").exists()


def test_fewer_trials_than_the_grid_has_and_another_sampler(tried: list[float], tmp_path: Path) -> None:
    base, alpha = RunConfig.of("split-digits", "owm"), (Range("alpha", 1e-4, 0.1),)
    assert len(tune(Search(base, alpha, trials=2), tmp_path / "grid").trials) == 2
    assert len(set(tried)) == 2
    assert len(tune(Search(base, alpha, trials=3, sampler="tpe"), tmp_path / "tpe").trials) == 3
    assert len(tried) == 5


@pytest.mark.parametrize("text", ["alpha", "alpha=1", "alpha=1:x", "alpha=2:1", "alpha=0:1", "alpha=1:inf"])
def test_wrong_ranges_are_refused(text: str) -> None:
    with pytest.raises(SettingError, match="range"):
        Range.parse(text)
    with pytest.raises(SettingError, match="choose 'grid' or 'tpe'"):
        Search(RunConfig.of("split-digits", "owm"), sampler="random")


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Runs whose accuracy is best at alpha = 0.01, and that diverge at 1."""
    values: list[float] = []

    def fake(self: Pilot, given: dict[str, float]) -> float | None:
        alpha = self.engine_with(given).alpha
        values.append(alpha)
        return None if alpha == 1.0 else 1 - abs(alpha - 0.01)

    monkeypatch.setattr(Pilot, "score", fake)
    return values


def test_the_best_of_the_grid_is_found_kept_and_not_sought_again(tried: list[float], tmp_path: Path) -> None:
    search = Search(RunConfig.of("split-digits", "owm"), (Range("alpha", 1e-4, 1.0),))
    found = tune(search, tmp_path)
    assert sorted(tried) == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1.0])
    assert found.values == {"alpha": pytest.approx(0.01)}
    assert found.score == pytest.approx(1.0)
    assert [t["score"] for t in found.trials if t["alpha"] == 1.0] == [None]
    assert Tuned.load(tmp_path) == Tuned.load(tmp_path / "tuned.json")
    assert tune(search, tmp_path).values == found.values
    assert len(tried) == 5
    with pytest.raises(FileError, match="another search"):
        tune(Search(RunConfig.of("split-digits", "owm"), trials=3), tmp_path)


def test_an_interrupted_search_goes_on(tried: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search(RunConfig.of("split-digits", "owm"), (Range("alpha", 1e-4, 0.1),))
    counted = Pilot.score

    def interrupted(self: Pilot, values: dict[str, float]) -> float | None:
        if len(tried) == 2:
            raise KeyboardInterrupt
        return counted(self, values)

    monkeypatch.setattr(Pilot, "score", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune(search, tmp_path)
    monkeypatch.setattr(Pilot, "score", counted)
    found = tune(search, tmp_path)
    assert found.score == pytest.approx(1.0)
    # Each value of the grid once, the one that was under way among them.
    assert sorted(tried) == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1])
    assert sorted(trial["alpha"] for trial in found.trials) == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1])
    assert all(trial["score"] is not None for trial in found.trials)


def test_a_trial_that_failed_does_not_count(
    tried: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = Search(RunConfig.of("split-digits", "owm"), (Range("alpha", 1e-3, 0.1),))
    counted = Pilot.score

    def failing(self: Pilot, values: dict[str, float]) -> float:
        raise OSError("no space left")

    monkeypatch.setattr(Pilot, "score", failing)
    with pytest.raises(OSError, match="no space left"):
        tune(search, tmp_path)
    monkeypatch.setattr(Pilot, "score", counted)
    found = tune(search, tmp_path)
    assert sorted(tried) == pytest.approx([1e-3, 1e-2, 1e-1])
    assert len(found.trials) == 3


def test_a_setting_that_the_method_does_not_have_is_refused_at_once(tried: list[float], tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="has no setting 'alpa'"):
        tune(Search(RunConfig.of("split-digits", "owm"), (Range("alpa", 1e-3, 0.1),)), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_search_that_only_diverges_says_so(tried: list[float], tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="diverged at every value"):
        tune(Search(RunConfig.of("split-digits", "owm"), (Range("alpha", 1.0, 1.0),)), tmp_path)


def test_files_that_are_no_result_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="There is no result of a search"):
        Tuned.load(tmp_path)
    (tmp_path / "tuned.json").write_text("[]")
    with pytest.raises(FileError, match="not the result of a search"):
        Tuned.load(tmp_path)


@pytest.mark.slow
def test_the_command_line_searches_and_runs_with_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tuned"
    command = ["tune", "split-digits", "--method", "owm", "--range", "alpha=1e-3:1e-2", "--steps", "3", "--tasks", "2"]
    assert run_command_line([*command, "--jobs", "2", "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    alpha = found["values"]["alpha"]
    assert sorted(trial["alpha"] for trial in Tuned.load(out).trials) == pytest.approx([1e-3, 1e-2])
    common = ["--steps", "2", "--tasks", "1", "--tuned", str(out), "--json"]
    run = ["run", "split-digits", "--method", "owm", *common, "--out", str(tmp_path / "run")]
    assert run_command_line(run) == 0
    assert RunConfig.load(tmp_path / "run" / "config.json").settings["alpha"] == alpha
    compare = ["compare", "split-digits", "--methods", "owm,none", *common, "--out", str(tmp_path / "cmp")]
    assert run_command_line(compare) == 0
    assert RunConfig.load(tmp_path / "cmp" / "owm" / "seed-0" / "config.json").settings["alpha"] == alpha
    assert "alpha" not in RunConfig.load(tmp_path / "cmp" / "none" / "seed-0" / "config.json").settings


def test_a_search_that_goes_on_does_not_propose_the_same_values_again(tried: list[float], tmp_path: Path) -> None:
    base, alpha = RunConfig.of("split-digits", "owm"), (Range("alpha", 1e-4, 0.1),)

    def stop(text: str) -> None:
        if len(tried) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(Search(base, alpha, trials=8, sampler="tpe"), tmp_path, say=stop)
    tune(Search(base, alpha, trials=8, sampler="tpe"), tmp_path)
    assert len(tried) == len(set(tried)) == 8


def test_a_search_is_one_processs_and_numbers_that_fail_are_a_score(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fake(self: OnlinePosterior, task: Task, **rest: Any) -> None:
        if self.engine.alpha < 1e-3:
            raise MatrixError("input is not positive definite.")
        with pytest.raises(FileError, match="Another process"), sole_use(tmp_path):
            pass

    monkeypatch.setattr(OnlinePosterior, "update", fake)
    monkeypatch.setattr(pilot, "evaluate", lambda *args, **rest: [Score(0.5, 0.1, 0.0, 10)])
    found = tune(Search(RunConfig.of("split-digits", "owm"), (Range("alpha", 1e-4, 1e-2),)), tmp_path)
    assert sorted(str(trial["score"]) for trial in found.trials) == ["0.5", "0.5", "None"]


def test_methods_with_kept_examples_have_the_ranges_of_their_base_and_some_have_none() -> None:
    assert Search(RunConfig.of("split-digits", "variational-ncl-replay", paper=True)).ranges[0].high == 100
    assert Search(RunConfig.of("split-digits", "vcl-coreset")).ranges[0].high == 100
    for method in ("none", "joint", "replay"):
        with pytest.raises(SettingError, match="has no prior to search for"):
            Search(RunConfig.of("split-digits", method))
    with pytest.raises(SettingError, match="keep must be a whole number of at least 1, not 0"):
        RunConfig.of("split-digits", "replay", settings={"keep": 0})


def test_the_command_searches_by_evidence_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["tune", "split-digits", "--method", "laplace-ncl", "--steps", "5", "--tasks", "2", "--size", "60"]
    given += ["--range", "prior_scale=0.1:10", "--objective", "evidence"]
    assert run_command_line([*given, "--out", str(tmp_path / "auto")]) == 2
    assert "here likelihood_weight is 'auto'" in capsys.readouterr().err
    assert not (tmp_path / "auto").exists()
    bayes = [*given, "-o", "likelihood_weight=1", "--out", str(tmp_path / "bayes")]
    assert run_command_line(bayes) == 0
    assert "(log evidence -" in capsys.readouterr().out
    found = Tuned.load(tmp_path / "bayes")
    assert found.objective == "evidence"
    assert found.score == max(trial["score"] for trial in found.trials) < 0
    assert run_command_line([*bayes, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["objective"] == "evidence"


def test_a_result_of_before_there_were_objectives_loads(tmp_path: Path) -> None:
    Tuned("split-digits", "owm", "domain", {"alpha": 0.01}, 0.9).save(tmp_path / "tuned.json")
    old = json.loads((tmp_path / "tuned.json").read_text())
    del old["objective"]
    (tmp_path / "tuned.json").write_text(json.dumps(old))
    assert Tuned.load(tmp_path).objective == "accuracy"


def test_hyperparameters_are_not_tested_on_the_seed_that_they_were_found_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Tuned("split-digits", "owm", "domain", {"alpha": 0.01}, 0.9, seed=3).save(tmp_path / "tuned.json")
    given = ["split-digits", "--methods", "owm", "--tuned", str(tmp_path / "tuned.json"), "--quick"]
    assert run_command_line(["compare", *given, "--seeds", "2-4", "--out", str(tmp_path / "runs")]) == 2
    assert "was found on seed 3" in capsys.readouterr().err


def test_what_was_found_with_the_papers_steps_is_used_with_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of before says nothing of it: there were no others."""
    Tuned("split-digits", "laplace-ncl", "domain", {"prior_scale": 3.0}, 0.9).save(tmp_path / "tuned.json")
    given = ["run", "split-digits", "--tuned", str(tmp_path), "--quick", "--tasks", "1", "--quiet"]
    assert run_command_line([*given, "--out", str(tmp_path / "own")]) == 2
    assert "was found with --paper" in capsys.readouterr().err
    assert run_command_line([*given, "--out", str(tmp_path / "paper"), "--paper"]) == 0
    config = RunConfig.load(tmp_path / "paper" / "config.json")
    assert (config.prior, config.prior_scale) == ("normal", 3.0)
