"""Running a model alone, and leaving the process as it was found.

Pyro's handler stack, torch's global generators, and a module whose weights are swapped for a run are shared by all
threads; grad mode and other switches are the thread's. Whatever is raised at whatever moment, an interrupt in the
middle of these very lines too, the next call must find them as the caller left them.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from pyro import distributions, infer, poutine
from pyro.nn import PyroModule
from pyro.poutine import runtime
from torch import nn

from nclbayes.errors import NCLError, SettingError
from nclbayes.isolation.autocasting import Switches, switch_off

if TYPE_CHECKING:
    from types import FrameType, TracebackType

T = TypeVar("T")

# Held by the thread whose model runs. It knows its owner: what an interrupt leaves locked is found and let go by
# the call around it.
_LOCK = threading.RLock()
# What the runs under way found, the outermost first: read and changed by the lock's owner only.
_RUNS: list[_Shared] = []
# What this thread's outermost call found, until it has been put back.
_THREAD = threading.local()


class _Shared:
    """What all threads share and a run of a model changes, as it was found.

    Args:
        generators: torch's global generators that the run will draw from.
    """

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        self._stack = list(runtime._PYRO_STACK)
        self._plates = list(runtime._DIM_ALLOCATOR._stack)
        self._validation = [(module, module.is_validation_enabled()) for module in (distributions, infer, poutine)]
        self._generators = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> None:
        """Put everything back."""
        runtime._PYRO_STACK[:] = self._stack
        runtime._DIM_ALLOCATOR._stack[:] = self._plates
        for module, enabled in self._validation:
            module.enable_validation(enabled)
        for generator, state in self._generators:
            generator.set_state(state)


class Alone:
    """A context in which no other thread runs a model, and no effect handler from outside applies.

    Args:
        *generators: torch's global generators that are drawn from inside; they are put back.

    Example:
        >>> from nclbayes.isolation import Alone
        >>> with Alone():
        ...     pass
    """

    def __init__(self, *generators: torch.Generator) -> None:
        self._generators = generators
        self._found: _Shared | None = None

    def __enter__(self) -> None:
        _LOCK.acquire()
        try:
            self._found = _Shared(self._generators)
            _RUNS.append(self._found)
            # Handlers around the call, or of another thread's own code, are not meant for this run.
            runtime._PYRO_STACK.clear()
            runtime._DIM_ALLOCATOR._stack.clear()
        except BaseException:
            self._leave()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._found in _RUNS:
            _end_runs(_RUNS.index(self._found))
        _LOCK.release()


class Turn:
    """The turn at an object that one thread at a time may change.

    A thread that holds such a turn waits for its models to run alone, so nobody who runs one (a data source that is
    read, a network) may wait for a turn: both would wait for ever.

    Args:
        what: The object, for the message.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.RLock()

    @property
    def is_mine(self) -> bool:
        """Whether this thread has the turn."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

    def taken(self) -> AbstractContextManager[Any]:
        """A context in which this thread has the turn.

        Returns:
            The context.

        Raises:
            SettingError: If another thread has it, and may be waiting for this one.
        """
        if not _is_mine():
            # Taken and let go by single instructions of a `with` statement, between which no interrupt comes.
            return self._lock
        if not self._lock.acquire(blocking=False):
            raise SettingError(
                f"{self._what} is in use by another thread, which may be waiting for this one: a model runs here, or "
                "the data of one are read. Call it elsewhere, or pass a `generator` to predict or to sample with."
            )
        stack = ExitStack()
        stack.callback(self._lock.release)
        return stack


class _Found:
    """What a call finds in its own thread and in its model.

    Args:
        model: The model that will be run; of a module, whose weights a run replaces, what it holds is noted.
        generators: What the call draws from.
        is_done: Whether the call has had its effect, although something was raised afterwards.

    Attributes:
        succeeded: Whether the call has done what it was asked for.
    """

    def __init__(self, model: object, generators: Iterable[torch.Generator], is_done: Callable[[], bool]) -> None:
        self.succeeded, self._is_done = False, is_done
        self._grad = torch.is_grad_enabled()
        self._autocast = Switches()
        self._flushing = flushes_denormals()
        self._modes = torch._C._len_torch_function_stack()
        self._transforms = torch._C._functorch.get_dynamic_layer_stack_depth()
        self._generators = [(generator, generator.get_state()) for generator in generators]
        self._weights: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._contexts = []
        self._runs = len(_RUNS) if _is_mine() else 0
        with _LOCK:
            for module in model.modules() if isinstance(model, nn.Module) else ():
                self._weights.append((module._parameters, dict(module._parameters)))
                if isinstance(module, PyroModule):
                    self._contexts.append((module._pyro_context, module._pyro_context.active))

    def restore(self) -> None:
        """Put everything back.

        If the call has not done what it was asked for, its generators go back too, as if nothing had been drawn, and so
        do weights that a run may have left swapped.
        """
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(self._transforms)
        while torch._C._len_torch_function_stack() > self._modes:
            torch._C._pop_torch_function_stack()
        torch.set_grad_enabled(self._grad)
        self._autocast.restore()
        torch.set_flush_denormal(self._flushing)
        with _LOCK:
            _end_runs(self._runs)
            if not (self.succeeded or self._is_done()):
                for held, before in self._weights:
                    held.update(before)
                for context, active in self._contexts:
                    context.active = active
                    context.cache.clear()
                for generator, state in self._generators:
                    generator.set_state(state)
        # The lock goes with a run: without one it is held because an interrupt came as it was to be let go.
        while _is_mine() and not self._runs:
            _LOCK.release()


def as_found(
    model: object,
    work: Callable[[], T],
    *,
    generators: Iterable[torch.Generator] = (),
    is_done: Callable[[], bool] = lambda: False,
) -> T:
    """Do some work with a model, with autograd on, and leave the process as it was found whatever is raised.

    Autocast is off for the work; the model runs :class:`~nclbayes.isolation.autocasting.as_called`.

    A call inside another leaves the process as it was when it began, in the midst of that one's work.

    Args:
        model: The model.
        work: The work.
        generators: What is drawn from; put back if the work fails, as if it had never been tried.
        is_done: Whether the work has had its effect, although something was raised afterwards.

    Returns:
        What the work returns.
    """
    outermost, handled = not _is_inside(), sys.exc_info()[1]
    if outermost and getattr(_THREAD, "found", None) is not None:
        # An interrupt hit the last lines of the call before, and not everything was put back.
        _THREAD.found.restore()
    found = _Found(model, generators, is_done)
    if outermost:
        _THREAD.found = found
    try:
        # Changes of context variables are left behind in the copy.
        result = copy_context().run(_learning, work)
        found.succeeded = True
        return result
    except KeyboardInterrupt as error:
        _let_go(error, handled)
        raise
    except (NCLError, RuntimeError) as error:
        # What an interrupt broke, in torch's vmap say, may be reported as an error of its own.
        is_ours = isinstance(error, NCLError) or type(error) is RuntimeError
        if is_ours and _is_interrupt(error, handled):
            _let_go(error, handled)
            raise KeyboardInterrupt from error
        raise
    finally:
        found.restore()
        if outermost:
            _THREAD.found = None


def _learning(work: Callable[[], T]) -> T:
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return _learning(work)
    switch_off()
    with torch.enable_grad():
        return work()


def _is_interrupt(error: BaseException | None, handled: BaseException | None) -> bool:
    """Whether an interrupt is behind an error, and not one that the caller was handling already."""
    while error is not None and error is not handled and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return error is not None and error is not handled


def _let_go(error: BaseException | None, handled: BaseException | None) -> None:
    """End what an interrupt has left suspended, now and not when its traceback is dropped.

    A context manager that was interrupted as it was entered, one of torch's that takes a mode off its stack say, is
    held by the traceback, and would put that mode back after everything here has been put back. Those that cannot end
    out of turn, such as torch's nested transforms, are undone by what was found.
    """
    hook = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None
    try:
        # What the caller was handling already is his.
        while error is not None and error is not handled:
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__
    finally:
        sys.unraisablehook = hook


def _is_inside() -> bool:
    """Whether this is a call within another: read off the stack, as a flag might be left standing."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not as_found.__code__:
        frame = frame.f_back
    return frame is not None


def _is_mine() -> bool:
    """Whether this thread holds the lock."""
    return bool(_LOCK._is_owned())  # type: ignore[attr-defined]


def _end_runs(left: int) -> None:
    """Put back what runs have changed, the innermost first, until so many are left."""
    while len(_RUNS) > left:
        _RUNS[-1].restore()
        _RUNS.pop()


def flushes_denormals() -> bool:
    """Whether this thread lets numbers below 1e-38 be zero."""
    return bool(torch.tensor(1e-38, dtype=torch.float32, device="cpu") * 0.1 == 0)
