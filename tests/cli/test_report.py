"""What the commands print of names that others have given."""

from __future__ import annotations

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
