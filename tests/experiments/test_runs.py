"""Runs that are stopped and taken up, and folders that say what they hold."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nclbayes import Record, Task, evaluate
from nclbayes.engines import PAPER
from nclbayes.errors import FileError, NCLError, NonFiniteError, SettingError
from nclbayes.experiments import SETUPS, RunConfig, compare, find_setup, run, run_all
from nclbayes.experiments.comparison import ComparisonError
from nclbayes.experiments.networks import SequenceFeatures, SequenceRegressor, perceptron
from nclbayes.experiments.runs import claim_folder, reopen, reopen_each
from nclbayes.storage.locking import sole_use

pytest.importorskip("sklearn")


def config(method: str = "laplace-ncl", **rest: object) -> RunConfig:
    return RunConfig.of("split-digits", method, settings={"steps": 15, "batch_size": 32}, size=60, tasks=3, **rest)  # type: ignore[arg-type]


def same(first: Record, second: Record) -> bool:
    untimed = [replace(record, seconds=[]) for record in (first, second)]
    return untimed[0] == untimed[1]


@pytest.mark.parametrize("method", ["laplace-ncl", "variational-ncl", "none", "joint"])
def test_a_run_that_is_stopped_goes_on_and_ends_the_same(method: str, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    whole = run(config(method), tmp_path / "whole", progress=False)
    assert torch.equal(torch.get_rng_state(), state)

    def stop(text: str) -> None:
        if text.startswith("2/3"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config(method), tmp_path / "halves", progress=False, say=stop)
    again = run(config(method), tmp_path / "halves", progress=False)
    assert same(whole, again)
    assert same(Record.load(tmp_path / "halves" / "record.json"), whole)
    assert len(whole.losses[2]) == 15
    assert not (tmp_path / "halves" / "update.ckpt").exists()


def test_a_run_killed_between_posterior_and_record_scores_the_task_once_more(tmp_path: Path) -> None:
    whole = run(config(), tmp_path / "a", progress=False)
    run(config(), tmp_path / "b", progress=False)
    record = Record.load(tmp_path / "b" / "record.json")
    for rows in (record.scores, record.losses, record.seconds, record.evidence):
        rows.pop()
    record.save(tmp_path / "b" / "record.json")
    again = run(config(), tmp_path / "b", progress=False)
    assert again.matrix() == whole.matrix()


def test_the_evidence_of_each_task_is_kept_even_of_one_that_was_killed_before_its_row(tmp_path: Path) -> None:
    of_bayes = RunConfig.of(
        "split-digits", "laplace-ncl", settings={"steps": 15, "likelihood_weight": 1.0}, size=60, tasks=2
    )
    whole = run(of_bayes, tmp_path, progress=False)
    _, tasks, learner = reopen(tmp_path)
    assert len(tasks) == 2
    assert whole.evidence[1] == learner.log_evidence is not None
    assert whole.log_evidence == sum(value for value in whole.evidence if value is not None)
    record = Record.load(tmp_path / "record.json")
    for rows in (record.scores, record.losses, record.seconds, record.evidence):
        rows.pop()
    record.save(tmp_path / "record.json")
    assert run(of_bayes, tmp_path, progress=False).evidence == whole.evidence
    assert run(config(), progress=False).evidence == [None] * 3


def test_the_posterior_after_each_task_is_kept_if_asked_for(tmp_path: Path) -> None:
    run(config(), tmp_path / "last", progress=False)
    with pytest.raises(FileError, match=r"posterior-1\.ncl"):
        reopen_each(tmp_path / "last")

    def stop(text: str) -> None:
        if text.startswith("2/3"):
            raise KeyboardInterrupt

    asked = config(keep_each=True)
    with pytest.raises(KeyboardInterrupt):
        run(asked, tmp_path / "each", progress=False, say=stop)
    record = run(asked, tmp_path / "each", progress=False)
    found, tasks, learners = reopen_each(tmp_path / "each")
    assert found == asked
    assert [learner.tasks for learner in learners] == [tuple(record.tasks[: k + 1]) for k in range(3)]
    for learner, row in zip(learners, record.scores, strict=True):
        assert evaluate(learner, tasks) == row
    last = reopen(tmp_path / "last")[2].mean()
    assert all(torch.equal(value, last[site]) for site, value in learners[-1].mean().items())


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    run(config("none"), tmp_path, progress=False)
    with pytest.raises(FileError, match="holds a run of another configuration"):
        run(config("joint"), tmp_path, progress=False)
    assert RunConfig.load(tmp_path / "config.json") == config("none")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileError, match="is not a configuration of a run"):
        run(config("none"), tmp_path, progress=False)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"Could not write to '.*file/run'"):
        run(config(), tmp_path / "file" / "run", progress=False)


def test_the_seed_decides_everything() -> None:
    first, second, other = (run(config(seed=seed), progress=False) for seed in (1, 1, 2))
    assert same(first, second)
    assert first.tasks != other.tasks


def test_defaults_come_from_set_method_and_scenario() -> None:
    mnist = RunConfig.of("split_mnist", "laplace-ncl", "class")
    assert (mnist.prior, mnist.prior_scale, mnist.active) == ("scaled", 1.0, "seen")
    assert mnist.settings == {"steps": 2000, "batch_size": 256, "lr": 0.05, "momentum": 0.9}
    assert RunConfig.of("split-mnist", "ewc", "class").prior == "normal"
    assert RunConfig.of("split-mnist", "replay", "class").active == "all"
    published = RunConfig.of("split-mnist", "laplace-ncl", "class", paper=True)
    assert (published.prior, published.prior_scale, published.active) == ("normal", 288.7, "all")
    assert {name: published.settings[name] for name in PAPER} == PAPER
    variational = RunConfig.of("split-mnist", "variational-ncl", "class", paper=True)
    assert variational.settings["fisher_temperature"] == 10.0
    assert RunConfig.of("split-mnist", "variational-ncl", "task", paper=True).settings["kronecker_sum"] == "bound"
    quick = RunConfig.of("stimulus-response", "none", quick=True)
    assert quick.settings["steps"] == 5
    assert quick.size == 5 * 32
    assert RunConfig.of("stimulus-response", "none").size == 1_000_000
    with pytest.raises(SettingError, match=r"no scenario 'clas' \(did you mean 'class'\?\)"):
        RunConfig.of("split-mnist", "none", "clas")
    with pytest.raises(SettingError, match="its scenarios are none: there is just one"):
        RunConfig.of("stroke-mnist", "none", "class")
    with pytest.raises(SettingError, match=r"no setting 'momentun' \(did you mean 'momentum'\?\)"):
        RunConfig.of("split-mnist", "none", settings={"momentun": 0.5})
    with pytest.raises(SettingError, match="lr must be positive"):
        RunConfig.of("split-mnist", "none", settings={"lr": -1})


def test_methods_with_rates_of_their_own_do_not_get_those_of_plain_training() -> None:
    for name, setup in SETUPS.items():
        assert {"lr", "momentum"} <= RunConfig.of(name, "none").settings.keys()
        for method in ("bgd", "foo-vb"):
            settings = RunConfig.of(name, method).settings
            assert not {"lr", "momentum"} & settings.keys()
            assert settings["steps"] == setup.settings["steps"]
        assert RunConfig.of(name, "ivon").settings["lr"] < 0.1
    assert RunConfig.of("split-digits", "bgd", settings={"lr": 2.0}).settings["lr"] == 2.0


def test_every_scenario_of_the_digits_runs() -> None:
    for scenario in ("task", "domain", "class"):
        settings = {"steps": 30, "batch_size": 32, "lr": 0.1}
        record = run(RunConfig.of("split-digits", "laplace-ncl", scenario, settings=settings, tasks=2), progress=False)
        assert record.is_complete
        assert record.matrix()[0][0] > 0.8
    assert set(SETUPS) >= {"split-digits", "split-mnist", "stroke-mnist", "stimulus-response", "split-cifar100"}
    assert find_setup("split_digits").name == "split-digits"


@pytest.mark.slow
def test_a_comparison_in_processes_is_that_in_one(tmp_path: Path) -> None:
    configs = [config(method, seed=seed) for method in ("none", "joint") for seed in (0, 1)]
    alone = compare(configs, tmp_path / "alone", progress=False)
    together = compare(configs, tmp_path / "together", jobs=2)
    assert list(alone) == list(together) == ["none", "joint"]
    for name, records in alone.items():
        for first, second in zip(records, together[name], strict=True):
            assert first.average_accuracy == pytest.approx(second.average_accuracy, abs=0.05)
    with pytest.raises(ComparisonError, match="another configuration"):
        compare([replace(configs[0], prior_scale=3.0)], tmp_path / "together", jobs=2)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_fails_does_not_keep_others_from_running(jobs: int, tmp_path: Path) -> None:
    diverging = config("none", seed=1)
    diverging = replace(diverging, settings={**diverging.settings, "lr": 1e30})
    with pytest.raises(ComparisonError, match=r"split-digits domain none, seed 1 failed: .*lower `lr`") as error:
        compare([diverging, config("none")], tmp_path, jobs=jobs, progress=False)
    ((done, record),) = error.value.done
    assert done == config("none")
    assert record.is_complete


@pytest.mark.slow
def test_a_run_that_fails_does_not_hide_another_of_the_same_method_and_seed(tmp_path: Path) -> None:
    diverging = replace(config("none"), settings={**config("none").settings, "lr": 1e30})
    with pytest.raises(ComparisonError) as error:
        run_all([(diverging, tmp_path / "a"), (config("none"), tmp_path / "b")], jobs=2)
    assert [done for done, _ in error.value.done] == [config("none")]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_folder_is_for_one_process_at_a_time(jobs: int, tmp_path: Path) -> None:
    folder = tmp_path / "none" / "seed-0"
    with sole_use(folder), pytest.raises(NCLError, match=r"Another process is at work in '.*seed-0'"):
        compare([config("none")], tmp_path, jobs=jobs, progress=False)
    assert compare([config("none")], tmp_path, progress=False)["none"][0].is_complete


def test_the_order_of_the_tasks_may_be_the_seeds(tmp_path: Path) -> None:
    def names(seed: int, shuffle: bool) -> list[str]:
        settings = {"steps": 1, "batch_size": 8}
        asked = RunConfig.of("split-digits", "none", seed=seed, settings=settings, size=10, shuffle=shuffle)
        return run(asked, progress=False).tasks

    assert names(0, shuffle=True) == names(0, shuffle=False)
    assert names(1, shuffle=True) != names(1, shuffle=False)
    assert sorted(names(1, shuffle=True)) == sorted(names(1, shuffle=False))


def test_a_folder_in_which_nothing_was_learnt_changes_hands(tmp_path: Path) -> None:
    diverging = replace(config("none"), settings={**config("none").settings, "lr": 1e30})
    with pytest.raises(NonFiniteError):
        run(diverging, tmp_path, progress=False)
    assert run(config("none"), tmp_path, progress=False).is_complete


def test_a_folder_whose_files_are_not_of_one_run_is_refused(tmp_path: Path) -> None:
    run(config("none"), tmp_path, progress=False)
    (tmp_path / "record.json").rename(tmp_path / "kept.json")
    with pytest.raises(FileError, match="has learnt 3 tasks and the record has 0"):
        run(config("none"), tmp_path, progress=False)
    (tmp_path / "kept.json").rename(tmp_path / "record.json")
    (tmp_path / "posterior.ncl").unlink()
    with pytest.raises(FileError, match=r"a record and no posterior\.ncl"):
        run(config("none"), tmp_path, progress=False)


def test_runs_that_cannot_be_are_refused() -> None:
    for wrong, said in (
        ({"seed": -1}, "seed must lie"),
        ({"seed": 2**70}, "seed must lie"),
        ({"prior_scale": math.inf}, "prior_scale must be a positive number"),
        ({"settings": {"schedule": 1}}, "schedule must be a function"),
    ):
        with pytest.raises(SettingError, match=said):
            RunConfig.of("split-digits", "none", **wrong)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="no end, and so no epochs"):
        RunConfig.of("stimulus-response", "none", settings={"steps": None, "epochs": 1})
    with pytest.raises(SettingError, match="split-digits has 5 tasks, not 12"):
        run(RunConfig.of("split-digits", "none", tasks=12), progress=False)


def test_few_examples_do_not_make_fewer_classes() -> None:
    asked = RunConfig.of("split-digits", "none", "class", seed=3, size=2, settings={"steps": 2})
    assert run(asked, progress=False).is_complete


def test_the_networks_have_the_shapes_of_their_tasks() -> None:
    x, lengths = torch.zeros(3, 9, 4), torch.tensor([9, 5, 6])
    assert SequenceFeatures(4, 7, last=5)(x, lengths).shape == (3, 5, 7)
    assert SequenceRegressor(4, 7, 3)(x, lengths).shape == (3, 9, 3)
    assert perceptron(16, (8,), 2, heads=3)(torch.zeros(5, 1, 4, 4), head=2).shape == (5, 2)
    features = SequenceFeatures(4, 7, last=5)
    moving = torch.randn(2, 9, 4)
    states = features.core(moving, torch.tensor([9, 6]))
    torch.testing.assert_close(features(moving, torch.tensor([9, 6]))[1], states[1, 1:6])


@pytest.mark.parametrize("scenario", ["task", "class"])
def test_a_shuffled_run_of_a_few_tasks_has_an_output_for_every_task_of_the_set(scenario: str) -> None:
    asked = RunConfig.of("split-digits", "none", scenario, 1, settings={"steps": 2}, size=10, tasks=2, shuffle=True)
    assert len(run(asked, progress=False).tasks) == 2
    with pytest.raises(SettingError, match="has 5 tasks, not 12"):
        run(replace(asked, tasks=12), progress=False)


def test_a_head_of_its_own_is_not_scored_before_its_task_is_learnt() -> None:
    asked = RunConfig.of("split-digits", "none", "task", settings={"steps": 2}, size=10, tasks=3)
    record = run(asked, progress=False)
    assert [len(row) for row in record.scores] == [1, 2, 3]
    assert math.isnan(record.forward_transfer)
    assert len(record.baseline) == 3


def test_a_run_goes_on_elsewhere_and_a_device_that_is_not_here_is_refused(tmp_path: Path) -> None:
    run(config(), tmp_path, progress=False)
    replace(config(), device="cuda:7").save(tmp_path / "config.json")
    with pytest.raises(SettingError, match="device is 'cuda:7', and there"):
        reopen(tmp_path)
    assert run(config(), tmp_path, progress=False).is_complete
    for wrong in ("cuda:x", "cuda:-1", "tpu"):
        with pytest.raises(SettingError, match="choose cpu, cuda, or one of several"):
            run(config(device=wrong), progress=False)


def test_runs_of_before_go_on_with_the_papers_steps(tmp_path: Path) -> None:
    """Configurations of format 1 say nothing of what has been decided since, nor of the kind of a prior."""
    asked = RunConfig.of("split-digits", "variational-ncl", settings={"steps": 3}, tasks=1)
    asked.save(tmp_path / "config.json")
    assert RunConfig.load(tmp_path / "config.json") == asked
    values = json.loads((tmp_path / "config.json").read_text())
    for name in ("prior", "active"):
        del values[name]
    (tmp_path / "config.json").write_text(json.dumps({**values, "format": 1, "prior_scale": 0.5}))
    found = RunConfig.load(tmp_path / "config.json")
    assert found.settings == {**PAPER, "kronecker_sum": "bound", **asked.settings}
    assert (found.prior, found.prior_scale, found.active) == ("normal", 0.5, "all")
    run(found, tmp_path, progress=False)
    assert reopen(tmp_path)[2].engine.stiffness is None


def test_with_one_head_over_all_classes_earlier_tasks_are_asked_among_all_that_were_seen(tmp_path: Path) -> None:
    settings = {"steps": 30, "batch_size": 32}
    asked = RunConfig.of("split-digits", "laplace-ncl", "class", settings=settings, tasks=3)
    record = run(asked, tmp_path, progress=False)
    _, tasks, learner = reopen(tmp_path)
    assert [task.context["active"] for task in tasks] == [2, 4, 6]
    among_all = [Task(t.train, t.test, name=t.name, context={"active": 6}) for t in tasks]
    assert record.scores[-1] == evaluate(learner, among_all, generator=torch.Generator().manual_seed(0))
    for wrong in ({"active": "some"}, {"active": "seen", "scenario": "domain"}, {"prior": "flat"}):
        with pytest.raises(SettingError, match=r"active|prior"):
            replace(asked, **wrong).check()


@pytest.mark.parametrize(("method", "paper"), [("ewc", False), ("owm", True), ("laplace-ncl", True)])
def test_a_run_of_before_goes_on_by_the_same_command(method: str, paper: bool, tmp_path: Path) -> None:
    asked = RunConfig.of("split-digits", method, settings={"steps": 2}, tasks=2, paper=paper)
    asked.save(tmp_path / "config.json")
    values = json.loads((tmp_path / "config.json").read_text())
    values["settings"] = {k: v for k, v in values["settings"].items() if k not in PAPER}
    for name in ("prior", "active"):
        del values[name]
    (tmp_path / "config.json").write_text(json.dumps({**values, "format": 1}))
    (tmp_path / "record.json").write_text("{}")
    claim_folder(tmp_path, asked)
    with pytest.raises(FileError, match="another configuration"):
        claim_folder(tmp_path, replace(asked, seed=1))


def test_classes_that_come_in_another_order_are_not_counted_as_seen() -> None:
    asked = RunConfig.of("split-digits", "laplace-ncl", "class", shuffle=True)
    assert asked.active == "all"
    with pytest.raises(SettingError, match="leave out shuffle"):
        replace(asked, active="seen").check()
