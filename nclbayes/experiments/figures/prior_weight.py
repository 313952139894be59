"""The weight lambda of the prior: NCL and KFAC in three forms, and what Adam's preconditioner becomes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nclbayes.analysis.drawing import MARKERS, PALETTE
from nclbayes.analysis.record import Record
from nclbayes.errors import SettingError
from nclbayes.experiments.comparison import ComparisonError, run_folder
from nclbayes.experiments.config import RunConfig
from nclbayes.experiments.figures.panels import FULL_WIDTH, letter, loss_axis, loss_by_task, panels
from nclbayes.experiments.figures.recipe import Recipe, Results, Row, Settings, Statement, Workplace
from nclbayes.experiments.figures.scores import least_losses, score_rows
from nclbayes.experiments.runs import reopen_each
from nclbayes.gaussians import KroneckerState
from nclbayes.posterior import OnlinePosterior

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Which setting of each method is lambda.
METHODS = {
    "laplace-ncl": "prior_weight",
    "kfac": "prior_weight",
    "decoupled-kfac": "preconditioner_weight",
    "reverse-decoupled-kfac": "prior_weight",
}


# A run, its lambda, and its folder.
_Run = tuple[RunConfig, float, Path]


def diagonal_scale_free_kl(first: Tensor, second: Tensor) -> float:
    """The scale-free KL divergence of two Gaussians with diagonal precisions.

    Args:
        first: The precisions of one, positive.
        second: Those of the other, of the same shape.

    Returns:
        ``1/2 (log|L1| - log|L2| + d log(tr(L1^-1 L2) / d))``, 0 if one is a multiple of the other.

    Example:
        >>> import torch
        >>> from nclbayes.experiments.figures.prior_weight import diagonal_scale_free_kl
        >>> round(diagonal_scale_free_kl(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])), 9)
        0.0
    """
    a, b = first.double().flatten(), second.double().flatten()
    gap = a.log().sum() - b.log().sum() + len(a) * (b / a).mean().log()
    return max(0.0, float(gap / 2))


def _compute(settings: Settings, place: Workplace) -> Results:
    if len(set(settings["weights"])) < 2:
        raise SettingError(f"The figure compares values of lambda: give two or more, not {settings['weights']}.")
    runs = [
        _run(method, setting, weight, seed, settings, place)
        for method, setting in METHODS.items()
        for weight in settings["weights"]
        for seed in range(settings["seeds"])
    ]
    scores: list[Row] = []
    similarity: list[Row] = []
    diverged: list[Row] = []
    for (config, weight, folder), record in _records(runs, place):
        where = {"method": config.method, "lambda": weight, "seed": config.seed}
        if record is None:
            diverged.append(where)
            continue
        _, tasks, learners = reopen_each(folder)
        scores += [{**where, **row} for row in score_rows(record, least_losses(tasks))]
        similarity += [{**where, **row} for row in _resemblance(learners)]
    tables = {"scores": scores, "preconditioner": similarity, "diverged": diverged}
    return Results(tables, _statements(_losses(tables), similarity))


def _records(runs: Sequence[_Run], place: Workplace) -> list[tuple[_Run, Record | None]]:
    """Every run with its record; None where learning diverged, which is a result too."""
    pairs = [(config, folder) for config, _, folder in runs]
    try:
        records = place.run_all(pairs)
        done = [(config, record) for (config, _), record in zip(pairs, records, strict=True)]
    except ComparisonError as error:
        if not error.is_divergence:
            raise
        done = error.done
    return [(run, next((record for config, record in done if config == run[0]), None)) for run in runs]


def _run(method: str, setting: str, weight: float, seed: int, settings: Settings, place: Workplace) -> _Run:
    """A run with one lambda, that lambda, and the run's folder."""
    given = {setting: weight, "steps": settings["steps"], "fisher_size": settings["fisher_size"]}
    if method in settings["rates"]:
        given["lr"] = settings["rates"][method]
    config = RunConfig.of(
        "stimulus-response",
        method,
        seed=seed,
        settings=given,
        units=settings["units"],
        tasks=settings["tasks"],
        paper=True,
        device=place.device,
        keep_each=True,
    )
    return config, weight, run_folder(place.out / "runs" / f"lambda-{weight:g}", config)


def _resemblance(learners: Sequence[OnlinePosterior]) -> list[Row]:
    """How Adam's preconditioner after each task but the first compares with the diagonal of the prior of that task."""
    rows: list[Row] = []
    for k, (before, after) in enumerate(pairwise(learners), start=2):
        for name, state in before.blocks.items():
            root = after.memory.get(f"adam/{name}")
            if root is not None and isinstance(state, KroneckerState):
                prior = torch.outer(state.precision.output.diagonal(), state.precision.input.diagonal())
                kl = diagonal_scale_free_kl(prior.cpu(), root.cpu().clamp(min=1e-12)) / prior.numel()
                rows.append({"task": k, "block": name, "kl": kl})
    return rows


def _losses(tables: Mapping[str, Sequence[Row]]) -> dict[str, dict[float, float]]:
    """The mean loss over tasks and seeds in the end, by method and lambda; infinite where a run diverged."""
    scores, diverged = tables["scores"], {(row["method"], row["lambda"]) for row in tables["diverged"]}
    count = max(row["tasks learnt"] for row in scores)
    final = [row for row in scores if row["tasks learnt"] == count]
    weights = sorted({row["lambda"] for row in (*scores, *tables["diverged"])})
    return {
        method: {w: math.inf if (method, w) in diverged else _mean(final, method, w, "loss") for w in weights}
        for method in METHODS
    }


def _mean(rows: Sequence[Row], method: str, weight: float, what: str) -> float:
    """Over tasks or blocks, and seeds; NaN if there is none."""
    values = [row[what] for row in rows if row["method"] == method and row["lambda"] == weight]
    return sum(values) / len(values) if values else math.nan


def _statements(losses: Mapping[str, Mapping[float, float]], similarity: Sequence[Row]) -> list[Statement]:
    ncl, kfac, decoupled, reverse = (list(losses[method].values()) for method in METHODS)
    found = [
        _less("NCL at the least lambda ends lower than KFAC at it", ncl[0], kfac[0]),
        _less("KFAC does better at some larger lambda", min(kfac[1:]), kfac[0]),
        _less("so does decoupled KFAC", min(decoupled[1:]), decoupled[0]),
        _less("the best of reverse decoupled is worse than that of KFAC", min(kfac), min(reverse)),
        _less("and than that of decoupled KFAC", min(decoupled), min(reverse)),
    ]
    spread = [max(values) / min(values) for values in (ncl, kfac)]
    detail = f"highest over lowest {spread[0]:.2f} against {spread[1]:.2f}"
    found.append(Statement("NCL depends less on lambda than KFAC", spread[0] < spread[1], detail))
    if similarity:
        weights = list(losses["kfac"])
        ends = [_mean(similarity, "kfac", weight, "kl") for weight in (weights[0], weights[-1])]
        claim = "with lambda, Adam's preconditioner comes to resemble the prior's diagonal"
        found.append(Statement(claim, ends[1] < ends[0], f"scale-free KL a weight {ends[0]:.3f} -> {ends[1]:.3f}"))
    return found


def _less(claim: str, left: float, right: float) -> Statement:
    shown = ("diverged" if math.isinf(loss) else f"{loss:.3f}" for loss in (left, right))
    return Statement(claim, left < right, f"mean loss {' against '.join(shown)}")


def _draw(results: Results) -> Mapping[str, Figure]:
    losses, tables = _losses(results.tables), results.tables
    return {"lambda": _summary(losses, tables["preconditioner"]), "tasks": _courses(losses, tables["scores"])}


def _summary(losses: Mapping[str, Mapping[float, float]], similarity: Sequence[Row]) -> Figure:
    """The loss in the end by lambda, and how close Adam's preconditioner is to the prior's diagonal."""
    weights = list(losses["kfac"])
    with panels(1, 2, FULL_WIDTH, 7.0) as (figure, ((left, right),)):
        for i, (method, values) in enumerate(losses.items()):
            gaps = ", ".join(f"{w:g}" for w, loss in values.items() if math.isinf(loss))
            label = rf"{method} (diverges at $\lambda = {gaps}$)" if gaps else method
            shown = [math.nan if math.isinf(loss) else loss for loss in values.values()]
            left.plot(weights, shown, color=PALETTE[i], marker=MARKERS[i], label=label)
        loss_axis(left, [loss for values in losses.values() for loss in values.values() if math.isfinite(loss)])
        left.set(xscale="log", xlabel=r"$\lambda$", ylabel="mean loss after all tasks")
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=2, fontsize=7)
        for i, block in enumerate(sorted({row["block"] for row in similarity})):
            rows = [row for row in similarity if row["block"] == block]
            kls = [_mean(rows, "kfac", w, "kl") for w in weights]
            right.plot(weights, kls, color=PALETTE[i], marker=MARKERS[i], label=block)
        right.set(xscale="log", xlabel=r"$\lambda$", ylabel="scale-free KL (nats a weight)")
        right.legend(fontsize=7)
        left.set_title("performance")
        right.set_title("prior's diagonal and Adam's preconditioner")
        for name, panel in zip("AB", (left, right), strict=True):
            letter(panel, name)
    return figure


def _courses(losses: Mapping[str, Mapping[float, float]], scores: Sequence[Row]) -> Figure:
    """The loss on each task from when it was learnt on: a row for each method, a column for each lambda."""
    size = (len(losses), len(losses["kfac"]))
    with panels(*size, FULL_WIDTH, 16.0, sharex=True, sharey=True) as (figure, axes):
        for row, (method, values) in zip(axes, losses.items(), strict=True):
            for panel, (weight, loss) in zip(row, values.items(), strict=True):
                if math.isinf(loss):
                    panel.text(0.5, 0.5, "diverged", transform=panel.transAxes, ha="center", va="center", color="0.5")
                else:
                    loss_by_task(panel, [r for r in scores if r["method"] == method and r["lambda"] == weight])
                panel.label_outer()
            row[0].set_ylabel(f"{method}\nloss on each task")
        for panel, weight in zip(axes[0], losses["kfac"], strict=True):
            panel.set_title(rf"$\lambda = {weight:g}$")
        for panel in axes[-1]:
            panel.set_xlabel("tasks learnt")
        handles, labels = max((panel.get_legend_handles_labels() for panel in axes.flat), key=lambda pair: len(pair[1]))
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=7)
    return figure


RECIPE = Recipe(
    "lambda",
    "the weight of the prior: NCL against KFAC, decoupled and reverse decoupled; Adam's preconditioner",
    {
        "quick": {
            "weights": [1.0, 100.0],
            "seeds": 1,
            "steps": 2,
            "fisher_size": 32,
            "units": 8,
            "tasks": 2,
            "rates": {},
        },
        "laptop": {
            "weights": [1.0, 10.0, 100.0, 1000.0],
            "seeds": 1,
            "steps": 1000,
            "fisher_size": 2048,
            "units": 64,
            "tasks": None,
            # With so few steps NCL needs larger ones; Adam's are long enough.
            "rates": {"laplace-ncl": 3e-4},
        },
        "paper": {
            "weights": [1.0, 10.0, 100.0, 1000.0, 10_000.0],
            "seeds": 5,
            "steps": 31_250,
            "fisher_size": 2048,
            "units": 256,
            "tasks": None,
            "rates": {},
        },
    },
    _compute,
    _draw,
)
