"""The ledger: results from folders of runs, verdicts, and the page that shows them."""

from __future__ import annotations

import math
import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("sklearn")

from nclbayes.analysis.evaluation import Score
from nclbayes.analysis.record import Record
from nclbayes.errors import FileError
from nclbayes.experiments.benchmarks import CELLS, Cell, Ledger, Result, run_cells, verdict
from nclbayes.experiments.benchmarks.ledger import collect, command_of, fingerprint, tables, write_ledger
from nclbayes.experiments.benchmarks.published import KAO, Published

CELL = CELLS["split-mnist-task-owm"]
SMALL = Cell("split-digits-domain-none", "none", "split-digits", "domain", 2, {"steps": 5})


def left(folder: Path, cell: Cell, seed: int, accuracies: list[float], complete: bool = True) -> None:
    """A run as a folder holds it."""
    path = folder / cell.name / f"seed-{seed}"
    path.mkdir(parents=True)
    cell.config(seed).save(path / "config.json")
    record = Record([f"task {k}" for k in range(len(accuracies))])
    for k in range(len(accuracies) if complete else len(accuracies) - 1):
        record.add([Score(a, 0.1, 0.1, 100) for a in accuracies[: k + 1]], seconds=30.0)
    record.save(path / "record.json")


def test_a_result_is_the_mean_over_the_seeds_of_complete_runs(tmp_path: Path) -> None:
    left(tmp_path, CELL, 0, [0.9, 0.8])
    left(tmp_path, CELL, 1, [0.9, 0.9])
    left(tmp_path, CELL, 7, [0.1, 0.1], complete=False)
    (result,) = collect(tmp_path)
    assert (result.cell, result.seeds, result.minutes) == (CELL.name, (0, 1), 1.0)
    assert math.isclose(result.accuracy, 87.5)
    assert result.error is not None
    assert math.isclose(result.error, 2.5)
    assert result.command == f"nclbayes bench {CELL.name} --seeds 0-1"
    assert result.is_current


def test_runs_of_other_settings_are_left_out(tmp_path: Path) -> None:
    left(tmp_path, replace(CELL, settings={"steps": 7}), 0, [0.9])
    assert collect(tmp_path) == []


def test_the_fingerprint_changes_with_the_settings_and_not_with_the_seed() -> None:
    assert fingerprint(CELL) != fingerprint(replace(CELL, settings={"alpha": 0.5}))
    assert fingerprint(CELL) != fingerprint(CELLS["split-mnist-domain-owm"])
    assert re.fullmatch("[0-9a-f]{12}", fingerprint(CELL))


def test_cells_are_run_and_go_on_where_they_were(tmp_path: Path) -> None:
    (first,) = run_cells([SMALL], [0], tmp_path, progress=False)
    said: list[str] = []
    (both,) = run_cells([SMALL], [1, 0], tmp_path, progress=False, say=said.append)
    assert first.seeds == (0,)
    assert first.error is None
    assert both.seeds == (0, 1)
    # The first seed was not learnt again: a line for each of the two tasks of the other.
    assert sum("average accuracy" in line for line in said) == 2


@pytest.mark.parametrize(
    ("accuracy", "error", "published", "expected"),
    [
        (88.0, 0.1, Published(90.0, KAO, 0.1), "reproduced"),
        (86.9, 0.1, Published(90.0, KAO, 0.1), "below"),
        (86.9, 1.5, Published(90.0, KAO, 0.1), "reproduced"),
        (93.1, None, Published(90.0, KAO), "above"),
        (90.1, None, Published(90.0, KAO, at_least=True), "reproduced"),
        (97.0, None, Published(90.0, KAO, at_least=True), "reproduced"),
        (89.9, None, Published(90.0, KAO, at_least=True), "below"),
        (90.1, None, Published(90.0, KAO, differs="x"), "differs in setting (as published): x"),
        (80.0, None, Published(90.0, KAO, differs="x"), "differs in setting (below): x"),
    ],
)
def test_the_verdict(accuracy: float, error: float | None, published: Published, expected: str) -> None:
    assert verdict(Result("c", accuracy, error, (0,)), published) == expected


def test_a_ledger_keeps_what_it_has_of_other_cells(tmp_path: Path) -> None:
    other = Result("split-mnist-domain-owm", 89.4, 2.3, (0, 1, 2), command="elsewhere", settings="0" * 12)
    write_ledger(tmp_path, [other, Result(CELL.name, 1.0, None, (0,))])
    ledger = write_ledger(tmp_path, [Result(CELL.name, 99.0, None, (0,), settings=fingerprint(CELL))])
    assert [result.accuracy for result in ledger.results] == [99.0, 89.4]
    assert Ledger.load(tmp_path / "ledger.json") == ledger
    text = (tmp_path / "ledger.md").read_text()
    assert "| 99.0 | 0 |" in text
    # The settings of the other one are not those that the cell has now.
    assert "Not run: owm (run with other settings than today's; published: 87.46 ± 0.74" in text
    assert "89.4" not in text
    (tmp_path / "ledger.json").write_text("{}")
    with pytest.raises(FileError, match="ledger"):
        write_ledger(tmp_path, [])


def test_cells_without_a_result_stand_below_the_table_with_what_was_published() -> None:
    done = Result(CELL.name, 99.0, None, (0,), settings=fingerprint(CELL), command=command_of(CELL, [0]))
    cells = [CELL, CELLS["split-mnist-task-ewc"], CELLS["split-mnist-task-gpm"]]
    *_, row, empty, left = tables(Ledger((done,)), cells).partition("\n\nSources")[0].splitlines()
    assert row.endswith(f"| 99.0 | 0 |  | reproduced | `{command_of(CELL, [0])}` |")
    assert (empty, left) == (
        "",
        "Not run: ewc (published: 98.67 ± 0.22 (Kao et al. 2021, read)); gpm. `nclbayes bench 'split-mnist-task-*'` "
        "runs all.",
    )
    text = tables(Ledger(), [CELL])
    assert "| Method |" not in text
    assert "1. Kao, Jensen" in text


def test_the_page_shows_the_ledger_of_the_project() -> None:
    docs = Path(__file__).parents[3] / "docs"
    script = runpy.run_path(str(docs / "ledger.py"))
    page = (docs / "reproducibility.md").read_text(encoding="utf-8")
    assert script["page"](page, Ledger.load(docs / "ledger.json")) == page, "run `python docs/ledger.py`"
    for result in Ledger.load(docs / "ledger.json").results:
        assert result.is_current
        assert result.command
