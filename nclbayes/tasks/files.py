"""Where data lie: in a folder of the user's, in the cache, or on the network."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from nclbayes.errors import DataError, FileError, SettingError
from nclbayes.tasks.formats import content_digest, file_digest
from nclbayes.tasks.registry import DATASETS, Archive, DataFile, DataSet

VARIABLE = "NCLBAYES_DATA"
"""The environment variable that names a folder to look in first."""


class Status(NamedTuple):
    """What is on this machine of a data set.

    Attributes:
        dataset: Its name.
        found: Whether it can be used without a download.
        where: The folder of its first file, or the archive that it will be unpacked from.
        missing: The files that are not there.
    """

    dataset: str
    found: bool
    where: Path | None
    missing: tuple[str, ...]


def cache_folder() -> Path:
    """The folder that downloads and features are kept in: the operating system's place for caches.

    Returns:
        A path, the same that pooch would choose; it need not exist yet.

    Example:
        >>> from nclbayes.tasks.files import cache_folder
        >>> "nclbayes" in cache_folder().parts
        True
    """
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
        return Path(local, "nclbayes", "nclbayes", "Cache")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "nclbayes"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "nclbayes")


def find(dataset: str) -> dict[str, Path]:
    """The files of a data set: from ``$NCLBAYES_DATA``, else from the cache, else downloaded into the cache.

    Only what is downloaded is compared with its known hash; :func:`check` does so for files that are there already.

    Args:
        dataset: One of ``DATASETS``.

    Returns:
        The path of each file, by key.

    Raises:
        SettingError: If there is no such data set, or a download is needed and pooch is not installed.
        DataError: If files are missing and cannot be downloaded; the message says where to get and put them.
        FileError: If a download has the wrong hash, or an archive is damaged.
    """
    wanted = _dataset(dataset)
    return fetch(dataset) if _missing(wanted) else _locate(wanted)


def fetch(dataset: str) -> dict[str, Path]:
    """Bring whatever is missing of a data set into the cache: from an archive that is there, else by download.

    Args:
        dataset: One of ``DATASETS``.

    Returns:
        The path of each file, by key.

    Raises:
        SettingError: If there is no such data set, or pooch is not installed.
        DataError: If no mirror answers, or nothing can be written; the message says what to do by hand.
        FileError: If what arrives has the wrong hash, or an archive is damaged.
    """
    wanted = _dataset(dataset)
    if wanted.archive is not None and _missing(wanted):
        _unpack(wanted, wanted.archive)
    for file in _missing(wanted):
        path = cache_folder() / file.places[0]
        _download(wanted, file.urls, path, file.sha256, file.published)
    return _locate(wanted)


def check(dataset: str) -> dict[str, bool]:
    """Compare the files that are there with their known hashes.

    Args:
        dataset: One of ``DATASETS``.

    Returns:
        For each file found, by key, whether its hash is known (and was right).

    Raises:
        SettingError: If there is no such data set.
        FileError: If a file is damaged; the message names it, the hash expected and the hash found.
    """
    wanted = _dataset(dataset)
    known = {file.key: file for file in wanted.files}
    return {
        key: _compare(path, str(path), known[key].sha256, known[key].published if path.suffix == ".gz" else None)
        for key, path in _locate(wanted).items()
    }


def status() -> list[Status]:
    """What is on this machine, for every data set; nothing is read or downloaded.

    Returns:
        One entry for each data set.

    Example:
        >>> from nclbayes.tasks.files import status
        >>> [entry.dataset for entry in status()]
        ['mnist', 'fashion-mnist', 'cifar10', 'cifar100', 'stroke-mnist']
    """
    entries = []
    for dataset in DATASETS.values():
        found, missing = _locate(dataset), _missing(dataset)
        archive = _first(dataset.archive.places) if missing and dataset.archive else None
        where = archive or next((path.parent for path in found.values()), None)
        names = () if archive else tuple(file.places[0] for file in missing)
        entries.append(Status(dataset.name, not names, where, names))
    return entries


def need(module: str, purpose: str) -> Any:
    """Import a package that only some task sets need.

    Args:
        module: Its name.
        purpose: What it is needed for, as the start of a sentence.

    Returns:
        The module.

    Raises:
        SettingError: If it is not installed.

    Example:
        >>> from nclbayes.tasks.files import need
        >>> need("json", "An example").dumps(1)
        '1'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0].replace("sklearn", "scikit-learn")
        raise SettingError(
            f"{purpose} needs {package}, which is not installed: pip install 'nclbayes[experiments]'"
        ) from error


def _dataset(name: str) -> DataSet:
    if name not in DATASETS:
        raise SettingError(f"There is no data set {name!r}; choose one of {', '.join(map(repr, DATASETS))}.")
    return DATASETS[name]


def _roots() -> list[Path]:
    own = os.environ.get(VARIABLE)
    return [*([Path(own).expanduser()] if own else []), cache_folder()]


def _first(places: Iterable[str]) -> Path | None:
    candidates = (root / place for root in _roots() for place in places)
    return next((path for path in candidates if path.exists()), None)


def _locate(dataset: DataSet) -> dict[str, Path]:
    paths = {file.key: _first(file.places) for file in dataset.files}
    return {key: path for key, path in paths.items() if path is not None}


def _missing(dataset: DataSet) -> list[DataFile]:
    found = _locate(dataset)
    return [file for file in dataset.files if file.key not in found]


def _unpack(dataset: DataSet, archive: Archive) -> None:
    """Unpack the archive into the cache; a downloaded one is deleted afterwards."""
    path = _first(archive.places)
    downloaded = cache_folder() / archive.places[0] if path is None else None
    if downloaded is not None:
        _download(dataset, archive.urls, downloaded, None, archive.published)
    source = path or downloaded
    assert source is not None
    try:
        archive.unpack(source, cache_folder())
        if lacking := [file.places[0] for file in _missing(dataset)]:
            raise FileError(f"'{source}' does not hold all of '{dataset.name}': {', '.join(lacking)} missing.")
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"Could not unpack '{source}' into '{cache_folder()}': {error}") from error
    finally:
        if downloaded is not None:
            downloaded.unlink()


def _download(dataset: DataSet, urls: Iterable[str], target: Path, sha256: str | None, published: str | None) -> None:
    """Try the addresses in turn; the file is in its place only once it is whole and right."""
    try:
        pooch = need("pooch", f"Downloading the data set '{dataset.name}'")
    except SettingError as error:
        raise SettingError(f"{error}. Or fetch it by hand: {_instructions(dataset)}") from error
    temporary = target.with_name(f".{os.getpid()}-{target.name}")
    failures: list[str] = []
    damaged: FileError | None = None
    for url in urls:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            pooch.HTTPDownloader(progressbar=sys.stderr.isatty())(url, str(temporary), None)
            _compare(temporary, url, sha256, published)
            os.replace(temporary, target)
            return
        except FileError as error:
            damaged = error
        except (OSError, ValueError) as error:
            failures.append(f"{url} ({error})")
        finally:
            temporary.unlink(missing_ok=True)
    if damaged is not None:
        raise damaged
    raise DataError(f"{_instructions(dataset)} No download succeeded: {'; '.join(failures)}.")


def _instructions(dataset: DataSet) -> str:
    missing = _missing(dataset)
    own = os.environ.get(VARIABLE)
    looked = f"${VARIABLE} = '{own}'" if own else f"${VARIABLE} (not set)"
    if own and not Path(own).expanduser().is_dir():
        looked += " (no such folder)"
    if dataset.archive:
        sources, put = dataset.archive.urls, f"the archive in '{cache_folder()}' as it is"
    else:
        sources = tuple(url for file in missing for url in file.urls)
        put = f"them in '{(cache_folder() / missing[0].places[0]).parent}'"
    return (
        f"The data set '{dataset.name}' is not complete. Missing: {', '.join(file.places[0] for file in missing)}. "
        f"Looked in {looked} and '{cache_folder()}'. Get: {' , '.join(sources)} , and put {put}, or the missing files "
        f"under the names above in a folder that ${VARIABLE} names."
    )


def _compare(path: Path, name: str, sha256: str | None, published: str | None) -> bool:
    """Whether a hash is known, which is then compared with the file's."""
    if sha256 is not None:
        expected, found = f"sha256:{sha256}", f"sha256:{content_digest(path)}"
    elif published is not None:
        algorithm = published.partition(":")[0]
        expected, found = published, f"{algorithm}:{file_digest(path, algorithm)}"
    else:
        return False
    if expected != found:
        raise FileError(
            f"'{name}' is not the file it should be: its hash is {found}, but {expected} was expected. Fetch it "
            "again, or from elsewhere."
        )
    return True
