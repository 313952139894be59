"""Ctrl-C at any moment of a command: one line, exit code 130, no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from tests.processes import heed_interrupts
from tests.tasks.fakes import write_cifar10

GOES_ON = "nclbayes: interrupted. The same command goes on from here."
STOPPED = "nclbayes: interrupted."


def start(*arguments: str) -> subprocess.Popen[str]:
    """Python with these arguments, in a process group of its own: Ctrl-C reaches all of a terminal's processes."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )


def interrupt(process: subprocess.Popen[str]) -> str:
    """Press Ctrl-C, and return what is said after it."""
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=60)[1].splitlines()
    return "\n".join(line for line in said if not line.startswith("import time:"))


def imported(process: subprocess.Popen[str], module: str) -> None:
    """Wait until Python, told to list its imports, has imported this module and another one."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.endswith(f" {module}\n"):
            break
    process.stderr.readline()


def while_importing(module: str, seconds: float = 0.0) -> tuple[int, list[str]]:
    """The exit code, and what the command line says, if it is interrupted so long after this module was imported."""
    process = start("-X", "importtime", "-m", "nclbayes", "info")
    imported(process, module)
    time.sleep(seconds)
    said = interrupt(process).splitlines()
    return process.returncode, [line for line in said if not line.startswith("import time:")]


@pytest.mark.parametrize("module", ["nclbayes.interrupts", "torch._C", "pyro", "typer"])
def test_while_it_imports(module: str) -> None:
    assert while_importing(module) == (130, [STOPPED])


@pytest.mark.parametrize(
    "tenth", [pytest.param(k, marks=pytest.mark.exhaustive if k % 6 else pytest.mark.slow) for k in range(40)]
)
def test_at_any_time_of_its_start(tenth: int) -> None:
    code, said = while_importing("nclbayes.interrupts", tenth / 10)
    assert (code, said) in [(130, [STOPPED]), (0, [])]  # with nothing to say if it was done before


def test_the_console_script_is_the_command_line_too(tmp_path: Path) -> None:
    script = tmp_path / "nclbayes"
    script.write_text("import sys\nfrom nclbayes.__main__ import main\nsys.exit(main())\n")
    process = start("-X", "importtime", str(script), "info")
    imported(process, "torch._C")
    assert interrupt(process).splitlines()[-1] == STOPPED
    assert process.returncode == 130


def test_a_program_that_imports_the_package_keeps_its_own_ways() -> None:
    code = "import signal, nclbayes; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    process = start("-c", code, "nclbayes")
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "begun"),
    [
        ("run split-digits --method none --steps 20000", "update.ckpt"),
        ("compare split-digits --methods none,si --steps 20000 --jobs 2", "log.txt"),
        pytest.param(
            *("compare split-digits --methods none,si --steps 20000 --jobs 2", "update.ckpt"),
            marks=pytest.mark.exhaustive,
        ),
        ("tune split-digits --method owm --steps 20000", "trials.log"),
        ("tune split-digits --method owm --steps 20000 --jobs 2", "trials.log"),
        ("figure toy --scale paper", "*"),
    ],
)
def test_while_runs_are_under_way(command: str, begun: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start("-m", "nclbayes", *command.split(), "--quiet", "--out", str(out))
    deadline = time.monotonic() + 60
    while not any(path.match(begun) for path in out.rglob("*")) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.02)
    assert interrupt(process) == GOES_ON
    assert process.returncode == 130
    for log in out.glob("**/log.txt"):
        assert "Traceback" not in log.read_text()


@pytest.mark.slow
def test_while_features_are_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10(tmp_path / "data")
    monkeypatch.setenv("NCLBAYES_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    process = start("-X", "importtime", "-m", "nclbayes", "data", "pretrain-cifar", "--epochs", "100000", "--quiet")
    imported(process, "nclbayes.cli")
    time.sleep(2)
    assert interrupt(process).splitlines()[-1] == STOPPED
    assert process.returncode == 130
    assert not list(tmp_path.glob("cache/**/*.safetensors"))
