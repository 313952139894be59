"""The command line."""

from nclbayes.cli.app import app, run_command_line

__all__ = ["app", "run_command_line"]
