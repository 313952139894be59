"""The documentation names every public name, its links and references resolve, and its code runs."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import nclbayes
from nclbayes import errors
from nclbayes.engines import LaplaceNCL, VariationalNCL
from nclbayes.methods import METHODS
from tests.test_tutorials import cells

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BUILT = {DOCS / "_build", DOCS / "tutorials"}
PAGES = sorted(p for p in DOCS.rglob("*.md") if not BUILT & set(p.parents))
IDS = [str(p.relative_to(DOCS)) for p in PAGES]
GUIDE = sorted((DOCS / "guide").glob("*.md"))
PACKAGES = (
    "",
    ".kronecker",
    ".fisher",
    ".watch",
    ".engines",
    ".methods",
    ".nn",
    ".priors",
    ".stream",
    ".tasks",
    ".analysis",
    ".experiments",
    ".experiments.benchmarks",
    ".experiments.figures",
)

NOT_RUN = re.compile(r"^% not run: \S.*\n```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
RUN = re.compile(r"^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
FENCES = re.compile(r"^(`{3,}).*?^\1`*$", flags=re.DOTALL | re.MULTILINE)


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return FENCES.sub("", text)


def resolve(name: str) -> Any:
    """What a dotted name stands for; by attributes first, as a function may have the name of its module."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
            for part in parts[length:]:
                found = _member(found, part)
            return found
        except (ImportError, AttributeError):
            continue
    raise LookupError(f"There is no {name}.")


def _member(owner: Any, name: str) -> Any:
    """An attribute; of a dataclass also a field without a default."""
    if dataclasses.is_dataclass(owner) and name in {field.name for field in dataclasses.fields(owner)}:
        return None
    return getattr(owner, name)


def documented() -> Iterator[str]:
    """What the API pages document: the targets of their directives, and those members of modules that they list."""
    for path in (DOCS / "api").glob("*.md"):
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            found = re.match(r"\.\. (?:auto|py:)(\w+):: (\S+)$", line)
            if found is None:
                continue
            yield found[2]
            options = re.match(r"   :members:(.*)", lines[number + 1]) if number + 1 < len(lines) else None
            if found[1] == "module" and options is not None:
                module = importlib.import_module(found[2])
                listed = options[1].replace(",", " ").split() or _public(module)
                yield from (f"{found[2]}.{name}" for name in listed)


def _public(module: ModuleType) -> list[str]:
    own = (name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__)
    return [name for name in own if not name.startswith("_")]


def public_names() -> list[str]:
    names = [f"nclbayes.errors.{name}" for name in _public(errors)]
    for package in PACKAGES:
        module = importlib.import_module("nclbayes" + package)
        names += [f"{module.__name__}.{name}" for name in module.__all__]
    return names


def test_the_api_pages_have_every_public_name() -> None:
    objects = {id(resolve(name)) for name in documented()}
    assert not [name for name in public_names() if id(resolve(name)) not in objects]


def test_every_public_class_and_function_has_an_example() -> None:
    objects = {name: resolve(name) for name in public_names() if not name.startswith("nclbayes.errors.")}
    callables = {name: o for name, o in objects.items() if inspect.isclass(o) or inspect.isfunction(o)}
    assert len(callables) > 80
    assert not [name for name, found in callables.items() if ">>>" not in (inspect.getdoc(found) or "")]


def slug(heading: str) -> str:
    """The anchor of a heading, as MyST makes it."""
    text = re.sub(r"\{\w+\}`([^`]*)`|`([^`]*)`", lambda m: m[1] or m[2], heading)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def real(path: Path) -> Path:
    """Where a page lies in the repository: the tutorials are copied when the site is built."""
    return ROOT / "tutorials" / path.name if path.parent == DOCS / "tutorials" else path


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_internal_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        aim = real((page.parent / file).resolve()) if file else page
        assert aim.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", aim.read_text(), flags=re.MULTILINE)
            assert anchor in map(slug, headings), target


def contents(page: Path) -> Iterator[Path]:
    """The pages that a page's tables of contents list by name."""
    for body in re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
        for line in filter(None, map(str.strip, body.splitlines())):
            if not line.startswith(":") and "*" not in line:
                yield page.parent / f"{line}.md"


def test_the_tables_of_contents_list_every_page_and_no_other() -> None:
    assert {aim for page in PAGES for aim in contents(page)} | {DOCS / "index.md"} == set(PAGES)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_what_a_page_includes_is_there(page: Path) -> None:
    for kind, target in re.findall(r"^```\{(image|include|figure)\} (\S+)$", page.read_text(), flags=re.MULTILINE):
        assert (page.parent / target).exists(), (kind, target)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_names_of_the_code_exist(page: Path) -> None:
    text = prose(page.read_text())
    names = re.findall(r"`(?:nclbayes|ncl)((?:\.\w+)+)(?:\([^`]*\))?`", text)
    role = r"\{(?:class|func|meth|attr|data|mod)\}"
    names += re.findall(role + r"`(?:[^`<]*<)?~?nclbayes((?:\.\w+)+)>?`", text)
    for name in names:
        if not re.search(r"\.(ncl|json|csv|ckpt|html)$", name):
            resolve("nclbayes" + name)


def test_tests_that_the_pages_name_exist() -> None:
    test_id = re.compile(r"`(?:tests/)?([\w/]+\.py)::(?:\w+::)?(\w+)`")
    named = {found for page in PAGES for found in test_id.findall(page.read_text())}
    assert len(named) > 50
    for file, test in named:
        assert re.search(rf"^ *def {test}\(", (ROOT / "tests" / file).read_text(), flags=re.MULTILINE), (file, test)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_files_that_a_page_names_exist(page: Path) -> None:
    for file in re.findall(r"`((?:nclbayes|tests|docs)/[\w/.-]+\.(?:py|md|svg))`", prose(page.read_text())):
        assert (ROOT / file).exists() or (Path(nclbayes.__file__).parent.parent / file).exists(), file


def first_cells(text: str) -> set[str]:
    """The names in code of the first column of a page's tables."""
    rows = re.findall(r"^\| ([^|]*) \|", text, flags=re.MULTILINE)
    return {name for row in rows for name in re.findall(r"(?<!\})`([^`]+)`", row)}


def test_the_guide_has_every_setting_of_the_engines_with_its_default() -> None:
    text = (DOCS / "guide" / "engines.md").read_text()
    shown = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", text, flags=re.MULTILINE))
    fields = {field.name: field for kind in (VariationalNCL, LaplaceNCL) for field in dataclasses.fields(kind)}
    assert shown.keys() == fields.keys()
    for name, default in shown.items():
        value = getattr(fields[name].default, "value", fields[name].default)
        assert default.strip("`") in (f'"{value}"', f"{value}", f"{value:g}" if isinstance(value, float) else "")


def test_the_guide_has_every_error() -> None:
    text = (DOCS / "guide" / "errors.md").read_text()
    for name in _public(errors):
        assert f"{{class}}`~nclbayes.errors.{name}`" in text, name


def test_the_methods_page_has_every_method() -> None:
    assert METHODS.keys() <= first_cells((DOCS / "methods.md").read_text())


def test_the_command_line_page_has_every_command_and_figure() -> None:
    from typer.main import get_command

    from nclbayes.cli import app
    from nclbayes.experiments.figures import FIGURES

    text = (DOCS / "guide" / "command-line.md").read_text()
    for name in get_command(app).commands:  # type: ignore[attr-defined]
        assert re.search(rf"^\| `nclbayes {name}\b", text, flags=re.MULTILINE), name
    assert FIGURES.keys() <= first_cells(text)


def run(name: str, sources: list[str]) -> dict[str, Any]:
    """Run the code of a page in one namespace; the global random state is put back."""
    state = torch.get_rng_state()
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for source in sources:
        exec(compile(source, name, "exec"), namespace)
    torch.set_rng_state(state)
    return namespace


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.stem)
def test_the_guides_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sources = RUN.findall(NOT_RUN.sub("", page.read_text()))
    assert bool(sources) == (page.stem not in ("performance", "command-line"))
    run(page.name, sources)


def test_the_quickstart_runs_and_shows_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = run("quickstart.md", [cell.source for cell in cells((DOCS / "quickstart.md").read_text())])
    assert min(score.accuracy for score in found["record"].scores[-1]) > 0.8
    forgotten = nclbayes.evaluate(found["forgetful"], found["tasks"])
    assert min(score.accuracy for score in forgotten) < 0.6
    assert found["again"].tasks == ("instrument 0", "instrument 1", "instrument 2")
