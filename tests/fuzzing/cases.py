"""A case: a model, a task, an engine, a learner and a call, of which one or two are odd."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

import torch

import nclbayes as ncl
from nclbayes.engines import PAPER, Engine
from nclbayes.methods import (
    BGD,
    EWC,
    FOOVB,
    GPM,
    IVON,
    KFAC,
    OWM,
    VCL,
    CoresetLearner,
    DiagonalNCL,
    JointLearner,
    PlainTraining,
    ReplayLearner,
    SynapticIntelligence,
)
from tests.fuzzing.models import Subject, good_subject, odd_subject
from tests.fuzzing.sources import GOOD_SOURCES, odd_source, raising
from tests.fuzzing.values import MUTATIONS, ODD_NUMBERS, ODD_THINGS, MineError, mutated

ENGINES: list[type[Engine]] = [
    ncl.LaplaceNCL,
    ncl.VariationalNCL,
    EWC,
    SynapticIntelligence,
    KFAC,
    OWM,
    GPM,
    VCL,
    BGD,
    FOOVB,
    IVON,
    PlainTraining,
    DiagonalNCL,
]
LEARNERS: list[type[ncl.OnlinePosterior]] = [ncl.OnlinePosterior, ReplayLearner, CoresetLearner, JointLearner]
ODD = ["task"] * 4 + ["targets", "inputs", "model"] * 2
ODD += ["setting", "call", "about", "learner", "predict", "nothing"]

ODD_STARTS: list[Any] = [
    *ODD_THINGS,
    *({name: value} for name in ("0.weight", "w") for value in (torch.zeros(2), torch.zeros(3, 4) / 0, None, 3)),
]

# With these, one step would take for ever.
_ENDLESS = ("steps", "epochs", "particles", "fisher_samples", "batch_size")


@dataclass
class Case:
    """What to do, in order; whatever is made may be refused when it is made.

    Attributes:
        seed: What the case was drawn with.
        odd: What is odd about it.
        words: What a message may name instead of the task: the argument that is odd.
    """

    seed: int
    odd: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    subject: Callable[[], Subject] = field(default=lambda: good_subject(random.Random(0)))
    engine: Callable[[], Any] = field(default=ncl.LaplaceNCL)
    learner: Callable[[Any, Any], ncl.OnlinePosterior] = field(default=ncl.OnlinePosterior)
    task: Callable[[Subject], Any] = field(default=lambda subject: None)
    first: Callable[[Subject], Any] | None = None
    call: dict[str, Any] = field(default_factory=dict)
    predict: dict[str, Any] = field(default_factory=dict)
    name: str = "strange"
    runs: bool = True


def draw_case(seed: int, folder: Path) -> Case:
    """The case of a seed.

    Args:
        seed: The seed.
        folder: Where checkpoints may be.
    """
    rng = random.Random(seed)
    case, odd = Case(seed), {rng.choice(ODD) for _ in range(rng.choice([1, 1, 1, 2]))}
    good = good_subject(random.Random(seed))
    case.subject = lambda: good
    if "model" in odd:
        name, case.subject = odd_subject(rng)
        case.odd.append(name)
        case.words += ["prior", "likelihood", "scale", "net", "inputs", "mask", "weight", "model", "site"]
    _draw_engine(case, rng, "setting" in odd)
    _draw_learner(case, rng, "learner" in odd)
    _draw_task(case, rng, odd)
    if rng.random() < 0.5:
        case.first = lambda subject: ncl.Task(subject.data(12, seed), name="ordinary", context=subject.context)
    if "call" in odd:
        _draw_call(case, rng, folder)
    if "predict" in odd:
        _draw_predict(case, rng)
    return case


def _draw_engine(case: Case, rng: random.Random, odd: bool) -> None:
    kind = rng.choice(ENGINES)
    settings: dict[str, Any] = {"steps": rng.randint(1, 5), "batch_size": rng.choice([1, 4, 16])}
    if kind in (ncl.LaplaceNCL, ncl.VariationalNCL) and rng.random() < 0.5:
        settings |= PAPER
    if odd:
        name = rng.choice([f.name for f in fields_of(kind)])
        value = rng.choice(ODD_NUMBERS if rng.random() < 0.8 else ODD_THINGS)
        if name == "epochs":
            settings["steps"] = None
        settings[name] = value
        case.odd.append(f"{kind.__name__}({name}={_shown(value)})")
        case.words.append(name)
        case.runs = not (name in _ENDLESS and isinstance(value, (int, float)) and value > 100)
    case.engine = lambda: kind(**settings)


def _draw_learner(case: Case, rng: random.Random, odd: bool) -> None:
    kind = rng.choice(LEARNERS + [ncl.OnlinePosterior] * 2)
    settings: dict[str, Any] = {}
    if issubclass(kind, (ReplayLearner, CoresetLearner)):
        settings["keep"] = rng.choice([1, 3, 5])
    if odd:
        name = rng.choice([*settings, "engine", "generator", "initial", "example"])
        value = rng.choice({"keep": ODD_NUMBERS, "initial": ODD_STARTS}.get(name, ODD_THINGS))
        settings[name] = value
        case.odd.append(f"{kind.__name__}({name}={_shown(value)})")
        case.words.append(name)

    def make(model: Any, engine: Any) -> ncl.OnlinePosterior:
        return kind(**{"model": model, "engine": engine, **settings})

    case.learner = make


def _draw_task(case: Case, rng: random.Random, odd: set[str]) -> None:
    count, seed, source_seed = rng.choice([1, 2, 7, 12, 20]), rng.randrange(10**6), rng.randrange(10**6)
    source = rng.choice(list(GOOD_SOURCES))
    which = "targets" if "targets" in odd else "inputs" if "inputs" in odd else None
    mutation = rng.choice(list(MUTATIONS)) if which else None
    about: dict[str, Any] = {}
    if "task" in odd or source in ("sampler", "global sampler", "stream"):
        about["size"] = 30
    if which:
        case.odd.append(f"{which}: {mutation} from {source}")
    if "about" in odd:
        name = rng.choice(["name", "size", "context", "test"])
        choices: list[Any] = ODD_NUMBERS if name == "size" else ODD_THINGS
        if name == "context":
            choices = [*choices, {"unknown": 1}, {3: 4}, {"head": 99}, {"head": "a"}, {"head": None}, {"head": -1}]
        about[name] = rng.choice(choices)
        case.odd.append(f"Task({name}={_shown(about[name])})")
        case.words.append(name)

    def task(subject: Subject) -> Any:
        x, y = subject.data(count, seed)
        data: Any = (x, y)
        here = random.Random(source_seed)
        if mutation is not None:
            x, y = (mutated(mutation, x, here), y) if which == "inputs" else (x, mutated(mutation, y, here))
        try:
            name, data = odd_source(x, y, here) if "task" in odd else (source, GOOD_SOURCES[source](x, y, here))
            case.odd.append(name)
        except Exception:
            # A data set of torch's own may refuse such tensors.
            data = (x, y)
        return ncl.Task(data, **{"name": case.name, "context": subject.context, **about})

    case.task = task


def _draw_call(case: Case, rng: random.Random, folder: Path) -> None:
    name = rng.choice(["callbacks", "callbacks", "checkpoint", "checkpoint_every", "progress", "generator", "engine"])
    if name == "callbacks":
        ways: dict[str, Any] = {
            "nothing": None,
            "function": lambda progress: None,
            "number": 3,
            "nones": [None],
            "texts": ["a"],
            "mine": [raising(MineError("callback"))],
            "stop": [raising(StopIteration())],
            "exit": [raising(GeneratorExit())],
            "of nothing": [lambda: None],
            "right": [lambda progress: progress.values()],
            "iterator": iter([lambda progress: None]),
            "the same posterior": "update",
            "another posterior": "another",
            "predicts": "predict",
        }
        way = rng.choice(list(ways))
        case.call[name] = ways[way]
        case.odd.append(f"callbacks: {way}")
    elif name == "checkpoint":
        file = folder / f"file{case.seed}"
        file.write_text("not a checkpoint")
        ways = {
            "too long": folder / ("n" * 300),
            "folder": folder,
            "no folder": folder / "no" / "such",
            "under a file": file / "snapshot",
            "foreign": file,
            "number": 3,
            "empty": "",
            "null": "a\0b",
            "right": folder / f"snapshot{case.seed}",
            "class": Path,
            "list": [],
            "flag": True,
        }
        way = rng.choice(list(ways))
        case.call = {"checkpoint": ways[way], "checkpoint_every": 1}
        case.odd.append(f"checkpoint: {way}")
        case.words.append(str(file))
    else:
        odd_for: dict[str, list[Any]] = {"checkpoint_every": ODD_NUMBERS}
        value = rng.choice(odd_for.get(name, ODD_THINGS))
        case.call[name] = value
        if name == "checkpoint_every":
            case.call["checkpoint"] = folder / f"snapshot{case.seed}"
        case.odd.append(f"update({name}={_shown(value)})")
    case.words.append(name)


def _draw_predict(case: Case, rng: random.Random) -> None:
    name = rng.choice(["num_samples", "method", "generator", "inputs", "inputs", "context"])
    if name == "inputs":
        way = rng.choice([*MUTATIONS, "none at all", "two", "wide"])
        case.predict["inputs"] = way
    elif name == "context":
        way = rng.choice(["unknown", "head"])
        case.predict[way] = rng.choice([99, None, "a", 3.5])
    else:
        ways = [*ODD_THINGS, "linearized", "probit", "last-layer", "samples"]
        case.predict[name] = rng.choice(ODD_NUMBERS if name == "num_samples" else ways)
        way = _shown(case.predict[name])
        if isinstance(case.predict[name], (int, float)) and case.predict[name] > 10**6:
            case.predict[name] = -3
    case.odd.append(f"predict({name}: {way})")
    case.words += [name, "input", "head", "num_samples", "targets"]


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:20]}" if not callable(value) else "function"


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="fuzzing")


def random_inputs(subject: Subject, way: Any, rng: random.Random) -> tuple[Any, ...]:
    """Inputs to predict from."""
    x = subject.data(5, 0)[0]
    if way is None:
        return (x,)
    if way in MUTATIONS:
        return (mutated(way, x, rng),)
    return {"none at all": (), "two": (x, x), "wide": (torch.cat([x, x], -1),)}[way]
