"""What the commands print of names that others have given."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from nclbayes import Record, Score
from nclbayes.analysis.names import plain
from nclbayes.cli import run_command_line
from nclbayes.cli.options import sayer
from nclbayes.cli.report import show
from tests.analysis.hostile import names


@pytest.mark.parametrize("name", names("http://localhost"), ids=lambda name: ascii(name)[:20])
def test_a_terminal_shows_any_name(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = Record(["a"])
    record.add([Score(0.9, 0.3, 0.1, 10)])
    show({name: [record]}, tmp_path / "report.html", quiet=False, as_json=False)
    sayer(silent=False)(name)
    printed = capsys.readouterr()
    assert plain(name)[:40].rstrip() in printed.out
    assert printed.err == plain(name) + "\n"
    for text in (printed.out, printed.err):
        assert all(c.isprintable() or c in "\n" for c in text)


def test_an_error_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["report", "\x1b[31mnowhere"]) == 2
    assert r"There is no run in '\x1b[31mnowhere'" in capsys.readouterr().err


def test_the_terminal_shows_the_evidence_where_there_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(evidence: float | None) -> list[list[str]]:
        record = Record(["a"])
        record.add([Score(0.9, 0.3, 0.1, 10)], seconds=90.0, evidence=evidence)
        show({"ncl": [record]}, tmp_path / "report.html", quiet=False, as_json=False)
        return [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()[:2]]

    common = ["method", "accuracy %", "forgetting %", "loss", "calibration error %"]
    assert shown(None) == [[*common, "minutes"], ["ncl", "90.0", "0.0", "0.300", "10.0", "1.50"]]
    assert shown(-12.34) == [
        [*common, "log evidence", "minutes"],
        ["ncl", "90.0", "0.0", "0.300", "10.0", "-12.3", "1.50"],
    ]
    record = Record(["a"])
    record.add([Score(0.9, 0.3, 0.1, 10)])
    show({"ncl": [record]}, tmp_path / "report.html", quiet=False, as_json=True)
    assert json.loads(capsys.readouterr().out)["methods"]["ncl"][0]["log evidence"] is None
