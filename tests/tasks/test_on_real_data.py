"""Every task set from the command line, on the real data, for a few steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nclbayes.cli import run_command_line

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "command",
    [
        ["split-mnist", "--scenario", "domain", "--tasks", "2"],
        ["split-mnist", "--scenario", "task", "--method", "variational-ncl", "--tasks", "2"],
        ["split-mnist", "--scenario", "class", "--method", "joint", "--tasks", "2"],
        ["permuted-mnist", "--tasks", "2"],
        ["rotated-mnist", "--tasks", "2"],
        ["stroke-mnist", "--tasks", "2"],
        # so few steps need a fast average, or the posterior stays as wide as the prior
        ["stroke-mnist", "--tasks", "2", "--method", "variational-ncl", "-o", "beta=0.3"],
    ],
    ids=lambda command: "-".join(part.strip("-") for part in command),
)
def test_it_runs_from_the_command_line(
    command: list[str], data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["run", *command, "--quick", "--json", "--out", str(tmp_path / "run")]) == 0
    found = json.loads(capsys.readouterr().out)["methods"]
    ((record,),) = found.values()
    assert 0 <= record["average accuracy"] <= 1


@pytest.mark.parametrize("method", ["laplace-ncl", "variational-ncl"])
def test_stimulus_response_needs_no_data(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", "stimulus-response", "--tasks", "2", "--method", method, "--quick", "--json"]
    command += ["-o", "beta=0.3"] if method == "variational-ncl" else []
    assert run_command_line([*command, "--out", str(tmp_path / "run")]) == 0
    assert method in json.loads(capsys.readouterr().out)["methods"]


@pytest.mark.parametrize("method", ["laplace-ncl", "variational-ncl"])
def test_features_of_cifar_are_learnt_after_a_short_pretraining(
    method: str, data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not (data_folder / "cifar-10-batches-bin").is_dir() or not (data_folder / "cifar-100-binary").is_dir():
        pytest.skip("CIFAR is not among the real data")
    assert run_command_line(["data", "pretrain-cifar", "--epochs", "1", "--size", "400", "--quiet"]) == 0
    assert "test accuracy on CIFAR-10" in capsys.readouterr().out
    command = ["run", "split-cifar100", "--tasks", "2", "--units", "100", "--method", method, "--quick", "--json"]
    assert run_command_line([*command, "--out", str(tmp_path / "run")]) == 0
    ((record,),) = json.loads(capsys.readouterr().out)["methods"].values()
    assert 0 <= record["average accuracy"] <= 1
