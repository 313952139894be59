"""The page is whole, says every number, and needs nothing else."""

from __future__ import annotations

import base64
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from nclbayes import Record, Score
from nclbayes.analysis.report import text_table, write_report
from nclbayes.errors import SettingError

VOID = {"meta", "img", "br", "link", "hr"}
FACTS = {"tasks": "split digits, domain", "steps <a>": "2,000 & more"}


class Page(HTMLParser):
    """Checks that tags are closed in order; keeps the text, the tags with their attributes, and the table cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())

    def count(self, tag: str) -> int:
        return sum(found == tag for found, _ in self.tags)


def record(drop: float = 0.1, tasks: int = 3, learnt: int | None = None, losses: int = 20, seed: int = 0) -> Record:
    found = Record([f"task {k}" for k in range(tasks)], about={"seed": seed})
    for i in range(tasks if learnt is None else learnt):
        scores = [Score(0.9 - drop * (i - j), 0.2 + drop, 0.04, 10) for j in range(i + 1)]
        found.add(scores, losses=[1.0] * losses, seconds=30.0)
    return found


def test_the_table_has_means_and_standard_errors() -> None:
    header, ncl, ewc = text_table({"ncl": [record(0.0), record(0.1)], "ewc": [record(0.2)]})
    assert header[0] == "Method"
    assert header[2:] == [
        "Average accuracy (%)",
        "Forgetting (%)",
        "Backward transfer (%)",
        "Loss (nats)",
        "Calibration error (%)",
        "Learning time (minutes)",
    ]
    assert ncl == ["ncl", "2", "85.0 ± 5.0", "7.5 ± 7.5", "-7.5 ± 7.5", "0.250 ± 0.050", "4.0 ± 0.0", "1.50 ± 0.00"]
    assert ewc == ["ewc", "1", "70.0", "30.0", "-30.0", "0.400", "4.0", "1.50"]


def test_the_log_evidence_is_a_column_where_a_run_has_it(tmp_path: Path) -> None:
    known, missing = record(), record()
    known.evidence = [-100.0, -20.0, -3.45]
    assert "Log evidence (nats)" not in text_table({"ewc": [missing]})[0]
    header, ncl, ewc = text_table({"ncl": [known, missing], "ewc": [missing]})
    assert header[-2] == "Log evidence (nats)"
    assert (ncl[-2], ewc[-2]) == ("-123.5 (1 of 2)", "-")
    assert (ncl[-1], ewc[-1]) == ("1.50 ± 0.00", "1.50")


def test_the_table_says_what_is_missing() -> None:
    lost = record()
    lost.scores[-1][0] = Score(math.nan, math.inf, math.nan, 10)
    runs = {"lost": [record(), lost, record()], "begun": [record(), record(learnt=1)], "empty": [record(learnt=0)]}
    _, first, begun, empty = text_table(runs)
    assert first[1:3] == ["3", "80.0 ± 0.0 (2 of 3)"]
    assert first[5] == "0.300 ± 0.000 (2 of 3)"
    assert begun[1] == "2 (1 unfinished)"
    assert empty[1:] == ["1 (1 unfinished)", *["-"] * 6]


def test_runs_without_records_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="no runs"):
        text_table({})
    with pytest.raises(SettingError, match="Method 'ewc' has no records"):
        write_report(tmp_path / "a.html", "a", {"ewc": []}, {})
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SettingError, match=r"pip install 'nclbayes\[experiments\]'"):
        write_report(tmp_path / "a.html", "a", {"ncl": [record()]}, {})
    assert list(tmp_path.iterdir()) == []


class TestPage:
    @pytest.fixture(autouse=True)
    def _matplotlib(self) -> None:
        pytest.importorskip("matplotlib", reason="pictures need matplotlib")

    def test_it_is_well_formed_and_says_everything(self, tmp_path: Path) -> None:
        runs = {"<ncl> & 'co'": [record(0.0, seed=7), record(0.1)], "ewc": [record(0.2)]}
        path = write_report(tmp_path / "new" / "report.html", "A <title>", runs, FACTS)
        assert [p.name for p in (tmp_path / "new").iterdir()] == ["report.html"]
        text = path.read_text(encoding="utf-8")
        page = Page(text)
        assert text.startswith("<!DOCTYPE html>")
        for expected in ["A <title>", *FACTS, *FACTS.values(), *sum(text_table(runs), [])]:  # noqa: RUF017
            assert expected in page.texts
        assert page.texts.count("<ncl> & 'co'") == 2
        assert any(text.startswith("Seed 7, 3 of 3 tasks") for text in page.texts)
        assert page.count("h1") == 1
        assert page.count("img") == 3 + 2 * 3
        assert "<ncl>" not in text
        assert "<a>" not in text

    def test_it_needs_no_other_file_and_no_script(self, tmp_path: Path) -> None:
        text = write_report(tmp_path / "a.html", "a", {"ncl": [record()]}, FACTS).read_text(encoding="utf-8")
        assert "http" not in text.replace("http-equiv", "")
        assert not re.search(r"url\(|@import|<script|<link", text)
        for tag, attributes in Page(text).tags:
            assert tag != "script"
            assert not any(name.startswith("on") or name == "href" for name in attributes)
            if tag == "img":
                kind, data = str(attributes["src"]).split(",")
                assert kind == "data:image/svg+xml;base64"
                assert b"<svg" in base64.b64decode(data, validate=True)
                assert attributes["alt"]

    def test_the_same_runs_give_the_same_page(self, tmp_path: Path) -> None:
        first, second = (write_report(tmp_path / name, "a", {"ncl": [record()]}, FACTS) for name in ("1", "2"))
        assert first.read_bytes() == second.read_bytes()

    def test_runs_that_have_only_begun(self, tmp_path: Path) -> None:
        runs = {"begun": [record(learnt=1, losses=0)], "empty": [record(learnt=0)]}
        page = Page(write_report(tmp_path / "a.html", "a", runs, {}).read_text(encoding="utf-8"))
        assert "No task has been learnt yet." in page.texts
        assert "The training losses were not kept." in page.texts
        assert "What was run" not in page.texts
        assert page.count("img") == 3 + 2
        nothing = write_report(tmp_path / "b.html", "b", {"empty": [record(learnt=0)]}, {})
        assert Page(nothing.read_text(encoding="utf-8")).count("img") == 0

    def test_what_is_not_finite_is_explained(self, tmp_path: Path) -> None:
        lost = record()
        lost.scores[-1][0] = Score(math.nan, math.nan, math.nan, 10)
        page = Page(write_report(tmp_path / "a.html", "a", {"n": [lost], "m": [record(), lost]}, {}).read_text("utf-8"))
        assert any("(n of m): the number is not finite" in text and "A dash" in text for text in page.texts)
