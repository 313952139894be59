"""Numbers that others have published: each with where it stands, and whether it was read there."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Checked(str, Enum):
    """How a published number is known.

    Attributes:
        READ: It was read in the source itself.
        SECOND_HAND: It was read in another work that quotes the source.
        NOT_CHECKED: It is said to stand in the source, which could not be read.
    """

    READ = "read"
    SECOND_HAND = "at second hand"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Source:
    """Where a number was published.

    Attributes:
        authors: Who wrote it.
        year: When.
        title: What it is called.
        where: The table, figure or section.
        checked: How the number is known.
        through: The work that quotes it, if that is what was read.

    Example:
        >>> from nclbayes.experiments.benchmarks.published import KAO
        >>> KAO.short, KAO.checked.value
        ('Kao et al. 2021', 'read')
    """

    authors: str
    year: int
    title: str
    where: str
    checked: Checked
    through: str = ""

    @property
    def short(self) -> str:
        """The authors and the year."""
        first, *others = self.authors.split(", ")
        return f"{first} et al. {self.year}" if others else f"{first} {self.year}"

    def __str__(self) -> str:
        """The whole reference, and how the number is known."""
        known = self.checked.value + (f", in {self.through}" if self.through else "")
        return f"{self.authors} ({self.year}), *{self.title}*, {self.where}; {known}"


@dataclass(frozen=True)
class Published:
    """An average test accuracy after the last task, as published.

    Attributes:
        accuracy: In percent.
        source: Where it was published.
        error: Its standard error, if that is given too.
        at_least: Whether the source only says that it is above this.
        differs: In what the setting there differs from that of the cell here; empty: in nothing that matters.

    Example:
        >>> from nclbayes.experiments.benchmarks.published import RITTER, Published
        >>> str(Published(90.0, RITTER, at_least=True))
        '> 90'
    """

    accuracy: float
    source: Source
    error: float | None = None
    at_least: bool = False
    differs: str = ""

    def __str__(self) -> str:
        """The number and its error, with as many digits as are known."""
        error = "" if self.error is None else f" ± {self.error:g}"
        return f"{'> ' if self.at_least else ''}{self.accuracy:g}{error}"


KAO = Source(
    "Kao, Jensen, van de Ven, Bernacchia, Hennequin",
    2021,
    "Natural continual learning: success is a journey, not (just) a destination",
    "table of numerical results",
    Checked.READ,
)
RITTER = Source(
    "Ritter, Botev, Barber",
    2018,
    "Online structured Laplace approximations for overcoming catastrophic forgetting",
    "abstract",
    Checked.READ,
)
AVALANCHE = Source(
    "ContinualAI", 2024, "Continual Learning Baselines", "table of batch continual learning", Checked.READ
)
_QUOTED = AVALANCHE.title
KIRKPATRICK = Source(
    "Kirkpatrick, Pascanu, Rabinowitz, Veness, Desjardins, Rusu, Milan, Quan, Ramalho, Grabska-Barwinska, Hassabis, "
    "Clopath, Kumaran, Hadsell",
    2017,
    "Overcoming catastrophic forgetting in neural networks",
    "a figure",
    Checked.SECOND_HAND,
    _QUOTED,
)
ZENKE = Source(
    "Zenke, Poole, Ganguli",
    2017,
    "Continual learning through synaptic intelligence",
    "a figure",
    Checked.SECOND_HAND,
    _QUOTED,
)
NGUYEN = Source(
    "Nguyen, Li, Bui, Turner",
    2018,
    "Variational continual learning",
    "section on permuted MNIST",
    Checked.NOT_CHECKED,
)
SWAROOP = Source(
    "Swaroop, Nguyen, Bui, Turner",
    2019,
    "Improving and understanding variational continual learning",
    "section on permuted MNIST",
    Checked.SECOND_HAND,
    "a summary of the paper on a site of summaries",
)
SOURCES = (KAO, KIRKPATRICK, ZENKE, AVALANCHE, NGUYEN, SWAROOP, RITTER)
"""Every source, in the order in which they are cited."""

SCENARIOS = ("task", "domain", "class")

# Test accuracy in % after all tasks, mean and standard error over 20 (MNIST) or 10 (CIFAR-100) seeds, in the order of
# SCENARIOS: the table of numerical results of Kao et al.
PUBLISHED: dict[str, dict[str, tuple[tuple[float, float], ...]]] = {
    "split-mnist": {
        "none": ((81.58, 1.64), (59.47, 1.71), (19.88, 0.02)),
        "joint": ((99.69, 0.02), (98.69, 0.04), (98.32, 0.05)),
        "si": ((97.24, 0.55), (65.20, 1.48), (21.40, 1.30)),
        "ewc": ((98.67, 0.22), (63.44, 1.70), (20.08, 0.16)),
        "kfac": ((99.04, 0.10), (67.86, 1.33), (19.99, 0.04)),
        "owm": ((99.36, 0.05), (87.46, 0.74), (80.73, 1.11)),
        "laplace-ncl (unit prior)": ((99.53, 0.03), (84.90, 1.06), (47.49, 0.84)),
        "laplace-ncl": ((99.55, 0.03), (91.48, 0.64), (69.31, 1.65)),
    },
    "split-cifar100": {
        "none": ((61.43, 0.36), (18.42, 0.33), (7.71, 0.18)),
        "joint": ((78.78, 0.25), (46.85, 0.51), (49.78, 0.21)),
        "si": ((74.84, 0.39), (22.58, 0.37), (7.02, 1.04)),
        "ewc": ((75.38, 0.24), (19.97, 0.44), (7.74, 0.18)),
        "kfac": ((76.61, 0.23), (26.57, 0.66), (7.59, 0.17)),
        "owm": ((77.07, 0.27), (28.51, 0.30), (29.23, 0.51)),
        "laplace-ncl (unit prior)": ((77.88, 0.26), (32.81, 0.38), (16.63, 0.34)),
        "laplace-ncl": ((78.38, 0.27), (38.79, 0.24), (26.36, 1.09)),
    },
}
"""Accuracies and their standard errors by set, method and scenario."""


def of_kao(set: str, method: str, scenario: str, differs: str = "") -> tuple[Published, ...]:
    """What the table of Kao et al. has for a method.

    Args:
        set: The task set.
        method: The method, as that table calls it.
        scenario: One of `SCENARIOS`.
        differs: In what the cell here differs.

    Returns:
        The number, or nothing.

    Example:
        >>> from nclbayes.experiments.benchmarks.published import of_kao
        >>> str(of_kao("split-mnist", "owm", "class")[0])
        '80.73 ± 1.11'
    """
    found = PUBLISHED.get(set, {}).get(method)
    if found is None:
        return ()
    accuracy, error = found[SCENARIOS.index(scenario)]
    return (Published(accuracy, KAO, error, differs=differs),)
