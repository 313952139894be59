"""``python -m nclbayes``: the command line."""

import sys


def main() -> int:
    """Run the command line.

    Returns:
        The exit code.
    """
    try:
        from nclbayes.cli import run_command_line
    except ModuleNotFoundError as error:
        print(
            f"nclbayes: error: the command line needs {error.name}: pip install 'nclbayes[experiments]'",
            file=sys.stderr,
        )
        return 2
    return run_command_line(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
