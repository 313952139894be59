"""Options and small services that the commands share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from nclbayes.analysis.names import plain
from nclbayes.errors import SettingError
from nclbayes.experiments.config import check_device
from nclbayes.ranks import is_launched

Scenario = Annotated[str | None, typer.Option(help="task, domain or class, where they apply.")]
Steps = Annotated[int | None, typer.Option(help="Steps a task; default: the task set's.")]
PriorScale = Annotated[float | None, typer.Option(help="The prior's scale; default: the method's.")]
Paper = Annotated[
    bool, typer.Option("--paper", help="Let NCL take the paper's steps, with the prior that was tuned for them.")
]
Size = Annotated[int | None, typer.Option(help="At most so many training examples a task.")]
Tasks = Annotated[int | None, typer.Option(help="Learn only the first so many tasks.")]
Units = Annotated[int | None, typer.Option(help="Units in each hidden layer; default: the task set's.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", help="A setting of the method, as `name=value`; can be given several times."),
]
Samples = Annotated[int | None, typer.Option(help="Evaluate with so many samples of the weights; default: the mean.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Quick = Annotated[bool, typer.Option("--quick", help="A few steps on a few examples, to see that all is well.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
TunedFiles = Annotated[
    list[Path] | None, typer.Option("--tuned", help="The result of a search, to take hyperparameters from.")
]
Cluster = Annotated[
    str | None, typer.Option(help="A cluster of Dask to run on, as `dask://HOST:PORT`, instead of this machine.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


class Interrupted(Exception):
    """Ctrl-C, and what to say about it."""


@contextmanager
def interruptible(hint: str = "The same command goes on from here.") -> Iterator[None]:
    """Ctrl-C becomes an error of its own, which Typer does not catch.

    Args:
        hint: What becomes of the work so far.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted. {hint}".strip()) from None


def refuse_launched() -> None:
    """Refuse torchrun, under which every process would make all runs of a command.

    Raises:
        SettingError: If this process was started by it, with others.
    """
    if is_launched():
        raise SettingError(
            "torchrun starts this command once in each process, and each would make all of its runs: leave torchrun "
            "out, and pass --jobs or --cluster. Of the commands, `run` learns with several processes."
        )


def sayer(silent: bool) -> Callable[[str], None]:
    """What prints a line of progress, or nothing.

    Args:
        silent: Whether to print nothing.

    Returns:
        A function of the line.
    """
    return (lambda text: None) if silent else (lambda text: print(plain(text), file=sys.stderr))


def read_settings(options: list[str] | None, steps: int | None = None) -> dict[str, Any]:
    """Settings from ``name=value`` strings; values are read as JSON where they can be.

    Args:
        options: The strings.
        steps: The number of steps, if it was given by itself.

    Returns:
        By name.

    Raises:
        SettingError: If one is not of that form.
    """
    settings: dict[str, Any] = {} if steps is None else {"steps": steps}
    for text in options or []:
        name, separator, value = text.partition("=")
        if not separator:
            raise SettingError(f"An option is given as name=value, not '{text}'.")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings


def read_seeds(text: str) -> list[int]:
    """Seeds from text.

    Args:
        text: Such as 0-4 or 1,3,5.

    Returns:
        The seeds.

    Raises:
        SettingError: If it is not of that form.
    """
    found: list[int] = []
    for part in text.split(","):
        first, separator, last = part.partition("-")
        try:
            found += range(int(first), int(last) + 1) if separator else [int(first)]
        except ValueError:
            found.clear()
            break
    if not found:
        raise SettingError(f"Seeds are given as 0-4 or 1,3,5, not '{text}'.")
    return found


def read_device(name: str) -> str:
    """A device that is there.

    Args:
        name: auto, cpu or cuda.

    Returns:
        The device's name.

    Raises:
        SettingError: If there is no such device.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    check_device(name)
    return name


def version_of(package: str) -> str:
    """The version of a package as it is installed.

    Args:
        package: Its name in the index of packages.

    Returns:
        The version, or that there is none.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
