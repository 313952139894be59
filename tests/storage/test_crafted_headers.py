"""Headers under a right seal that say what no header says."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nclbayes.errors import FileError
from nclbayes.storage import read_file, write_file
from nclbayes.storage.sealed import _sealed

DATA = bytes(16)
ENTRY = {"dtype": "F64", "shape": [2], "data_offsets": [0, 16]}
CONTENT = {"kind": "thing", "version": 2, "digest": hashlib.sha256(DATA).hexdigest(), "settings": {}}


def sealed(content: str, entries: str, more: str = "") -> bytes:
    """A header of format 2 with any text in it."""
    about = f'{{"__metadata__":{{"seal":"{"0" * 64}","nclbayes":{content}{more}}},{entries}}}'.encode(
        "utf-8", "surrogatepass"
    )
    return _sealed(about + b" " * (-len(about) % 8))


def put(path: Path, header: bytes, data: bytes = DATA) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def entry(**changes: Any) -> str:
    return f'"x":{json.dumps({**ENTRY, **changes})}'


def content(**changes: Any) -> str:
    return json.dumps(json.dumps({**CONTENT, **changes}))


HEADERS = {
    **{f"dtype {d!r}": (content(), entry(dtype=d)) for d in ("C64", "U64", "F8", "", 1, None, ["F64"], "F32")},
    **{
        f"shape {s!r}"[:40]: (content(), entry(shape=s))
        for s in (
            [3],
            [-2],
            [-1, -2],
            [2.0],
            ["2"],
            [True, 2],
            2,
            None,
            {},
            [2] * 100,
            [2**70],
            [2**40, 2**40],
            [[2]],
        )
    },
    **{
        f"offsets {o!r}": (content(), entry(data_offsets=o))
        for o in (
            [0],
            [0, 8],
            [8, 24],
            [16, 0],
            [0, 16, 16],
            [-16, 0],
            [0.0, 16.0],
            [0, 2**70],
            None,
            "0,16",
            [0, 2**40],
        )
    },
    "no dtype": (content(), '"x":{"shape":[2],"data_offsets":[0,16]}'),
    "an unknown word": (content(), entry(strides=[1])),
    "an entry that is none": (content(), '"x":1'),
    "a tensor twice": (content(), f"{entry()},{entry()}"),
    "tensors that overlap": (content(), f'{entry()},"y":{json.dumps(ENTRY)}'),
    "a gap": (content(), f'"x":{json.dumps({**ENTRY, "shape": [0], "data_offsets": [0, 0]})}'),
    "metadata twice": (content(), f'{entry()},"__metadata__":{{}}'),
    "deep": (content(), f'"x":{"[" * 100_000}{"]" * 100_000}'),
    "deep settings": (json.dumps("[" * 100_000), entry()),
    "content that is no JSON": ('"{"', entry()),
    "content that is no text": ("1", entry()),
    "content that is a list": ('"[]"', entry()),
    "content with a field twice": (json.dumps('{"kind":"thing","kind":"thing","version":2,"settings":{}}'), entry()),
    "a surrogate": (json.dumps('{"kind":"thing","version":2,"digest":"","settings":{},"k":"\\\\ud800"}'), entry()),
    "a name that no text can hold": (content(), entry().replace('"x"', '"\\ud800"')),
    **{
        f"{k} {v!r}"[:40]: (content(**{k: v}), entry())
        for k, v in (
            ("kind", 1),
            ("kind", None),
            ("version", "2"),
            ("version", 2.0),
            ("version", True),
            ("version", -1),
            ("version", 0),
            ("version", 1),
            ("version", 10**30),
            ("version", 4),
            ("settings", []),
            ("settings", None),
            ("settings", "x"),
            ("digest", 5),
            ("digest", ""),
            ("digest", "0" * 64),
            ("checksum", "x"),
            ("surprise", 1),
        )
    },
}


@pytest.mark.parametrize("case", list(HEADERS))
def test_a_header_under_a_right_seal_is_not_believed(tmp_path: Path, case: str) -> None:
    put(tmp_path / "f", sealed(content(), entry()))
    assert torch.equal(read_file(tmp_path / "f", "thing")[0]["x"], torch.zeros(2, dtype=torch.float64))
    put(tmp_path / "f", sealed(*HEADERS[case]))
    with pytest.raises(FileError) as caught:
        read_file(tmp_path / "f", "thing")
    assert str(tmp_path / "f") in str(caught.value)
    assert len(str(caught.value)) < 500


def test_bytes_that_are_neither_true_nor_false_are_refused(tmp_path: Path) -> None:
    data = bytes([0, 1, 2, 1])
    about = content(digest=hashlib.sha256(data).hexdigest())
    put(tmp_path / "f", sealed(about, entry(dtype="BOOL", shape=[4], data_offsets=[0, 4])), data)
    with pytest.raises(FileError, match="'x' holds other things than true and false"):
        read_file(tmp_path / "f", "thing")


@pytest.mark.parametrize("length", [0, 5, 100, 10**6, 2**40, 2**63, 2**64 - 1])
def test_a_sparse_file_of_gigabytes_is_refused_without_being_read(tmp_path: Path, length: int) -> None:
    write_file(tmp_path / "f", "thing", {"x": torch.zeros(2)}, {})
    good = (tmp_path / "f").read_bytes()
    for start in (struct.pack("<Q", length), good):
        with (tmp_path / "f").open("wb") as file:
            file.write(start)
            file.truncate(6 * 2**30)
        before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        with pytest.raises(FileError):
            read_file(tmp_path / "f", "thing")
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # kB
        assert grown < 10_000
        assert time.process_time() - started < 1
    assert os.stat(tmp_path / "f").st_size == 6 * 2**30


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(FileError, match="no regular file"):
            read_file(path, "thing")
    for name in ("x" * 300, "a\0b"):
        with pytest.raises(FileError, match="Could not read"):
            read_file(tmp_path / name, "thing")
