"""Calls inside calls, calls while an error is handled, and threads that would wait for each other."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import nclbayes as ncl
from nclbayes.errors import DataError, FileError, SettingError
from nclbayes.isolation import Alone, process
from tests.isolation.learners import LEARNERS, SETTINGS, contents, network, same, task
from tests.isolation.test_process import MODES


@pytest.mark.parametrize("mode", MODES)
def test_a_callback_may_update_another_posterior_in_any_grad_mode(mode: str) -> None:
    outer, inner, alone = (LEARNERS["laplace"](network()) for _ in range(3))
    alone.update(task("b", 1), progress=False)

    def learn(progress: Any) -> None:
        if progress.step == 2:
            with MODES[mode]():
                inner.update(task("b", 1), progress=False)

    outer.update(task("a", 0), callbacks=[learn], progress=False)
    assert same(contents(inner), contents(alone))


def test_a_nested_update_that_fails_has_not_happened() -> None:
    outer, inner, alone = (LEARNERS["laplace"](network()) for _ in range(3))
    before = contents(inner)

    def fail(progress: Any) -> None:
        with suppress(ZeroDivisionError):
            inner.update(task("b", 1), callbacks=[lambda progress: 1 / 0], progress=False)
        assert same(contents(inner), before)

    outer.update(task("a", 0), callbacks=[fail], progress=False)
    alone.update(task("a", 0), progress=False)
    assert same(contents(outer), contents(alone))


def test_errors_are_what_they_are_while_an_interrupt_is_handled() -> None:
    posterior = LEARNERS["laplace"](network())
    bad = ncl.Task((torch.randn(4, 7), torch.zeros(4).long()), name="bad")
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(DataError, match="'bad'"):
            posterior.update(bad, progress=False)
        with pytest.raises(FileError):
            ncl.OnlinePosterior.load("/nonexistent", posterior.model)


def test_an_error_of_the_users_own_in_place_of_an_interrupt_passes() -> None:
    class Own(RuntimeError):
        pass

    def stop(progress: Any) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise Own from None

    with pytest.raises(Own):
        LEARNERS["laplace"](network()).update(task("a", 0), callbacks=[stop], progress=False)


def test_a_source_that_asks_a_posterior_in_use_is_told_so_and_waits_for_nobody() -> None:
    """It is read while no other model may run, for which the thread that uses the posterior is waiting."""
    asked, other = LEARNERS["laplace"](network()), LEARNERS["laplace"](network())
    asked.update(task("a", 0), progress=False)
    begun, read, said = threading.Event(), threading.Event(), []

    def sampler(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if begun.is_set():
            try:
                asked.predict(torch.zeros(1, 3), num_samples=2)
            except SettingError as error:
                said.append(str(error))
            asked.predict(torch.zeros(1, 3), num_samples=2, generator=torch.Generator())
            read.set()
        return torch.randn(size, 3, generator=generator), torch.zeros(size).long()

    def learn(progress: Any) -> None:
        begun.set()
        read.wait(30)

    def use() -> None:
        asked.update(task("b", 1), callbacks=[learn], progress=False)

    drawn = ncl.Task(sampler, name="drawn", size=24)
    user = threading.Thread(target=use, daemon=True)
    user.start()
    assert begun.wait(30)
    asking = threading.Thread(target=lambda: other.update(drawn, progress=False), daemon=True)
    asking.start()
    for thread in (asking, user):
        thread.join(60)
        assert not thread.is_alive()
    assert said
    assert "in use by another thread" in said[0]


def test_a_posterior_moves_with_its_model_or_not_at_all() -> None:
    class Heavy(nn.Linear):
        def _apply(self, *args: Any, **kwargs: Any) -> Any:
            raise MemoryError

    net = nn.Sequential(Heavy(3, 2))
    model = ncl.BayesianNetwork(net, ncl.Categorical(), prior=ncl.priors.scaled(1.0))
    posterior = ncl.OnlinePosterior(model, ncl.LaplaceNCL(**SETTINGS))
    posterior.update(task("a", 0), progress=False)
    with pytest.raises(MemoryError):
        posterior.to("meta")
    assert all(state.loc.device.type == "cpu" for state in posterior.blocks.values())


def test_what_an_interrupt_has_left_suspended_ends_before_the_process_is_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when it hits torch while a mode is off its stack: the mode would come back with the end of the traceback."""

    class Mode(TorchFunctionMode):
        pass

    @contextmanager
    def lifted() -> Iterator[None]:
        try:
            yield
        finally:
            torch._C._push_on_torch_function_stack(Mode())
            raise ArithmeticError("of the end, which nobody can be told")

    def stop(progress: Any) -> None:
        held = lifted()
        held.__enter__()
        raise KeyboardInterrupt

    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    before = torch._C._len_torch_function_stack()
    try:
        with suppress(KeyboardInterrupt):
            LEARNERS["laplace"](network()).update(task("a", 0), callbacks=[stop], progress=False)
        gc.collect()
        assert torch._C._len_torch_function_stack() == before
        assert not ignored
    finally:
        while torch._C._len_torch_function_stack() > before:
            torch._C._pop_torch_function_stack()


def test_a_lock_that_an_interrupt_left_is_let_go_by_the_next_call() -> None:
    posterior = LEARNERS["laplace"](network())
    posterior.update(task("a", 0), progress=False)
    process._LOCK.acquire()
    posterior.predict(torch.zeros(2, 3))
    assert not process._LOCK._is_owned()


def test_a_lock_that_a_run_holds_is_kept_by_a_call_inside_it() -> None:
    posterior = LEARNERS["laplace"](network())
    posterior.update(task("a", 0), progress=False)
    with Alone():
        posterior.predict(torch.zeros(2, 3))
        assert process._LOCK._is_owned()
    assert not process._LOCK._is_owned()
