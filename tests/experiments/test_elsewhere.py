"""Runs in other processes that are killed or stopped in their midst: others take them up where they were."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nclbayes import Record
from nclbayes.cli import run_command_line
from nclbayes.experiments import RunConfig, compare
from nclbayes.experiments.comparison import ComparisonError
from nclbayes.experiments.elsewhere import Failure, _run_here
from nclbayes.storage.locking import sole_use
from tests.processes import heed_interrupts
from tests.workers.clusters import cluster, wait_until

pytest.importorskip("joblib")
pytest.importorskip("sklearn")

METHODS = ("none", "si")


def config(method: str, steps: int = 1000) -> RunConfig:
    return RunConfig.of("split-digits", method, settings={"steps": steps, "batch_size": 32}, size=60, tasks=2)


def begun(folder: Path) -> list[tuple[int, int]]:
    """Which processes have worked in a folder, and with which step each began."""
    log = folder / "log.txt"
    found = re.findall(r"^process (\d+) on .* begins with step (\d+)$", log.read_text() if log.exists() else "", re.M)
    return [(int(pid), int(step)) for pid, step in found]


def kill_once(folder: Path) -> Callable[[], None]:
    """Kill the process that works in a folder, once there is a snapshot; the function that is returned waits for it."""

    def kill() -> None:
        wait_until((folder / "update.ckpt").exists)
        os.kill(begun(folder)[0][0], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread.join


def untimed(records: dict[str, list[Record]]) -> list[Record]:
    return [replace(record, seconds=[]) for found in records.values() for record in found]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """What runs come to whose workers are left alone."""
    return untimed(compare([config(method) for method in METHODS], tmp_path_factory.mktemp("whole"), jobs=2))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["here", "cluster"])
def test_a_run_whose_worker_is_killed_goes_on_from_its_snapshot_in_another(
    place: str, whole: list[Record], tmp_path: Path
) -> None:
    configs, folder = [config(method) for method in METHODS], tmp_path / "killed" / "none" / "seed-0"
    killed = kill_once(folder)
    if place == "here":
        records = compare(configs, tmp_path / "killed", jobs=2)
    else:
        pytest.importorskip("distributed")
        with cluster(tmp_path) as found:
            records = compare(configs, tmp_path / "killed", cluster=found.address)
    killed()
    (first, start), (second, step) = begun(folder)
    assert first != second
    assert start == 1
    assert step > 200
    assert untimed(records) == whole


def started(given: list[str], **how: Any) -> subprocess.Popen[Any]:
    return subprocess.Popen([sys.executable, "-m", "nclbayes", *given], preexec_fn=heed_interrupts, **how)


@pytest.mark.slow
def test_ctrl_c_stops_the_runs_on_a_cluster_and_the_same_command_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    out = tmp_path / "out"
    command = ["compare", "split-digits", "--methods", ",".join(METHODS), "--tasks", "1", "--out", str(out), "--quiet"]
    with cluster(tmp_path) as found:
        given = [*command, "--steps", "20000", "--cluster", found.address]
        process = started(given, stderr=subprocess.PIPE, text=True)
        folders = [out / method / "seed-0" for method in METHODS]
        wait_until(lambda: all((folder / "update.ckpt").exists() for folder in folders))
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[1].splitlines()[-1].startswith("nclbayes: interrupted. The same command")
        assert process.returncode == 130
        for folder in folders:
            with sole_use(folder):
                assert not (folder / "stop").exists()
                assert (folder / "update.ckpt").exists()
                assert not (folder / "record.json").exists()
        assert all(worker.poll() is None for worker in found.workers)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["compare split-digits --methods none,si", "tune split-digits --method owm"])
def test_ctrl_c_leaves_no_process_behind(command: str, tmp_path: Path) -> None:
    given = [*command.split(), "--steps", "20000", "--jobs", "2", "--quiet", "--out", str(tmp_path / "out")]
    process = started(given, start_new_session=True)
    begun = "update.ckpt" if command.startswith("compare") else "trials.log"
    wait_until(lambda: list(tmp_path.rglob(begun)))
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130

    def gone() -> bool:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        return False

    wait_until(gone, seconds=20)


def test_a_worker_that_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    said = _run_here(config("none"), tmp_path / "elsewhere")
    assert isinstance(said, Failure)
    assert "need the same folders at the same paths" in str(said)
    assert not (tmp_path / "elsewhere").exists()


def test_a_failure_that_is_none_of_ours_is_told_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **rest: object) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr("nclbayes.experiments.elsewhere.run", fail)
    config("none").save(tmp_path / "config.json")
    assert "failed: MemoryError: no more (more is in" in str(_run_here(config("none"), tmp_path))
    assert "Traceback" in (tmp_path / "log.txt").read_text()


@pytest.mark.slow
def test_a_run_that_fails_on_a_cluster_keeps_no_other_from_running(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    wrong = config("none", steps=20)
    wrong = replace(wrong, settings={**wrong.settings, "lr": 1e30})
    with (
        cluster(tmp_path, workers=1) as found,
        pytest.raises(ComparisonError, match=r"none, seed 0 failed: .*lower `lr`") as error,
    ):
        compare([wrong, config("si", steps=20)], tmp_path / "runs", cluster=found.address)
    assert error.value.is_divergence
    assert [done.method for done, _ in error.value.done] == ["si"]


def test_a_cluster_that_is_none_is_an_error_of_the_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["compare", "split-digits", "--quick"], ["figure", "toy"]):
        assert run_command_line([*command, "--cluster", "tcp://x:1", "--out", str(tmp_path / "new")]) == 2
        assert "write dask://" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
