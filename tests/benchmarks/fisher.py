"""The Fisher of 784-400-400-10 over 12,000 examples against a plain epoch and against other implementations."""

from __future__ import annotations

import resource
import subprocess
import sys
import warnings
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import nclbayes as ncl
from tests.benchmarks.timing import best_times, table

EXAMPLES, BATCH = 12_000, 256


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10))


class Classifier:
    """The same network with normal priors, as a Pyro model."""

    def __init__(self, net: nn.Sequential) -> None:
        self.priors = {
            name: dist.Normal(torch.zeros(p.shape), 1.0).to_event(p.dim()) for name, p in net.named_parameters()
        }

    def __call__(self, x: Tensor, y: Tensor) -> None:
        w = {name: pyro.sample(name, prior) for name, prior in self.priors.items()}
        h = F.relu(F.linear(x, w["0.weight"], w["0.bias"]))
        h = F.relu(F.linear(h, w["2.weight"], w["2.bias"]))
        pyro.sample("y", dist.Categorical(logits=F.linear(h, w["4.weight"], w["4.bias"])), obs=y)


def values(net: nn.Sequential) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in net.named_parameters()}


def batches(examples: int) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    x, y = torch.rand(examples, 784, generator=g), torch.randint(10, (examples,), generator=g)
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True))


def epoch(net: nn.Module, data: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in data:
        net.zero_grad()
        F.cross_entropy(net(x), y, reduction="sum").backward()


def fisher(model: Classifier, net: nn.Sequential, data: list[tuple[Tensor, Tensor]]) -> None:
    accumulator = ncl.FisherAccumulator(model, values(net))
    for batch in data:
        accumulator.update(batch)
    accumulator.factors()


def curvlinops(net: nn.Module, data: list[tuple[Tensor, Tensor]]) -> None:
    from curvlinops import KFACLinearOperator
    from curvlinops.kfac import FisherType

    operator = KFACLinearOperator(
        net,
        nn.CrossEntropyLoss(reduction="sum"),
        list(net.parameters()),
        data,
        fisher_type=FisherType.MC,
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    operator.compute_kronecker_factors()


def laplace_fit(net: nn.Module, data: list[tuple[Tensor, Tensor]], stochastic: bool) -> None:
    from laplace import Laplace

    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    fit = Laplace(
        net,
        "classification",
        subset_of_weights="all",
        hessian_structure="kron",
        backend_kwargs={"stochastic": stochastic},
    )
    fit.fit(DataLoader(TensorDataset(x, y), batch_size=BATCH))


def run(threads: str) -> str:
    net, data = network(), batches(EXAMPLES)
    model = Classifier(net)
    contestants: dict[str, Callable[[], object]] = {
        "plain forward + backward epoch": lambda: epoch(net, data),
        "nclbayes": lambda: fisher(model, net, data),
        "curvlinops KFAC (MC)": lambda: curvlinops(net, data),
    }
    absent = []
    try:
        import laplace  # noqa: F401
    except (ImportError, RuntimeError) as error:
        absent.append(f"laplace-torch was left out, as it could not be imported: {str(error).splitlines()[0]}\n")
    else:
        contestants["laplace-torch Kronecker fit (MC)"] = lambda: laplace_fit(net, data, True)
        contestants["laplace-torch Kronecker fit (default)"] = lambda: laplace_fit(net, data, False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        times = best_times(contestants, rounds=8)
    base, ours = times["plain forward + backward epoch"], times["nclbayes"]
    rows = [(name, threads, f"{t:.3f} s", f"{t / base:.2f}", f"{t / ours:.2f}") for name, t in times.items()]
    title = f"Fisher of 784-400-400-10 over {EXAMPLES:,} examples, batch {BATCH}"
    header = ("what", "threads", "best of 8", "times a plain epoch", "times nclbayes")
    return table(title, header, rows) + "".join(absent)


def run_memory() -> str:
    """Peak resident memory of a fresh process that sums the Fisher over so many examples, made batch by batch."""
    rows = []
    for examples in (3_000, 12_000, 48_000):
        command = [sys.executable, "-m", "tests.benchmarks.fisher", str(examples)]
        peak = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        rows.append((f"{examples:,}", f"{peak / 1024:.0f} MiB"))
    return table("Peak memory of the Fisher of 784-400-400-10", ("examples", "peak resident memory"), rows)


def _stream(examples: int) -> None:
    net = network()
    accumulator = ncl.FisherAccumulator(Classifier(net), values(net))
    g = torch.Generator().manual_seed(1)
    for _ in range(0, examples, BATCH):
        accumulator.update((torch.rand(BATCH, 784, generator=g), torch.randint(10, (BATCH,), generator=g)))
    accumulator.factors()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


if __name__ == "__main__":
    _stream(int(sys.argv[1]))
