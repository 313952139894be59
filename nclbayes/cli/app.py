"""All commands under one name, and their errors as one line."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from nclbayes.analysis.names import plain
from nclbayes.cli.bench import bench_app
from nclbayes.cli.data import data_app, info
from nclbayes.cli.options import Interrupted, interruptible
from nclbayes.cli.report import report_app
from nclbayes.cli.run import run_app
from nclbayes.cli.study import study_app
from nclbayes.errors import NCLError, NonFiniteError
from nclbayes.experiments.comparison import DIVERGED
from nclbayes.interrupts import INTERRUPTED, raised


class _Commands(TyperGroup):
    """All commands, any of which may be interrupted."""

    def invoke(self, ctx: Any) -> Any:
        with interruptible(hint=""):
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
    help="Bayesian continual learning: run methods on task sets, compare them, report.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.add_typer(run_app)
app.add_typer(report_app)
app.add_typer(study_app)
app.add_typer(bench_app)
app.add_typer(data_app, name="data")
app.command()(info)


def run_command_line(arguments: Sequence[str]) -> int:
    """Run a command; errors become one line.

    Args:
        arguments: What follows the program's name. ``--debug`` anywhere shows tracebacks.

    Returns:
        The exit code: 0, 2 for an error of the user's, 3 if learning diverged, 130 for an interrupt, 1 for anything
        else.
    """
    try:
        with raised():
            app([a for a in arguments if a != "--debug"], prog_name="nclbayes")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except (Interrupted, KeyboardInterrupt) as stop:
        print(f"nclbayes: {str(stop) or 'interrupted.'}", file=sys.stderr)
        return INTERRUPTED
    except NCLError as error:
        if "--debug" in arguments:
            traceback.print_exc()
        print(f"nclbayes: error: {plain(' '.join(str(error).split()))}", file=sys.stderr)
        return DIVERGED if isinstance(error, NonFiniteError) else 2
    return 0
