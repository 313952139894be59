"""The command that runs the field's benchmarks, cell by cell, and keeps their ledger."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from nclbayes.cli.options import (
    AsJson,
    Cluster,
    Device,
    Quiet,
    interruptible,
    read_device,
    read_seeds,
    refuse_launched,
    sayer,
)
from nclbayes.experiments.benchmarks import CELLS, Cell, find_cells, run_cells
from nclbayes.experiments.benchmarks.ledger import collect, missing, tables, write_ledger
from nclbayes.experiments.comparison import ComparisonError
from nclbayes.workers import Workers

bench_app = typer.Typer()


@bench_app.command(epilog="Example: `nclbayes bench split-mnist-domain-ewc --seeds 0-2 --out runs/bench`")
def bench(
    cells: Annotated[
        list[str] | None, typer.Argument(help="Cells, or patterns such as 'split-digits-*'; none: list them all.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Such as 0-4 or 1,3,5.")] = "0-2",
    out: Annotated[Path, typer.Option(help="The folder of runs and ledger; the same command goes on in it.")] = Path(
        "runs/bench"
    ),
    jobs: Annotated[int, typer.Option(help="How many runs at a time.", min=1)] = 1,
    cluster: Cluster = None,
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run cells of the field's benchmarks beside what was published, and write a ledger of them."""
    if not cells:
        _list(list(CELLS.values()), as_json)
        return
    chosen, numbers, workers = find_cells(cells), list(dict.fromkeys(read_seeds(seeds))), Workers(jobs, cluster)
    failed: ComparisonError | None = None
    refuse_launched()
    with interruptible():
        try:
            results = run_cells(
                chosen,
                numbers,
                out,
                device=read_device(device),
                jobs=workers.jobs,
                cluster=workers.cluster,
                progress=False if quiet else None,
                say=sayer(quiet or as_json),
            )
        except ComparisonError as error:
            results, failed = collect(out, chosen), error
    ledger = write_ledger(out, results)
    if as_json:
        print(json.dumps({"results": [asdict(result) for result in results], "ledger": str(out / "ledger.md")}))
    elif not quiet:
        print(tables(ledger, chosen))
        print(f"Ledger: {(out / 'ledger.md').resolve()}")
    if failed is not None:
        raise failed


def _list(cells: Sequence[Cell], as_json: bool) -> None:
    """The cells, what each is a run of, and what was published."""
    if as_json:
        facts = [
            {"cell": c.name, "method": c.method, "set": c.set, "scenario": c.scenario, "tasks": c.tasks}
            | {"published": [{"accuracy": p.accuracy, "source": str(p.source)} for p in c.published]}
            for c in cells
        ]
        print(json.dumps(facts))
        return
    for cell in cells:
        known = "; ".join(f"{p} ({p.source.short}, {p.source.checked.value})" for p in cell.published)
        print(f"{cell.name:40} {known}".rstrip())
    print(f"Not among them:\n{missing()}", end="")
