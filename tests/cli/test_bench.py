"""`nclbayes bench` as a person types it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("sklearn")

from nclbayes.cli import run_command_line
from nclbayes.experiments.benchmarks import CELLS


def test_without_a_cell_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["bench"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[: len(CELLS)]] == list(CELLS)
    assert any(
        line.startswith("permuted-mnist-50-kfac") and "> 90 (Ritter et al. 2018, read)" in line for line in lines
    )
    assert any("split-cifar100 as images:" in line for line in lines)
    assert run_command_line(["bench", "--json"]) == 0
    assert [cell["cell"] for cell in json.loads(capsys.readouterr().out)] == list(CELLS)


def test_a_cell_is_run_and_its_row_printed_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "split-digits-domain-none"
    monkeypatch.setitem(CELLS, name, replace(CELLS[name], settings={"steps": 5}))
    command = ["bench", name, "--seeds", "0,1", "--out", str(tmp_path)]
    assert run_command_line(command) == 0
    printed = capsys.readouterr().out
    assert "| none | 5 x 64, 100 units | none found |" in printed
    assert f"`nclbayes bench {name} --seeds 0-1`" in (tmp_path / "ledger.md").read_text()
    assert run_command_line([*command, "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["seeds"] == [0, 1]
    assert run_command_line([*command, "--quiet"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "split-digits-domain-nune"], "did you mean 'split-digits-domain-none'"),
        (["bench", "split-digits-domain-none", "--seeds", "x"], "Seeds are given as"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(arguments) == 2
    assert message in capsys.readouterr().err
