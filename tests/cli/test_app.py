"""The command line as a person types it: tables, files, exit codes and one-line errors."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from nclbayes import Record
from nclbayes.cli import run_command_line
from nclbayes.experiments.tuning import Tuned


@pytest.mark.slow
def test_the_demo_leaves_a_table_pictures_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["demo", "--quick", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    for method in ("laplace-ncl", "variational-ncl", "none", "joint"):
        assert method in printed.out
    assert str(tmp_path.resolve()) in printed.out
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert (tmp_path / "plots" / "methods.png").exists()
    assert run_command_line(["report", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["methods"]) == ["laplace-ncl", "variational-ncl", "none", "joint"]
    assert 0 <= found["methods"]["none"][0]["average accuracy"] <= 1


def test_a_run_can_be_repeated_from_its_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    command = ["run", "split-digits", "--method", "none", "--steps", "10", "--tasks", "2", "-o", "lr=0.1", "--json"]
    assert run_command_line([*command, "--out", str(first)]) == 0
    one = json.loads(capsys.readouterr().out)
    assert run_command_line(["run", "--config", str(first / "config.json"), "--out", str(second), "--json"]) == 0
    two = json.loads(capsys.readouterr().out)
    assert one["methods"]["none"][0]["average loss"] == two["methods"]["none"][0]["average loss"]
    assert sorted(p.name for p in first.iterdir()) == [
        *("config.json", "plots", "posterior.ncl", "record.csv", "record.json", "report.html")
    ]
    assert json.loads((first / "config.json").read_text())["settings"]["lr"] == 0.1


def test_a_configuration_of_a_device_that_is_not_here_runs_on_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", "split-digits", "--method", "none", "--steps", "2", "--tasks", "1", "--quiet"]
    assert run_command_line([*command, "--device", "cpu", "--out", str(tmp_path)]) == 0
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"cpu"', '"cuda:7"'))
    assert run_command_line(["run", "--config", str(path), "--quiet"]) == 2
    assert "device is 'cuda:7'" in capsys.readouterr().err
    assert run_command_line(["run", "--config", str(path), "--device", "cpu", "--quiet"]) == 0


def test_quiet_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", "split-digits", "--method", "none", "--steps", "2", "--tasks", "1", "--quiet", "--out"]
    assert run_command_line([*command, str(tmp_path / "r")]) == 0
    printed = capsys.readouterr()
    assert printed.out == printed.err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "split-mnits"], "no task set 'split-mnits' (did you mean 'split-mnist'?)"),
        (["run"], "Name a task set"),
        (["run", "split-digits", "--method", "jont"], "no method 'jont' (did you mean 'joint'?)"),
        (["run", "split-digits", "--scenario", "tsk"], "no scenario 'tsk' (did you mean 'task'?)"),
        (["run", "split-digits", "-o", "lr"], "name=value, not 'lr'"),
        (["run", "split-digits", "-o", "lr=fast"], "lr must be positive"),
        (["run", "split-digits", "--device", "tpu"], "choose cpu, cuda, or one of several"),
        (["compare", "split-digits", "--seeds", "a-b"], "0-4 or 1,3,5"),
        (["report", "nowhere"], "There is no run in 'nowhere'"),
        (["data", "check", "mnits"], "mnist"),
    ],
)
def test_errors_are_one_line_and_exit_code_two(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command_line(arguments) == 2
    said = capsys.readouterr().err.strip()
    assert message in said
    assert said.startswith("nclbayes: error: ")
    assert len(said.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_where_an_error_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["run", "nothing", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_missing_data_say_what_to_fetch_and_where_to_put_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pooch

    def offline(*args: object, **kwargs: object) -> None:
        raise OSError("no network")

    monkeypatch.setenv("NCLBAYES_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(pooch, "retrieve", offline)
    assert run_command_line(["run", "split-mnist", "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "train-images-idx3-ubyte.gz" in said
    assert str(tmp_path / "data") in said


def test_a_folder_of_another_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", "split-digits", "--steps", "2", "--tasks", "1", "--quiet", "--out", str(tmp_path)]
    assert run_command_line([*command, "--method", "none"]) == 0
    assert run_command_line([*command, "--method", "joint"]) == 2
    assert "another configuration" in capsys.readouterr().err


def test_the_module_runs_and_tells_about_itself(capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nclbayes", "info", "--json"], capture_output=True, text=True, check=True
    )
    assert "torch" in json.loads(done.stdout)["versions"]
    assert run_command_line(["--help"]) == 0
    shown = capsys.readouterr().out
    for command in ("demo", "run", "compare", "report", "data", "info"):
        assert command in shown


@pytest.mark.slow
def test_an_interrupt_leaves_a_run_that_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nclbayes", "run", "split-digits", "--method", "none", "--tasks", "2"]
    command += ["--steps", "1000", "--quiet", "--out", str(tmp_path)]
    # A shell's background jobs ignore the signal; the child must not inherit that.
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    )
    deadline = time.monotonic() + 100
    while not (tmp_path / "record.json").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.strip() == "nclbayes: interrupted. The same command goes on from here."
    assert not Record.load(tmp_path / "record.json").is_complete
    subprocess.run(command, check=True)
    assert Record.load(tmp_path / "record.json").is_complete


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "split-digits", "--methods", "none", "--seeds", "4-0"], "Seeds are given as 0-4"),
        (["run", "split-digits", "--tasks", "0"], "tasks must be at least 1, not 0"),
        (["run", "split-digits", "--units", "0"], "units must be at least 1, not 0"),
        (["run", "split-digits", "--num-samples", "0"], "num_samples must be at least 1, not 0"),
    ],
)
def test_numbers_out_of_range_are_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line([*arguments, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


def test_what_a_configuration_or_a_search_does_not_fit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["--steps", "2", "--tasks", "1", "--quiet"]
    assert run_command_line(["run", "split-digits", *short, "--out", str(tmp_path / "run")]) == 0
    again = ["run", "--config", str(tmp_path / "run" / "config.json")]
    assert run_command_line([*again, "--method", "none", "--seed", "3"]) == 2
    assert "leave out --method, --seed" in capsys.readouterr().err
    assert run_command_line([*again, "--quiet"]) == 0
    Tuned("split-digits", "owm", "domain", {"alpha": 0.1}, 0.9).save(tmp_path / "tuned.json")
    tuned = ["--tuned", str(tmp_path / "tuned.json"), "--out", str(tmp_path / "none")]
    assert run_command_line(["run", "split-digits", "--method", "none", *short, *tuned]) == 2
    assert run_command_line(["compare", "split-digits", "--methods", "none,joint", *short, *tuned]) == 2
    assert "was found for owm on split-digits domain" in capsys.readouterr().err


def test_a_comparison_reports_what_was_done_and_names_what_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compare", "split-digits", "--methods", "none, vcl-coreset, none", "--seeds", "0,0", "--size", "50"]
    assert run_command_line([*command, "--steps", "2", "--tasks", "2", "--json", "--out", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert list(json.loads(shown.out)["methods"]) == ["none"]
    assert len(json.loads(shown.out)["methods"]["none"]) == 1
    assert "vcl-coreset, seed 0 failed: Task" in shown.err
    assert (tmp_path / "report.html").exists()


def test_a_report_does_not_take_other_settings_for_other_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def learn(name: str, *options: str) -> None:
        command = ["run", "split-digits", "--method", "none", "--steps", "2", "--tasks", "2", "--quiet"]
        assert run_command_line([*command, "--out", str(tmp_path / name), *options]) == 0

    learn("a")
    learn("b", "--seed", "1")
    learn("c", "-o", "lr=0.1")
    assert run_command_line(["report", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["methods"]
    assert {name: len(records) for name, records in found.items()} == {"none, lr = 0.05": 2, "none, lr = 0.1": 1}
    page = (tmp_path / "report.html").read_text()
    assert "momentum = 0.9" in page
    learn("d", "--scenario", "task")
    assert run_command_line(["report", str(tmp_path)]) == 2
    assert "split-digits domain, split-digits task" in capsys.readouterr().err


def test_data_that_are_not_here_fail_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NCLBAYES_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert run_command_line(["data", "check", "mnist"]) == 2
    assert "train-images-idx3-ubyte.gz" in capsys.readouterr().err


@pytest.fixture(scope="module")
def learnt_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    command = ["run", "split-digits", "--method", "none", "--steps", "2", "--tasks", "1", "--quiet", "--out"]
    assert run_command_line([*command, str(folder)]) == 0
    return folder


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 1}', b"\xff", b"[" * 100_000, b'{"format": 1e999}'])
@pytest.mark.parametrize("name", ["record.json", "config.json", "posterior.ncl", "update.ckpt"])
def test_a_damaged_file_of_a_run_is_one_line_and_exit_code_two(
    name: str, content: bytes, learnt_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(learnt_run, tmp_path, dirs_exist_ok=True)
    sealed = name in ("posterior.ncl", "update.ckpt")
    if sealed:
        # So that there is something left to do with it.
        (tmp_path / "record.json").unlink()
        (tmp_path / "posterior.ncl").unlink()
    (tmp_path / name).write_bytes(content)
    again = ["run", "--config", str(tmp_path / "config.json"), "--quiet"]
    for arguments in (again,) if sealed else (again, ["report", str(tmp_path)]):
        assert run_command_line(arguments) == 2
        said = capsys.readouterr().err.strip()
        assert said.startswith("nclbayes: error: ")
        assert name in said
        assert len(said.splitlines()) == 1


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"format": 1, "set": 3}'])
def test_damaged_results_and_searches_are_one_line_and_exit_code_two(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    for name in ("tuned.json", "search.json"):
        (tmp_path / name).write_bytes(content)
    quick = ["split-digits", "--steps", "2", "--tasks", "1", "--quiet", "--out", str(tmp_path)]
    for arguments, name in (
        (["run", *quick, "--method", "owm", "--tuned", str(tmp_path / "tuned.json")], "tuned.json"),
        (["compare", *quick, "--methods", "owm", "--tuned", str(tmp_path / "tuned.json")], "tuned.json"),
        (["tune", *quick, "--method", "owm", "--trials", "1"], "search.json"),
    ):
        assert run_command_line(arguments) == 2
        said = capsys.readouterr().err.strip()
        assert name in said
        assert len(said.splitlines()) == 1


def test_a_report_is_written_through_no_link(
    learnt_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    shutil.copytree(learnt_run, run)
    elsewhere.mkdir()
    (elsewhere / "page").write_text("precious")
    for name in ("report.html", "record.csv", "plots/accuracy.png"):
        (run / name).unlink()
        (run / name).symlink_to(elsewhere / "page")
    assert run_command_line(["report", str(run), "--quiet"]) == 0
    assert (elsewhere / "page").read_text() == "precious"
    assert not (run / "report.html").is_symlink()
    for picture in (run / "plots").iterdir():
        picture.unlink()
    (run / "plots").rmdir()
    (run / "plots").symlink_to(elsewhere)
    assert run_command_line(["report", str(run), "--quiet"]) == 2
    assert "is a link" in capsys.readouterr().err
    assert [path.name for path in elsewhere.iterdir()] == ["page"]
