"""What a second process gains: the Fisher, a step, and the sums of a network of 1024-2000-2000-100.

``python -m tests.benchmarks.ranks`` learns the same task with one process and with two, each with one thread, over gloo
on this machine.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import nclbayes as ncl
from nclbayes.engines.base import ENGINES, Outcome, Problem
from nclbayes.engines.curvature import add_fishers, task_fisher
from nclbayes.engines.laplace import LaplaceStepper
from nclbayes.engines.loop import History
from nclbayes.ranks import present
from tests.benchmarks.timing import table

WIDTHS = (1024, 2000, 2000, 100)
EXAMPLES, BATCH, STEPS = 5000, 256, 12
# One process and two take turns, so that both meet the machine as it is at its best.
TURNS, FISHERS = 3, 4


@dataclass(frozen=True, kw_only=True)
class Timed(ncl.LaplaceNCL):
    """Laplace-NCL that takes a few steps, and notes how long everything took at best."""

    def run(self, problem: Problem) -> Outcome:
        """Time steps, Fisher and sums."""
        stepper = LaplaceStepper(self, problem)
        batches = problem.task.batches(self.batch_size, problem.generator)
        taken = []
        for _ in range(STEPS):
            batch, moved, started = next(batches), problem.ranks.moved, time.perf_counter()
            stepper.step(batch, 1e-4)
            taken.append(time.perf_counter() - started)
            moved = problem.ranks.moved - moved
        seen = []
        for _ in range(FISHERS):
            started = time.perf_counter()
            fishers, _ = task_fisher(self, problem, stepper.values())
            seen.append(time.perf_counter() - started)
        started = time.perf_counter()
        after = add_fishers(problem, stepper.matrices(), fishers, self.kronecker_sum)
        added = time.perf_counter() - started
        FOUND.append({"step": min(taken), "Fisher": min(seen), "sums": added, "moved": moved})
        return Outcome(after, History([0.0], 0.0, 1, False, 0.0, 0))


FOUND: list[dict[str, float]] = []


def measure(rank: int, count: int, folder: str, widths: tuple[int, ...], examples: int) -> None:
    """Learn two tasks; the second is held by a precision, as all later ones are."""
    torch.set_num_threads(1)
    if count > 1:
        place = f"file://{folder}/meeting-{count}"
        timeout = datetime.timedelta(seconds=600)
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=count, timeout=timeout)
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for n, m in pairwise(widths):
        layers += [nn.Linear(n, m), nn.Tanh()]
    model = ncl.BayesianNetwork(nn.Sequential(*layers[:-1]), ncl.Categorical(), prior=ncl.priors.scaled(1.0))
    # Fixed settings: what "auto" measures now and then is no part of a step.
    engine = Timed(
        batch_size=BATCH, schedule=None, stiffness=None, enough=None, fisher_samples=1, likelihood_weight=1.0
    )
    posterior = ncl.OnlinePosterior(model, engine)
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(examples, widths[0], generator=draw), torch.randint(widths[-1], (examples,), generator=draw)
    for k in range(2):
        posterior.update(ncl.Task((x.roll(k, 0), y), name=str(k)), progress=False)
    if rank == 0:
        Path(folder, f"found-{count}").write_text(json.dumps(FOUND[-1]))
    if count > 1:
        dist.destroy_process_group()


def meet(rank: int, folder: str, times: int) -> None:
    """Meet the other process again and again."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    ranks = present()
    ranks.meet("the start")
    started = time.perf_counter()
    for _ in range(times):
        ranks.meet("again")
    if rank == 0:
        Path(folder, "seconds").write_text(str((time.perf_counter() - started) / times))
    dist.destroy_process_group()


def meeting_time(times: int = 2000) -> float:
    """What it takes two processes on this machine to meet."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=meet, args=(rank, folder, times)) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return float(Path(folder, "seconds").read_text())


def compared(widths: tuple[int, ...] = WIDTHS, examples: int = EXAMPLES) -> tuple[dict[str, float], dict[str, float]]:
    """How long it takes one process, and two."""
    context = multiprocessing.get_context("spawn")
    found: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as folder:
        for turn, count in product(range(TURNS), (1, 2)):
            place = Path(folder, str(turn))
            place.mkdir(exist_ok=True)
            arguments = [(rank, count, str(place), widths, examples) for rank in range(count)]
            processes = [context.Process(target=measure, args=own) for own in arguments]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            found[count].append(json.loads(Path(place, f"found-{count}").read_text()))
    one, two = ({what: min(run[what] for run in runs) for what in runs[0]} for runs in found.values())
    return one, two


def run() -> str:
    """The table."""
    one, two = compared()
    rows: list[tuple[object, ...]] = [
        (what, f"{1000 * one[what]:.0f} ms", f"{1000 * two[what]:.0f} ms", f"{one[what] / two[what]:.2f}")
        for what in ("Fisher", "step", "sums")
    ]
    weights = sum((n + 1) * m for n, m in pairwise(WIDTHS))
    rows.append(("bytes handed over a step", "", f"{two['moved']:.0f}", f"4 m n summed: {4 * weights}"))
    title = f"Two processes: {'-'.join(map(str, WIDTHS))}, {EXAMPLES} examples, batches of {BATCH}, one thread each"
    return table(title, ("what", "one process", "two", "times faster"), rows)


del ENGINES["Timed"]

if __name__ == "__main__":
    print(run())
