"""One process at a time in a run's folder."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nclbayes.errors import FileError

if sys.platform == "win32":
    import msvcrt

    def _open(folder: Path) -> int:
        return os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)

    def _lock(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _open(folder: Path) -> int:
        return os.open(folder, os.O_RDONLY)

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def sole_use(folder: Path | None, patience: float = 0.0) -> Iterator[None]:
    """Have a folder to oneself; it is made if it is not there.

    The lock goes with the process, however that ends: nobody has to remove anything after a crash.

    Args:
        folder: The folder; None: there is nothing to share.
        patience: So many seconds to wait for another process that has it.

    Yields:
        Nothing.

    Raises:
        FileError: If another process has it, or it cannot be made.
    """
    if folder is None:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _open(folder)
    except OSError as error:
        raise FileError(f"Could not write to '{folder}': {error.strerror}.") from None
    deadline = time.monotonic() + patience
    try:
        while True:
            try:
                _lock(descriptor)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() >= deadline:
                    raise FileError(
                        f"Another process is at work in '{folder}': wait until it is done, stop it, or choose another "
                        "folder."
                    ) from None
                time.sleep(0.1)
            except OSError:
                break  # A file system without locks.
        yield
    finally:
        os.close(descriptor)
