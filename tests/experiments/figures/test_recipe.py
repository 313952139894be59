"""What every figure leaves in its folder, and what it refuses."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from nclbayes.errors import FileError, SettingError
from nclbayes.experiments.figures import FIGURES, SCALES, Recipe, Results, Statement, Workplace, find_figure, make
from nclbayes.experiments.figures.recipe import _check


def recipe() -> Recipe:
    return Recipe(
        "squares",
        "some squares",
        {scale: {"count": 3} for scale in SCALES},
        lambda settings, place: Results(
            {"squares": [{"x": x, "y": x * x} for x in range(settings["count"])]},
            [Statement("squares grow", True, "they do")],
        ),
        lambda results: {},
    )


def test_results_are_written_as_json_and_csv(tmp_path: Path) -> None:
    make(recipe(), "quick", Workplace(tmp_path / "new"), {"count": 4})
    found = json.loads((tmp_path / "new" / "results.json").read_text())
    assert found["statements"] == [{"claim": "squares grow", "holds": True, "detail": "they do"}]
    with (tmp_path / "new" / "squares.csv").open() as file:
        assert list(csv.DictReader(file))[3] == {"x": "3", "y": "9"}


def test_a_folder_belongs_to_one_figure_with_one_set_of_settings(tmp_path: Path) -> None:
    make(recipe(), "quick", Workplace(tmp_path))
    make(recipe(), "laptop", Workplace(tmp_path))
    with pytest.raises(FileError, match="of other settings"):
        make(recipe(), "quick", Workplace(tmp_path), {"count": 5})


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="scale is 'huge'"):
        make(recipe(), "huge", Workplace(tmp_path))
    with pytest.raises(SettingError, match="has no setting 'counts': it has count"):
        make(recipe(), "quick", Workplace(tmp_path), {"counts": 5})
    with pytest.raises(SettingError, match="did you mean 'toy'"):
        find_figure("toys")


@pytest.mark.parametrize("name", FIGURES)
def test_every_recipe_has_every_scale_with_the_same_settings(name: str) -> None:
    scales = FIGURES[name].scales
    assert tuple(scales) == SCALES
    assert len({frozenset(settings) for settings in scales.values()}) == 1
    json.dumps(scales)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("seeds", 0, "seeds must be a whole number of at least 1, not 0"),
        ("seeds", 2.5, "seeds must be a whole number"),
        ("sets", "split-digits", "sets must be something like"),
        ("sets", [], "sets must be something like"),
        ("steps", 0, "steps must be a whole number of at least 1"),
    ],
)
def test_settings_of_another_kind_are_refused_before_anything_is_made(
    name: str, value: object, said: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingError, match=said):
        make(find_figure("feedforward"), "quick", Workplace(tmp_path / "new"), {name: value})
    assert not (tmp_path / "new").exists()


def test_settings_may_be_false_and_seeds_zero() -> None:
    for name, usual, value in (("shuffle", True, False), ("seed", 1, 0), ("process_noise", 0.5, 0.0)):
        _check(name, value, usual)
    for name, usual, wrong, said in (
        ("shuffle", True, 1, "true or false"),
        ("seed", 0, -1, "0 or more"),
        ("seed", 0, 0.5, "0 or more"),
        ("alpha", 0.1, 0.0, "a positive number"),
    ):
        with pytest.raises(SettingError, match=f"{name} must be {said}"):
            _check(name, wrong, usual)


def test_an_error_while_computing_is_not_one_of_the_folder(tmp_path: Path) -> None:
    def fail(settings: object, place: object) -> Results:
        raise OSError(12, "Cannot allocate memory")

    with pytest.raises(OSError, match="Cannot allocate memory") as caught:
        make(replace(recipe(), compute=fail), "quick", Workplace(tmp_path))
    assert not isinstance(caught.value, FileError)
