"""The paper's comparisons on recurrent networks: stimulus-response tasks and stroke MNIST."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nclbayes.analysis.drawing import PALETTE
from nclbayes.analysis.measures import mean_and_error
from nclbayes.analysis.record import Record
from nclbayes.experiments.comparison import run_folder
from nclbayes.experiments.config import RunConfig
from nclbayes.experiments.figures.panels import letter, loss_by_task, panels
from nclbayes.experiments.figures.recipe import Recipe, Results, Row, Settings, Statement, Workplace
from nclbayes.experiments.figures.scores import least_losses, score_rows
from nclbayes.experiments.setups import find_setup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NCL, LAPLACE_DOWM = "NCL", "Laplace-DOWM"
WEAK_KFAC = "KFAC, lambda = 1"
# A task is retained if its loss has grown by no more than this since it was learnt.
RETAINED = 1.5


def run_variants(name: str, settings: Settings, place: Workplace) -> dict[str, list[Record]]:
    """Run every variant of a comparison over the seeds.

    Args:
        name: The task set.
        settings: ``variants`` (by label: the method and what changes in its settings), ``seeds``, ``steps``,
            ``fisher_size``, ``units``, ``tasks`` and ``size``; ``shuffle``, if each seed has an order of its own.
        place: Where and how.

    Returns:
        The records of each variant, by label.
    """
    runs = []
    for label, variant in settings["variants"].items():
        changed = dict(variant.get("settings", {}))
        changed |= {"steps": settings["steps"], "fisher_size": settings["fisher_size"]}
        folder = place.out / "runs" / label.replace(" ", "-").replace(",", "")
        for seed in range(settings["seeds"]):
            config = RunConfig.of(
                name,
                variant["method"],
                seed=seed,
                settings=changed,
                units=settings["units"],
                tasks=settings["tasks"],
                size=settings["size"],
                paper=True,
                device=place.device,
                shuffle=settings.get("shuffle", False),
            )
            runs.append((config, run_folder(folder, config)))
    records = place.run_all(runs)
    seeds = settings["seeds"]
    return {label: records[i * seeds : (i + 1) * seeds] for i, label in enumerate(settings["variants"])}


def _tables(records: Mapping[str, Sequence[Record]], least: Sequence[Sequence[float]] = ()) -> dict[str, list[Row]]:
    """Every score of every run, and what is left of each task in the end; losses above the least of that seed."""
    scores: list[Row] = []
    final: list[Row] = []
    for label, runs in records.items():
        for seed, record in enumerate(runs):
            where = {"method": label, "seed": seed}
            rows = score_rows(record, least[seed] if least else ())
            scores += [{**where, **row} for row in rows]
            learnt = {row["number"]: row for row in rows if row["number"] == row["tasks learnt"]}
            for row in rows:
                if row["tasks learnt"] == len(record.scores):
                    then = learnt[row["number"]]
                    after = {"loss when learnt": then["loss"], "accuracy when learnt": then["accuracy"]}
                    final.append({**where, **row, **after})
    return {"scores": scores, "final": final}


def _worst_ratio(final: Sequence[Row], label: str) -> float:
    """The largest loss in the end relative to that right after learning, over tasks, averaged over seeds."""
    ratios: dict[int, float] = {}
    for row in final:
        if row["method"] == label:
            ratios[row["seed"]] = max(ratios.get(row["seed"], 0.0), row["loss"] / row["loss when learnt"])
    return sum(ratios.values()) / len(ratios)


def _average(rows: Sequence[Row], label: str, what: str) -> tuple[float, float]:
    """Mean and standard error over seeds of the mean over tasks."""
    seeds = sorted({row["seed"] for row in rows if row["method"] == label})
    means = []
    for seed in seeds:
        values = [row[what] for row in rows if row["method"] == label and row["seed"] == seed]
        means.append(sum(values) / len(values))
    mean, error, _ = mean_and_error(means)
    return mean, 0.0 if error != error else error


def _stimulus_response(settings: Settings, place: Workplace) -> Results:
    records = run_variants("stimulus-response", settings, place)
    setup = find_setup("stimulus-response")
    least = [least_losses(setup.make_tasks("", seed, 1)[: settings["tasks"]]) for seed in range(settings["seeds"])]
    tables = _tables(records, least)
    statements = []
    labels = list(settings["variants"])
    if NCL in labels:
        worst = _worst_ratio(tables["final"], NCL)
        claim = f"NCL retains every task: its loss grows by no more than {RETAINED - 1:.0%}"
        statements.append(Statement(claim, worst <= RETAINED, f"at most {worst:.2f} times the loss when learnt"))
    if WEAK_KFAC in labels:
        worst = _worst_ratio(tables["final"], WEAK_KFAC)
        claim = "KFAC with lambda = 1 forgets"
        statements.append(Statement(claim, worst > RETAINED, f"up to {worst:.2f} times the loss when learnt"))
    statements += _best(tables["final"], labels, "loss")
    return Results(tables, statements, {"shown": "loss"})


def _stroke_mnist(settings: Settings, place: Workplace) -> Results:
    tables = _tables(run_variants("stroke-mnist", settings, place))
    for row in tables["final"]:
        row["error"] = 1 - row["accuracy"]  # type: ignore[index]
    labels = list(settings["variants"])
    statements = _best(tables["final"], labels, "error")
    if NCL in labels and LAPLACE_DOWM in labels:
        gap = _gap(tables["final"], "error")
        late = [value for number, value in gap.items() if number > len(gap) // 2]
        mean = sum(late) / len(late)
        claim = "on the later tasks Laplace-DOWM makes more errors than NCL"
        orders = "order" if settings["seeds"] == 1 else "orders"
        detail = f"{100 * mean:+.1f} points over the second half of the tasks, in {settings['seeds']} {orders} of them"
        statements.append(Statement(claim, mean > 0, detail))
    return Results(tables, statements, {"shown": "error"})


def _best(final: Sequence[Row], labels: Sequence[str], what: str) -> list[Statement]:
    """NCL against every other continual method."""
    if NCL not in labels:
        return []
    own, _ = _average(final, NCL, what)
    found = []
    for label in labels:
        if label not in (NCL, LAPLACE_DOWM):
            other, _ = _average(final, label, what)
            claim = f"NCL ends with a lower mean {what} than {label}"
            found.append(Statement(claim, own < other, f"{own:.3f} against {other:.3f}"))
    return found


def _gap(final: Sequence[Row], what: str) -> dict[int, float]:
    """By the task's number, how much more Laplace-DOWM has than NCL."""
    gaps = {}
    for number in sorted({row["number"] for row in final}):
        rows = [row for row in final if row["number"] == number]
        gaps[number] = _average(rows, LAPLACE_DOWM, what)[0] - _average(rows, NCL, what)[0]
    return gaps


def _draw(results: Results) -> Mapping[str, Figure]:
    final, scores, what = results.tables["final"], results.tables["scores"], results.facts["shown"]
    labels = list(dict.fromkeys(row["method"] for row in final))
    shown = [label for label in labels if label in (NCL, WEAK_KFAC)] or labels[:2]
    with_gap = NCL in labels and LAPLACE_DOWM in labels
    count = 1 + len(shown) + with_gap
    with panels(1, count, 6.0 * count, 6.0) as (figure, (axes,)):
        _bars(axes[0], final, labels, what)
        for panel, label in zip(axes[1:], shown, strict=False):
            loss_by_task(panel, [row for row in scores if row["method"] == label])
            panel.set(ylabel="loss on each task", title=label)
        # One legend, where there is most room: the colours are the same in all panels.
        if len({row["number"] for row in scores}) <= 6:
            axes[1].legend(fontsize=6, ncols=2)
        if with_gap:
            gaps = _gap(final, what)
            axes[-1].axhline(0.0, color="0.6", linewidth=0.8)
            axes[-1].plot(list(gaps), list(gaps.values()), "o-", color=PALETTE[1])
            axes[-1].set_xlabel("task number")
            axes[-1].set_ylabel(f"{what}: Laplace-DOWM - NCL")
        for name, panel in zip("ABCDEF", axes, strict=False):
            letter(panel, name)
    return {"comparison": figure}


def _bars(axes: Any, final: Sequence[Row], labels: Sequence[str], what: str) -> None:
    found = [_average(final, label, what) for label in labels]
    colours = [PALETTE[0] if label == NCL else "0.75" for label in labels]
    places = range(len(labels))
    axes.barh(places, [mean for mean, _ in found], xerr=[error for _, error in found], color=colours, height=0.7)
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.set_xlabel(f"mean {what} after all tasks")


_STIMULUS_VARIANTS: dict[str, Any] = {
    NCL: {"method": "laplace-ncl"},
    LAPLACE_DOWM: {"method": "laplace-dowm"},
    "DOWM": {"method": "dowm", "settings": {"alpha": 1e-2}},
    "OWM": {"method": "owm", "settings": {"alpha": 1e-3}},
    "KFAC, lambda = 100": {"method": "kfac", "settings": {"prior_weight": 100.0}},
    WEAK_KFAC: {"method": "kfac", "settings": {"prior_weight": 1.0}},
}
# A tenth of the paper's trials, twice its learning rate: with five times, NCL learns more of each task and forgets it.
# Adam's steps are long enough.
_STIMULUS_LAPTOP: dict[str, Any] = {
    label: variant
    if variant["method"] == "kfac"
    else {**variant, "settings": {**variant.get("settings", {}), "lr": 2e-4}}
    for label, variant in _STIMULUS_VARIANTS.items()
}
_COMMON = {"tasks": None, "size": None, "fisher_size": 2048}

STIMULUS_RESPONSE = Recipe(
    "stimulus-response",
    "six tasks of cognitive neuroscience: what each method retains",
    {
        "quick": {
            **_COMMON,
            "variants": {NCL: _STIMULUS_VARIANTS[NCL], WEAK_KFAC: _STIMULUS_VARIANTS[WEAK_KFAC]},
            "seeds": 1,
            "steps": 2,
            "fisher_size": 32,
            "units": 8,
            "tasks": 2,
        },
        "laptop": {**_COMMON, "variants": _STIMULUS_LAPTOP, "seeds": 1, "steps": 3000, "units": 64},
        "paper": {**_COMMON, "variants": _STIMULUS_VARIANTS, "seeds": 5, "steps": 31_250, "units": 256},
    },
    _stimulus_response,
    _draw,
)

# Seeds have orders of their own, as what depends on a task's number would otherwise depend on the task.
_STROKES = {**_COMMON, "variants": _STIMULUS_VARIANTS, "units": 30, "shuffle": True}
STROKE_MNIST = Recipe(
    "stroke-mnist",
    "fifteen tasks of pen strokes: the error of each method, and by task number",
    {
        "quick": {
            "variants": {NCL: {"method": "laplace-ncl"}, LAPLACE_DOWM: _STIMULUS_VARIANTS[LAPLACE_DOWM]},
            "seeds": 1,
            "steps": 5,
            "fisher_size": 100,
            "units": 12,
            "tasks": 3,
            "size": 200,
            "shuffle": True,
        },
        "laptop": {**_STROKES, "seeds": 1, "steps": 700},
        "paper": {**_STROKES, "seeds": 20, "steps": 3906},
    },
    _stroke_mnist,
    _draw,
)
