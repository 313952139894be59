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
    assert namespace["posterior"].tasks[5:] == ("my data", "again")  # type: ignore[attr-defined]
    assert "KroneckerNormal" in repr(namespace["q"])


def test_ci_calls_the_readmes_two_commands() -> None:
    demo, test = fenced("console")
    assert "nclbayes demo" in demo
    assert "pytest" in test
    for command in (demo, test):
        assert command.strip() in (ROOT / ".ci" / "run").read_text()


def test_the_command_lines_parse() -> None:
    from nclbayes.cli import run_command_line

    (block,) = fenced("text")
    for line in block.strip().splitlines():
        name, *arguments = line.split()
        assert name == "nclbayes"
        command = arguments[:2] if arguments[0] == "data" else arguments[:1]
        assert run_command_line([*command, "--help"]) == 0
        from nclbayes.experiments import RunConfig

        if arguments[0] == "run":
            chosen = dict(zip(arguments[2::2], arguments[3::2], strict=True))
            assert RunConfig.of(arguments[1], chosen["--method"], chosen["--scenario"]).set == arguments[1]


def test_the_citation_names_this_version() -> None:
    assert f"version: {nclbayes.__version__}\n" in (ROOT / "CITATION.cff").read_text()
