"""Streams: what is retained where nobody says when a task ends, against being told and against other methods."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nclbayes.analysis.drawing import PALETTE
from nclbayes.analysis.measures import mean_and_error
from nclbayes.analysis.record import Record
from nclbayes.analysis.stream_plots import draw_odds, draw_scores
from nclbayes.experiments.comparison import ComparisonError
from nclbayes.experiments.config import RunConfig
from nclbayes.experiments.figures.panels import letter, panels
from nclbayes.experiments.figures.recipe import Recipe, Results, Row, Settings, Statement, Workplace
from nclbayes.experiments.runs import prepared
from nclbayes.experiments.streaming import found_boundaries, stream_of
from nclbayes.stream import Changed, Judged, StreamSettings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TUNED_ON = "hard"
_EVIDENCE = ("judged", "changes", "boundaries")
_FOUND, _TOLD = "laplace-ncl, found", "laplace-ncl, told"


def _compute(settings: Settings, place: Workplace) -> Results:
    tuning = [row for way in settings["ways"] for row in _tuned(way, settings, place)]
    best = {way["way"]: _best(way["way"], tuning) for way in settings["ways"]}
    accuracy: list[Row] = []
    boundaries: list[Row] = []
    facts: dict[str, Any] = {}
    for kind in settings["kinds"]:
        runs = [
            (way["way"], seed, _run(kind, way, way["candidates"][best[way["way"]]], seed, settings, place))
            for way in settings["ways"]
            # Where nothing changes there is nothing to be told.
            if kind != "unchanged" or way["boundaries"] == "found"
            for seed in settings["seeds"]
        ]
        folders = [place.out / "runs" / kind / name / f"{best[name]}" / f"seed-{seed}" for name, seed, _ in runs]
        records = place.run_all(list(zip([config for *_, config in runs], folders, strict=True)))
        for (name, seed, config), record in zip(runs, records, strict=True):
            accuracy.append(_row(kind, name, seed, record))
            if config.boundaries == "found":
                boundaries.append(_found(kind, name, seed, config, record))
                facts.setdefault("evidence", {name: record.about[name] for name in _EVIDENCE})
    tables = {"tuning": tuning, "accuracy": accuracy, "boundaries": boundaries}
    return Results(tables, _statements(settings, accuracy, boundaries), facts)


def _tuned(way: Settings, settings: Settings, place: Workplace) -> list[Row]:
    """The candidates of a way of learning, on the seed that they are chosen by."""
    candidates = way["candidates"]
    if len(candidates) == 1:
        return [{"way": way["way"], "candidate": 0, "is": _shown(candidates[0]), "accuracy": None}]
    shortened = {**settings, **way["tuned_on"]}
    runs = [
        (
            _run(_TUNED_ON, way, candidate, settings["tuning_seed"], shortened, place),
            place.out / "tuning" / way["way"] / f"{k}",
        )
        for k, candidate in enumerate(candidates)
    ]
    records: list[Record | None]
    try:
        records = [*place.run_all(runs)]
    except ComparisonError as error:
        # Candidates with which learning diverges are not chosen.
        if not error.is_divergence:
            raise
        records = [next((record for done, record in error.done if done == config), None) for config, _ in runs]
    return [
        {
            "way": way["way"],
            "candidate": k,
            "is": _shown(candidate),
            "accuracy": None if record is None else _average(record),
        }
        for k, (candidate, record) in enumerate(zip(candidates, records, strict=True))
    ]


def _best(way: str, tuning: Sequence[Row]) -> int:
    own = [row for row in tuning if row["way"] == way]
    return int(max(own, key=lambda row: row["accuracy"] or 0.0)["candidate"])


def _run(
    kind: str, way: Settings, candidate: Mapping[str, Any], seed: int, settings: Settings, place: Workplace
) -> RunConfig:
    chosen = dict(candidate)
    boundaries, scale = str(chosen.pop("boundaries", way["boundaries"])), chosen.pop("prior_scale", None)
    steps = settings["unchanged_steps" if kind == "unchanged" else "steps"]
    return RunConfig.of(
        settings["set"],
        way["method"],
        settings["scenario"],
        seed,
        prior_scale=scale,
        settings={"steps": steps, "batch_size": settings["batch_size"], **chosen},
        tasks=settings["tasks"],
        units=settings["units"],
        device=place.device,
        stream=kind,
        boundaries=boundaries,
    )


def _row(kind: str, way: str, seed: int, record: Record) -> Row:
    return {
        "stream": kind,
        "way": way,
        "seed": seed,
        "accuracy": _average(record),
        "forgetting": 100 * record.forgetting,
        "seconds": sum(record.seconds),
        **{f"after {k + 1}": 100 * sum(s.accuracy for s in row[: k + 1]) / (k + 1) for k, row in _rows(record)},
    }


def _rows(record: Record) -> list[tuple[int, Any]]:
    return list(enumerate(record.scores))


def _average(record: Record) -> float:
    return 100 * record.average_accuracy


def _found(kind: str, way: str, seed: int, config: RunConfig, record: Record) -> Row:
    _, tasks, _ = prepared(config)
    source = stream_of(config, tasks)
    found = found_boundaries(source, [Changed(**change) for change in record.about["changes"]])
    return {
        "stream": kind,
        "way": way,
        "seed": seed,
        "boundaries": len(source.boundaries),
        "found": len(found.delays),
        "missed": found.missed,
        "false alarms": found.false,
        "batches late, mean": sum(found.delays) / len(found.delays) if found.delays else None,
        "batches late, most": max(found.delays, default=None),
        "batches": len(source),
    }


def _statements(settings: Settings, accuracy: Sequence[Row], boundaries: Sequence[Row]) -> list[Statement]:
    found = list[Statement]()
    names = [way["way"] for way in settings["ways"]]
    for kind in dict.fromkeys(row["stream"] for row in accuracy if row["stream"] != "unchanged"):
        means = {name: mean_and_error(_of(accuracy, kind, name))[0] for name in names}
        if {_FOUND, _TOLD} <= set(names):
            claim = f"{kind}: within a point of being told"
            detail = f"{means[_FOUND]:.2f} % found, {means[_TOLD]:.2f} % told"
            found.append(Statement(claim, means[_FOUND] >= means[_TOLD] - 1, detail))
        for name in names:
            if name not in (_FOUND, _TOLD) and _FOUND in names:
                detail = f"{means[_FOUND]:.2f} % against {means[name]:.2f} %"
                found.append(Statement(f"{kind}: ahead of {name}", means[_FOUND] > means[name], detail))
    for row in boundaries:
        where = f"{row['stream']}, {row['way']}, seed {row['seed']}"
        detail = (
            f"{row['found']} of {row['boundaries']}, {row['false alarms']} false alarms in {row['batches']} batches"
        )
        holds = row["missed"] == 0 and row["false alarms"] <= (1 if row["stream"] == "unchanged" else 0)
        found.append(Statement(f"{where}: every boundary is found, and no other", holds, detail))
    return found


def _of(rows: Sequence[Row], kind: str, way: str) -> list[float]:
    return [row["accuracy"] for row in rows if (row["stream"], row["way"]) == (kind, way)]


def _shown(candidate: Mapping[str, Any]) -> str:
    return json.dumps(candidate) if candidate else "defaults"


def _draw(results: Results) -> Mapping[str, Figure]:
    rows = results.tables["accuracy"]
    kinds = [kind for kind in dict.fromkeys(row["stream"] for row in rows) if kind != "unchanged"]
    ways = list(dict.fromkeys(row["way"] for row in rows))
    with panels(1, len(kinds) + 1, 5.5 * (len(kinds) + 1), 8.0, width_ratios=[1] * len(kinds) + [1.3]) as drawn:
        figure, (axes,) = drawn
        for panel, kind in zip(axes, kinds, strict=False):
            points = [mean_and_error(_of(rows, kind, way)) for way in ways]
            errors = [0.0 if point[1] != point[1] else point[1] for point in points]
            colours = [PALETTE[k % len(PALETTE)] for k in range(len(ways))]
            panel.barh(range(len(ways)), [point[0] for point in points], xerr=errors, color=colours, height=0.7)
            for k, point in enumerate(points):
                panel.text(2, k, f"{point[0]:.1f}", va="center", fontsize=7, color="white")
            panel.set(title=kind, xlim=(0, 100), xlabel="accuracy in the end (%)")
            panel.set_yticks(range(len(ways)), ways if panel is axes[0] else [""] * len(ways))
            panel.invert_yaxis()
        for k, way in enumerate(ways):
            own = [row for row in rows if row["stream"] == kinds[0] and row["way"] == way]
            count = sum(name.startswith("after ") for name in own[0])
            means = [mean_and_error([row[f"after {i + 1}"] for row in own])[0] for i in range(count)]
            axes[-1].plot(range(1, count + 1), means, color=PALETTE[k % len(PALETTE)], marker=".", label=way)
        axes[-1].set(xlabel="tasks that have come", ylabel="accuracy on them (%)", title=kinds[0])
        axes[-1].xaxis.get_major_locator().set_params(integer=True)
        axes[-1].legend(fontsize=6)
        for name, panel in zip("ABCDEFGH", axes, strict=False):
            letter(panel, name)
    facts = results.facts.get("evidence")
    return {"streams": figure, **({"evidence": _drawn_evidence(facts)} if facts else {})}


def _drawn_evidence(facts: Mapping[str, Any]) -> Figure:
    judged, changes = [Judged(*each) for each in facts["judged"]], [Changed(**each) for each in facts["changes"]]
    with panels(2, 1, 14.0, 8.0, sharex=True) as (figure, rows):
        scores, odds = (row[0] for row in rows)
        draw_scores(scores, judged, changes, facts["boundaries"])
        draw_odds(odds, judged, changes, StreamSettings().false_alarm_every, facts["boundaries"])
        scores.legend(fontsize=7, loc="lower right")
    return figure


def _way(method: str, boundaries: str, *candidates: Mapping[str, Any], **tuned_on: Any) -> dict[str, Any]:
    name = f"{method}, {boundaries}" if boundaries != "none" else method
    candidates = candidates or ({},)
    return {
        "way": name,
        "method": method,
        "boundaries": boundaries,
        "candidates": list(candidates),
        # Settings of the scale that are others while candidates are compared.
        "tuned_on": tuned_on,
    }


_OURS = (_way("laplace-ncl", "found"), _way("laplace-ncl", "told"))
# Lengths that do not happen to be those of the tasks.
_EVERY = tuple({"boundaries": length} for length in (100, 150, 200, 300, 400, 600, 1000, 1500))


# As many candidates for each method that needs no boundaries.
_BGD = tuple({"init_scale": scale, "lr": eta} for scale in (0.02, 0.04, 0.06, 0.08) for eta in (1.0, 3.0))
_FOOVB = tuple({"init_scale": scale, "lr": eta} for scale in (0.3, 0.6, 1.0, 1.5) for eta in (0.5, 1.0))
_IVON = tuple(
    {"lr": lr, "hess_init": h, "second_momentum": 0.99999} for lr in (0.003, 0.01, 0.03, 0.1) for h in (0.3, 3.0)
)
_WITHOUT = (
    _way("bgd", "none", *_BGD),
    _way("ivon", "none", *_IVON),
    # Singular values of a map 784 wide at each step, a quarter of an hour a run of 100 units: tuned on three tasks.
    _way("foo-vb", "none", *_FOOVB, tasks=3),
)


def _scale(**changes: Any) -> dict[str, Any]:
    every = {**_way("laplace-ncl", "every", *_EVERY), "boundaries": "300"}
    usual: dict[str, Any] = {
        "set": "permuted-mnist",
        "scenario": None,
        "kinds": ["hard", "blurred", "recurring", "unchanged"],
        "ways": [*_OURS, every, *_WITHOUT],
        "tasks": 10,
        "units": 100,
        "steps": 469,
        # With so many batches for each of ten tasks.
        "unchanged_steps": 1000,
        "batch_size": 128,
        "tuning_seed": 0,
        "seeds": [1, 2, 3],
    }
    return usual | changes


RECIPE = Recipe(
    "streams",
    "a stream of tasks whose boundaries nobody tells, against being told and against methods without boundaries",
    {
        "quick": _scale(
            set="split-digits",
            scenario="domain",
            kinds=["hard"],
            ways=list(_OURS),
            tasks=2,
            units=20,
            steps=60,
            batch_size=16,
            seeds=[1],
        ),
        "laptop": _scale(),
        "paper": _scale(units=400, steps=1000, seeds=[1, 2, 3, 4, 5]),
    },
    _compute,
    _draw,
)
