"""Files that are replaced whole: a temporary one is written beside the old one, and then takes its place."""

from __future__ import annotations

import os
import secrets
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from nclbayes.errors import FileError

_PREFIX, _SUFFIX = ".nclbayes-", ".part"
# Where files cannot be locked, a temporary one of this age (seconds) is taken for one of a dead writer.
_OLD = 24 * 3600.0
_EXCLUSIVELY = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)

if sys.platform == "win32":
    # An open file can be neither removed nor renamed there: that is lock enough, and it is closed before it moves.
    _MOVES_OPEN = False

    def _hold(descriptor: int) -> bool:
        return True

    def _sweep_one(path: Path) -> None:
        path.unlink()

else:
    import fcntl

    _MOVES_OPEN = True

    def _hold(descriptor: int) -> bool:
        """Lock a temporary file for as long as it is open; False if somebody has swept it away meanwhile."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True  # A file system without locks.
        return os.fstat(descriptor).st_nlink > 0

    def _sweep_one(path: Path) -> None:
        """Remove a temporary file whose writer is dead: the lock goes with the process, however that ends."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        except BlockingIOError:
            pass
        except OSError:
            if time.time() - os.fstat(descriptor).st_mtime > _OLD:
                path.unlink()
        finally:
            os.close(descriptor)


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A file that is in its place only once it is whole and on the disk; until then the old one is.

    It is created exclusively, under a random name in the same folder, and gets the mode of the file that it replaces.
    If the path is a link, the link is replaced and what it points to is left alone. Temporary files that killed
    writers left in the folder are removed.

    Args:
        path: Where to.

    Yields:
        The file, to write bytes to.

    Raises:
        FileError: If it cannot be written; whatever was at `path` is still there.
    """
    target = Path(path)
    try:
        try:
            _sweep(target.parent)
            descriptor, temporary = _create(target)
        except ValueError as error:
            # A name that no file can have, such as one with a zero byte.
            raise FileError(f"Could not write {str(target)!r}: {error}.") from error
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(descriptor)
                if _MOVES_OPEN:
                    os.replace(temporary, target)
            if not _MOVES_OPEN:
                os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _settle(target.parent)
    except FileError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise FileError(f"Could not write '{target}': {reason}. A file that was there before is untouched.") from error


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file that is complete or not there.

    Args:
        path: Where to.
        text: What to write.

    Raises:
        FileError: If it cannot be written; whatever was at `path` is still there.
    """
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        raise FileError(f"Could not write '{os.fspath(path)}': a name in it is no text ({error}).") from None
    with replacing(path) as file:
        file.write(content)


def _create(target: Path) -> tuple[int, Path]:
    """A new file beside the target, held by this process; the mode is the old file's, else what the umask says."""
    try:
        old = target.lstat()
    except FileNotFoundError:
        old = None
    kept = stat.S_IMODE(old.st_mode) if old is not None and stat.S_ISREG(old.st_mode) else None
    while True:
        temporary = target.parent / f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}"
        try:
            descriptor = os.open(temporary, _EXCLUSIVELY, 0o666 if kept is None else 0o600)
        except FileExistsError:
            continue
        try:
            if _hold(descriptor):
                if kept is not None and hasattr(os, "fchmod"):
                    os.fchmod(descriptor, kept)
                return descriptor, temporary
        except BaseException:
            os.close(descriptor)
            temporary.unlink(missing_ok=True)
            raise
        os.close(descriptor)
        temporary.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Remove what killed writers left; what cannot be removed is left to the next one."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and entry.name.endswith(_SUFFIX):
                with suppress(OSError):
                    _sweep_one(folder / entry.name)


def _settle(folder: Path) -> None:
    """Have the new name on the disk too, where a folder can be told to."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
