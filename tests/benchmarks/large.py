"""What large sides cost: the Fisher and the sums of published networks, with factors in blocks and with whole ones.

``python -m tests.benchmarks.large`` needs the extra ``zoo``. For each network it times a plain epoch, the Fisher of as
many examples, and the addition of that Fisher to the prior with its factorisation, in a process of its own for each
structure; and it states the peak of memory and the size of the file. Each step of an engine is followed by a plain one,
and is given as a ratio to it: of Laplace-NCL's on a first task, where nothing is held yet, and of both engines' on a
later one. What it takes variational NCL to form a new Gaussian, which it does every 50 steps, stands by itself.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import nclbayes as ncl
from nclbayes import FisherAccumulator
from nclbayes.engines import PAPER
from tests.benchmarks.operators import declare_operators
from tests.benchmarks.timing import table

Made = tuple[nn.Module, Any, torch.Tensor]

STEPS = 24


def resnet(examples: int) -> Made:
    import timm

    net = timm.create_model("resnet10t", num_classes=10).eval()
    return net, torch.randn(examples, 3, 32, 32), torch.randint(10, (examples,))


def bert(examples: int) -> Made:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    config = BertConfig(**sizes, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    words = torch.randint(5, 30_000, (examples, 64))
    inputs = {"input_ids": words, "attention_mask": torch.ones(examples, 64, dtype=torch.long)}
    return BertForSequenceClassification(config), inputs, torch.randint(2, (examples,))


def head(examples: int) -> Made:
    return nn.Linear(64, 30_000), torch.randn(examples, 64), torch.randint(30_000, (examples,))


NETWORKS: dict[str, tuple[Callable[[int], Made], int]] = {
    "ResNet-10t": (resnet, 16),
    "BERT-small": (bert, 16),
    "Linear(64, 30000)": (head, 64),
}


def part(inputs: Any, index: slice) -> Any:
    return {name: value[index] for name, value in inputs.items()} if isinstance(inputs, dict) else inputs[index]


def plain_steps(net: nn.Module, slices: list[slice], inputs: Any, targets: torch.Tensor) -> Callable[[], float]:
    """Takes a step of plain training, with momentum; returns its seconds."""
    optimiser = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=1e-4, momentum=0.9)
    taken = 0

    def step() -> float:
        nonlocal taken
        index = slices[taken % len(slices)]
        taken += 1
        started = time.process_time()
        optimiser.zero_grad()
        x = part(inputs, index)
        out = net(**x) if isinstance(x, dict) else net(x)
        F.cross_entropy(getattr(out, "logits", out), targets[index]).backward()
        optimiser.step()
        return time.process_time() - started

    return step


def steps(posterior: ncl.OnlinePosterior, engine: Any, task: ncl.Task, plain: Callable[[], float]) -> dict[str, float]:
    """A step as a ratio to the plain one after it, without those that form a new Gaussian; and what these add."""
    took: list[float] = []
    plainly: list[float] = []
    ended = time.process_time()

    def after(_: Any) -> None:
        nonlocal ended
        took.append(time.process_time() - ended)
        plainly.append(plain())
        ended = time.process_time()

    posterior.update(task, engine=engine, progress=False, callbacks=[after])
    anew = {k - 1 for k in (1, 2, 4, 8, 16)}
    usual = [k for k in range(STEPS) if k not in anew]
    step = sum(took[k] for k in usual) / len(usual)
    refresh = statistics.median(took[k] for k in anew - {0}) - step
    return {"step": step * len(usual) / sum(plainly[k] for k in usual), "refresh": refresh}


def measure(name: str, structure: str, examples: int) -> dict[str, float]:
    """One network with one structure: seconds, and bytes."""
    declare_operators()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    make, batch = NETWORKS[name]
    net, inputs, targets = make(examples)
    slices = [slice(i, i + batch) for i in range(0, examples, batch)]
    found: dict[str, float] = {}
    model = ncl.BayesianNetwork(net, ncl.Categorical())
    few = part(inputs, slice(0, 2 * batch))
    data: Any = {**few, "labels": targets[: 2 * batch]} if isinstance(few, dict) else (few, targets[: 2 * batch])
    task = ncl.Task(data, name="a few", target="labels" if isinstance(few, dict) else None)
    engine = ncl.LaplaceNCL(steps=1, batch_size=batch, fisher_samples=1)
    kept: Any = int(structure) if structure.isdecimal() else structure
    posterior = ncl.OnlinePosterior(model, engine, example=task, structure=kept)
    blocks = {key: state.block for key, state in posterior.blocks.items()}
    accumulator = FisherAccumulator(model, model.initial_values(), blocks=blocks)
    plain = plain_steps(deepcopy(net), slices, inputs, targets)
    found |= {"epoch": 0.0, "fisher": 0.0}
    for index in slices:
        found["epoch"] += plain()
        start = time.process_time()
        accumulator.update((part(inputs, index), targets[index]))
        found["fisher"] += time.process_time() - start
    start = time.process_time()
    fishers = accumulator.factors()
    found["fisher"] += time.process_time() - start
    start = time.process_time()
    for key, state in posterior.blocks.items():
        if key in fishers:
            state.add(state.loc, fishers[key], ncl.SumRule.ADDITIVE)
    found["sums"] = time.process_time() - start
    posterior.update(task, progress=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "posterior.ncl"
        posterior.save(path)
        found["file"] = float(path.stat().st_size)
        start = time.process_time()
        ncl.OnlinePosterior.load(path, model)
        found["load"] = time.process_time() - start
    found["weights"] = float(sum(state.loc.numel() for state in posterior.blocks.values()))
    found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    settings = {**PAPER, "steps": STEPS, "batch_size": batch, "lr": 1e-4}
    laplace, variational = ncl.LaplaceNCL(**settings), ncl.VariationalNCL(**settings)
    first = ncl.OnlinePosterior(model, laplace, example=task, structure=kept)
    found["first"] = steps(first, laplace, task, plain)["step"]
    del first
    found["laplace"] = steps(posterior, laplace, task, plain)["step"]
    last = steps(posterior, variational, task, plain)
    found |= {"variational": last["step"], "refresh": last["refresh"]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(NETWORKS))
    parser.add_argument("--structures", nargs="*", default=["auto", "dense"], help="auto, dense, diagonal, or a width")
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--one", action="store_true", help="Measure here, and print JSON.")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.names[0], given.structures[0], given.examples)))
        return
    rows = []
    for name in given.names:
        for structure in given.structures:
            command = [sys.executable, "-m", "tests.benchmarks.large", name, "--structures", structure]
            command += ["--examples", str(given.examples), "--one"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                rows.append((name, structure, f"exit {done.returncode}", *[""] * 10))
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            times = [f"{found[key]:.1f} s" for key in ("epoch", "fisher", "sums", "load")]
            size = f"{found['file'] / (4 * found['weights']):.1f}"
            ratio = f"{found['fisher'] / found['epoch']:.2f}"
            ratios = [f"{found[key]:.2f}" for key in ("first", "laplace", "variational")]
            peak, refresh = f"{found['peak'] / 1e9:.1f} GB", f"{found['refresh']:.1f} s"
            rows.append((name, structure, *times, ratio, size, peak, *ratios, refresh))
            print(rows[-1], file=sys.stderr, flush=True)
    header = (
        "network",
        "structure",
        "plain epoch",
        "Fisher",
        "sums",
        "load",
        "Fisher / epoch",
        "file / weights",
        "peak",
        "first Laplace step",
        "Laplace step",
        "variational step",
        "new Gaussian",
    )
    print(table(f"{given.examples} examples", header, rows))


if __name__ == "__main__":
    main()
