"""The pictures show the numbers of the records: read back from what was drawn."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nclbayes import Record, Score
from nclbayes.analysis import measures, plots
from nclbayes.analysis.drawing import short_names
from nclbayes.errors import SettingError

matplotlib = pytest.importorskip("matplotlib", reason="pictures need matplotlib")

NAN = math.nan
LONG = [f"a very long name with all its details, variant number {k}" for k in range(15)]
OF_A_RECORD = [plots.accuracy_over_tasks, plots.accuracy_matrix, plots.loss_curves]


def record(rows: list[list[float]], names: list[str] | None = None, steps: int = 250) -> Record:
    names = names or [f"task {k}" for k in range(len(rows[-1]))]
    found = Record(names)
    for i, row in enumerate(rows):
        losses = [1 / (1 + t) for t in range(steps)]
        found.add([Score(a, 1 - a, a / 10, 10) for a in row], losses=losses, seconds=60.0 * (i + 1))
    return found


def many(tasks: int, seed: int = 0, names: list[str] | None = None) -> Record:
    draw = random.Random(seed)
    return record([[draw.uniform(0.2, 1) for _ in range(i + 1)] for i in range(tasks)], names)


def lines(figure: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {
        line.get_label(): (list(map(float, line.get_xdata())), list(map(float, line.get_ydata())))
        for line in figure.axes[0].lines
    }


def texts_in_sight(figure: Any) -> list[Any]:
    """Every text that is drawn, with its box; all of them must lie inside the figure."""
    from matplotlib.text import Text

    figure.draw_without_rendering()
    return [t for t in figure.findobj(Text) if t.get_visible() and t.get_text()]


def test_accuracy_over_tasks_starts_each_line_at_its_own_task() -> None:
    figure = plots.accuracy_over_tasks(record([[0.9], [0.8, 0.7], [0.6, 0.5, 1.0]]))
    found = lines(figure)
    assert found["task 0"] == ([1, 2, 3], pytest.approx([90, 80, 60]))
    assert found["task 1"] == ([2, 3], pytest.approx([70, 50]))
    assert found["task 2"] == ([3], pytest.approx([100]))
    assert found["average"] == ([1, 2, 3], pytest.approx([90, 75, 70]))
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["average", "task 0", "task 1", "task 2"]
    figure.draw_without_rendering()
    legend, panel = figure.legends[0].get_window_extent(), figure.axes[0].get_window_extent()
    assert legend.x0 >= panel.x1


def test_scores_of_later_tasks_are_left_out_of_the_average() -> None:
    figure = plots.accuracy_over_tasks(record([[0.9, 0.1], [0.8, 0.7]]))
    assert lines(figure)["average"] == ([1, 2], pytest.approx([90, 75]))
    assert lines(figure)["task 1"] == ([2], pytest.approx([70]))


def test_accuracy_matrix_writes_every_score_and_leaves_the_rest_empty() -> None:
    figure = plots.accuracy_matrix(record([[0.913], [0.2, 0.7], [0.6, NAN, 1.0]]))
    axes = figure.axes[0]
    written = {(t.get_position()[1] - 0.5, t.get_position()[0] - 0.5): t.get_text() for t in axes.texts}
    assert written == {(0, 0): "91.3", (1, 0): "20.0", (1, 1): "70.0", (2, 0): "60.0", (2, 1): "NaN", (2, 2): "100.0"}
    drawn = axes.collections[0].get_array()
    assert drawn.mask.tolist() == [[False, True, True], [False, False, True], [False, True, False]]
    assert drawn[1, 0] == pytest.approx(20)
    assert axes.yaxis_inverted()


def test_the_text_of_every_cell_contrasts_with_it() -> None:
    from matplotlib.colors import to_rgb

    def luminance(colour: Any) -> float:
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour))
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    axes = plots.accuracy_matrix(record([[k / 40 for k in range(41)]])).axes[0]
    cells = axes.collections[0]
    cells.update_scalarmappable()
    for text, cell in zip(axes.texts, cells.get_facecolor(), strict=True):
        dark, light = sorted([luminance(text.get_color()), luminance(cell)])
        assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_compare_methods_shows_mean_error_and_seeds() -> None:
    runs = {"b": [record([[a]]) for a in (0.5, 0.6, 0.7)], "a": [record([[0.9]])]}
    figure = plots.compare_methods(runs)
    axes = figure.axes[0]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["b", "a"]
    assert lines(figure)["b"] == ([pytest.approx(60)], [0])
    assert lines(figure)["a"] == ([pytest.approx(90)], [1])
    (bar,) = axes.collections
    error = 10 / math.sqrt(3)
    assert bar.get_segments()[0][:, 0].tolist() == pytest.approx([60 - error, 60 + error])
    (seeds,) = [line for line in axes.lines if len(line.get_xdata()) == 3]
    assert list(seeds.get_xdata()) == pytest.approx([50, 60, 70])
    assert [t.get_text() for t in axes.texts] == ["60.0 ± 5.8 %", "90.0 %"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]


@pytest.mark.parametrize("what", list(measures.MEASURES))
def test_compare_methods_knows_every_number_of_a_summary(what: str) -> None:
    run = many(3)
    assert set(run.summary()) == set(measures.MEASURES)
    run.baseline, run.evidence = [0.1] * 3, [-1.5] * 3
    run.scores = [[*row, *[Score(0.3, 1, 0, 10)] * (3 - len(row))] for row in run.scores]
    figure = plots.compare_methods({"ncl": [run]}, what)
    assert lines(figure)["ncl"][0] == [pytest.approx(measures.MEASURES[what].scale * run.summary()[what])]
    assert measures.MEASURES[what].title in figure.axes[0].get_xlabel()


def test_what_is_not_finite_is_left_out_and_said() -> None:
    runs = {
        "ncl": [record([[0.8]]), record([[NAN]]), record([[0.6]])],
        "lost": [record([[math.inf]])],
        "empty": [Record(["a"])],
    }
    figure = plots.compare_methods(runs)
    assert [t.get_text() for t in figure.axes[0].texts] == ["70.0 ± 10.0 % (2 of 3)", "no value", "no value"]
    assert all(map(math.isfinite, figure.axes[0].get_xlim()))
    by_method = lines(plots.accuracy_by_method(runs))
    assert by_method["ncl"] == ([1], [pytest.approx(70)])
    assert by_method["empty"] == ([], [])


def test_accuracy_by_method_has_a_band_of_the_standard_error() -> None:
    runs = {"ncl": [record([[0.9], [0.8, 0.6]]), record([[0.7], [0.8, 0.8]])], "ewc": [record([[0.5]])]}
    figure = plots.accuracy_by_method(runs)
    assert lines(figure)["ncl"] == ([1, 2], pytest.approx([80, 75]))
    assert lines(figure)["ewc"] == ([1], pytest.approx([50]))
    (band,) = figure.axes[0].collections
    corners = band.get_paths()[0].vertices
    assert sorted({round(float(y), 6) for x, y in corners if x == 2}) == [70, 80]


def test_a_mean_is_over_the_records_that_reach_it() -> None:
    runs = {"ncl": [record([[0.9], [0.8, 0.6]]), record([[0.7]], names=["task 0", "task 1"])]}
    assert lines(plots.accuracy_by_method(runs))["ncl"] == ([1, 2], pytest.approx([80, 70]))


def test_loss_curves_are_means_of_blocks_one_task_after_the_other() -> None:
    run = record([[0.9], [0.8, 0.7]])
    run.losses = [[float(t) for t in range(1000)], [5.0, 6.0, NAN]]
    found = lines(plots.loss_curves(run))
    x, y = found["task 0"]
    assert len(x) == 100
    assert (x[0], y[0], x[-1], y[-1]) == (5.5, 4.5, 995.5, 994.5)
    assert sum(y) / 100 == pytest.approx(sum(run.losses[0]) / 1000)
    assert found["task 1"][0] == [1001, 1002, 1003]
    assert found["task 1"][1][:2] == [5.0, 6.0]
    assert math.isnan(found["task 1"][1][2])


def test_loss_curves_mark_boundaries_and_name_tasks_whose_losses_were_kept() -> None:
    run = many(3)
    run.losses[1] = []
    axes = plots.loss_curves(run).axes[0]
    assert [t.get_text() for t in axes.texts] == ["task 0", "task 2"]
    assert [line.get_xdata()[0] for line in axes.lines if list(line.get_ydata()) == [0, 1]] == [250.5]


def test_a_wide_range_of_losses_is_logarithmic() -> None:
    run = record([[0.9]])
    assert plots.loss_curves(run).axes[0].get_yscale() == "log"
    run.losses = [[-loss for loss in run.losses[0]]]
    assert plots.loss_curves(run).axes[0].get_yscale() == "linear"


@pytest.mark.parametrize("draw", OF_A_RECORD)
@pytest.mark.parametrize(
    "run",
    [
        record([[0.9]], names=LONG[:5]),
        many(2),
        many(15),
        many(15, names=LONG),
        many(3, names=["_hidden", "$x_1$ costs $", "two\nlines"]),
        record([[NAN], [NAN, NAN]]),
    ],
    ids=["one of five", "two", "fifteen", "long names", "odd names", "NaN"],
)
def test_all_text_is_inside_the_figure_and_large_enough(draw: Callable[[Record], Any], run: Record) -> None:
    figure = draw(run)
    for text in texts_in_sight(figure):
        box = text.get_window_extent()
        shown = figure.bbox
        # Tick labels beyond the limits of an axis are kept by matplotlib but never drawn.
        if text in figure.axes[0].get_xticklabels() + figure.axes[0].get_yticklabels():
            box = figure.axes[0].get_tightbbox()
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= shown.x1 + 1 and box.y1 <= shown.y1 + 1, text  # noqa: PT018
        assert text.get_fontsize() >= 8


def test_labels_never_overlap_on_the_axis_of_tasks() -> None:
    run = many(5, names=LONG[:5])
    run.losses = [[1.0] * n for n in (2000, 20, 30, 5000, 40)]
    figure = plots.loss_curves(run)
    figure.draw_without_rendering()
    boxes = [t.get_window_extent() for t in figure.axes[0].texts]
    assert all(a.x1 <= b.x0 for a, b in pairwise(boxes))


def test_names_are_shown_as_they_are_and_long_ones_stay_apart() -> None:
    figure = plots.accuracy_by_method({"_a": [many(2)], "$b$": [many(2)]})
    assert [(t.get_text(), t.get_parse_math()) for t in figure.legends[0].get_texts()] == [
        ("_a", False),
        ("$b$", False),
    ]
    alike = [f"the same beginning {k} and the same end" for k in range(2)]
    labels = [
        t.get_text() for t in plots.compare_methods({name: [many(2)] for name in alike}).axes[0].get_yticklabels()
    ]
    assert len(set(labels)) == 2
    assert all(len(label) < 30 for label in labels)


def test_curves_differ_in_more_than_colour() -> None:
    axes = plots.accuracy_over_tasks(many(15)).axes[0]
    looks = {(ln.get_color(), ln.get_marker(), ln.get_linestyle(), str(ln.get_markerfacecolor())) for ln in axes.lines}
    assert len(looks) == 16
    first = axes.lines[:6]
    assert (
        len({line.get_color() for line in first}) == len({(ln.get_marker(), ln.get_linestyle()) for ln in first}) == 6
    )


def test_settings_of_matplotlib_neither_change_nor_matter(tmp_path: Path) -> None:
    plain = plots.save(plots.accuracy_over_tasks(many(3)), tmp_path / "plain.png")[0].read_bytes()
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "black", "lines.linewidth": 9, "axes.grid": True}):
        before = dict(matplotlib.rcParams)
        styled = plots.save(plots.accuracy_over_tasks(many(3)), tmp_path / "styled.png")[0].read_bytes()
        assert dict(matplotlib.rcParams) == before
    assert styled == plain


def test_save_writes_what_the_suffix_says(tmp_path: Path) -> None:
    figure, both = plots.compare_methods({"ncl": [many(2)]}), tmp_path / "new" / "both"
    assert plots.save(figure, both) == [both.with_suffix(".png"), both.with_suffix(".pdf")]
    assert (tmp_path / "new" / "both.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "new" / "both.pdf").read_bytes().startswith(b"%PDF")
    assert plots.save(figure, str(tmp_path / "one.svg")) == [tmp_path / "one.svg"]
    assert sorted(p.name for p in tmp_path.rglob("*.*")) == ["both.pdf", "both.png", "one.svg"]
    with pytest.raises(SettingError, match=r"'lr-0.05' ends in '.05', which is no picture format: use one of .*png"):
        plots.save(figure, tmp_path / "lr-0.05")


@pytest.mark.parametrize("suffix", ["png", "pdf", "svg"])
def test_a_picture_drawn_again_gives_the_same_file(tmp_path: Path, suffix: str) -> None:
    files = [plots.save(plots.accuracy_by_method({"ncl": [many(2)]}), tmp_path / f"{k}.{suffix}")[0] for k in range(2)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_png_has_200_dots_an_inch(tmp_path: Path) -> None:
    figure = plots.accuracy_over_tasks(many(2))
    content = plots.save(figure, tmp_path / "a.png")[0].read_bytes()
    width = int.from_bytes(content[16:20], "big")
    assert width == pytest.approx(200 * figure.get_size_inches()[0], abs=1)


@pytest.mark.parametrize("draw", OF_A_RECORD)
def test_an_empty_record_is_refused(draw: Callable[[Record], Any]) -> None:
    with pytest.raises(SettingError, match=r"has no row yet|has no training losses"):
        draw(Record(["a"]))


@pytest.mark.parametrize("draw", [plots.accuracy_by_method, plots.compare_methods])
def test_runs_without_records_are_refused(draw: Callable[[Any], Any]) -> None:
    with pytest.raises(SettingError, match="no runs"):
        draw({})
    with pytest.raises(SettingError, match="Method 'ewc' has no records"):
        draw({"ncl": [many(2)], "ewc": []})


def test_unknown_numbers_and_runs_that_never_began_are_refused() -> None:
    with pytest.raises(SettingError, match="no 'speed' to compare: choose one of 'average accuracy'"):
        plots.compare_methods({"ncl": [many(2)]}, "speed")
    with pytest.raises(SettingError, match="No record has a row yet"):
        plots.accuracy_by_method({"ncl": [Record(["a"])]})


def test_without_matplotlib_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SettingError, match=r"pip install 'nclbayes\[experiments\]'"):
        plots.accuracy_over_tasks(many(2))


def test_numbers_are_written_plainly() -> None:
    loss, accuracy = measures.MEASURES["average loss"], measures.MEASURES["average accuracy"]
    assert loss.write([1234567.0]) == "1.23e+06"
    assert accuracy.write([-0.0001]) == "0.0"
    assert accuracy.write([]) == accuracy.write([NAN]) == "-"
    assert measures.MEASURES["seconds"].write([60, 120], with_unit=True) == "1.50 ± 0.50 minutes"


@pytest.mark.slow
def test_importing_the_pictures_does_not_import_matplotlib() -> None:
    code = "import sys, nclbayes.analysis.report; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_long_names_are_shortened_where_they_stay_apart() -> None:
    assert short_names(["set 1 (44, 19, 93, 90, 71, 69)", "set 10 (38, 27)"]) == [
        "set 1 (44, 19, 93, 90, …",
        "set 10 (38, 27)",
    ]
    assert short_names([f"{'a' * 30}{k}" for k in (1, 2)]) == ["aaaaaaaaaaa…aaaaaaaaaa1", "aaaaaaaaaaa…aaaaaaaaaa2"]
    assert short_names(["same", "same"]) == ["1. same", "2. same"]
