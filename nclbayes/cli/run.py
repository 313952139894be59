"""The commands that learn: one run, several to compare, and the demonstration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from nclbayes.cli.options import (
    AsJson,
    Cluster,
    Device,
    Options,
    Paper,
    PriorScale,
    Quick,
    Quiet,
    Samples,
    Scenario,
    Size,
    Steps,
    Tasks,
    TunedFiles,
    Units,
    interruptible,
    read_device,
    read_seeds,
    read_settings,
    refuse_launched,
    sayer,
)
from nclbayes.cli.report import by_label, show, write_page
from nclbayes.errors import SettingError
from nclbayes.experiments.comparison import ComparisonError
from nclbayes.experiments.comparison import compare as compare_runs
from nclbayes.experiments.config import STREAMS, RunConfig
from nclbayes.experiments.runs import run as run_one
from nclbayes.experiments.setups import SETUPS, find_setup
from nclbayes.experiments.tuning import Tuned
from nclbayes.methods import METHODS
from nclbayes.ranks import launched, present
from nclbayes.workers import Workers

run_app = typer.Typer()

_SETS = ", ".join(SETUPS)
_METHODS = ", ".join(METHODS)
_DEMO = ("laplace-ncl", "variational-ncl", "none", "joint")


@run_app.command(
    epilog="Example: `nclbayes run split-digits --method laplace-ncl --scenario domain --seed 1 --out runs/digits`"
)
def run(
    context: typer.Context,
    set: Annotated[str | None, typer.Argument(help=f"The task set: {_SETS}.")] = None,
    method: Annotated[str, typer.Option(help=f"{_METHODS}.")] = "laplace-ncl",
    scenario: Scenario = None,
    seed: Annotated[int, typer.Option(help="Decides tasks, initial weights and every draw.")] = 0,
    out: Annotated[Path | None, typer.Option(help="The run's folder; the same command goes on in it.")] = None,
    config: Annotated[Path | None, typer.Option(help="Repeat the run of this configuration.")] = None,
    steps: Steps = None,
    prior_scale: PriorScale = None,
    paper: Paper = False,
    size: Size = None,
    tasks: Tasks = None,
    units: Units = None,
    option: Options = None,
    tuned: TunedFiles = None,
    num_samples: Samples = None,
    keep_each: Annotated[bool, typer.Option("--keep-each", help="Keep the posterior after each task.")] = False,
    shuffle: Annotated[
        bool, typer.Option("--shuffle", help="Learn the tasks in an order that the seed decides.")
    ] = False,
    stream: Annotated[
        str | None, typer.Option(help=f"The tasks come as a stream, batch after batch: {', '.join(STREAMS)}.")
    ] = None,
    boundaries: Annotated[
        str | None, typer.Option(help="Where its segments end: found, told, none, or after so many batches.")
    ] = None,
    device: Device = "auto",
    quick: Quick = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Learn one task set with one method."""
    if config is not None:
        _refuse_others(context)
        chosen = RunConfig.load(config)
        if device != "auto":
            chosen = replace(chosen, device=read_device(device))
        out = config.parent if out is None else out
    else:
        if set is None:
            raise SettingError(f"Name a task set ({_SETS}), or pass --config.")
        given: dict[str, Any] = {"quick": quick, "size": size, "tasks": tasks, "num_samples": num_samples}
        given |= {"units": units, "keep_each": keep_each, "shuffle": shuffle, "paper": paper}
        given |= {"stream": stream or "", "boundaries": boundaries or ""}
        settings = read_settings(option, steps)
        chosen = _config(set, method, scenario, seed, tuned, settings, prior_scale, read_device(device), given)
        _refuse_unused(tuned, [chosen])
        parts = (chosen.set, chosen.scenario, chosen.stream, chosen.boundaries)
        place = "-".join((*filter(None, parts), *(() if any(parts[1:]) else ("run",)), method, str(seed)))
        out = Path("runs") / place if out is None else out
    with interruptible(), launched(chosen.device):
        record = run_one(chosen, out, progress=False if quiet else None, say=sayer(quiet or as_json))
        is_first = present().is_first
    if is_first:
        report = write_page(out, f"{chosen.set}: {chosen.method}", [(chosen, record)])
        show({chosen.method: [record]}, report, quiet, as_json)


@run_app.command(
    epilog="Example: `nclbayes compare split-digits --methods laplace-ncl,none,joint --seeds 0-4 --jobs 2 --out cmp`"
)
def compare(
    set: Annotated[str, typer.Argument(help=f"The task set: {_SETS}.")],
    methods: Annotated[str, typer.Option(help=f"Separated by commas: {_METHODS}.")] = ",".join(METHODS),
    scenario: Scenario = None,
    seeds: Annotated[str, typer.Option(help="Such as 0-4 or 1,3,5.")] = "0",
    out: Annotated[Path | None, typer.Option(help="The folder of all runs; the same command goes on in it.")] = None,
    jobs: Annotated[int, typer.Option(help="How many runs at a time.", min=1)] = 1,
    cluster: Cluster = None,
    paper: Paper = False,
    steps: Steps = None,
    size: Size = None,
    tasks: Tasks = None,
    units: Units = None,
    option: Options = None,
    tuned: TunedFiles = None,
    num_samples: Samples = None,
    device: Device = "auto",
    quick: Quick = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Learn one task set with several methods, over several seeds."""
    given = {"quick": quick, "size": size, "tasks": tasks, "num_samples": num_samples, "units": units, "paper": paper}
    settings, where = read_settings(option, steps), read_device(device)
    configs = [
        _config(set, method, scenario, seed, tuned, settings, None, where, given)
        for method in dict.fromkeys(name.strip() for name in methods.split(","))
        for seed in dict.fromkeys(read_seeds(seeds))
    ]
    _refuse_unused(tuned, configs)
    first = configs[0]
    out = Path("runs") / f"{first.set}-{first.scenario or 'run'}" if out is None else out
    _compare(configs, out, Workers(jobs, cluster), quiet, as_json)


@run_app.command(epilog="Example: `nclbayes demo --out demo`")
def demo(
    out: Annotated[Path, typer.Option(help="Where pictures and report go.")] = Path("nclbayes-demo"),
    quick: Quick = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Both engines against plain and joint training on five tasks of small digits; about a minute."""
    configs = [RunConfig.of("split-digits", method, "domain", quick=quick) for method in _DEMO]
    _compare(configs, out, Workers(), quiet, as_json)


def _config(
    set: str,
    method: str,
    scenario: str | None,
    seed: int,
    tuned: list[Path] | None,
    settings: dict[str, Any],
    prior_scale: float | None,
    device: str,
    rest: dict[str, Any],
) -> RunConfig:
    """A run with its defaults, then what searches found, then what was asked for."""
    found: dict[str, Any] = {}
    results = {path: Tuned.load(path) for path in tuned or []}
    fitting = {path: r for path, r in results.items() if r.fits(set, method, find_setup(set).scenario(scenario))}
    for result in fitting.values():
        found |= result.values
    scale = found.pop("prior_scale", None)
    prior_scale = scale if prior_scale is None else prior_scale
    merged = {**found, **settings}
    config = RunConfig.of(set, method, scenario, seed, prior_scale=prior_scale, settings=merged, device=device, **rest)
    for path, result in fitting.items():
        if result.prior != config.prior:
            raise SettingError(f"'{path}' was found {'with' if result.prior == 'normal' else 'without'} --paper.")
    return config


def _refuse_others(context: typer.Context) -> None:
    """A configuration says everything: what else is given would be ignored."""
    allowed = ("config", "out", "device", "quiet", "as_json")
    sources = {name: context.get_parameter_source(name) for name in context.params if name not in allowed}
    given = [
        "the task set" if name == "set" else f"--{name.replace('_', '-')}"
        for name, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    ]
    if given:
        raise SettingError(f"--config says everything about a run: leave out {', '.join(given)}.")


def _refuse_unused(tuned: list[Path] | None, configs: Sequence[RunConfig]) -> None:
    for path in tuned or []:
        found = Tuned.load(path)
        if not any(found.fits(config.set, config.method, config.scenario) for config in configs):
            place = " ".join((found.set, found.scenario)).strip()
            raise SettingError(
                f"'{path}' was found for {found.method} on {place}, which is not among what is to be run."
            )
        if any(config.seed == found.seed for config in configs):
            raise SettingError(f"'{path}' was found on seed {found.seed}: leave that out, or its result is no test.")


def _compare(configs: list[RunConfig], out: Path, workers: Workers, quiet: bool, as_json: bool) -> None:
    failed: ComparisonError | None = None
    refuse_launched()
    with interruptible():
        try:
            records = compare_runs(
                configs,
                out,
                jobs=workers.jobs,
                cluster=workers.cluster,
                progress=False if quiet else None,
                say=sayer(quiet or as_json),
            )
            done = list(zip(configs, (record for found in records.values() for record in found), strict=True))
        except ComparisonError as error:
            done, failed = error.done, error
    if done:
        show(by_label(done), write_page(out, configs[0].set, done), quiet, as_json)
    if failed is not None:
        raise failed
