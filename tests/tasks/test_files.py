"""Finding, downloading and checking data, against a server on this machine."""

from __future__ import annotations

import hashlib
import importlib
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nclbayes.errors import DataError, FileError, SettingError
from nclbayes.tasks import files, formats
from nclbayes.tasks.registry import DATASETS, Archive, DataFile, DataSet
from tests.tasks import fakes

CLOSED = "http://127.0.0.1:9/"


def register(monkeypatch: pytest.MonkeyPatch, dataset: DataSet) -> None:
    monkeypatch.setitem(DATASETS, dataset.name, dataset)


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCLBAYES_DATA", raising=False)


def test_the_cache_is_where_pooch_would_have_it() -> None:
    pooch = pytest.importorskip("pooch")
    assert files.cache_folder() == Path(pooch.os_cache("nclbayes"))


@pytest.mark.parametrize("place", ["mnist", "MNIST/raw", "."])
@pytest.mark.parametrize("zipped", [True, False], ids=["zipped", "plain"])
def test_files_are_found_zipped_or_plain_in_a_folder_or_beside_it(folder: Path, place: str, zipped: bool) -> None:
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    written = [
        fakes.write_idx(folder / place / f"{name}-ubyte{'.gz' if zipped else ''}", np.arange(3), zipped)
        for name in names
    ]
    found = files.find("mnist")
    assert list(found) == ["train_images", "train_labels", "test_images", "test_labels"]
    assert all(path.samefile(other) for path, other in zip(found.values(), written, strict=True))


def test_the_users_folder_comes_before_the_cache_and_file_by_file(folder: Path) -> None:
    fakes.write_mnist(files.cache_folder() / "mnist")
    first = fakes.write_idx(folder / "mnist" / "train-labels-idx1-ubyte.gz", np.arange(3))
    found = files.find("mnist")
    assert found["train_labels"] == first
    assert found["train_images"].is_relative_to(files.cache_folder())


def test_fashion_is_not_taken_from_mnists_files(folder: Path) -> None:
    fakes.write_mnist(folder)
    entries = {entry.dataset: entry for entry in files.status()}
    assert entries["mnist"].found
    assert not entries["fashion-mnist"].found


def test_status_lists_what_is_missing(folder: Path) -> None:
    (folder / "cifar-100-binary").mkdir()
    (folder / "cifar-100-binary" / "test.bin").touch()
    (folder / "sequences.tar.gz").touch()
    entries = {entry.dataset: entry for entry in files.status()}
    assert entries["cifar100"] == ("cifar100", False, folder / "cifar-100-binary", ("cifar-100-binary/train.bin",))
    assert entries["stroke-mnist"] == ("stroke-mnist", True, folder / "sequences.tar.gz", ())
    assert entries["mnist"].where is None
    assert len(entries["mnist"].missing) == 4


def test_an_unknown_data_set_is_refused() -> None:
    for function in (files.find, files.fetch, files.check):
        with pytest.raises(SettingError, match=r"'emnist'; choose one of 'mnist'"):
            function("emnist")


@pytest.mark.usefixtures("nothing")
def test_a_download_tries_the_mirrors_in_turn_and_checks_the_content(
    server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pooch")
    address, served = server
    right = formats.content_digest(fakes.write_idx(served / "good" / "a.gz", np.arange(9)))
    fakes.write_idx(served / "bad" / "a.gz", np.arange(8))
    urls = (f"{CLOSED}a.gz", f"{address}missing/a.gz", f"{address}bad/a.gz", f"{address}good/a.gz")
    register(monkeypatch, DataSet("small", (DataFile("a", ("small/a.gz", "a.gz"), right, None, urls),)))
    assert files.find("small") == {"a": files.cache_folder() / "small" / "a.gz"}
    assert formats.read_idx(files.find("small")["a"]).tolist() == list(range(9))
    assert [path.name for path in (files.cache_folder() / "small").iterdir()] == ["a.gz"]
    (served / "good" / "a.gz").unlink()
    assert files.check("small") == {"a": True}
    assert files.find("small") == files.fetch("small")


@pytest.mark.usefixtures("nothing")
@pytest.mark.parametrize("packed", [True, False], ids=["published", "content"])
def test_a_download_with_the_wrong_hash_is_refused_and_not_kept(
    server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    pytest.importorskip("pooch")
    address, served = server
    path = fakes.write_idx(served / "a.gz", np.arange(9))
    if packed:
        found, hashes = hashlib.md5(path.read_bytes()).hexdigest(), (None, f"md5:{'0' * 32}")
    else:
        found, hashes = formats.content_digest(path), ("0" * 64, None)
    register(monkeypatch, DataSet("small", (DataFile("a", ("small/a.gz",), *hashes, (f"{address}a.gz",)),)))
    with pytest.raises(FileError, match=rf"a\.gz.*its hash is \w+:{found}, but \w+:0+ was expected"):
        files.find("small")
    assert not [p for p in files.cache_folder().rglob("*") if p.is_file()]


@pytest.mark.usefixtures("nothing")
def test_without_a_network_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pooch")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    register(monkeypatch, DataSet("small", (DataFile("a", ("small/a.gz",), None, None, (f"{CLOSED}a.gz",)),)))
    with pytest.raises(DataError) as caught:
        files.find("small")
    message = str(caught.value)
    for part in ("'small'", "Missing: small/a.gz", f"{CLOSED}a.gz", str(files.cache_folder() / "small")):
        assert part in message
    assert "$NCLBAYES_DATA (not set)" in message
    monkeypatch.setenv("NCLBAYES_DATA", "/no/such/folder")
    with pytest.raises(DataError, match=r"\$NCLBAYES_DATA = '/no/such/folder' \(no such folder\)"):
        files.find("small")


@pytest.mark.usefixtures("nothing")
def test_without_pooch_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(SettingError, match=r"needs pooch.*pip install 'nclbayes\[experiments\]'.*cifar-100-binary.tar"):
        files.find("cifar100")


@pytest.mark.usefixtures("nothing")
def test_an_archive_is_downloaded_unpacked_and_deleted(
    server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pooch")
    address, served = server
    fakes.write_cifar100(served)
    with tarfile.open(served / "c.tar.gz", "w:gz") as tar:
        tar.add(served / "cifar-100-binary", "cifar-100-binary")
    digest = f"md5:{hashlib.md5((served / 'c.tar.gz').read_bytes()).hexdigest()}"
    archive = Archive(("c.tar.gz",), (f"{address}c.tar.gz",), formats.unpack_cifar, digest)
    register(monkeypatch, DataSet("cifar100", DATASETS["cifar100"].files, archive))
    found = files.find("cifar100")
    assert sorted(found) == ["test", "train"]
    assert found["test"].read_bytes() == (served / "cifar-100-binary" / "test.bin").read_bytes()
    assert not (files.cache_folder() / "c.tar.gz").exists()


@pytest.mark.usefixtures("nothing")
def test_a_damaged_archive_is_not_kept(server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pooch")
    address, served = server
    (served / "sequences.tar.gz").write_bytes(b"half an archive")
    archive = Archive(("sequences.tar.gz",), (f"{address}sequences.tar.gz",), formats.unpack_strokes)
    register(monkeypatch, DataSet("stroke-mnist", DATASETS["stroke-mnist"].files, archive))
    for _ in range(2):
        with pytest.raises(FileError, match=r"sequences\.tar\.gz"):
            files.find("stroke-mnist")
    assert not [p for p in files.cache_folder().rglob("*") if p.is_file()]


def test_an_archive_in_the_users_folder_is_unpacked_into_the_cache(folder: Path) -> None:
    fakes.write_stroke_texts(folder / "sequences")
    found = files.find("stroke-mnist")
    assert found == {"strokes": files.cache_folder() / "stroke-mnist.npz"}
    assert (folder / "sequences").is_dir()


def test_an_archive_that_lacks_files_is_refused(folder: Path) -> None:
    fakes.write_cifar100(folder / "source")
    with tarfile.open(folder / "cifar-100-binary.tar.gz", "w:gz") as tar:
        tar.add(folder / "source" / "cifar-100-binary" / "test.bin", "cifar-100-binary/test.bin")
    with pytest.raises(FileError, match=r"cifar-100-binary\.tar\.gz' does not hold all.*train\.bin missing"):
        files.find("cifar100")


def test_check_tells_wrong_right_and_unknown_apart(folder: Path) -> None:
    assert files.check("mnist") == {}
    fakes.write_idx(folder / "fashion-mnist" / "t10k-labels-idx1-ubyte", np.arange(3), zipped=False)
    assert files.check("fashion-mnist") == {"test_labels": False}
    fakes.write_idx(folder / "fashion-mnist" / "t10k-labels-idx1-ubyte.gz", np.arange(3))
    with pytest.raises(FileError, match=r"t10k-labels-idx1-ubyte\.gz.*md5:bb300cfdad3c16e7a12a480ee83cd310"):
        files.check("fashion-mnist")
    path = folder / "mnist" / "train-labels-idx1-ubyte.gz"
    fakes.write_idx(path, np.arange(3))
    with pytest.raises(FileError, match=rf"{path}.*sha256:{formats.content_digest(path)}, but sha256:65a50cbb"):
        files.check("mnist")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(FileError, match=f"{path}.*truncated"):
        files.check("mnist")


@pytest.mark.parametrize("dataset", list(DATASETS))
def test_the_real_files_have_the_known_hashes(data_folder: Path, dataset: str) -> None:
    checked = files.check(dataset)
    if not checked:
        pytest.skip(f"no files of {dataset} in {data_folder}")
    assert all(checked.values())


def test_importing_the_task_sets_imports_no_extra() -> None:
    code = (
        "import sys, nclbayes.tasks; "
        "print([m for m in ('sklearn', 'pooch', 'matplotlib', 'requests') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
