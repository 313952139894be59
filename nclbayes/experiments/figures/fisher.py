"""The paper's comparison of projection matrices: the exact Fisher of a linear recurrent network against four others.

The network is h_t = W z_t + xi_t with z_t = (r_{t-1}; x_t), r_t = h_t, and a readout C r_t, of which the outputs are
Normal with covariance I, Normal with a covariance that is not diagonal ("rotated"), or class labels. Its exact Fishers
for W and for C are computed from Jacobians and averaged over random sequences of inputs x and process noise xi.
Without the noise, W has directions that change no output, and its Fisher is singular.

The approximations are KFAC as the engines use it, the diagonal, and what the projections of DOWM and OWM imply. Scales
do not count: each matrix is scaled to a mean diagonal of 1. Then the same small damping is added to all, because the
exact Fisher of C is singular for class labels (adding a number to all logits changes nothing).

The divergence is KL_s[exact || approximation], with the mean over randomly rotated exact Fishers as the reference; the
table has the other direction too. How the approximations rank depends on the process noise: with a standard deviation
of 0.5 or 1, KFAC is closest for W in both directions; with 0.1 or none, it is still closest in the other direction, but
the diagonal is about as close or closer in this one.

The paper gives neither the sizes nor the weights of its network, nor its noise: here the recurrent weights are half an
orthogonal matrix, input and readout weights are normal, and several networks are drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nclbayes.analysis.drawing import PALETTE
from nclbayes.analysis.fishers import damped, dowm_factors, owm_factors, random_rotation
from nclbayes.experiments.figures.fisher_network import LIKELIHOODS, Network
from nclbayes.experiments.figures.panels import FULL_WIDTH, empty_figure
from nclbayes.experiments.figures.recipe import Recipe, Results, Row, Settings, Statement, Workplace
from nclbayes.kronecker import scale_free_kl
from nclbayes.kronecker.blockdiagonal import whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

APPROXIMATIONS = {"kfac": "KFAC", "diagonal": "diagonal", "dowm": "DOWM", "owm": "OWM"}
_ROTATED = "rotated"
_COLOURS, _LINE = (PALETTE[0], PALETTE[5], PALETTE[2], PALETTE[3]), PALETTE[1]


def compute(settings: Settings, place: Workplace) -> Results:
    """Compare the approximations for every network, likelihood and weight matrix.

    Args:
        settings: ``units``, ``inputs``, ``outputs`` of each of so many ``networks``; so many ``sequences`` of so many
            ``steps``; ``process_noise``, the standard deviation of xi; ``alpha`` of OWM and DOWM; ``damping``; how many
            ``rotations``; the ``seed``.
        place: Unused but for its `say`.

    Returns:
        The divergences, and the matrices of the first network.
    """
    generator = torch.Generator(device="cpu").manual_seed(settings["seed"])
    rows: list[Row] = []
    facts: dict[str, Any] = {"rotations": settings["rotations"], "damping": settings["damping"], "matrices": {}}
    for index in range(settings["networks"]):
        place.say(f"network {index + 1} of {settings['networks']}")
        network = Network.drawn(settings, generator)
        for likelihood in LIKELIHOODS:
            exact, kfac = network.exact(likelihood), network.kfac(likelihood)
            for site, weight in (("W", network.rnn.W), ("C", network.rnn.C)):
                key = {"network": index, "likelihood": likelihood, "weights": site}
                moment = network.second_moment(site)
                factors = {
                    "kfac": (whole(kfac[site].input), whole(kfac[site].output)),
                    "dowm": dowm_factors(moment, weight, settings["alpha"]),
                    "owm": owm_factors(moment, len(weight), settings["alpha"]),
                }
                rows += _compared(key, _dense(exact[site], factors), settings, generator)
                if index == 0:
                    kept = facts["matrices"].setdefault(likelihood, {}).setdefault(site, {})
                    kept["exact"] = _stored(exact[site])
                    kept["factors"] = {name: [_stored(A), _stored(G)] for name, (A, G) in factors.items()}
    return Results({"divergences": rows}, _statements(rows), facts)


def draw(results: Results) -> dict[str, Figure]:
    """For each likelihood, the matrices and the divergences, of W above and of C below.

    Args:
        results: Those of :func:`compute`.

    Returns:
        A picture for each of :data:`LIKELIHOODS`.
    """
    return {f"fisher-{likelihood}": _picture(likelihood, results) for likelihood in LIKELIHOODS}


_SETTINGS = {"process_noise": 0.5, "alpha": 1e-3, "damping": 1e-3, "seed": 0}
RECIPE = Recipe(
    name="fisher",
    summary="the exact Fisher of a linear recurrent network against KFAC, diagonal, OWM and DOWM",
    scales={
        "quick": {
            **{"units": 5, "inputs": 2, "outputs": 3, "networks": 2},
            **{"sequences": 64, "steps": 8, "rotations": 5},
            **_SETTINGS,
        },
        "laptop": {
            **{"units": 10, "inputs": 4, "outputs": 4, "networks": 5},
            **{"sequences": 500, "steps": 20, "rotations": 100},
            **_SETTINGS,
        },
        "paper": {
            **{"units": 10, "inputs": 4, "outputs": 4, "networks": 10},
            **{"sequences": 5000, "steps": 20, "rotations": 500},
            **_SETTINGS,
        },
    },
    compute=compute,
    draw=draw,
)


def _compared(key: Row, matrices: Mapping[str, Tensor], settings: Settings, generator: torch.Generator) -> list[Row]:
    """The divergence of each approximation from the exact Fisher, and the mean over random rotations."""
    scaled = {name: damped(matrix, settings["damping"]) for name, matrix in matrices.items()}
    exact = scaled.pop("exact")
    exact = (exact + exact.mT) / 2
    rows: list[Row] = []
    for name, matrix in scaled.items():
        rows.append({**key, "approximation": name, **_both_ways(exact, matrix)})
    turned = []
    for _ in range(settings["rotations"]):
        R = random_rotation(len(exact), generator)
        turned.append(_both_ways(exact, R @ exact @ R.mT))
    means = {name: sum(row[name] for row in turned) / len(turned) for name in turned[0]}
    return [*rows, {**key, "approximation": _ROTATED, **means}]


def _both_ways(exact: Tensor, matrix: Tensor) -> dict[str, float]:
    matrix = (matrix + matrix.mT) / 2
    return {"kl": float(scale_free_kl(exact, matrix)), "reverse_kl": float(scale_free_kl(matrix, exact))}


def _dense(exact: Tensor, factors: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The exact Fisher and its approximations, in the order in which they are shown."""
    whole = {"exact": exact, "diagonal": exact.diagonal().diag()}
    whole |= {name: torch.kron(A, G) for name, (A, G) in factors.items()}
    return {name: whole[name] for name in ("exact", *APPROXIMATIONS)}


def _stored(matrix: Tensor) -> list[list[float]]:
    """A matrix of mean diagonal 1 with four digits: enough for a picture."""
    return [[float(f"{value:.4g}") for value in row] for row in (matrix / matrix.diagonal().mean()).tolist()]


def _shown(kept: Mapping[str, Any]) -> dict[str, Tensor]:
    """The matrices of a picture, of mean diagonal 1, from what was stored of them."""
    factors = {name: (torch.tensor(A).double(), torch.tensor(G).double()) for name, (A, G) in kept["factors"].items()}
    matrices = _dense(torch.tensor(kept["exact"]).double(), factors)
    return {name: damped(matrix, 0.0) for name, matrix in matrices.items()}


def _of(rows: Sequence[Row], likelihood: str, site: str, name: str, measure: str = "kl") -> list[float]:
    """The divergences of an approximation, one a network."""
    wanted = (likelihood, site, name)
    return [row[measure] for row in rows if (row["likelihood"], row["weights"], row["approximation"]) == wanted]


def _statements(rows: Sequence[Row]) -> list[Statement]:
    statements = []
    for likelihood, title in LIKELIHOODS.items():
        for measure, direction in (("kl", "from the exact Fisher"), ("reverse_kl", "to the exact Fisher")):
            found = {name: _of(rows, likelihood, "W", name, measure) for name in [*APPROXIMATIONS, _ROTATED]}
            means = ", ".join(f"{name} {sum(values) / len(values):.1f}" for name, values in found.items())
            best = [min(APPROXIMATIONS, key=lambda name: found[name][k]) == "kfac" for k in range(len(found["kfac"]))]
            statements.append(
                Statement(
                    f"{title} outputs: of the approximations for W, KFAC has the lowest scale-free KL {direction}",
                    all(best),
                    f"in {sum(best)} of {len(best)} networks; means in nats: {means}",
                )
            )
        within = [
            max(_of(rows, likelihood, "W", name)[k] for name in ("owm", "dowm"))
            < _of(rows, likelihood, "W", _ROTATED)[k]
            for k in range(len(_of(rows, likelihood, "W", _ROTATED)))
        ]
        statements.append(
            Statement(
                f"{title} outputs: OWM and DOWM approximate the Fisher of W better than random rotations of it do",
                all(within),
                f"in {sum(within)} of {len(within)} networks",
            )
        )
    return statements


def _picture(likelihood: str, results: Results) -> Figure:
    rows, names = results.tables["divergences"], {"exact": "exact Fisher", **APPROXIMATIONS}
    with empty_figure(FULL_WIDTH, 8.0) as figure:
        parts: Any = figure.subfigures(1, 2, width_ratios=[3.4, 1])
        left, right = parts
        images, bars = left.subplots(2, len(names)), right.subplots(2, 1, sharex=True)
        for line, panel, (site, kept) in zip(images, bars, results.facts["matrices"][likelihood].items(), strict=True):
            matrices = _shown(kept)
            for cell, (name, matrix) in zip(line, matrices.items(), strict=True):
                image = cell.imshow(matrix.numpy(), cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
                cell.set(xticks=[], yticks=[])
                cell.spines[:].set_visible(True)
                if site == "W":
                    cell.set_title(names[name])
            line[0].set_ylabel(f"{site}: {len(matrices['exact'])} weights")
            panel.set_title(site)
            _bars(panel, [_of(rows, likelihood, site, name) for name in [*APPROXIMATIONS, _ROTATED]])
        scale = {"location": "bottom", "shrink": 0.4, "aspect": 30, "ticks": [-1, 0, 1], "extend": "both"}
        left.colorbar(image, ax=images, label="entry, in units of the mean diagonal entry", **scale)
        left.suptitle(f"{LIKELIHOODS[likelihood]} outputs", fontsize=8)
        for part, text in ((left, "A"), (right, "B")):
            part.text(0.005, 0.99, text, weight="bold", va="top")
    return figure


def _bars(panel: Axes, values: Sequence[Sequence[float]]) -> None:
    """The mean divergence of each approximation, each network as a dot, and the line of random rotations."""
    for k, (own, colour) in enumerate(zip(values[:-1], _COLOURS, strict=True)):
        panel.bar(k, sum(own) / len(own), width=0.7, color=colour)
        if len(own) > 1:
            panel.plot([k] * len(own), own, "o", color="0.2", markersize=2, markeredgewidth=0)
    reference = sum(values[-1]) / len(values[-1])
    highest = max(reference, *(value for own in values[:-1] for value in own))
    panel.axhline(reference, color=_LINE, linestyle="--")
    panel.text(1, 1.06 * highest, "random rotations", transform=panel.get_yaxis_transform(), ha="right", color=_LINE)
    panel.set_xticks(
        range(len(APPROXIMATIONS)), list(APPROXIMATIONS.values()), rotation=45, ha="right", rotation_mode="anchor"
    )
    panel.tick_params(axis="x", length=0)
    panel.set(ylabel="scale-free KL (nats)", ylim=(0, 1.2 * highest))
