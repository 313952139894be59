"""Running a model alone, and leaving the process as it was found.

Pyro's handler stack, torch's global generators, and a module whose weights are swapped for a run are shared by all
threads; grad mode and other switches are the thread's. Whatever is raised at whatever moment, an interrupt in the
middle of these very lines too, the next call must find them as the caller left them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from pyro import distributions, infer, poutine
from pyro.nn import PyroModule
from pyro.poutine import runtime
from torch import nn

from nclbayes.errors import NCLError

if TYPE_CHECKING:
    from types import FrameType, TracebackType

T = TypeVar("T")

# Held by the thread whose model runs. An RLock is taken and let go by a single instruction of a `with` statement, and
# knows its owner: unlike a flag of ours, it cannot be left wrong by an interrupt.
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
        self._found = _Shared(self._generators)
        _RUNS.append(self._found)
        # Handlers around the call, or of another thread's own code, are not meant for this run.
        runtime._PYRO_STACK.clear()
        runtime._DIM_ALLOCATOR._stack.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._found in _RUNS:
            _end_runs(_RUNS.index(self._found))
        _LOCK.release()


class _Found:
    """What a call finds in its own thread and in its model.

    Args:
        model: The model that will be run; of a module, whose weights a run replaces, what it holds is noted.
        generators: What the call draws from.
    """

    def __init__(self, model: object, generators: Iterable[torch.Generator]) -> None:
        self._grad = torch.is_grad_enabled()
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

    def restore(self, succeeded: bool) -> None:
        """Put everything back.

        Args:
            succeeded: Whether the call has done what it was asked for. If not, its generators go back too, as if
                nothing had been drawn, and so do weights that a run may have left swapped.
        """
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(self._transforms)
        while torch._C._len_torch_function_stack() > self._modes:
            torch._C._pop_torch_function_stack()
        torch.set_grad_enabled(self._grad)
        torch.set_flush_denormal(self._flushing)
        with _LOCK:
            _end_runs(self._runs)
            if not succeeded:
                for held, before in self._weights:
                    held.update(before)
                for context, active in self._contexts:
                    context.active = active
                    context.cache.clear()
                for generator, state in self._generators:
                    generator.set_state(state)
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

    A call inside another is part of that one's work.

    Args:
        model: The model.
        work: The work.
        generators: What is drawn from; put back if the work fails, as if it had never been tried.
        is_done: Whether the work has had its effect, although something was raised afterwards.

    Returns:
        What the work returns.
    """
    if _is_inside():
        return work()
    if getattr(_THREAD, "found", None) is not None:
        # An interrupt hit the last lines of the call before, and not everything was put back.
        _THREAD.found.restore(_THREAD.is_done())
    succeeded = False
    _THREAD.is_done = lambda: succeeded or is_done()
    _THREAD.found = _Found(model, generators)
    try:
        # Changes of context variables are left behind in the copy.
        result = copy_context().run(_learning, work)
        succeeded = True
        return result
    except (NCLError, RuntimeError) as error:
        # What an interrupt broke, in torch's vmap say, may be reported as an error of its own.
        if _is_interrupt(error):
            raise KeyboardInterrupt from error
        raise
    finally:
        _THREAD.found.restore(_THREAD.is_done())
        _THREAD.found = _THREAD.is_done = None


def _learning(work: Callable[[], T]) -> T:
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return _learning(work)
    with torch.enable_grad():
        return work()


def _is_interrupt(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


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
