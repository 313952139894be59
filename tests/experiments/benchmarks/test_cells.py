"""The table of cells: every one can be run, and what was published stands where it should."""

from __future__ import annotations

import pytest

from nclbayes.errors import SettingError
from nclbayes.experiments.benchmarks import CELLS, find_cells
from nclbayes.experiments.benchmarks.published import PUBLISHED, SCENARIOS, SOURCES, Checked


def test_every_cell_is_a_run_and_no_two_are_the_same() -> None:
    configs = {name: cell.config(seed=5) for name, cell in CELLS.items()}
    for name, config in configs.items():
        assert config.seed == 5
        cell = CELLS[name]
        assert name == f"{cell.family}-{cell.label}"
        assert cell.family.startswith(cell.set)
    assert len({repr(config) for config in configs.values()}) == len(configs)


def test_the_whole_table_of_the_paper_is_among_the_cells() -> None:
    for set, methods in PUBLISHED.items():
        for method, numbers in methods.items():
            if "unit prior" in method:
                continue
            for scenario, (accuracy, error) in zip(SCENARIOS, numbers, strict=True):
                name = f"{set}-{scenario}-{method}" + ("-paper" if method == "laplace-ncl" else "")
                (published,) = CELLS[name].published
                assert (published.accuracy, published.error, published.differs) == (accuracy, error, "")
                assert CELLS[name].config(0).active == "all"


def test_engines_with_their_defaults_are_said_to_differ_from_the_tuned_paper() -> None:
    for set in PUBLISHED:
        for scenario in SCENARIOS:
            cell = CELLS[f"{set}-{scenario}-laplace-ncl"]
            assert "nothing is tuned" in cell.published[0].differs
            assert cell.config(0).prior == "scaled"
            assert (cell.config(0).active == "seen") is ("classes seen" in cell.published[0].differs)


def test_the_sources_say_how_they_are_known() -> None:
    cited = {published.source for cell in CELLS.values() for published in cell.published}
    assert cited == set(SOURCES)
    for source in SOURCES:
        assert (source.checked is Checked.SECOND_HAND) is bool(source.through)
        assert source.checked.value in str(source)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_method_by_name_is_a_cell_only_if_it_is_there(scenario: str) -> None:
    assert f"split-mnist-{scenario}-ivon" in CELLS


def test_cells_are_found_by_name_and_by_pattern_in_the_order_of_the_table() -> None:
    names = [cell.name for cell in find_cells(["split-mnist-*-owm", "split-digits-task-none"])]
    assert names == ["split-digits-task-none", *(f"split-mnist-{scenario}-owm" for scenario in SCENARIOS)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("split-mnist-task-emc", "did you mean 'split-mnist-task-ewc'"),
        ("split-cifar10 as images-task-ewc", "the cells are of features"),
    ],
)
def test_an_unknown_cell_is_refused_with_a_hint(name: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        find_cells([name])


def test_short_cells_are_those_of_the_whole_set_in_fewer_steps() -> None:
    for name in CELLS:
        if "-short-" in name:
            cell, whole = CELLS[name], CELLS[name.replace("-short", "")]
            assert (cell.config(0).settings["steps"], cell.config(0).units) == (1000, 400)
            assert {**cell.config(0).settings, "steps": 5000} == dict(whole.config(0).settings)
            assert [p.accuracy for p in cell.published] == [p.accuracy for p in whole.published]
            assert all("1,000 steps a task" in p.differs for p in cell.published)


def test_the_setting_of_a_cell_is_told() -> None:
    assert CELLS["permuted-mnist-10-vcl"].setting == "5,000 x 256, 100 units; 20 samples to predict"
    assert CELLS["split-mnist-task-owm"].setting == "2,000 x 256, 400 units"
