"""The README's snippets run, its test command is what CI calls, and the version has one source."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import nclbayes

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def fenced(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_snippets_run_in_order(capsys: object) -> None:
    state = torch.get_rng_state()
    namespace: dict[str, object] = {}
    for snippet in fenced("python"):
        exec(compile(snippet, "README.md", "exec"), namespace)
    torch.set_rng_state(state)
    assert namespace["posterior"].tasks == ("task 0", "task 1", "task 2", "again")  # type: ignore[attr-defined]
    assert "KroneckerNormal" in repr(namespace["q"])


def test_ci_calls_the_readmes_only_command() -> None:
    (command,) = fenced("console")
    assert "pytest" in command
    assert command.strip() in (ROOT / ".ci" / "run").read_text()


def test_the_citation_names_this_version() -> None:
    assert f"version: {nclbayes.__version__}\n" in (ROOT / "CITATION.cff").read_text()
