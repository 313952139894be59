"""Opening what somebody else may have written: a regular file, whose size is known before anything is read."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from nclbayes.errors import FileError


@contextmanager
def opened(path: str | os.PathLike[str], what: str = "file") -> Iterator[tuple[FileIO, int]]:
    """A file to read from.

    Args:
        path: Where it is.
        what: What an error calls it.

    Yields:
        The file, unbuffered, and its size.

    Raises:
        FileError: If it is missing, is no regular file, or cannot be read.
    """
    target = Path(path)
    try:
        # A pipe would otherwise be waited for.
        descriptor = os.open(target, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (FileNotFoundError, NotADirectoryError):
        raise FileError(f"There is no {what} '{target}'.") from None
    except (OSError, ValueError) as error:
        raise FileError(f"Could not read '{target}': {getattr(error, 'strerror', None) or error}.") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise FileError(f"There is no {what} '{target}': that is no regular file.")
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        yield file, status.st_size


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Around a read from an open file, which may fail: a disk does, or a share that is gone.

    Args:
        path: Where the file is.

    Yields:
        Nothing.

    Raises:
        FileError: If it does.
    """
    try:
        yield
    except OSError as error:
        raise FileError(f"Could not read '{Path(path)}': {error.strerror or error}.") from error
