"""Where the trials of a search are kept: nowhere, in a folder, or where several processes and machines find them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nclbayes.errors import FileError, SettingError, UnreachableError
from nclbayes.interrupts import deferred

if TYPE_CHECKING:
    import optuna

_FORMS = "sqlite:///FILE, postgresql+psycopg://USER:PASSWORD@HOST/DATABASE, or the path of a journal file"
# Seconds that one process waits for another to write to a file of SQLite.
_PATIENCE = 60.0
# Two processes that make the tables of a new database at once get in each other's way.
_ATTEMPTS = 5


def needed() -> Any:
    """Refuse to begin without what a search needs.

    Returns:
        Optuna.

    Raises:
        SettingError: If it is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise SettingError("A search needs Optuna: pip install 'nclbayes[experiments]'") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def study_in_folder(folder: Path | None) -> optuna.Study:
    """The study of a search that is one process's.

    Args:
        folder: Where its journal is; None: nowhere.

    Returns:
        The study.

    Raises:
        FileError: If the journal is damaged, or cannot be written.
    """
    if folder is None:
        return needed().create_study(direction="maximize")
    return _in_journal(folder / "trials.log", "search")


def shared_study(storage: str, name: str) -> optuna.Study:
    """The study of a search that several processes may be at.

    Args:
        storage: The address of a database, or the path of a journal file.
        name: The study's name.

    Returns:
        The study.

    Raises:
        FileError: If a file cannot be written, or is none of a search.
        SettingError: If it is no such address, or its driver is not installed.
        UnreachableError: If the server cannot be reached.
    """
    needed()
    if not storage:
        raise SettingError(f"A storage is given as {_FORMS}.")
    if "://" not in storage:
        return _in_journal(Path(storage), name)
    with reaching(storage):
        return _in_database(storage, name)


@contextmanager
def reaching(storage: str | None) -> Iterator[None]:
    """What goes wrong with a database becomes an error of ours.

    Args:
        storage: Its address; None: there is no database.

    Raises:
        FileError: If a file of SQLite cannot be used.
        UnreachableError: If a server cannot be.
    """
    if storage is None or "://" not in storage:
        yield
        return
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import DBAPIError, OperationalError

    try:
        yield
    except (StorageInternalError, DBAPIError) as error:
        cause = error if isinstance(error, DBAPIError) else error.__cause__
        said = str(getattr(cause, "orig", None) or cause or error).strip().splitlines()[0]
        if storage.startswith("sqlite"):
            raise FileError(f"The storage '{storage}' cannot be used: {said}.") from error
        advice = "is the server running, and do host, port, user, password and the name of the database fit"
        what = "cannot be reached" if isinstance(cause, OperationalError) else "cannot be used"
        raise UnreachableError(f"The storage '{_shown(storage)}' {what} ({said}): {advice}?") from error


def _in_database(storage: str, name: str) -> optuna.Study:
    from sqlalchemy.exc import DBAPIError, OperationalError

    is_file = storage.startswith("sqlite")
    for left in reversed(range(_ATTEMPTS)):
        try:
            return _study(_database(storage, is_file), name)
        except DBAPIError as error:
            if not left or (isinstance(error, OperationalError) and not is_file):
                raise
            time.sleep(0.5)
    raise AssertionError


def _database(storage: str, is_file: bool) -> Any:
    from optuna.storages import RDBStorage
    from sqlalchemy import event
    from sqlalchemy.exc import ArgumentError

    if storage.startswith("redis"):
        raise SettingError(f"Redis is no storage of a search: use {_FORMS}.")
    # A connection to a server may have been closed since it was used last.
    settings = {"connect_args": {"timeout": _PATIENCE}} if is_file else {"pool_pre_ping": True}
    try:
        found = RDBStorage(storage, engine_kwargs=settings)
    except (ArgumentError, ValueError) as error:
        raise SettingError(f"'{_shown(storage)}' is no address of a storage, which is {_FORMS}.") from error
    except ImportError as error:
        missing = getattr(error.__cause__, "name", None) or error.name or "for it"
        raise SettingError(
            f"The storage '{_shown(storage)}' needs the package {missing}, which is not installed. For PostgreSQL, pip "
            "install 'psycopg[binary]', and begin the address with postgresql+psycopg://."
        ) from error
    if is_file:
        event.listen(found.engine, "begin", _begin_alone)
    return found


def _begin_alone(connection: Any) -> None:
    """Begin a transaction of SQLite as the only one.

    Optuna reads whether a trial is waiting, and then writes that it is taken. A server locks the row that was read
    (SELECT ... FOR UPDATE), and a journal has an order. SQLite by itself would begin with what is written, and let two
    processes take the same trial.
    """
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _shown(storage: str) -> str:
    """An address without its password."""
    kind, _, rest = storage.partition("://")
    user, at, place = rest.rpartition("@")
    return f"{kind}://{user.partition(':')[0]}{at}{place}"


def _in_journal(path: Path, name: str) -> optuna.Study:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    try:
        with deferred():
            return _study(JournalStorage(JournalFileBackend(str(path))), name)
    except Exception as error:
        # Optuna reads its journal line by line, and says nothing of its own of what it finds there.
        raise FileError(f"'{path}' is damaged, or cannot be written: {error}.") from error


def _study(storage: Any, name: str) -> optuna.Study:
    return needed().create_study(storage=storage, study_name=name, direction="maximize", load_if_exists=True)
