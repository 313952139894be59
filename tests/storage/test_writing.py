"""Files are put in place whole, through no link, with the mode that they had; what dead writers left is swept away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

import nclbayes as ncl
from nclbayes.errors import FileError
from nclbayes.storage import read_file, replacing, write_file, write_text
from tests.storage.small import model, posterior


def left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(".nclbayes-"))


def test_threads_that_save_one_path_leave_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "p"
    write_file(path, "thing", {"x": torch.zeros(1000)}, {})
    problems: list[BaseException] = []

    def save(value: float) -> None:
        try:
            for _ in range(60):
                write_file(path, "thing", {"x": torch.full((1000,), value)}, {"value": value})
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=save, args=(float(k),)) for k in (1, 2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        tensors, settings = read_file(path, "thing")
        assert (tensors["x"] == settings.get("value", 0.0)).all()
    for thread in threads:
        thread.join()
    assert problems == []
    assert os.listdir(tmp_path) == ["p"]


def test_a_planted_link_is_replaced_and_its_target_left_alone(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "p").symlink_to(victim)
    for write in (lambda p: write_text(p, "new"), lambda p: write_file(p, "thing", {}, {})):
        write(tmp_path / "p")
        assert victim.read_text() == "precious"
        assert not (tmp_path / "p").is_symlink()


def test_a_planted_link_under_a_name_of_a_temporary_file_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    names = iter(["taken", "free"])
    monkeypatch.setattr("nclbayes.storage.writing.secrets.token_hex", lambda _: next(names))
    (tmp_path / ".nclbayes-taken.part").symlink_to(victim)
    write_text(tmp_path / "p", "new")
    assert victim.read_text() == "precious"
    assert (tmp_path / "p").read_text() == "new"


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o666])
def test_the_mode_of_the_old_file_is_kept(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "p"
    path.write_text("old")
    path.chmod(mode)
    with replacing(path) as file:
        file.write(b"new")
    assert path.stat().st_mode & 0o777 == mode


def test_a_new_file_has_the_mode_that_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "p", "new")
    finally:
        os.umask(before)
    assert (tmp_path / "p").stat().st_mode & 0o777 == 0o640


KILLED = """
    import os, signal, sys
    from nclbayes.storage.writing import replacing
    with replacing(sys.argv[1]) as file:
        file.write(b"half")
        file.flush()
        print("writing", flush=True)
        if sys.argv[2] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.stdin.read()
"""


@pytest.mark.slow
def test_what_killed_writers_left_is_swept_and_what_living_ones_write_is_not(tmp_path: Path) -> None:
    path = tmp_path / "p"
    write_text(path, "old")
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(path)]
    for _ in range(3):
        done = subprocess.run([*command, "kill"], stdout=subprocess.PIPE, check=False)
        assert done.returncode == -signal.SIGKILL
    # Each has swept what the one before had left.
    assert len(left_over(tmp_path)) == 1
    with subprocess.Popen([*command, "wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as alive:
        assert alive.stdout is not None
        assert alive.stdout.readline() == b"writing\n"
        kept = left_over(tmp_path)
        assert len(kept) == 1
        write_text(tmp_path / "other", "new")
        assert left_over(tmp_path) == kept
        assert path.read_text() == "old"
        alive.communicate(b"")
    assert alive.returncode == 0
    assert path.read_text() == "half"
    assert left_over(tmp_path) == []


def test_an_error_while_writing_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write_text(tmp_path / "p", "old")
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "p"):
        raise KeyboardInterrupt
    with pytest.raises(FileError, match=r"Could not write .*p'.*untouched"), replacing(tmp_path / "p"):
        raise OSError(28, "No space left on device")
    with pytest.raises(FileError, match="no text"):
        write_text(tmp_path / "p", "\ud800")
    with pytest.raises(FileError, match="Could not write"):
        write_text(tmp_path / ("x" * 300), "new")
    for name in ("a\0b", "a\0b/c", "\ud800"):
        with pytest.raises(FileError, match="Could not write"):
            write_file(tmp_path / name, "thing", {}, {})
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileError, match="Could not write"):
        write_text(tmp_path / "folder", "new")
    assert (tmp_path / "p").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["folder", "p"]


def test_what_happens_to_a_loaded_file_does_not_touch_the_posterior(tmp_path: Path) -> None:
    path = tmp_path / "p"
    posterior().save(path)
    loaded = ncl.OnlinePosterior.load(path, model())
    before, size = loaded.mean(), path.stat().st_size
    with path.open("r+b") as file:
        file.write(bytes(size))
    assert all(torch.equal(value, before[site]) for site, value in loaded.mean().items())
    os.truncate(path, 0)
    assert all(torch.equal(value, before[site]) for site, value in loaded.mean().items())
    assert loaded.sample(3)
