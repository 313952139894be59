r"""The paper's schematic: the paths of three methods from one toy loss to another, and the losses along them.

Both panels start at the optimum of l_1 and learn task 2: by gradient descent on the Laplace posterior, by gradient
descent on l_2 preconditioned with the curvature of l_1 (projection), and by NCL. The engine itself learns the convex
problem too, as two regressions.

The paper has zeta = 5.5 and does not give the angles, nor the well of its nonconvex loss. At zeta = 5.5 the loss on
task 1 along Laplace's path rises above its final value by about a hundredth at most, whatever the angles; by default
zeta is 55 here, with angles of 20 and 160 degrees, where the detour is there to be seen. ``zeta`` and ``angles`` are
settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyro.distributions as dist
import torch
from torch import Tensor, nn

from nclbayes.analysis.drawing import PALETTE
from nclbayes.engines import PAPER, LaplaceNCL, Progress
from nclbayes.experiments.figures.panels import FULL_WIDTH, letter, panels
from nclbayes.experiments.figures.recipe import Recipe, Results, Row, Settings, Statement, Workplace
from nclbayes.nn import BayesianNetwork, Normal
from nclbayes.posterior import OnlinePosterior
from nclbayes.tasks.toy import ToyProblem, toy_convex, toy_nonconvex

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PRIOR_SCALE = 1e3  # so wide that it hardly counts
_KEPT = 60  # steps kept of each decade
_LOOKS: dict[str, dict[str, Any]] = {
    "laplace": {"color": PALETTE[2], "linewidth": 1.6, "label": "Laplace"},
    "projected": {"color": PALETTE[3], "linewidth": 1.6, "label": "projected"},
    "ncl": {"color": "black", "linestyle": (0, (4, 2)), "linewidth": 1.3, "label": "NCL"},
}
_DOTS: dict[str, Any] = {"color": "black", "marker": "o", "markersize": 3.2, "markerfacecolor": "white"}
_DOTS |= {"linestyle": "none", "label": "NCL, the engine"}
_STARS = (PALETTE[1], PALETTE[0], PALETTE[4])  # of l_1, l_2 and their sum
_LOSSES = (r"$\ell_1$", r"$\ell_2$", r"$\ell_1 + \ell_2$")


def problems(settings: Mapping[str, Any]) -> dict[str, ToyProblem]:
    """The convex and the nonconvex problem.

    Args:
        settings: With ``zeta`` and ``angles``.

    Returns:
        The problems by name.
    """
    given: dict[str, Any] = {"zeta": settings["zeta"], "angles": tuple(settings["angles"])}
    return {"convex": toy_convex(**given), "nonconvex": toy_nonconvex(**given)}


def engine_path(problem: ToyProblem, rate: float, steps: int) -> Tensor:
    """Where Laplace-NCL goes on task 2, after it has learnt task 1 from random weights.

    Args:
        problem: The convex problem.
        rate: The learning rate, as in :meth:`~nclbayes.tasks.toy.ToyProblem.paths`.
        steps: How many points, of which the optimum of task 1 as it was learnt is the first.

    Returns:
        [steps, 2].
    """
    prior = dist.Normal(torch.tensor(0.0, device="cpu"), torch.tensor(_PRIOR_SCALE, device="cpu"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        linear = nn.Linear(2, 1, bias=False, device="cpu", dtype=torch.float64)
    first, second = problem.tasks()
    settings: dict[str, Any] = {**PAPER, "batch_size": 2, "fisher": "exact"}
    # Rate and momentum with which gradient descent on l_1 converges fastest; lr is for the mean over two examples.
    low, high = torch.linalg.eigvalsh(problem.Q_1).sqrt().tolist()
    rate_1, momentum = (2 / (high + low)) ** 2, ((high - low) / (high + low)) ** 2
    engine = LaplaceNCL(steps=200, lr=2 * rate_1, momentum=momentum, **settings)
    posterior = OnlinePosterior(BayesianNetwork(linear, Normal(1.0), prior), engine)
    posterior.update(first, progress=False)
    points = [posterior.mean()["weight"].squeeze(0).clone()]

    def keep(progress: Progress) -> None:
        points.append(progress.values()["weight"].squeeze(0).clone())

    # A step on the bracket is lr tau / N, with tau the prior's precision and N = 2.
    engine = LaplaceNCL(steps=steps - 1, lr=rate * 2 * _PRIOR_SCALE**2, momentum=0.0, **settings)
    posterior.update(second, engine=engine, progress=False, callbacks=[keep])
    return torch.stack(points)


def compute(settings: Settings, place: Workplace) -> Results:
    """Follow the paths.

    Args:
        settings: ``zeta`` and ``angles`` of the problems; ``rate``, as a part of the highest stable one; ``steps`` of
            the paths and ``engine_steps`` of the engine's.
        place: Unused but for its `say`.

    Returns:
        The points of each path with the losses there, at steps that are spread evenly over the logarithm.
    """
    rows: list[Row] = []
    statements: list[Statement] = []
    facts: dict[str, Any] = {"problem": {"zeta": settings["zeta"], "angles": list(settings["angles"])}}
    for name, problem in problems(settings).items():
        place.say(f"{settings['steps']} steps on the {name} problem")
        rate = settings["rate"] * problem.highest_rate()
        paths = problem.paths(rate, settings["steps"])
        for method, path in paths.items():
            rows += _kept(name, method, problem, path)
        statements += _statements(name, problem, paths)
        if problem.convex:
            place.say("the engine on the convex problem")
            path = engine_path(problem, rate, settings["engine_steps"])
            apart = (path - paths["ncl"][: len(path)]).norm(dim=-1).max()
            facts["largest distance between the engine's path and NCL's"] = float(apart)
            rows += _kept(name, "engine", problem, path)
    return Results({"paths": rows}, statements, facts)


def draw(results: Results) -> dict[str, Figure]:
    """The landscapes with the paths, and the losses along them.

    Args:
        results: Those of :func:`compute`.

    Returns:
        The pictures "landscapes" and "losses".
    """
    paths: dict[str, dict[str, list[Row]]] = {}
    for row in results.tables["paths"]:
        paths.setdefault(row["problem"], {}).setdefault(row["method"], []).append(row)
    return {"landscapes": _landscapes(problems(results.facts["problem"]), paths), "losses": _losses(paths)}


_PROBLEM = {"zeta": 55.0, "angles": [20.0, 160.0]}
RECIPE = Recipe(
    name="toy",
    summary="the schematic: paths of Laplace, projection and NCL on two toy problems",
    scales={
        # The problem is the same: there are more steps, each of them smaller.
        "quick": {**_PROBLEM, "rate": 0.49, "steps": 20_000, "engine_steps": 200},
        "laptop": {**_PROBLEM, "rate": 0.1, "steps": 200_000, "engine_steps": 3000},
        "paper": {**_PROBLEM, "rate": 0.05, "steps": 600_000, "engine_steps": 6000},
    },
    compute=compute,
    draw=draw,
)


def _kept(name: str, method: str, problem: ToyProblem, path: Tensor) -> list[Row]:
    """The rows of a path at steps that are spread evenly over the logarithm."""
    last = len(path) - 1
    spread = np.geomspace(1, last, int(_KEPT * np.log10(last)) + 1) if last > 0 else np.zeros(1)
    chosen = np.unique([0, *spread.round().astype(int)]).tolist()
    points = path[chosen]
    l_1, l_2 = problem.losses(points)
    return [
        {"problem": name, "method": method, "step": step, "theta_1": x, "theta_2": y, "loss_1": a, "loss_2": b}
        for step, (x, y), a, b in zip(chosen, points.tolist(), l_1.tolist(), l_2.tolist(), strict=True)
    ]


def _statements(name: str, problem: ToyProblem, paths: Mapping[str, Tensor]) -> list[Statement]:
    """What the caption says of each method on one of the problems."""
    optima = problem.optima()
    first = {method: problem.losses(path)[0] for method, path in paths.items()}
    highest = {method: float(losses.max()) for method, losses in first.items()}
    last = {method: float(losses[-1]) for method, losses in first.items()}
    way = float((optima[0] - problem.theta_1).norm())
    ends = {
        method: int((path[-1] - optima).norm(dim=-1).argmin())
        for method, path in paths.items()
        if float((path[-1] - optima).norm(dim=-1).min()) < 0.01 * way
    }
    ncl = Statement(
        f"{name}: NCL comes to an optimum of the sum with good performance on task 1 throughout",
        ends.get("ncl") == 0 and highest["ncl"] <= 1.01 * last["ncl"],
        f"ends at {_written(paths['ncl'][-1])}, the optimum is {_written(optima[0])}; "
        f"the loss on task 1 is at most {highest['ncl']:.4g}, at the end {last['ncl']:.4g}",
    )
    if problem.convex:
        laplace = Statement(
            "convex: Laplace comes to the same optimum, but transiently forgets task 1",
            ends.get("laplace") == ends.get("ncl") == 0 and highest["laplace"] > 1.5 * last["laplace"],
            f"the loss on task 1 rises to {highest['laplace']:.4g} and falls to {last['laplace']:.4g}",
        )
    else:
        laplace = Statement(
            "nonconvex: Laplace converges to a local optimum that has forgotten task 1",
            len(optima) > 1 and ends.get("laplace", 0) > 0 and last["laplace"] > 3 * last["ncl"],
            f"ends at {_written(paths['laplace'][-1])} with a loss of {last['laplace']:.4g} on task 1; NCL's is "
            f"{last['ncl']:.4g}",
        )
    # Together until NCL is halfway, as seen from there.
    halfway = int(((paths["ncl"] - problem.theta_1).norm(dim=-1) < way / 2).sum())
    apart = float((paths["ncl"] - paths["projected"])[:halfway].norm(dim=-1).max())
    minima = problem.optima_2()
    distances = (paths["projected"][-1] - minima).norm(dim=-1)
    nearest = minima[int(distances.argmin())]
    left = float(distances.min() / (problem.theta_1 - nearest).norm())
    projected = Statement(
        f"{name}: projection takes a path like NCL's at first, and ends in a minimum of task 2's loss",
        apart < 0.1 * way and left < 0.1 and last["projected"] > 10 * last["ncl"],
        f"until NCL is halfway they are at most {apart:.3g} apart, of {way:.3g} to the optimum; at the end "
        f"{100 * left:.2g} % of the way to {_written(nearest)} is left, and the loss on task 1 is "
        f"{last['projected']:.4g}",
    )
    return [laplace, ncl, projected]


def _written(point: Tensor) -> str:
    return "({:.2f}, {:.2f})".format(*point.tolist())


def _landscapes(found: Mapping[str, ToyProblem], paths: Mapping[str, Mapping[str, list[Row]]]) -> Figure:
    xs, ys = torch.linspace(-3, 21, 161, dtype=torch.float64), torch.linspace(-9, 9, 121, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(xs, ys, indexing="xy"), dim=-1)
    with panels(2, 3, FULL_WIDTH, 11.0, sharex=True, sharey=True) as (figure, axes):
        for row, (name, problem) in zip(axes, found.items(), strict=True):
            l_1, l_2 = problem.losses(grid)
            for panel, loss, title in zip(row, (l_1, l_2, l_1 + l_2), _LOSSES, strict=True):
                _contours(panel, xs, ys, loss)
                for method, look in _LOOKS.items():
                    _path(panel, paths[name][method], look)
                panel.set(title=f"{title}, {name}", aspect="equal", xticks=range(0, 21, 5), yticks=(-5, 0, 5))
                for optima, colour in zip(_optima(problem), _STARS, strict=True):
                    for k, optimum in enumerate(optima.tolist()):
                        panel.plot(*optimum, **_star(colour, hollow=k > 0), zorder=4 + k)
            row[0].set_ylabel(r"$\theta_2$")
            if "engine" in paths[name]:
                _path(row[2], _evenly(paths[name]["engine"]), _DOTS)
        for panel in axes[1]:
            panel.set_xlabel(r"$\theta_1$")
        for row, text in zip(axes, "AB", strict=True):
            letter(row[0], text, left=1.1)
        _landscapes_legend(figure, axes[0, 2])
    return figure


def _landscapes_legend(figure: Figure, panel: Axes) -> None:
    from matplotlib.lines import Line2D

    handles, labels = panel.get_legend_handles_labels()
    handles += [Line2D([], [], **_star(colour)) for colour in _STARS] + [Line2D([], [], **_star("0.4", hollow=True))]
    labels += [f"optimum of {loss}" for loss in _LOSSES] + ["further local optimum"]
    # A legend is filled column by column; here each row is of one kind.
    order = [index for pair in zip(range(4), range(4, 8), strict=True) for index in pair]
    figure.legend([handles[i] for i in order], [labels[i] for i in order], loc="outside lower center", ncols=4)


def _optima(problem: ToyProblem) -> tuple[Tensor, Tensor, Tensor]:
    """The optima of l_1, of l_2 and of their sum, the lowest of each first."""
    return problem.theta_1.unsqueeze(0), problem.optima_2(), problem.optima()


def _star(colour: str, hollow: bool = False) -> dict[str, Any]:
    edge, inside = (colour, "white") if hollow else ("black", colour)
    return {"marker": "*", "linestyle": "none", "markersize": 8.5, "markeredgecolor": edge, "markerfacecolor": inside}


def _contours(panel: Axes, xs: Tensor, ys: Tensor, loss: Tensor) -> None:
    """A landscape in pale greys; levels grow as squares, so that a quadratic's lines are evenly apart."""
    low, high = float(loss.min()), float(loss.max())
    levels = low + (high - low) * np.linspace(0, 1, 17) ** 2
    panel.contourf(xs, ys, loss, levels=levels, cmap="Greys", vmin=low, vmax=low + 1.8 * (high - low))
    panel.contour(xs, ys, loss, levels=levels[1:], colors="0.7", linewidths=0.3)


def _path(panel: Axes, rows: list[Row], look: Mapping[str, Any]) -> None:
    panel.plot([row["theta_1"] for row in rows], [row["theta_2"] for row in rows], **look)


def _evenly(rows: list[Row], count: int = 9) -> list[Row]:
    """Some of a path's rows, about evenly apart along it."""
    points = np.array([(row["theta_1"], row["theta_2"]) for row in rows])
    covered = np.concatenate([[0.0], np.linalg.norm(np.diff(points, axis=0), axis=1).cumsum()])
    return [rows[i] for i in np.unique(np.searchsorted(covered, np.linspace(0, covered[-1], count)))]


def _steps_axis(panel: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(100))
    panel.xaxis.set_minor_locator(NullLocator())
    # The usual powers of ten have exponents too small to read.
    panel.xaxis.set_major_formatter("{x:,.0f}")


def _losses(paths: Mapping[str, Mapping[str, list[Row]]]) -> Figure:
    with panels(3, 2, 14.0, 12.0, sharex="col") as (figure, axes):
        for column, (name, methods) in enumerate(paths.items()):
            for row, title in enumerate(_LOSSES):
                panel = axes[row, column]
                for method, look in {**_LOOKS, "engine": _DOTS}.items():
                    kept = methods.get(method, [])[:: 12 if method == "engine" else 1]
                    if kept and row == 0:
                        kept = kept[1:]  # where l_1 = 0 has no logarithm
                    if kept:
                        values = [(at["loss_1"], at["loss_2"], at["loss_1"] + at["loss_2"])[row] for at in kept]
                        # The start is drawn at half a step: a logarithm has no zero.
                        panel.plot([at["step"] or 0.5 for at in kept], values, **look)
                _steps_axis(panel)
                panel.grid(axis="y")
                if column == 0:
                    panel.set_ylabel(f"{title} (nats)")
            # What the methods forget differs by factors.
            axes[0, column].set(title=name, yscale="log", ylim=(5, 8000))
            axes[0, column].yaxis.set_major_formatter("{x:g}")
            axes[-1, column].set_xlabel("optimization step")
            letter(axes[0, column], "AB"[column], left=1.3)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure
