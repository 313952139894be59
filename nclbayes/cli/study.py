"""The commands that study: figures of the paper, and the search for hyperparameters."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from nclbayes.cli.options import (
    AsJson,
    Cluster,
    Device,
    Options,
    Paper,
    Quiet,
    Samples,
    Scenario,
    Size,
    Steps,
    Tasks,
    interruptible,
    read_device,
    read_settings,
    refuse_launched,
    sayer,
)
from nclbayes.errors import SettingError
from nclbayes.experiments.config import RunConfig
from nclbayes.experiments.figures import FIGURES, SCALES, Workplace, find_figure, make
from nclbayes.experiments.search import HELD_OUT, Search
from nclbayes.experiments.tuning import tune as search_for
from nclbayes.tuning import Range
from nclbayes.workers import Workers

study_app = typer.Typer()

_NAMES = ", ".join(FIGURES)


@study_app.command(epilog="Example: `nclbayes figure toy --out figures/toy`")
def figure(
    name: Annotated[str | None, typer.Argument(help=f"The figure: {_NAMES}.")] = None,
    scale: Annotated[
        str, typer.Option(help=f"{', '.join(SCALES)}: seconds, minutes to some hours, or as published.")
    ] = "laptop",
    out: Annotated[
        Path | None, typer.Option(help="Where data and pictures go; the same command goes on in it.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="How many runs at a time.", min=1)] = 1,
    cluster: Cluster = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", help="What to change in the scale's settings, as `name=value`."),
    ] = None,
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Make one of the paper's tables or figures: its data, its pictures, and what they show."""
    if name is None:
        raise SettingError(f"Name a figure: {_NAMES}.")
    recipe = find_figure(name)
    out = Path("figures") / f"{name}-{scale}" if out is None else out
    say = sayer(quiet or as_json)
    Workers(jobs, cluster)  # refuses what is no address before anything is written
    place = Workplace(out, jobs, read_device(device), False if quiet else None, say, cluster)
    refuse_launched()
    with interruptible():
        results = make(recipe, scale, place, read_settings(option))
    if as_json:
        print(json.dumps({"statements": [asdict(s) for s in results.statements], "folder": str(out)}))
    elif not quiet:
        for statement in results.statements:
            print(f"{'yes' if statement.holds else 'NO '}  {statement.claim}: {statement.detail}")
        print(f"Data and pictures: {out.resolve()}")


@study_app.command(
    epilog="Example: `nclbayes tune split-digits --method owm --scenario domain --range alpha=1e-5:0.1 --out tuned`"
)
def tune(
    set: Annotated[str, typer.Argument(help="The task set.")],
    method: Annotated[str, typer.Option(help="The method.")],
    scenario: Scenario = None,
    seed: Annotated[int, typer.Option(help="The held-out seed.")] = HELD_OUT,
    range: Annotated[
        list[str] | None, typer.Option("--range", help="What to vary, as `name=low:high`; default: the method's.")
    ] = None,
    trials: Annotated[int | None, typer.Option(help="How many values to try; default: the whole grid.", min=1)] = None,
    sampler: Annotated[str, typer.Option(help="grid or tpe.")] = "grid",
    objective: Annotated[
        str,
        typer.Option(
            help="accuracy, on held-out examples, or evidence: how probable each task was before it was learnt "
            "(for laplace-ncl and diagonal-ncl, with `-o likelihood_weight=1`)."
        ),
    ] = "accuracy",
    out: Annotated[Path | None, typer.Option(help="The search's folder; the same command goes on in it.")] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            help="Search together with other processes: a database, as `sqlite:///FILE` or "
            "`postgresql+psycopg://USER@HOST/NAME`, or a journal file."
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(help="How many trials at a time.", min=1)] = 1,
    cluster: Cluster = None,
    paper: Paper = False,
    steps: Steps = None,
    size: Size = None,
    tasks: Tasks = None,
    option: Options = None,
    num_samples: Samples = None,
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Search a method's hyperparameter on a held-out seed; `run` and `compare` take the result with --tuned."""
    base = RunConfig.of(
        set,
        method,
        scenario,
        seed,
        settings=read_settings(option, steps),
        size=size,
        tasks=tasks,
        num_samples=num_samples,
        device=read_device(device),
        paper=paper,
    )
    search = Search(base, tuple(Range.parse(text) for text in range or []), trials, sampler, objective)
    out = Path("tuned") / f"{base.set}-{base.scenario or 'run'}-{method}" if out is None else out
    refuse_launched()
    with interruptible():
        tuned = search_for(search, out, storage=storage, jobs=jobs, cluster=cluster, say=sayer(quiet or as_json))
    values: dict[str, Any] = dict(tuned.values)
    if as_json:
        told = {"values": values, "score": tuned.score, "objective": tuned.objective}
        print(json.dumps({**told, "file": str(out / "tuned.json")}))
    elif not quiet:
        shown = ", ".join(f"{name} = {value:g}" for name, value in values.items())
        what = "log evidence " if tuned.objective == "evidence" else ""
        print(f"Best: {shown} ({what}{tuned.score:.6g} on seed {seed})")
        print(f"Use it with --tuned {out / 'tuned.json'}")
