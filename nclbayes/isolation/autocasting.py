"""``torch.autocast`` around a call: it is meant for the model, and not for the sums that are formed of it."""

from __future__ import annotations

from contextvars import ContextVar

import torch

_KINDS = ("cpu", "cuda")
# The kinds of devices on which the caller of the outermost call has it on.
_CALLERS: ContextVar[frozenset[str]] = ContextVar("nclbayes_autocast", default=frozenset())


class Switches:
    """The switches of automatic mixed precision in this thread, as they are found."""

    def __init__(self) -> None:
        self._enabled = {kind: torch.is_autocast_enabled(kind) for kind in _KINDS}

    def restore(self) -> None:
        """Put them back."""
        for kind, enabled in self._enabled.items():
            torch.set_autocast_enabled(kind, enabled)


def switch_off() -> None:
    """Compute as it is written from now on, but for what runs inside :class:`as_called`.

    To be called in a context of its own (:func:`contextvars.copy_context`), and with :class:`Switches` to put it back.
    """
    _CALLERS.set(_CALLERS.get() | {kind for kind in _KINDS if torch.is_autocast_enabled(kind)})
    for kind in _KINDS:
        torch.set_autocast_enabled(kind, False)


class as_called:
    """Around a run of a model: autocast is on where whoever called nclbayes has it on.

    Inside an outer autocast torch would keep rounded weights from one step to the next, which are the same tensors
    changed in place: they are forgotten after every run.
    """

    def __enter__(self) -> None:
        self._found = Switches()
        for kind in _CALLERS.get():
            torch.set_autocast_enabled(kind, True)
        torch.clear_autocast_cache()

    def __exit__(self, *exception: object) -> None:
        torch.clear_autocast_cache()
        self._found.restore()
