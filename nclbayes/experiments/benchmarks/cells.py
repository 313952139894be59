"""The cells of the field's benchmarks: a method on a task set in a scenario, how it is run, what was published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from nclbayes.errors import SettingError
from nclbayes.experiments.benchmarks.published import (
    AVALANCHE,
    KIRKPATRICK,
    NGUYEN,
    RITTER,
    SCENARIOS,
    SWAROOP,
    ZENKE,
    Published,
    of_kao,
)
from nclbayes.experiments.config import RunConfig
from nclbayes.experiments.setups import find_setup
from nclbayes.methods.registry import suggestion


@dataclass(frozen=True)
class Cell:
    """One cell of a benchmark.

    Attributes:
        name: What it is called on the command line.
        method: The method.
        set: The task set.
        scenario: The scenario, empty where there is just one.
        tasks: How many tasks; None: all of the set.
        settings: What it changes in the settings that the set has for the method.
        units: Units in each hidden layer; None: the set's.
        num_samples: Evaluate with so many samples of the weights; None: at the mean.
        paper: Whether it is run as the paper has it (:meth:`RunConfig.of`).
        published: What others have published, the number to compare with first.

    Example:
        >>> from nclbayes.experiments.benchmarks import find_cells
        >>> (cell,) = find_cells(["split-mnist-class-owm"])
        >>> cell.config(seed=3).settings["alpha"], str(cell.published[0])
        (0.0001, '80.73 ± 1.11')
    """

    name: str
    method: str
    set: str
    scenario: str = ""
    tasks: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    units: int | None = None
    num_samples: int | None = None
    paper: bool = False
    published: tuple[Published, ...] = ()

    def config(self, seed: int, device: str = "cpu") -> RunConfig:
        """The run of this cell with a seed.

        Args:
            seed: Decides the tasks, the initial weights and every draw.
            device: Where to compute.

        Returns:
            The configuration.
        """
        return RunConfig.of(
            self.set,
            self.method,
            self.scenario or None,
            seed,
            settings=self.settings,
            tasks=self.tasks,
            units=self.units,
            num_samples=self.num_samples,
            paper=self.paper,
            device=device,
        )

    @property
    def setting(self) -> str:
        """Steps a task and examples a step, units, and what else the cell sets."""
        config = self.config(0)
        steps, batch = config.settings["steps"], config.settings["batch_size"]
        units = find_setup(self.set).units if self.units is None else self.units
        rest = [f"{name} = {value:g}" for name, value in self.settings.items() if name != "steps"]
        if self.num_samples is not None:
            rest.append(f"{self.num_samples} samples to predict")
        return "; ".join([f"{steps:,} x {batch}, {units} units", *rest])

    @property
    def family(self) -> str:
        """The benchmark that it is a cell of: the set, the number of tasks, the scenario."""
        return self.name.removesuffix(f"-{self.label}")

    @property
    def label(self) -> str:
        """The method, and whether it is run as in the paper where that is another thing."""
        return f"{self.method}-paper" if self.name.endswith("-paper") else self.method


_ENGINES = ("laplace-ncl", "variational-ncl")
_BASELINES = ("none", "joint", "ewc", "si", "kfac", "owm", "gpm", "vcl", "vcl-coreset", "replay")
# Those that are run as their sets have them, and not as the paper does.
_OTHERS = ("ivon",)


def _split(
    set: str, of_paper: bool = True, kind: str = "", steps: int | None = None, units: int | None = None
) -> list[Cell]:
    """A set that is split by class, in three scenarios; a kind of it that is shorter or narrower has a name."""
    told: dict[str, Any] = {"settings": {} if steps is None else {"steps": steps}, "units": units}
    size = "" if steps is None else f"{steps:,} steps a task and {units} units here, the set's 5,000 and 2,000 there"
    cells = []
    for scenario in SCENARIOS:
        prefix = "-".join(filter(None, (set, kind, scenario)))
        decides = "nothing is tuned: the engine decides" + (
            ", and the softmax goes over the classes seen so far" if scenario == "class" else ""
        )
        for method in (*_ENGINES, *_OTHERS):
            published = of_kao(set, method, scenario, "; ".join(filter(None, (decides, size))))
            cells.append(Cell(f"{prefix}-{method}", method, set, scenario, published=published, **told))
        if of_paper:
            published = of_kao(set, "laplace-ncl", scenario, size)
            name = f"{prefix}-laplace-ncl-paper"
            cells.append(Cell(name, "laplace-ncl", set, scenario, paper=True, published=published, **told))
        for method in _BASELINES:
            # With one head over all classes a baseline's softmax goes over all of them, as published.
            published = of_kao(set, method, scenario, size)
            cells.append(Cell(f"{prefix}-{method}", method, set, scenario, paper=True, published=published, **told))
    return cells


# 10,000 examples a task tell the Fisher well enough.
_FISHER: dict[str, Any] = {"fisher_size": 10_000}
# Those of EWC and SI by `nclbayes tune permuted-mnist --method METHOD --tasks 4 --steps 500` on its held-out seed, over
# `--range prior_weight=1:1000` and `0.1:100`; nothing else is tuned.
_PERMUTED: dict[str, dict[str, Any]] = {
    "laplace-ncl": _FISHER,
    "ewc": {**_FISHER, "prior_weight": 100.0},
    "si": {"prior_weight": 10.0},
    "kfac": _FISHER,
}
# As the authors' published code has it: two layers of 100 units, batches of 256, 200 examples for a coreset.
_VCL: dict[str, Any] = {"units": 100, "num_samples": 20}
_LENGTH = "5,000 steps a task here, 100 epochs (23,400 steps) there"


def _permuted() -> list[Cell]:
    """Permuted MNIST with one head: ten tasks, and fifty."""
    published: dict[str, tuple[Published, ...]] = {
        "ewc": (
            Published(94, KIRKPATRICK, differs="network and length there are not known"),
            Published(83, AVALANCHE, differs="one layer of 512 units and SGD there"),
        ),
        "si": (
            Published(95, ZENKE, differs="network and length there are not known"),
            Published(83, AVALANCHE, differs="one layer of 1000 units there"),
        ),
        "vcl": (
            Published(90, NGUYEN, differs=_LENGTH),
            Published(94.6, SWAROOP, differs="5,000 steps of 256 a task here, 800 epochs of 1,024 there"),
        ),
        "vcl-coreset": (Published(93, NGUYEN, differs=_LENGTH),),
    }
    cells = []
    for method in (*_ENGINES, *_OTHERS, *_BASELINES):
        name, settings = f"permuted-mnist-10-{method}", dict(_PERMUTED.get(method, {}))
        if method.startswith("vcl"):
            settings = {"steps": 5000}
            cells.append(Cell(name, method, "permuted-mnist", "", 10, settings, published=published[method], **_VCL))
        else:
            cells.append(Cell(name, method, "permuted-mnist", "", 10, settings, published=published.get(method, ())))
    many = (Published(90, RITTER, at_least=True, differs="network and length there are not known"),)
    for method in (*_ENGINES, *_OTHERS, "none", "ewc", "kfac"):
        name, settings = f"permuted-mnist-50-{method}", dict(_PERMUTED.get(method, {}))
        numbers = many if method == "kfac" else ()
        cells.append(Cell(name, method, "permuted-mnist", "", 50, settings, published=numbers))
    return cells


def _rotated() -> list[Cell]:
    """Rotated MNIST, five angles, with what was found for permuted MNIST; every example tells the Fisher."""
    found = {m: {k: v for k, v in settings.items() if k not in _FISHER} for m, settings in _PERMUTED.items()}
    return [
        Cell(f"rotated-mnist-5-{method}", method, "rotated-mnist", "", 5, found.get(method, {}))
        for method in (*_ENGINES, *_OTHERS, *_BASELINES)
    ]


CELLS: dict[str, Cell] = {
    cell.name: cell
    for cell in (
        *_split("split-digits", of_paper=False),
        *_split("split-mnist"),
        *_permuted(),
        *_rotated(),
        *_split("split-cifar10", of_paper=False),
        *_split("split-cifar100"),
        # All of them take an hour or two of one core and not some days.
        *_split("split-cifar100", kind="short", steps=1000, units=400),
    )
}
"""Every cell by its name."""

MISSING = {
    "split-cifar10 as images": "the cells are of features; no network here is convolutional by default",
    "split-cifar100 as images": "likewise",
}
"""What the field runs and this table does not have, and why."""


def find_cells(names: Sequence[str]) -> list[Cell]:
    """Cells by their names.

    Args:
        names: Names, or patterns such as ``"split-digits-*"``.

    Returns:
        The cells, in the order of the table.

    Raises:
        SettingError: If a name or pattern is of no cell; the nearest name is suggested.

    Example:
        >>> from nclbayes.experiments.benchmarks import find_cells
        >>> [cell.name for cell in find_cells(["permuted-mnist-??-kfac"])]
        ['permuted-mnist-10-kfac', 'permuted-mnist-50-kfac']
    """
    chosen = dict.fromkeys(CELLS, False)
    for pattern in names:
        found = [name for name in CELLS if fnmatchcase(name, pattern)]
        if not found:
            why = next((f": {why}" for what, why in MISSING.items() if f"{pattern}-".startswith(f"{what}-")), "")
            hint = "" if why else suggestion(pattern, CELLS)
            raise SettingError(f"There is no cell '{pattern}'{hint}{why}. `nclbayes bench` lists them all.")
        chosen.update(dict.fromkeys(found, True))
    return [CELLS[name] for name, is_chosen in chosen.items() if is_chosen]
