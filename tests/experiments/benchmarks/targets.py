"""Short forms of five cells, and the accuracies that they had when their targets were stored.

``python -m tests.experiments.benchmarks.targets`` runs them and exits with 1 if one has moved, 125 if it cannot be run
(what ``git bisect run`` takes as a commit to skip); with ``--update`` it stores what it found, as of this commit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from nclbayes.analysis.measures import mean_and_error
from nclbayes.experiments import run
from nclbayes.experiments.benchmarks import CELLS

FILE = Path(__file__).with_name("targets.json")
SHORT = {"steps": 100}
SEEDS = tuple(range(6))
NAMES = (
    "split-digits-domain-laplace-ncl",
    "split-digits-class-variational-ncl",
    "split-digits-task-ewc",
    "split-digits-task-owm",
    "split-digits-domain-replay",
)
# In points. Two of the 360 test images: less than that says nothing, however alike the seeds are.
LEAST = 0.6


@dataclass(frozen=True)
class Target:
    """What a cell had.

    Attributes:
        accuracy: In percent, the mean over `SEEDS`.
        tolerance: Three standard errors of that mean: as far as other seeds would carry it.
        commit: As of which commit.
    """

    accuracy: float
    tolerance: float
    commit: str


def load(path: Path = FILE) -> dict[str, Target]:
    """The stored targets, by cell."""
    return {name: Target(**values) for name, values in json.loads(path.read_text()).items()}


def measured(name: str) -> list[float]:
    """The accuracies of a cell's short form in percent, one a seed."""
    cell = replace(CELLS[name], settings={**CELLS[name].settings, **SHORT})
    return [100 * run(cell.config(seed), progress=False).average_accuracy for seed in SEEDS]


def target_of(accuracies: Sequence[float], commit: str) -> Target:
    """What to store of a cell."""
    mean, error, _ = mean_and_error(accuracies)
    return Target(round(mean, 3), round(max(LEAST, 3 * error), 3), commit)


def complaint(name: str, accuracies: Sequence[float], target: Target) -> str | None:
    """What to say of a cell that has moved; None of one that has not."""
    mean, error, _ = mean_and_error(accuracies)
    if abs(mean - target.accuracy) <= target.tolerance:
        return None
    command = f"python -m {__spec__.name} {name}"
    return (
        f"{name}: {mean:.2f} ± {error:.2f} %, where its target is {target.accuracy:.2f} ± {target.tolerance:.2f}, "
        f"which stands since commit {target.commit}. What moved it: "
        f"`git bisect start HEAD {target.commit} && git bisect run {command}`. "
        f"If it is meant to be so: `{command} --update`, with the reason in the commit's message."
    )


def moved(found: Mapping[str, Sequence[float]], targets: Mapping[str, Target]) -> list[str]:
    """What to say of all cells that have moved."""
    said = (complaint(name, accuracies, targets[name]) for name, accuracies in found.items())
    return [text for text in said if text is not None]


def _commit() -> str:
    """The present commit; refused while the package has changes that are not in it."""
    changes = subprocess.run(["git", "status", "--porcelain", "nclbayes"], check=True, capture_output=True, text=True)
    if changes.stdout.strip():
        sys.exit("The package has changes that are not committed: a target is of a commit.")
    head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], check=True, capture_output=True, text=True)
    return head.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cells", nargs="*", help="some of the cells; none: all")
    parser.add_argument("--update", action="store_true", help="store what is found")
    given = parser.parse_args()
    commit = _commit() if given.update else ""
    try:
        found = {name: measured(name) for name in given.cells or NAMES}
    except Exception:
        traceback.print_exc()
        sys.exit(125)
    targets = load() if FILE.exists() else {}
    if given.update:
        targets |= {name: target_of(accuracies, commit) for name, accuracies in found.items()}
        stored = {name: asdict(targets[name]) for name in NAMES if name in targets}
        FILE.write_text(json.dumps(stored, indent=1) + "\n")
        return
    complaints = moved(found, targets)
    print("\n".join(complaints) or "Nothing has moved.")
    sys.exit(bool(complaints))


if __name__ == "__main__":
    main()
