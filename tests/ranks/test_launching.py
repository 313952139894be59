"""torchrun: one script, and the command line, with one process or several."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nclbayes.cli import run_command_line
from nclbayes.errors import RankError
from nclbayes.experiments import RunConfig, run
from tests.ranks.group import failures, together

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "scale-out.md"


def launch(count: int, *command: str, folder: Path) -> str:
    """What a command prints that is run by python, or by torchrun."""
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(count)] if count > 1 else []
    done = subprocess.run(
        [sys.executable, *start, *command],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_pages_script_prints_the_same_with_one_process_and_with_two(tmp_path: Path) -> None:
    script = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)[0]
    (tmp_path / "script.py").write_text(script)
    alone, both = (launch(count, "script.py", folder=tmp_path) for count in (1, 2))
    assert re.fullmatch(r"loss 0\.\d{4}, accuracy 0\.\d\d\n", alone)
    assert both == alone


@pytest.mark.slow
def test_the_pages_shared_predictions_are_those_of_one_process(tmp_path: Path) -> None:
    script, sharing = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)[:2]
    assert "gather_rows" in sharing
    end = 'if "RANK" in os.environ:\n    torch.distributed.destroy_process_group()\n'
    check = (
        "assert torch.allclose(probs, posterior.predict(x).probs, atol=1e-6)\nassert len(own) * ranks.count == len(x)\n"
    )
    assert script.endswith(end)
    (tmp_path / "script.py").write_text(script.removesuffix(end) + sharing + check + end)
    for count in (1, 2):
        assert launch(count, "script.py", folder=tmp_path).endswith("\ntorch.Size([400, 2]) 400\n")


@pytest.mark.slow
def test_a_run_from_the_command_line_leaves_the_same_files(tmp_path: Path) -> None:
    command = [
        "-m",
        "nclbayes",
        "run",
        "split-digits",
        "--scenario",
        "domain",
        "--tasks",
        "2",
        "--steps",
        "30",
        "--json",
    ]
    for count in (1, 2):
        said = launch(count, *command, "--json", "--out", str(count), folder=tmp_path)
        # Printed once, or it would be no document.
        assert list(json.loads(said)["methods"]) == ["laplace-ncl"]
    assert files(tmp_path / "2") == files(tmp_path / "1")
    compare(tmp_path / "1", tmp_path / "2")


class Stop(Exception):
    pass


CONFIG = RunConfig.of("split-digits", "variational-ncl", "domain", tasks=2, settings={"steps": 20})


def run_to_the_first_task(rank: int, folder: Path) -> None:
    def stop(text: str) -> None:
        raise Stop

    with pytest.raises((Stop, RankError)):
        run(CONFIG, folder / "run", progress=False, say=stop)


def run_on(rank: int, folder: Path) -> None:
    run(CONFIG, folder / "run", progress=False)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_goes_on_with_another_number_of_processes(before: int, after: int, tmp_path: Path) -> None:
    for count, work in ((before, run_to_the_first_task), (after, run_on)):
        if count == 1:
            work(0, tmp_path)
        else:
            assert together(count, work, tmp_path) == [0] * count, failures(tmp_path)
        assert len(json.loads((tmp_path / "run" / "record.json").read_text())["scores"]) == (2 if work is run_on else 1)
    run(CONFIG, tmp_path / "alone", progress=False)
    compare(tmp_path / "alone", tmp_path / "run")


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def compare(first: Path, second: Path) -> None:
    """Records of the same scores, to rounding."""
    one, two = (json.loads((folder / "record.json").read_text())["scores"] for folder in (first, second))
    for row, other in zip(one, two, strict=True):
        for score, its in zip(row, other, strict=True):
            assert its["accuracy"] == pytest.approx(score["accuracy"])
            assert its["loss"] == pytest.approx(score["loss"], rel=1e-3)


@pytest.mark.parametrize(
    "command",
    [
        ["compare", "split-digits", "--methods", "none"],
        ["demo"],
        ["figure", "toy"],
        ["tune", "split-digits", "--method", "owm"],
    ],
    ids=lambda command: command[0],
)
def test_commands_of_many_runs_are_not_for_torchrun(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run_command_line([*command, "--out", str(tmp_path / "out")]) == 2
    assert "leave torchrun out" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
