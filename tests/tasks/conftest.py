"""Where the tests of task sets find data: the real ones if they are here, and small made-up ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cache."""
    for variable in ("HOME", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(variable, str(tmp_path / "home"))


@pytest.fixture
def data_folder() -> Path:
    """The folder of real data, which the library is told of."""
    own = os.environ.get("NCLBAYES_DATA", "")
    if not own or not Path(own).is_dir():
        pytest.skip("no real data here: set NCLBAYES_DATA to a folder that holds them")
    return Path(own)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for made-up data, which the library is told of."""
    made = tmp_path / "data"
    made.mkdir()
    monkeypatch.setenv("NCLBAYES_DATA", str(made))
    return made


@pytest.fixture
def untouched() -> Iterator[None]:
    """The global random state must be left as it was found."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path]]:
    """An address on this machine, and the folder whose files it serves."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    served = tmp_path / "served"
    served.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(served))) as running:
        thread = Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}/", served
        running.shutdown()
        thread.join()
