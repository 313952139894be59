"""What the commands leave and print: a page, pictures, a table; and the command that makes them again."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nclbayes.analysis.names import plain
from nclbayes.analysis.record import Record
from nclbayes.analysis.report import text_table, write_report
from nclbayes.cli.options import AsJson, Quiet, version_of
from nclbayes.errors import FileError
from nclbayes.experiments.config import RunConfig
from nclbayes.methods import METHODS
from nclbayes.stream import Changed, Judged, StreamSettings

report_app = typer.Typer()

# What the terminal shows of the report's table, and how it calls it.
_SHORT = {
    "Average accuracy (%)": "accuracy %",
    "Forgetting (%)": "forgetting %",
    "Loss (nats)": "loss",
    "Calibration error (%)": "calibration error %",
    "Log evidence (nats)": "log evidence",
    "Learning time (minutes)": "minutes",
}


@report_app.command(epilog="Example: `nclbayes report runs/split-digits-domain`")
def report(
    folder: Annotated[Path, typer.Argument(help="A run's folder, or one with runs in it.")],
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Write the HTML page of a run, or of all runs in a folder."""
    runs: list[tuple[RunConfig, Record]] = []
    for path in sorted([folder / "record.json", *folder.glob("**/record.json")]):
        if path.exists() and (path.parent / "config.json").exists():
            config = RunConfig.load(path.parent / "config.json")
            if all(config != other for other, _ in runs):
                runs.append((config, Record.load(path)))
    if not runs:
        raise FileError(f"There is no run in '{folder}': it holds no record.json beside a config.json.")
    places = dict.fromkeys(" ".join((config.set, config.scenario)).strip() for config, _ in runs)
    if len(places) > 1:
        raise FileError(
            f"The runs in '{folder}' are of {', '.join(places)}: name a folder with runs of one task set and scenario."
        )
    runs.sort(key=lambda pair: list(METHODS).index(pair[0].method))
    show(by_label(runs), write_page(folder, runs[0][0].set, runs), quiet, as_json)


def by_label(runs: Sequence[tuple[RunConfig, Record]]) -> dict[str, list[Record]]:
    """The records by method; runs of a method that differ in more than the seed have that in their name.

    Args:
        runs: Configurations with their records.

    Returns:
        The records of each method, in order.
    """
    return {label: [record for _, record in pairs] for label, pairs in _grouped(runs).items()}


def _grouped(runs: Sequence[tuple[RunConfig, Record]]) -> dict[str, list[tuple[dict[str, Any], Record]]]:
    """The facts and records of the runs under each label."""
    by_method: dict[str, list[tuple[dict[str, Any], Record]]] = {}
    for config, record in runs:
        by_method.setdefault(config.method, []).append((_facts(config), record))
    found: dict[str, list[tuple[dict[str, Any], Record]]] = {}
    for method, pairs in by_method.items():
        names = dict.fromkeys(name for facts, _ in pairs for name in facts)
        differ = [name for name in names if any(facts.get(name) != pairs[0][0].get(name) for facts, _ in pairs)]
        for facts, record in pairs:
            label = ", ".join((method, *(f"{name} = {facts.get(name)}" for name in differ)))
            found.setdefault(label, []).append((facts, record))
    return found


def _facts(config: RunConfig) -> dict[str, Any]:
    """What decides a run besides its method and seed."""
    about = {k: v for k, v in asdict(config).items() if k not in ("set", "scenario", "method", "seed", "settings")}
    return {**config.settings, **{k: v for k, v in about.items() if v not in (None, False, "")}}


def write_page(out: Path, title: str, done: Sequence[tuple[RunConfig, Record]]) -> Path:
    """Write the HTML page and the pictures of some runs.

    Args:
        out: The folder.
        title: What the page is called.
        done: Configurations with their records, of one task set and scenario.

    Returns:
        The page.

    Raises:
        FileError: If the folder cannot be written.
    """
    from nclbayes.analysis import plots
    from nclbayes.analysis.stream_plots import evidence

    config, runs = done[0][0], by_label(done)
    facts = {
        "task set": config.set,
        "scenario": config.scenario or "there is just one",
        "tasks": ", ".join(done[0][1].tasks),
        "seeds": ", ".join(str(seed) for seed in sorted({other.seed for other, _ in done})),
        "nclbayes": version_of("nclbayes"),
    }
    for label, pairs in _grouped(done).items():
        facts[label] = ", ".join(f"{name} = {value}" for name, value in pairs[0][0].items())
    folder = out / "plots"
    try:
        if folder.is_symlink():
            raise FileError(f"'{folder}' is a link, and pictures are not written through it: remove it.")
        folder.mkdir(exist_ok=True)
        first = next(iter(runs.values()))[0]
        if len(runs) > 1:
            plots.save(plots.compare_methods(runs), folder / "methods.png")
            plots.save(plots.accuracy_by_method(runs), folder / "accuracy.png")
        else:
            plots.save(plots.accuracy_over_tasks(first), folder / "accuracy.png")
            plots.save(plots.accuracy_matrix(first), folder / "matrix.png")
            if any(first.losses):
                plots.save(plots.loss_curves(first), folder / "loss.png")
            if first.about.get("judged"):
                judged = [Judged(*each) for each in first.about["judged"]]
                changes = [Changed(**each) for each in first.about["changes"]]
                every = StreamSettings().false_alarm_every
                plots.save(evidence(judged, changes, every, first.about["boundaries"]), folder / "evidence.png")
        return write_report(out / "report.html", title, runs, facts)
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"Could not write to '{out}': {error.strerror}.") from None


def show(runs: dict[str, list[Record]], page: Path, quiet: bool, as_json: bool) -> None:
    """Print the table of some runs, or their summaries as JSON.

    Args:
        runs: The records of each method.
        page: The page that was written of them.
        quiet: Whether to print nothing.
        as_json: Whether to print JSON.
    """
    if as_json:
        found = {
            method: [{k: v if math.isfinite(v) else None for k, v in record.summary().items()} for record in records]
            for method, records in runs.items()
        }
        print(json.dumps({"methods": found, "report": str(page)}))
    elif not quiet:
        table = Table(box=None, pad_edge=False)
        header, *rows = text_table(runs)
        table.add_column("method", no_wrap=True)
        chosen = [(header.index(title), short) for title, short in _SHORT.items() if title in header]
        for _, short in chosen:
            table.add_column(short, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(Text(plain(row[0])), *(row[column] for column, _ in chosen))
        Console(width=max(100, Console().width)).print(table)
        print(plain(f"Report and pictures: {page.parent.resolve()}"))
