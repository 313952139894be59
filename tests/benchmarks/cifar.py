"""Why the last tasks of split CIFAR-100 are hardly learnt with the paper's prior, on a small copy of the problem.

``python -m tests.benchmarks.cifar --out results`` (after ``nclbayes data pretrain-cifar``) learns the ten tasks of the
domain scenario with each of `VARIANTS`, one line of ``results/runs.jsonl`` each; the same call goes on with those that
are not there yet, and prints the table. ``--units``, ``--steps`` and ``--seed`` say how small.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import nclbayes as ncl
from nclbayes.experiments import RunConfig
from nclbayes.experiments.runs import prepared
from nclbayes.methods import find_method
from tests.benchmarks.timing import table

WIDE, FIXED = 44.72, {"lr": 0.05, "momentum": 0.9, "batch_size": 256}


@dataclass(frozen=True)
class Variant:
    """One change of the paper's setting.

    Attributes:
        scale: The prior's standard deviation; None: the engine decides how firmly to hold on.
        settings: Of the engine, besides.
        features: The features are multiplied by this.
        head: What the last layer learnt is multiplied by this before the next task.
        steps: How many times the usual number of steps.
        alone: Whether each task is learnt by a new network.
    """

    scale: float | None = WIDE
    settings: dict[str, Any] = field(default_factory=dict)
    features: float = 1.0
    head: float = 1.0
    steps: int = 1
    alone: bool = False


VARIANTS: dict[str, Variant] = {
    "paper": Variant(),
    "each task alone": Variant(alone=True),
    "rule kl": Variant(settings={"kronecker_sum": "kl"}),
    "rule bound": Variant(settings={"kronecker_sum": "bound"}),
    "head begins anew": Variant(head=0.0),
    "four times the steps": Variant(steps=4),
    "features / 10": Variant(features=0.1),
    "Fisher / 100": Variant(settings={"likelihood_weight": 0.01}),
    "scale 5": Variant(scale=5.0),
    "scale 1": Variant(scale=1.0),
    "scale 0.3": Variant(scale=0.3),
    "defaults": Variant(scale=None),
}


def run(variant: Variant, units: int, steps: int, seed: int) -> dict[str, Any]:
    """Learn the ten tasks.

    Returns:
        By task: its loss before its first step, the share of that gradient that the preconditioner lets through, its
        accuracy right after it was learnt, and in the end.
    """
    settings = {**variant.settings, "steps": steps * variant.steps}
    paper = variant.scale is not None
    if paper:
        settings = {**FIXED, **settings}
    config = RunConfig.of(
        "split-cifar100",
        "laplace-ncl",
        "domain",
        seed,
        prior_scale=variant.scale,
        settings=settings,
        paper=paper,
        units=units,
    )
    _, tasks, model = prepared(config)
    tasks = [_scaled(task, variant.features) for task in tasks]
    posterior, found, started = _learner(config, model), list[dict[str, float]](), time.perf_counter()
    for k, task in enumerate(tasks):
        if k and variant.alone:
            posterior = _learner(config, model)
        if k and not variant.alone:
            _shrink_head(posterior, variant.head)
        before = _before(posterior, task) if posterior.tasks else {}
        report = posterior.update(task, progress=False)
        (score,) = ncl.evaluate(posterior, task)
        found.append({**before, "learnt": 100 * score.accuracy, "loss after": _mean(report.losses[-20:])})
    if not variant.alone:
        for row, score in zip(found, ncl.evaluate(posterior, tasks), strict=True):
            row["end"] = 100 * score.accuracy
    return {"tasks": found, "minutes": (time.perf_counter() - started) / 60}


def _learner(config: RunConfig, model: Any) -> ncl.OnlinePosterior:
    generator = torch.Generator().manual_seed(config.seed)
    return find_method(config.method).build(model, config.settings, generator)


def _scaled(task: ncl.Task, factor: float) -> ncl.Task:
    (x, y), (x_test, y_test) = task.train, task.test
    return ncl.Task((x * factor, y), (x_test * factor, y_test), name=task.name, context=task.context)


def _shrink_head(posterior: ncl.OnlinePosterior, factor: float) -> None:
    """Multiply the mean of the last layer."""
    belief = posterior._belief
    name = list(belief.states)[-1]
    state = belief.states[name]
    posterior._belief = replace(belief, states={**belief.states, name: state.moved(state.loc * factor)})


def _before(posterior: ncl.OnlinePosterior, task: ncl.Task) -> dict[str, float]:
    """The loss of a task before it is learnt, and <g, P g> / <g, g> of its gradient g with P = tau Lambda^-1."""
    belief = posterior._belief
    x, y = task.train
    sites = {site: value.detach().requires_grad_() for site, value in belief.mean().items()}
    loss = -_log_likelihood(posterior, sites, x[:2000], y[:2000])
    gradients = dict(zip(sites, torch.autograd.grad(loss, list(sites.values())), strict=True))
    through, whole = 0.0, 0.0
    for state in belief.states.values():
        g = state.block.pack(gradients).double()
        tau = torch.tensor(state.log_scale, dtype=torch.float64).exp()
        precision = state.whole().precision
        through += float((g * tau * precision.solve(g)).sum())
        whole += float(g.square().sum())
    return {"loss before": loss.item(), "let through": through / whole}


def _log_likelihood(posterior: ncl.OnlinePosterior, sites: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The mean log likelihood of a network with the given weights."""
    network = posterior.model.network
    logits = torch.func.functional_call(network, sites, (x,))
    return torch.distributions.Categorical(logits=logits).log_prob(y).mean()


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else float("nan")


def shown(runs: dict[str, dict[str, Any]]) -> str:
    """The table: means over the last five tasks, where it goes wrong, and over all in the end."""
    rows = list[tuple[object, ...]]()
    for name, result in runs.items():
        late = result["tasks"][5:]
        cells = [f"{_mean([row[what] for row in late if what in row]):{form}}" for what, form in COLUMNS.items()]
        end = [row["end"] for row in result["tasks"] if "end" in row]
        rows.append((name, *cells, f"{_mean(end):.1f}", f"{result['minutes']:.1f}"))
    return table("The last five tasks in the mean", ("variant", *COLUMNS, "all in the end", "minutes"), rows)


COLUMNS = {"loss before": ".2f", "let through": ".1e", "loss after": ".2f", "learnt": ".1f"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--units", type=int, default=300)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    told = parser.parse_args()
    told.out.mkdir(parents=True, exist_ok=True)
    path = told.out / "runs.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    size = {"units": told.units, "steps": told.steps, "seed": told.seed}
    done = {line["variant"]: line["result"] for line in lines if line["size"] == size}
    for name in told.variants:
        if name not in done:
            done[name] = run(VARIANTS[name], **size)
            line = {"variant": name, "size": size, "is": asdict(VARIANTS[name]), "result": done[name]}
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(shown({name: done[name]}), flush=True)
    print(shown(done))


if __name__ == "__main__":
    main()
