"""Searches of several processes at once: each trial is made by one of them, and all find the same."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nclbayes as ncl
from nclbayes.cli import run_command_line
from nclbayes.errors import FileError, SettingError, UnreachableError
from nclbayes.tuning import storages
from nclbayes.tuning.storages import reaching, shared_study
from tests.workers.clusters import cluster, wait_until

pytest.importorskip("optuna")


def start(storage: str, folder: Path, count: int, sampler: str = "grid") -> list[subprocess.Popen[bytes]]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.tuning.searching", storage, str(folder), str(count), sampler]
    return [subprocess.Popen(command) for _ in range(count)]


def own(folder: Path, process: subprocess.Popen[bytes]) -> list[str]:
    """The values that a process tried."""
    path = folder / f"own-{process.pid}.txt"
    return path.read_text().splitlines() if path.exists() else []


def result(folder: Path, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"result-{process.pid}.json").read_text())
    return found


@contextmanager
def before_each_claim(call: Callable[[], None]) -> Iterator[None]:
    """Between a process's look at whether a trial is waiting, and its note that it has taken it."""
    from optuna.storages.journal import JournalFileBackend
    from sqlalchemy import Engine, event

    append = JournalFileBackend.append_logs

    def appended(self: Any, logs: Any) -> None:
        call()
        append(self, logs)

    def executed(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if statement.startswith("UPDATE trials SET state"):
            call()

    event.listen(Engine, "before_cursor_execute", executed)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(JournalFileBackend, "append_logs", appended)
            yield
    finally:
        event.remove(Engine, "before_cursor_execute", executed)


def search(storage: str, **rest: Any) -> ncl.tuning.Tuning:
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = ncl.BayesianNetwork(nn.Linear(3, 2), ncl.Categorical())
    task = ncl.Task((x, (x[:, 0] > 0).long()), name="sign")
    return ncl.tune(model, task, ncl.LaplaceNCL(steps=2), storage=storage, **rest)


@pytest.mark.parametrize("form", ["sqlite:///{folder}/trials.db", "{folder}/trials.log"])
def test_of_two_that_ask_at_the_same_moment_each_gets_a_trial_of_its_own(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Who cannot write at once is told so.
    monkeypatch.setattr(storages, "_PATIENCE", 0.0)
    storage, numbers, calls = form.format(folder=tmp_path), list[int](), list[str]()
    first, second = (shared_study(storage, "name") for _ in range(2))
    for x in range(2):
        first.enqueue_trial({"x": x})

    def ask_too() -> None:
        if not calls:
            calls.append("asked")
            with suppress(FileError), reaching(storage):
                numbers.append(second.ask().number)

    with before_each_claim(ask_too):
        numbers.append(first.ask().number)
    assert calls
    if len(numbers) == 1:
        numbers.append(second.ask().number)
    assert sorted(numbers) == [0, 1]


@pytest.mark.parametrize(
    ("storage", "sampler"),
    [
        pytest.param("sqlite:///{folder}/trials.db", "grid", marks=pytest.mark.slow),
        pytest.param("{folder}/trials.log", "tpe", marks=pytest.mark.slow),
        pytest.param("sqlite:///{folder}/trials.db", "tpe", marks=pytest.mark.exhaustive),
        pytest.param("{folder}/trials.log", "grid", marks=pytest.mark.exhaustive),
    ],
)
def test_two_processes_share_the_trials_of_a_search(storage: str, sampler: str, tmp_path: Path) -> None:
    processes = start(storage.format(folder=tmp_path), tmp_path, 2, sampler)
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    shares = [own(tmp_path, process) for process in processes]
    assert all(shares)
    assert len(shares[0]) + len(shares[1]) == len({*shares[0], *shares[1]}) == 12
    first, second = (result(tmp_path, process) for process in processes)
    assert first["trials"] == second["trials"]
    assert first["values"] == second["values"]
    tried = [{name: value for name, value in trial.items() if name != "score"} for trial in first["trials"]]
    assert sorted(map(json.dumps, tried)) == sorted([*shares[0], *shares[1]])


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["sqlite:///{folder}/trials.db", "{folder}/trials.log"])
def test_the_trials_of_a_process_that_is_killed_are_made_by_the_other(storage: str, tmp_path: Path) -> None:
    first, second = start(storage.format(folder=tmp_path), tmp_path, 2)
    wait_until(lambda: len(own(tmp_path, first)) > 1)
    first.kill()
    first.wait()
    assert second.wait(timeout=300) == 0
    tried = [*own(tmp_path, first), *own(tmp_path, second)]
    assert len(set(tried)) == 12
    # The one that was under way was begun twice, and counts once.
    assert len(tried) in (12, 13)
    assert len(result(tmp_path, second)["trials"]) == 12


def test_a_search_goes_on_in_its_storage_and_others_have_their_place_beside_it(tmp_path: Path) -> None:
    storage, said = f"sqlite:///{tmp_path}/trials.db", list[str]()
    found = search(storage, say=said.append)
    assert len(said) == 4
    assert said[0].startswith("The study is nclbayes-")
    assert search(storage, say=said.append).trials == found.trials
    assert len(said) == 5
    assert len(search(storage, ranges={"lr": (0.01, 0.1)}, folder=tmp_path / "out").trials) == 2
    with pytest.raises(FileError, match="holds another search"):
        search(storage, folder=tmp_path / "out")


@pytest.mark.slow
def test_a_search_in_processes_and_on_a_cluster_finds_what_one_process_finds(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    one, two = (search(str(tmp_path / f"{jobs}.log"), jobs=jobs) for jobs in (1, 2))
    with cluster(tmp_path) as found:
        three = search(str(tmp_path / "three.log"), cluster=found.address)
    for other in (two, three):
        assert sorted(map(str, other.trials)) == sorted(map(str, one.trials))


@pytest.mark.parametrize(
    ("storage", "kind", "said"),
    [
        ("", SettingError, "A storage is given as sqlite:///FILE"),
        ("redis://localhost", SettingError, "Redis is no storage of a search"),
        ("nosuch://localhost/x", SettingError, "'nosuch://localhost/x' is no address of a storage"),
        ("sqlite://///", FileError, "cannot be used: unable to open database file"),
        ("postgresql+pg8000://me:secret@localhost/x", SettingError, r"needs the package pg8000.*psycopg\[binary\]"),
        ("{folder}/missing/trials.log", FileError, "is damaged, or cannot be written"),
        ("sqlite:///{folder}/missing/trials.db", FileError, "cannot be used: unable to open database file"),
        ("sqlite:///{folder}/page.db", FileError, "cannot be used: file is not a database"),
        ("{folder}/page.db", FileError, "is damaged, or cannot be written"),
    ],
)
def test_storages_that_cannot_be_used_are_refused(
    storage: str, kind: type[Exception], said: str, tmp_path: Path
) -> None:
    (tmp_path / "page.db").write_text("a page of text\n" * 200)
    with pytest.raises(kind, match=said) as error:
        search(storage.format(folder=tmp_path), folder=tmp_path / "out")
    assert "secret" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_server_that_is_not_there_is_said_without_the_password() -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(UnreachableError, match=r"'postgresql\+psycopg://me@127.0.0.1:1/x' cannot be reached") as error:
        shared_study("postgresql+psycopg://me:secret@127.0.0.1:1/x", "name")
    assert "secret" not in str(error.value)


def test_the_command_line_tells_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["tune", "split-digits", "--method", "owm", "--out", str(tmp_path / "out")]
    assert run_command_line([*command, "--storage", "redis://localhost"]) == 2
    assert "Redis is no storage" in capsys.readouterr().err
    assert run_command_line([*command, "--cluster", "ray://localhost:1"]) == 2
    assert "A cluster of Ray" in capsys.readouterr().err
