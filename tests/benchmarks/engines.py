"""Steps of the engines on 784-400-400-10 against plain torch, and predictions against a loop over samples."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import nclbayes as ncl
from nclbayes.engines import PAPER
from nclbayes.gaussians.gradients import RowGradient
from tests.benchmarks.fisher import BATCH, EXAMPLES, batches, network
from tests.benchmarks.timing import best_times, table

STEPS = 60


def task() -> ncl.Task:
    x, y = (torch.cat(parts) for parts in zip(*batches(EXAMPLES), strict=True))
    return ncl.Task((x, y), name="random")


def plain_steps(
    net: nn.Module, data: list[tuple[Tensor, Tensor]], inverses: list[tuple[Tensor, Tensor]], steps: int = STEPS
) -> None:
    """Forward, backward, and the bare two-sided products of the same shapes."""
    for i in range(steps):
        x, y = data[i % len(data)]
        net.zero_grad()
        F.cross_entropy(net(x), y).backward()
        for (left, right), layer in zip(inverses, (net[0], net[2], net[4]), strict=True):  # type: ignore[index]
            g = torch.cat([layer.weight.grad, layer.bias.grad.unsqueeze(-1)], -1)
            _ = left @ g @ right


class BareLikelihood:
    """The same log likelihood, and the rows of its gradient, by torch alone: without Pyro, and without watching."""

    def __init__(self, states: dict[str, object]) -> None:
        self.names = {state.block.weight: name for name, state in states.items()}  # type: ignore[attr-defined]

    def __call__(self, batch: tuple[Tensor, Tensor], leaves: dict[str, Tensor]) -> tuple[float, dict[str, object], int]:
        x, y = batch
        inputs, outputs = [x], []
        with torch.enable_grad():
            for layer in ("0", "2", "4"):
                outputs.append(F.linear(inputs[-1], leaves[f"{layer}.weight"], leaves[f"{layer}.bias"]))
                inputs.append(F.relu(outputs[-1]))
            value = -F.cross_entropy(outputs[-1], y, reduction="sum")
        # The last layer is narrow: its gradient is multiplied out.
        *rows, weight, bias = torch.autograd.grad(value, [*outputs[:-1], leaves["4.weight"], leaves["4.bias"]])
        found: dict[str, object] = {self.names["4.weight"]: torch.cat([weight, bias.unsqueeze(-1)], -1)}
        for layer, z, g in zip(("0", "2"), inputs, rows, strict=False):
            found[self.names[f"{layer}.weight"]] = RowGradient(((z.detach(), g, True),))
        return float(value.detach()), found, len(y)


def steps_only(
    engine: ncl.engines.Engine, posterior: ncl.OnlinePosterior, t: ncl.Task, bare: bool = False
) -> Callable[[], object]:
    """An engine's steps without what it does once for each task; with `bare`, without Pyro."""
    from nclbayes.engines.laplace import LaplaceStepper
    from nclbayes.engines.loop import run_loop
    from nclbayes.engines.variational import VariationalStepper

    problems: list[object] = []

    class Catch(type(engine)):  # type: ignore[misc]
        def run(self, problem: object) -> object:
            problems.append(problem)
            raise KeyboardInterrupt

    catcher = Catch(**engine.to_dict())
    try:
        posterior.update(t, engine=catcher)
    except KeyboardInterrupt:
        pass
    problem = problems[0]
    if isinstance(engine, ncl.LaplaceNCL):
        stepper: object = LaplaceStepper(engine, problem)  # type: ignore[arg-type]
        if bare:
            stepper._likelihood = BareLikelihood(problem.states)  # type: ignore[attr-defined]
    else:
        stepper = VariationalStepper(engine, problem)  # type: ignore[arg-type]
    return lambda: run_loop(stepper, engine, replace(problem, progress=False))  # type: ignore[arg-type,type-var]


def run(threads: str) -> str:
    net, data, t = network(), batches(EXAMPLES)[:40], task()
    model = ncl.BayesianNetwork(net, ncl.Categorical(), prior=dist.Normal(0.0, 1.0))
    laplace = ncl.LaplaceNCL(**PAPER, steps=STEPS, batch_size=BATCH, lr=1e-4)
    variational = ncl.VariationalNCL(**PAPER, steps=STEPS, batch_size=BATCH, lr=1e-4, refresh_every=10_000)
    posterior = ncl.OnlinePosterior(model, laplace)
    posterior.update(t, progress=False)
    inverses = [(torch.eye(m), torch.eye(n)) for m, n in ((400, 785), (400, 401), (10, 401))]
    times = best_times(
        {
            "plain step + bare products": lambda: plain_steps(net, data, inverses),
            "Laplace-NCL step": steps_only(laplace, posterior, t),
            "variational NCL step, one particle": steps_only(variational, posterior, t),
            "Laplace-NCL step without Pyro": steps_only(laplace, posterior, t, bare=True),
        },
        rounds=4,
    )
    base = times["plain step + bare products"]
    rows = [(name, threads, f"{1e3 * s / STEPS:.2f} ms", f"{s / base:.2f}") for name, s in times.items()]
    ratio = times["variational NCL step, one particle"] / times["Laplace-NCL step"]
    pyro_share = 1 - times["Laplace-NCL step without Pyro"] / times["Laplace-NCL step"]
    title = (
        f"Engine steps on 784-400-400-10, batch {BATCH} (variational / Laplace: {ratio:.2f}; "
        f"Pyro's share of a Laplace step: {pyro_share:.0%})"
    )
    return (
        table(title, ("what", "threads", "a step", "times plain"), rows) + "\n" + predictions(posterior, net, threads)
    )


def run_wide(threads: str) -> str:
    """A network so wide that a batch has few rows: the size of the paper's for CIFAR-100."""
    steps, g = 5, torch.Generator().manual_seed(1)
    x, y = torch.rand(2 * BATCH, 1024, generator=g), torch.randint(10, (2 * BATCH,), generator=g)
    layers = [nn.Linear(1024, 2000), nn.ReLU(), nn.Linear(2000, 2000), nn.ReLU(), nn.Linear(2000, 10)]
    net, t = nn.Sequential(*layers), ncl.Task((x, y), name="random")
    engine = ncl.LaplaceNCL(**PAPER, steps=steps, batch_size=BATCH, lr=1e-4)
    posterior = ncl.OnlinePosterior(ncl.BayesianNetwork(net, ncl.Categorical(), prior=dist.Normal(0.0, 1.0)), engine)
    posterior.update(t, progress=False)
    inverses = [(torch.eye(m), torch.eye(n)) for m, n in ((2000, 1025), (2000, 2001), (10, 2001))]
    data = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    times = best_times(
        {
            "plain step + bare products": lambda: plain_steps(net, data, inverses, steps),
            "Laplace-NCL step": steps_only(engine, posterior, t),
        },
        rounds=3,
    )
    base = times["plain step + bare products"]
    rows = [(name, threads, f"{1e3 * s / steps:.0f} ms", f"{s / base:.2f}") for name, s in times.items()]
    return table(
        f"Engine steps on 1024-2000-2000-10, batch {BATCH}", ("what", "threads", "a step", "times plain"), rows
    )


def run_deciding(threads: str, steps: int = 1000) -> str:
    """Whole updates by a second task of engines that decide themselves, against fixed settings; all take all steps."""
    t, rows = task(), []
    for kind in (ncl.LaplaceNCL, ncl.VariationalNCL):
        given: dict[str, Any] = {"steps": steps, "batch_size": BATCH, "kronecker_sum": "additive"}
        engines = {"fixed": kind(**PAPER, **given), "deciding": kind(**given, enough=None, fisher_samples=1)}
        updates: dict[str, Callable[[], object]] = {}
        for name, engine in engines.items():
            first = ncl.OnlinePosterior(ncl.BayesianNetwork(network(), ncl.Categorical()), replace(engine, steps=5))
            first.update(t, progress=False)
            updates[name] = partial(lambda p, e: deepcopy(p).update(t, engine=e, progress=False), first, engine)
        times = best_times(updates, rounds=2)
        ratio = times["deciding"] / times["fixed"]
        rows.append((kind.__name__, threads, *(f"{times[name]:.1f} s" for name in engines), f"{ratio:.2f}"))
    title = f"Updates of {steps} steps on 784-400-400-10, batch {BATCH}"
    return table(title, ("engine", "threads", "fixed settings", "deciding itself", "ratio"), rows)


def predictions(posterior: ncl.OnlinePosterior, net: nn.Module, threads: str) -> str:
    x = batches(1000)[0][0]

    def loop() -> Tensor:
        draws = posterior.sample(32)
        with torch.no_grad():
            outs = [functional_call(net, {k: v[i] for k, v in draws.items()}, (x,)).softmax(-1) for i in range(32)]
        return torch.stack(outs).mean(0)

    def plain() -> Tensor:
        with torch.no_grad():
            return net(x)

    ways = ("mean", "linearized", "probit", "last-layer")
    asked = {f"predict(method='{way}')": lambda way=way: posterior.predict(x, method=way) for way in ways}
    samples = {"loop over 32 samples": loop, "predict(num_samples=32)": lambda: posterior.predict(x, num_samples=32)}
    times = best_times({"plain forward pass": plain, **asked, **samples}, rounds=4)
    base, of_loop = times["plain forward pass"], times["loop over 32 samples"]
    rows = [(name, threads, f"{1e3 * s:.1f} ms", f"{s / base:.1f}", f"{s / of_loop:.2f}") for name, s in times.items()]
    title = "Predictions for 256 inputs"
    return table(title, ("what", "threads", "time", "times a plain pass", "times the loop"), rows)


def run_recurrent(threads: str) -> str:
    """256 units, 100 steps, batch 32: a Laplace-NCL step against a plain loop with its backward pass."""
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core, self.out = ncl.nn.RNN(11, 256, leak=0.2), nn.Linear(256, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.core(x))

    net = Net()
    x, y = torch.randn(320, 100, 11), torch.randn(320, 100, 3)
    t = ncl.Task((x, y), name="noise")
    model = ncl.BayesianNetwork(net, ncl.Normal(1.0), prior=dist.Normal(0.0, 1.0))
    engine = ncl.LaplaceNCL(**PAPER, steps=10, batch_size=32, lr=1e-5)
    posterior = ncl.OnlinePosterior(model, engine)
    posterior.update(t, progress=False)
    products = [(torch.eye(256), torch.eye(267)), (torch.eye(3), torch.eye(256))]
    weights = [net.core.weight, net.out.weight]

    def plain() -> None:
        for i in range(10):
            r, outs = torch.zeros(32, 256), []
            for step in range(100):
                h = F.linear(torch.cat([r, x[32 * i : 32 * i + 32, step]], -1), net.core.weight)
                r = 0.8 * r + 0.2 * F.relu(h)
                outs.append(r)
            loss = (net.out(torch.stack(outs, 1)) - y[32 * i : 32 * i + 32]).square().sum() / 2
            for (left, right), g in zip(products, torch.autograd.grad(loss, weights), strict=True):
                _ = left @ g @ right

    times = best_times({"plain loop": plain, "Laplace-NCL": steps_only(engine, posterior, t)}, rounds=4)
    rows = [(n, threads, f"{10 / s:.1f}", f"{s / times['plain loop']:.2f}") for n, s in times.items()]
    return table("RNN: 256 units, 100 time steps, batch 32", ("what", "threads", "steps a second", "times plain"), rows)
