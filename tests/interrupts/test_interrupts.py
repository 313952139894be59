"""Ctrl-C comes later, or not at all, where it must; and as ever everywhere else."""

from __future__ import annotations

import signal
import subprocess
import sys
from threading import Thread

import pytest

from nclbayes.interrupts import deferred, kept_from_children, leave_quietly, raised


@pytest.fixture(autouse=True)
def as_in_a_program() -> object:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("put_off", [deferred, kept_from_children])
def test_it_comes_at_the_end(put_off: object) -> None:
    reached = []

    def work() -> None:
        with put_off():  # type: ignore[operator]
            signal.raise_signal(signal.SIGINT)
            reached.append("end")
        reached.append("beyond")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["end"]


@pytest.mark.skipif(sys.platform == "win32", reason="signals cannot be blocked there")
def test_children_do_not_see_it() -> None:
    code = "import signal; signal.raise_signal(signal.SIGINT); print('unmoved')"
    with kept_from_children():
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.communicate(timeout=60)[0] == "unmoved\n"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_in_other_threads_there_is_nothing_to_put_off() -> None:
    done = []

    def work() -> None:
        with deferred():
            done.append(signal.getsignal(signal.SIGINT))

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert done == [signal.default_int_handler]


def test_a_process_that_is_not_the_command_line_keeps_its_handler() -> None:
    leave_quietly()
    with pytest.raises(KeyboardInterrupt), raised():
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("given", "seen", "ours"),
    [
        (["python", "/env/bin/nclbayes", "run"], ["/env/bin/nclbayes", "run"], True),
        (["python", "-m", "nclbayes", "run"], ["-m", "run"], True),
        (["python", "script.py", "install", "nclbayes"], ["script.py"], False),
        (["python", "-m", "pytest", "nclbayes"], ["-m", "nclbayes"], False),
    ],
)
def test_only_the_command_line_leaves_quietly(
    given: list[str], seen: list[str], ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", given)
    monkeypatch.setattr(sys, "argv", seen)
    before = signal.getsignal(signal.SIGINT)
    try:
        leave_quietly()
        assert (signal.getsignal(signal.SIGINT) is not before) is ours
    finally:
        signal.signal(signal.SIGINT, before)
