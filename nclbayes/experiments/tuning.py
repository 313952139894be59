"""The search for a method's hyperparameter on a held-out seed."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nclbayes.errors import FileError, NonFiniteError, SettingError
from nclbayes.experiments.runs import RunConfig, run
from nclbayes.experiments.setups import find_setup

if TYPE_CHECKING:
    import optuna

HELD_OUT = 1000
"""The default seed of a search, which no evaluation uses."""


@dataclass(frozen=True)
class Range:
    """A range to search on a logarithmic scale.

    Attributes:
        name: The setting: one of the method's, or ``prior_scale``.
        low: The least value.
        high: The greatest.
        factor: The ratio of neighbours on a grid.

    Raises:
        SettingError: If it is empty or not positive.
    """

    name: str
    low: float
    high: float
    factor: float = 10.0

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high:
            raise SettingError(f"A range needs 0 < low <= high, not {self.low:g} to {self.high:g}.")

    @classmethod
    def parse(cls, text: str) -> Range:
        """A range from text such as ``alpha=1e-6:1e-2``.

        Args:
            text: The text.

        Returns:
            The range.

        Raises:
            SettingError: If it is not of that form.
        """
        name, equals, rest = text.partition("=")
        low, colon, high = rest.partition(":")
        try:
            if not (name and equals and colon):
                raise ValueError
            ends = float(low), float(high)
        except ValueError:
            raise SettingError(f"A range is given as name=low:high, such as alpha=1e-6:1e-2, not '{text}'.") from None
        return cls(name.strip(), *ends)

    def grid(self) -> list[float]:
        """From low on, each so many times the one before, up to high."""
        steps = math.floor(math.log(self.high / self.low, self.factor) + 1e-6)
        return [min(self.low * self.factor**i, self.high) for i in range(steps + 1)]


# The paper's ranges. Of NCL it varies p_w^-2 = N s^2 from 1e2 to 1e11, with N = 12,000: s from 0.09 to 2,900.
_SCALES = Range("prior_scale", 0.0913, 2888.0, factor=math.sqrt(10))
PAPER_RANGES: dict[str, Range] = {
    "si": Range("prior_weight", 1e-5, 1e8),
    "ewc": Range("prior_weight", 1e-4, 1e14),
    "kfac": Range("prior_weight", 1e-4, 1e14),
    "decoupled-kfac": Range("preconditioner_weight", 1e0, 1e6),
    "reverse-decoupled-kfac": Range("prior_weight", 1e0, 1e6),
    "owm": Range("alpha", 1e-12, 1e6),
    "dowm": Range("alpha", 1e-12, 1e6),
    "gpm": Range("threshold", 0.8, 0.999, factor=1.05),
    "laplace-ncl": _SCALES,
    "variational-ncl": Range("prior_scale", 0.01, 100.0, factor=math.sqrt(10)),
}


@dataclass(frozen=True)
class Search:
    """What to search for.

    Attributes:
        base: The run whose hyperparameter is sought; its seed is the held-out one.
        ranges: What to vary; empty: the paper's range for the method.
        trials: How many values to try; None: the whole grid, or 20.
        sampler: "grid" or "tpe" (Optuna's tree of Parzen estimators).
    """

    base: RunConfig
    ranges: tuple[Range, ...] = ()
    trials: int | None = None
    sampler: str = "grid"

    def __post_init__(self) -> None:
        if self.sampler not in ("grid", "tpe"):
            raise SettingError(f"sampler is '{self.sampler}'; choose 'grid' or 'tpe'.")
        if not self.ranges:
            object.__setattr__(self, "ranges", (PAPER_RANGES.get(self.base.method, _SCALES),))

    @property
    def count(self) -> int:
        """How many trials there will be."""
        return self.trials or (math.prod(len(r.grid()) for r in self.ranges) if self.sampler == "grid" else 20)

    def config(self, values: Mapping[str, float]) -> RunConfig:
        """The run with some values of the hyperparameters.

        Args:
            values: By name.

        Returns:
            The configuration.

        Raises:
            SettingError: If the method has no such setting.
        """
        base, rest = self.base, dict(values)
        scale = rest.pop("prior_scale", base.prior_scale)
        given: dict[str, Any] = {
            "size": base.size,
            "tasks": base.tasks,
            "num_samples": base.num_samples,
            "units": base.units,
        }
        return RunConfig.of(
            base.set,
            base.method,
            base.scenario,
            base.seed,
            prior_scale=scale,
            settings={**base.settings, **rest},
            device=base.device,
            **given,
        )


@dataclass(frozen=True)
class Tuned:
    """The best hyperparameters that a search found.

    Attributes:
        set: The task set.
        method: The method.
        scenario: The scenario.
        values: The hyperparameters.
        score: What they reached on the held-out seed: accuracy, or minus the loss where that counts.
        trials: Every value that was tried, with its score; None where learning diverged.
    """

    set: str
    method: str
    scenario: str
    values: Mapping[str, float]
    score: float
    trials: Sequence[Mapping[str, Any]] = ()

    def save(self, path: Path) -> None:
        """Write the result.

        Args:
            path: The file.
        """
        path.write_text(json.dumps({"format": 1, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Tuned:
        """Read a result.

        Args:
            path: The file, or the folder of the search.

        Returns:
            The result.

        Raises:
            FileError: If it is not one.
        """
        path = path / "tuned.json" if path.is_dir() else path
        try:
            content = json.loads(path.read_text())
            content.pop("format")
            return cls(**content)
        except OSError as error:
            raise FileError(f"Could not read '{path}': {error.strerror}.") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise FileError(f"'{path}' is not the result of a search.") from None

    def fits(self, set: str, method: str, scenario: str | None) -> bool:
        """Whether it was found for this task set, method and scenario."""
        return (self.set, self.method) == (set.replace("_", "-"), method) and scenario in (None, self.scenario)


def tune(search: Search, out: Path, *, jobs: int = 1, say: Callable[[str], None] = lambda text: None) -> Tuned:
    """Search, and keep what was found: trials that are done are not done again.

    Args:
        search: What to search for.
        out: The folder of the search.
        jobs: How many trials at a time, each in a process of its own.
        say: Called with a line after each trial.

    Returns:
        The best values.

    Raises:
        SettingError: If Optuna is not installed, or the method has no such setting.
        FileError: If the folder cannot be written or holds another search.
        NonFiniteError: If learning diverged at every value.
    """
    optuna = _optuna()
    # A setting that the method does not have is an error before anything is written.
    search.config({r.name: r.low for r in search.ranges})
    try:
        out.mkdir(parents=True, exist_ok=True)
        _claim(out / "search.json", search)
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"Could not write to '{out}': {error.strerror}.") from None
    study = _study(optuna, search, out)
    if jobs > 1:
        _run_in_processes(out, jobs)
    while True:
        # A trial that failed for a reason of its own (a full disk, a kill) does not count.
        ended = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
        done = study.get_trials(deepcopy=False, states=ended)
        if len(done) >= search.count:
            break
        study.optimize(lambda trial: _try(optuna, trial, search, say), n_trials=1)
    finished = [t for t in study.get_trials(deepcopy=False) if t.value is not None]
    if not finished:
        raise NonFiniteError("Learning diverged at every value that was tried: lower `lr`, or search another range.")
    base, best = search.base, study.best_trial
    trials = [{**t.params, "score": t.value} for t in study.get_trials(deepcopy=False)]
    tuned = Tuned(base.set, base.method, base.scenario, best.params, float(best.value or 0.0), trials)
    tuned.save(out / "tuned.json")
    return tuned


def resume(out: Path) -> Tuned:
    """Go on with a search, from its folder alone.

    Args:
        out: The folder.

    Returns:
        The best values.
    """
    content = json.loads((out / "search.json").read_text())
    ranges = tuple(Range(**r) for r in content.pop("ranges"))
    return tune(Search(RunConfig(**content.pop("base")), ranges, **content), out)


def _try(optuna: Any, trial: optuna.Trial, search: Search, say: Callable[[str], None]) -> float:
    values = {r.name: trial.suggest_float(r.name, r.low, r.high, log=True) for r in search.ranges}
    shown = ", ".join(f"{name} = {value:g}" for name, value in values.items())
    try:
        record = run(search.config(values), progress=False)
    except NonFiniteError:
        say(f"{shown}: diverged")
        raise optuna.TrialPruned from None
    endless = find_setup(search.base.set).endless
    score = -record.average_loss if endless else record.average_accuracy
    say(f"{shown}: {f'loss {-score:.4g}' if endless else f'accuracy {score:.1%}'}")
    return score


def _study(optuna: Any, search: Search, out: Path) -> optuna.Study:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    sampler: optuna.samplers.BaseSampler
    if search.sampler == "grid":
        sampler = optuna.samplers.GridSampler({r.name: r.grid() for r in search.ranges}, seed=0)
    else:
        sampler = optuna.samplers.TPESampler(seed=0)
    storage = JournalStorage(JournalFileBackend(str(out / "trials.log")))
    return optuna.create_study(
        storage=storage, sampler=sampler, study_name="search", direction="maximize", load_if_exists=True
    )


def _run_in_processes(out: Path, jobs: int) -> None:
    """Several processes work on the same search; each has its share of the cores."""
    environment = dict(os.environ, OMP_NUM_THREADS=str(max(1, (os.cpu_count() or 1) // jobs)))
    code = "import sys, pathlib, nclbayes.experiments.tuning as t; t.resume(pathlib.Path(sys.argv[1]))"
    workers = [subprocess.Popen([sys.executable, "-c", code, str(out)], env=environment) for _ in range(jobs)]
    try:
        for worker in workers:
            worker.wait()
    finally:
        for worker in workers:
            worker.terminate()


def _claim(path: Path, search: Search) -> None:
    text = json.dumps(asdict(search), indent=1) + "\n"
    if not path.exists():
        path.write_text(text)
    elif path.read_text() != text:
        raise FileError(f"'{path.parent}' holds another search: choose another folder, or remove that one.")


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise SettingError("A search needs Optuna: pip install 'nclbayes[experiments]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
