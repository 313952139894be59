"""Readers: what they read, and what they refuse."""

from __future__ import annotations

import gzip
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from nclbayes.errors import FileError
from nclbayes.tasks import formats
from tests.tasks import fakes


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(array=arrays(np.uint8, array_shapes(max_dims=3, max_side=5)), zipped=st.booleans())
def test_idx_is_read_as_it_was_written(tmp_path: Path, array: np.ndarray, zipped: bool) -> None:
    read = formats.read_idx(fakes.write_idx(tmp_path / "file", array, zipped))
    assert read.dtype == np.uint8
    assert np.array_equal(read, array)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with nothing"),
        (b"\x00\x00\x0d\x01\x00\x00\x00\x01\x00", "not an IDX file of bytes: it begins with 00 00 0d 01"),
        (b"\x00\x00\x08\x03\x00\x00", "truncated: 6 bytes"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x03ab", r"has 10 bytes, but its header \(3,\) asks for 11"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x01ab", r"has 10 bytes, but its header \(1,\) asks for 9"),
        (gzip.compress(bytes(100), mtime=0)[:-9], "truncated or damaged"),
    ],
)
def test_damaged_idx_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "the-file"
    path.write_bytes(content)
    with pytest.raises(FileError, match=f"the-file.*{message}"):
        formats.read_idx(path)


def test_a_flipped_bit_of_a_gzip_file_is_noticed(tmp_path: Path) -> None:
    path = fakes.write_idx(tmp_path / "the-file", np.arange(200))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    with pytest.raises(FileError, match="the-file"):
        formats.read_idx(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"nowhere.*missing"):
        formats.read_idx(tmp_path / "nowhere")


@pytest.mark.parametrize(("label_bytes", "classes"), [(1, 10), (2, 100)])
def test_cifar_is_read_as_it_was_written(tmp_path: Path, label_bytes: int, classes: int) -> None:
    rows = fakes.cifar_rows(classes, 2, label_bytes)
    rows.tofile(tmp_path / "file.bin")
    images, labels = formats.read_cifar(tmp_path / "file.bin", label_bytes, classes)
    assert images.shape == (2 * classes, 3, 32, 32)
    assert labels.tolist() == 2 * list(range(classes))
    assert images[3, 2, 1, 4] == rows[3, label_bytes + 2 * 1024 + 32 + 4]


def test_damaged_cifar_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "the-file.bin"
    rows = fakes.cifar_rows(10, 1, 1)
    for content, message in ((rows.tobytes()[:-1], "no whole number of records of 3073"), (b"", "has 0 bytes")):
        path.write_bytes(content)
        with pytest.raises(FileError, match=f"the-file.*{message}"):
            formats.read_cifar(path, 1, 10)
    rows[0, 0] = 10
    rows.tofile(path)
    with pytest.raises(FileError, match=r"the-file.*label 10, but there are 10 classes"):
        formats.read_cifar(path, 1, 10)


def test_a_cifar_archive_writes_its_own_files_only(tmp_path: Path) -> None:
    fakes.write_cifar100(tmp_path / "source")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "source" / "cifar-100-binary", "cifar-100-binary")
        for foreign in ("../escaped.bin", "cifar-100-binary/../../escaped.bin", "cifar-100-binary/notes.txt"):
            tar.add(tmp_path / "source" / "cifar-100-binary" / "test.bin", foreign)
    formats.unpack_cifar(tmp_path / "a.tar.gz", tmp_path / "target")
    written = sorted(str(p.relative_to(tmp_path / "target")) for p in (tmp_path / "target").rglob("*") if p.is_file())
    assert written == ["cifar-100-binary/test.bin", "cifar-100-binary/train.bin"]
    assert not list(tmp_path.rglob("escaped.bin"))
    (tmp_path / "b.tar.gz").write_bytes((tmp_path / "a.tar.gz").read_bytes()[:5000])
    with pytest.raises(FileError, match=r"b\.tar\.gz"):
        formats.unpack_cifar(tmp_path / "b.tar.gz", tmp_path / "other")


@pytest.mark.parametrize("packed", [True, False], ids=["archive", "folder"])
def test_stroke_texts_become_the_compact_file(tmp_path: Path, packed: bool) -> None:
    source = fakes.write_stroke_texts(tmp_path / "sequences")
    if packed:
        with tarfile.open(tmp_path / "sequences.tar.gz", "w:gz") as tar:
            tar.add(source, "sequences")
        source = tmp_path / "sequences.tar.gz"
    formats.unpack_strokes(source, tmp_path / "cache")
    compact = fakes.write_strokes(tmp_path / "compact.npz")
    assert formats.content_digest(tmp_path / "cache" / "stroke-mnist.npz") == formats.content_digest(compact)
    for split in ("train", "test"):
        strokes = formats.read_strokes(tmp_path / "cache" / "stroke-mnist.npz", split)
        assert len(strokes.labels) == 40
        third = strokes.steps[strokes.offsets[3] : strokes.offsets[4]]
        assert np.array_equal(third, fakes.stroke_digits()[split][3])


def test_incomplete_or_damaged_stroke_texts_are_refused_by_name(tmp_path: Path) -> None:
    source = fakes.write_stroke_texts(tmp_path / "sequences")
    file = source / "testimg-7-inputdata.txt"
    for content, message in (
        ("1 0 0\n", "testimg-7-inputdata.txt does not have four columns"),
        ("", "testimg-7-inputdata.txt does not have four columns"),
        ("1 0 0 x\n", "testimg-7-inputdata.txt holds something other than whole numbers"),
        ("1 0 0 200\n", "testimg-7-inputdata.txt is not between -128 and 127"),
    ):
        file.write_text(content)
        with pytest.raises(FileError, match=f"sequences.*{message}"):
            formats.unpack_strokes(source, tmp_path)
    file.unlink()
    with pytest.raises(FileError, match="39 test digits and 40 labels"):
        formats.unpack_strokes(source, tmp_path)
    (source / "trainlabels.txt").unlink()
    with pytest.raises(FileError, match="40 train digits and 0 labels"):
        formats.unpack_strokes(source, tmp_path)
    (tmp_path / "a.tar.gz").write_bytes(b"no archive")
    with pytest.raises(FileError, match=r"a\.tar\.gz"):
        formats.unpack_strokes(tmp_path / "a.tar.gz", tmp_path)
    assert not list(tmp_path.glob("*.npz"))


def test_damaged_compact_strokes_are_refused_by_name(tmp_path: Path) -> None:
    path = fakes.write_strokes(tmp_path / "good.npz")
    content = path.read_bytes()
    with np.load(path) as loaded:
        arrays = dict(loaded)
    for changes, message in (
        ({"train_offsets": arrays["train_offsets"][:-1]}, "do not fit together"),
        ({"train_steps": arrays["train_steps"].astype(np.int64)}, "do not fit together"),
        ({"train_labels": arrays["train_labels"] + np.uint8(7)}, "a label > 9"),
        ({"train_labels": np.array([object()])}, "cannot be read"),
    ):
        np.savez(tmp_path / "bad.npz", **{**arrays, **changes})
        with pytest.raises(FileError, match=rf"bad\.npz.*{message}"):
            formats.read_strokes(tmp_path / "bad.npz", "train")
    (tmp_path / "bad.npz").write_bytes(content[: len(content) // 2])
    with pytest.raises(FileError, match=r"bad\.npz"):
        formats.read_strokes(tmp_path / "bad.npz", "train")
    np.savez(tmp_path / "bad.npz", other=arrays["train_labels"])
    with pytest.raises(FileError, match=r"bad\.npz"):
        formats.read_strokes(tmp_path / "bad.npz", "train")


def test_the_digest_is_of_the_content_not_of_its_compression(tmp_path: Path) -> None:
    plain = fakes.write_idx(tmp_path / "plain", np.arange(50), zipped=False)
    zipped = fakes.write_idx(tmp_path / "zipped", np.arange(50))
    other = fakes.write_idx(tmp_path / "other", np.arange(51))
    assert formats.content_digest(plain) == formats.content_digest(zipped) != formats.content_digest(other)
    compact = fakes.write_strokes(tmp_path / "a.npz")
    with np.load(compact) as loaded:
        np.savez(tmp_path / "b.npz", **dict(loaded))
    assert compact.read_bytes() != (tmp_path / "b.npz").read_bytes()
    assert formats.content_digest(compact) == formats.content_digest(tmp_path / "b.npz")
