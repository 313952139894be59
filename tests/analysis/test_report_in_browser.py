"""The page in a browser: whatever the names are, no script runs, nothing is loaded, and the text is what it is."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from nclbayes import Record, Score
from nclbayes.analysis.names import plain
from nclbayes.analysis.report import write_report
from nclbayes.cli.report import write_page
from nclbayes.experiments import RunConfig
from tests.analysis.hostile import names

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom"),
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
    # The fonts of the machine decide which letters a picture can show.
    pytest.mark.filterwarnings("ignore:Glyph", "ignore:Matplotlib currently does not support"),
]


@dataclass
class Canary:
    """A server on this machine that notes who asks."""

    asked: list[str] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def canary() -> Iterator[Canary]:
    found = Canary()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.asked.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        found.url = f"http://127.0.0.1:{server.server_port}/found"
        yield found
        server.shutdown()
        thread.join()


class Dom(HTMLParser):
    """The document after its scripts, if it has any, have run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.texts: list[str] = [""]
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.texts.append("")

    def handle_data(self, data: str) -> None:
        self.texts[-1] += data


def opened(page: Path, folder: Path) -> tuple[Dom, str]:
    """The document as the browser has it in the end, and what the browser said."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return Dom(done.stdout), done.stderr


def record(tasks: list[str], seed: object = 0) -> Record:
    found = Record(tasks, about={"seed": seed})
    for i in range(len(tasks)):
        found.add([Score(0.9, 0.3, 0.1, 10)] * (i + 1), losses=[1.0, 0.5, 0.3], seconds=1.0)
    return found


def test_this_browser_would_run_scripts_and_load_pictures(canary: Canary, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for name in names(canary.url)[:1] + names(canary.url)[4:8]:
        canary.asked.clear()
        page.write_text(f"<!DOCTYPE html><body>{name}</body>", encoding="utf-8")
        dom, _ = opened(page, tmp_path / "profile")
        assert "data-hacked" in dom.attributes or canary.asked, name


def test_hostile_names_are_text(canary: Canary, tmp_path: Path) -> None:
    hostile = names(canary.url)
    runs = {name: [Record(hostile)] for name in hostile}
    runs[hostile[0]] = [record(hostile, seed=hostile[1])]
    for k, title in enumerate(hostile[:2]):
        page = write_report(tmp_path / f"{k}.html", title, runs, {name: name for name in hostile})
        dom, said = opened(page, tmp_path / "profile")
        assert canary.asked == []
        assert "data-hacked" not in dom.attributes
        assert not {"script", "iframe", "object", "embed", "link", "base", "form", "b", "a", "svg"} & dom.tags
        assert not [name for name in dom.attributes if name.startswith("on")]
        # The policy is a second wall: nothing got as far as to be stopped by it.
        assert "Content Security Policy" not in said
        shown = [" ".join(text.split()) for text in dom.texts]
        for name in (*hostile, f"Seed {hostile[1]}, {len(hostile)} of {len(hostile)} tasks learnt."):
            assert " ".join(plain(name, keep="\n\t").split()) in shown


def test_hostile_configurations_are_text(canary: Canary, tmp_path: Path) -> None:
    hostile = names(canary.url)
    config = RunConfig.of("split-digits", "none")
    done = [(replace(config, features=name, scenario=name), record(hostile[:3])) for name in hostile[:8]]
    page = write_page(tmp_path, hostile[1], done)
    dom, said = opened(page, tmp_path / "profile")
    assert canary.asked == []
    assert "data-hacked" not in dom.attributes
    assert "script" not in dom.tags
    assert "Content Security Policy" not in said
    for name in hostile[:8]:
        assert any(name in text for text in dom.texts)


def test_the_policy_alone_stops_what_would_be_markup(
    canary: Canary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nclbayes.analysis.report.escape", lambda text: text)
    attacks = {str(k): name for k, name in enumerate(names(canary.url)[4:8])}
    page = write_report(tmp_path / "page.html", "Without escapes", {"none": [Record(["a"])]}, attacks)
    dom, said = opened(page, tmp_path / "profile")
    assert "script" in dom.tags
    assert canary.asked == []
    assert "data-hacked" not in dom.attributes
    assert "Content Security Policy" in said
