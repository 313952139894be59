"""The paper's comparison of sums of Kronecker products: five rules, accumulated over tasks.

A precision starts as a spherical prior and takes up one Fisher after the other, Lambda_k ~= Lambda_{k-1} + F_k, and
each sum is replaced by one Kronecker product. The Fishers are those of the recurrent and input weights of (A) random
recurrent networks, (B) a network that learns the stimulus-response tasks, and (C) one that learns stroke MNIST, where
its data are on this machine. The prior makes the sum positive definite. It is weak, so that the sum is that of the
Fishers, as in the paper: its precision is a hundredth of the mean diagonal entry of the first of them. With a prior
that outweighs the Fishers, `kl` is still the closest, but has the lowest correlation on (A) and (B).

Each rule is compared with two sums:

- as in the paper, what it has accumulated with the exact sum of the prior and all Fishers so far. Errors of earlier
  steps are carried along, so no rule is sure to be the best;
- its step alone with the exact sum of the same two terms, an accumulated precision and the next Fisher, for all rules
  and for the precisions that each of them has accumulated. There, `kl` is the minimum by construction.

Divergences are KL( approximation || exact sum ), which is what `kl` minimises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nclbayes.analysis.drawing import PALETTE, tasks_learnt_axis
from nclbayes.analysis.product_sums import ProductSum
from nclbayes.experiments.figures.panels import FULL_WIDTH, letter, panels
from nclbayes.experiments.figures.recipe import Recipe, Results, Row, Settings, Statement, Workplace
from nclbayes.experiments.figures.task_fishers import random_fishers, stimulus_fishers, stroke_fishers
from nclbayes.fisher import KroneckerFisher
from nclbayes.kronecker import KroneckerPrecision, SumRule, kronecker_sum
from nclbayes.kronecker.blockdiagonal import whole
from nclbayes.storage import Form, Misfit, fitted, open_sealed, write_file
from nclbayes.tasks.files import status

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SOURCES = {"random": "random RNNs", "stimulus-response": "stimulus-response", "stroke-mnist": "stroke MNIST"}
RULES = [rule.value for rule in SumRule]
_KIND, _SIDES, _NONE = "fishers", ("input", "output"), Form(torch.float64, ())
_LOOKS: dict[str, dict[str, Any]] = {
    "kl": {"color": PALETTE[2], "marker": "o", "linestyle": "-"},
    "additive": {"color": PALETTE[0], "marker": "s", "linestyle": "--"},
    "bound": {"color": PALETTE[5], "marker": "^", "linestyle": "-."},
    # Hollow and wide, so that a curve beneath it can be seen.
    "mse": {"color": PALETTE[1], "marker": "D", "linestyle": ":", "markersize": 4.8, "markerfacecolor": "none"},
    "naive": {"color": "0.45", "marker": "v", "linestyle": "--"},
}
_MEASURES = {"correlation": "correlation", "kl": "KL (nats)", "scale_free_kl": "scale-free KL (nats)"}


def compute(settings: Settings, place: Workplace) -> Results:
    """Accumulate the Fishers of each source by each rule.

    Args:
        settings: Those of each source by its name; the precision of the ``prior`` as a part of the first Fisher's mean
            diagonal entry; the ``seed``.
        place: Where and how; Fishers that are in its folder already are not computed again.

    Returns:
        The closeness to the exact sums ("accumulated") and the divergence of each step alone ("steps").
    """
    accumulated: list[Row] = []
    steps: list[Row] = []
    facts: dict[str, Any] = {}
    for source in SOURCES:
        if source == "stroke-mnist" and not next(entry.found for entry in status() if entry.dataset == source):
            facts[source] = "left out: its data are not on this machine"
            continue
        fishers = list(_fishers(source, settings, place))
        n, m = fishers[0].input.shape[0], fishers[0].output.shape[0]
        prior = settings["prior"] * float(fishers[0].input.diagonal().mean() * fishers[0].output.diagonal().mean())
        facts[source] = {"tasks": len(fishers), "weights": f"{m} x {n}", "prior precision, per trial": prior}
        place.say(f"{source}: {len(RULES)} rules over {len(fishers)} tasks, {m} x {n} weights")
        for k, (own, alone) in enumerate(accumulate(fishers, prior), start=1):
            accumulated += [{"source": source, "tasks": k, **row} for row in own]
            steps += [{"source": source, "tasks": k, **row} for row in alone]
    tables = {"accumulated": accumulated, "steps": steps}
    return Results(tables, _statements(accumulated, steps), facts)


def accumulate(fishers: Iterable[KroneckerFisher], prior: float) -> Iterator[tuple[list[Row], list[Row]]]:
    """Add one Fisher after the other to a prior by every rule.

    Args:
        fishers: What to add.
        prior: The prior's precision.

    Yields:
        After each Fisher: for each rule, the closeness of what it has accumulated to the exact sum; and for each
        accumulated precision (``before``) and each rule, the KL of the step alone.
    """
    held: dict[str, KroneckerPrecision] = {}
    exact: ProductSum | None = None
    for fisher in fishers:
        C, D = whole(fisher.input), whole(fisher.output)
        if exact is None:
            A, B = (torch.eye(len(factor), dtype=factor.dtype, device=factor.device) for factor in (C, D))
            exact = ProductSum(prior * A, B)
            held = dict.fromkeys(RULES, KroneckerPrecision.factorise(prior * A, B))
        exact.add(C, D)
        alone: list[Row] = []
        for before in RULES:
            A, B = whole(held[before].input), whole(held[before].output)
            for rule in RULES:
                total = kronecker_sum(A, B, C, D, rule, rtol=fisher.rtol)
                alone.append({"before": before, "rule": rule, "kl": float(total.kl)})
                if rule == before:
                    held[rule] = total
        yield [{"rule": rule, **exact.closeness(held[rule]).to_dict()} for rule in RULES], alone


def draw(results: Results) -> dict[str, Figure]:
    """The three measures over tasks, and the divergence of each step alone.

    Args:
        results: Those of :func:`compute`.

    Returns:
        The pictures "kronecker-sums" and "kronecker-steps".
    """
    return {
        "kronecker-sums": _accumulated_picture(results.tables["accumulated"]),
        "kronecker-steps": _steps_picture(results.tables["steps"]),
    }


_COMMON = {"prior": 0.01, "seed": 0}
RECIPE = Recipe(
    name="kronecker-sums",
    summary="five rules for sums of Kronecker products, accumulated over tasks",
    scales={
        "quick": {
            "random": {"tasks": 4, "units": 6, "inputs": 3, "outputs": 2, "trials": 32, "steps": 6},
            "stimulus-response": {"tasks": 3, "units": 6, "steps": 1, "batch_size": 4, "trials": 8},
            "stroke-mnist": {"tasks": 3, "units": 6, "steps": 1, "batch_size": 8, "trials": 16},
            **_COMMON,
        },
        "laptop": {
            "random": {"tasks": 15, "units": 30, "inputs": 10, "outputs": 5, "trials": 512, "steps": 20},
            "stimulus-response": {"tasks": 6, "units": 50, "steps": 200, "batch_size": 32, "trials": 512},
            "stroke-mnist": {"tasks": 15, "units": 30, "steps": 60, "batch_size": 64, "trials": 512},
            **_COMMON,
        },
        "paper": {
            "random": {"tasks": 15, "units": 50, "inputs": 10, "outputs": 5, "trials": 2048, "steps": 20},
            "stimulus-response": {"tasks": 6, "units": 50, "steps": 31_250, "batch_size": 32, "trials": 2048},
            "stroke-mnist": {"tasks": 15, "units": 30, "steps": 3906, "batch_size": 256, "trials": 2048},
            **_COMMON,
        },
    },
    compute=compute,
    draw=draw,
)


def _fishers(source: str, settings: Settings, place: Workplace) -> Iterator[KroneckerFisher]:
    """The Fishers of a source: from the folder, or computed and put there."""
    path = Path(place.out, f"{source}-fishers.safetensors")
    if path.exists():
        yield from _kept(path)
        return
    own, seed = settings[source], settings["seed"]
    if source == "random":
        made = random_fishers(own, seed)
    else:
        made = (stimulus_fishers if source == "stimulus-response" else stroke_fishers)(own, seed, place)
    found = list(made)
    tensors = {f"{k}.{side}": getattr(fisher, side) for k, fisher in enumerate(found) for side in _SIDES}
    counts = [{"rows": fisher.rows, "examples": fisher.examples, "rtol": fisher.rtol} for fisher in found]
    write_file(path, _KIND, tensors, {"counts": counts})
    yield from found


@dataclass(frozen=True)
class _Counts:
    """What a file holds of a Fisher besides its factors."""

    rows: float
    examples: float
    rtol: float


@dataclass(frozen=True)
class _Kept:
    """The schema of the settings of a file of Fishers."""

    counts: list[_Counts]


def _kept(path: Path) -> list[KroneckerFisher]:
    """The Fishers of a file, all of one block."""
    with open_sealed(path, _KIND) as file:
        counts = fitted(_Kept, file.settings).counts
        sizes = [len(form.shape) and form.shape[0] for form in (file.forms.get(f"0.{side}", _NONE) for side in _SIDES)]
        square = {side: Form(torch.float64, (n, n)) for side, n in zip(_SIDES, sizes, strict=True)}
        expected = {f"{k}.{side}": form for k in range(len(counts)) for side, form in square.items()}
        if not all(sizes) or expected != file.forms:
            raise Misfit("its tensors are not the factors of Fishers of one block")
        tensors = file.read()
        for name, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise Misfit(f"the tensor '{name}' has NaN or infinite entries")
    return [
        KroneckerFisher(tensors[f"{k}.input"], tensors[f"{k}.output"], **asdict(count))
        for k, count in enumerate(counts)
    ]


def _statements(accumulated: Sequence[Row], steps: Sequence[Row]) -> list[Statement]:
    statements = []
    for source, title in SOURCES.items():
        own = [row for row in accumulated if row["source"] == source]
        alone = [row for row in steps if row["source"] == source]
        if not own:
            continue
        # A difference within the rounding errors of a divergence is none.
        best = [
            row["kl"] <= min(other["kl"] for other in alone if _same(row, other, "tasks", "before")) + 1e-9
            for row in alone
            if row["rule"] == "kl"
        ]
        statements.append(
            Statement(
                f"{title}: of all rules for the sum of the same two terms, kl has the lowest KL at every step",
                all(best),
                f"in {sum(best)} of {len(best)} steps",
            )
        )
        statements += [
            _lowest(f"{title}: kl has the lowest KL from the exact sum of all Fishers", own, "kl", "kl", RULES),
            _lowest(f"{title}: kl has a lower scale-free KL than mse", own, "scale_free_kl", "kl", ["kl", "mse"]),
            _lowest(f"{title}: mse has the highest correlation", own, "correlation", "mse", RULES, -1),
        ]
    return statements


def _lowest(claim: str, rows: Sequence[Row], measure: str, rule: str, rules: Sequence[str], sign: int = 1) -> Statement:
    """Whether a rule has the lowest value of a measure (the highest, if the sign is -1) after every task."""
    last = max(row["tasks"] for row in rows)
    holds = []
    for k in range(1, last + 1):
        values = {row["rule"]: sign * row[measure] for row in rows if row["tasks"] == k and row["rule"] in rules}
        holds.append(values[rule] == min(values.values()))
    numbers = ", ".join(f"{row['rule']} {row[measure]:.4g}" for row in rows if row["tasks"] == last)
    return Statement(f"{claim}, after every task", all(holds), f"after {sum(holds)} of {last}; at the end: {numbers}")


def _same(row: Row, other: Row, *keys: str) -> bool:
    return all(row[key] == other[key] for key in keys)


def _sources(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each source that there is."""
    return {source: own for source in SOURCES if (own := [row for row in rows if row["source"] == source])}


def _accumulated_picture(rows: Sequence[Row]) -> Figure:
    found = _sources(rows)
    with panels(3, len(found), _width(len(found)), 13.0, sharex="col") as (figure, axes):
        for column, (source, own) in enumerate(found.items()):
            for panel, (measure, title) in zip(axes[:, column], _MEASURES.items(), strict=True):
                _curves(panel, own, measure)
                if column == 0:
                    panel.set_ylabel(title)
            axes[0, column].set_title(SOURCES[source])
            axes[-1, column].set_xlabel("number of tasks")
            letter(axes[0, column], "ABC"[list(SOURCES).index(source)])
        _legend(figure, axes[0, 0])
    return figure


def _steps_picture(rows: Sequence[Row]) -> Figure:
    found = _sources([row for row in rows if row["before"] == "kl"])
    with panels(1, len(found), _width(len(found)), 6.0) as (figure, axes):
        for column, (source, own) in enumerate(found.items()):
            panel = axes[0, column]
            _curves(panel, own, "kl")
            panel.set_title(SOURCES[source])
            panel.set_xlabel("number of tasks")
            letter(panel, "ABC"[list(SOURCES).index(source)])
        axes[0, 0].set_ylabel("KL of one step (nats)")
        _legend(figure, axes[0, 0])
    return figure


def _width(columns: int) -> float:
    return FULL_WIDTH if columns == 3 else 2.0 + 5.0 * columns


def _curves(panel: Axes, rows: Sequence[Row], measure: str) -> None:
    for rule, look in _LOOKS.items():
        own = [row for row in rows if row["rule"] == rule]
        panel.plot([row["tasks"] for row in own], [row[measure] for row in own], label=rule, **look)
    tasks_learnt_axis(panel, max(row["tasks"] for row in rows))
    panel.set_xlabel("")
    panel.grid(axis="y")
    if measure != "correlation":
        _log_axis(panel, [row[measure] for row in rows])


def _log_axis(panel: Axes, values: Sequence[float]) -> None:
    """A logarithmic axis with at least two numbers on it, written in full: exponents would be too small to read."""
    from matplotlib.ticker import LogLocator, NullFormatter

    panel.set_yscale("log")
    narrow = max(values) < 100 * min(values)
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,)))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_formatter(NullFormatter())


def _legend(figure: Figure, panel: Axes) -> None:
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), handlelength=2.8)
