"""Running a case, and judging each thing that is called: clear words or none, and everything else as it was."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.poutine import runtime
from torch import Tensor

import nclbayes as ncl
from nclbayes.errors import NCLError
from nclbayes.gaussians import State
from tests.fuzzing.cases import Case, draw_case, random_inputs
from tests.fuzzing.values import MineError


@dataclass
class Verdict:
    """What a call did.

    Attributes:
        stage: What was called.
        outcome: The class of what it raised, or "done".
        message: Its message.
        fault: What is wrong with that; empty if nothing is.
    """

    stage: str
    outcome: str
    message: str = ""
    fault: str = ""


@dataclass
class Result:
    """What became of a case."""

    case: Case
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def faults(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.fault]

    def __str__(self) -> str:
        lines = [f"case {self.case.seed}: {'; '.join(self.case.odd) or 'nothing odd'}"]
        for verdict in self.verdicts:
            fault = f"  <-- {verdict.fault}" if verdict.fault else ""
            lines.append(f"  {verdict.stage}: {verdict.outcome}: {verdict.message}{fault}")
        return "\n".join(lines)


def run_case(seed: int, folder: Path) -> Result:
    """Draw a case, run it, and judge all that happens.

    Args:
        seed: The case.
        folder: Where its checkpoints may be.
    """
    case = draw_case(seed, folder)
    result = Result(case)

    def attempt(stage: str, action: Callable[[], Any], posterior: Any = None, name: str | None = None) -> Any:
        return _attempt(result, stage, action, posterior, name)

    subject = attempt("model", lambda: _made(case))
    engine = attempt("engine", case.engine)
    if subject is None or engine is None or not case.runs:
        return result
    posterior = attempt("posterior", lambda: case.learner(subject.model, engine))
    if posterior is None:
        return result
    if case.first is not None:
        attempt("first update", lambda: posterior.update(case.first(subject), progress=False), posterior, "ordinary")
    task = attempt("task", lambda: case.task(subject), name=case.name)
    if task is None:
        return result
    call = {"progress": False, **case.call}
    call["callbacks"] = _callbacks(call.get("callbacks", ()), posterior, task, subject)
    attempt("update", lambda: posterior.update(task, **call), posterior, task.name)
    if not posterior.tasks:
        return result
    settings = dict(case.predict)
    inputs = random_inputs(subject, settings.pop("inputs", None), random.Random(seed))
    context = {**subject.context, **settings}
    attempt("predict", lambda: posterior.predict(*inputs, **context), posterior, "coreset")
    return result


def _callbacks(given: Any, posterior: Any, task: Any, subject: Any) -> Any:
    if given == "update":
        return [lambda progress: posterior.update(task, progress=False)]
    if given == "another":
        return [lambda progress: _another(subject)]
    if given == "predict":
        return [lambda progress: posterior.predict(subject.data(3, 0)[0], **subject.context) if posterior.tasks else 0]
    return given


def _another(subject: Any) -> None:
    other = ncl.OnlinePosterior(subject.model, ncl.LaplaceNCL(steps=1))
    other.update(ncl.Task(subject.data(5, 1), name="another", context=subject.context), progress=False)


def _made(case: Case) -> Any:
    """The model; its weights are drawn by torch, as they are anywhere."""
    with torch.random.fork_rng():
        return case.subject()


def _attempt(result: Result, stage: str, action: Callable[[], Any], posterior: Any, name: str | None) -> Any:
    before, world = _snapshot(posterior), _world()
    verdict, done = Verdict(stage, "done"), None
    try:
        done = action()
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        verdict.outcome, verdict.message = type(error).__name__, str(error)
        verdict.fault = _unclear(error, result.case, name)
        # The generator of a posterior advances with predictions that fail half way, as with those that succeed.
        if stage != "predict" and not _same(before, _snapshot(posterior)):
            verdict.fault = "the posterior has changed"
    else:
        if "update" in stage:
            verdict.fault = _unsound(posterior)
        done = True if done is None else done
    if not _same(world, _world()):
        verdict.fault = f"left behind: {[k for k, v in _world().items() if not _equal(v, world[k])]}"
        _clean()
    result.verdicts.append(verdict)
    return done


def _unclear(error: BaseException, case: Case, name: str | None) -> str:
    if isinstance(error, MineError):
        return ""
    if not isinstance(error, NCLError):
        return "unclear"
    words = [*case.words, *([f"'{name}'"] if name is not None else [])]
    return "" if any(word in str(error) for word in words) else f"names none of {words}"


def _unsound(posterior: Any) -> str:
    for name, state in posterior.blocks.items():
        if not bool(torch.isfinite(state.loc).all()):
            return f"the mean of '{name}' is not finite"
        if not _is_positive(state):
            return f"the precision of '{name}' is not positive definite"
    return "" if posterior.blocks else "a task was learnt and left no block"


def _is_positive(state: State) -> bool:
    precision: Any = state.precision
    if isinstance(precision, Tensor):
        return bool((precision > 0).all() and torch.isfinite(precision).all())
    factors = (precision.input, precision.output)
    return all(bool((torch.linalg.cholesky_ex(factor).info == 0).all()) for factor in factors)


def _snapshot(posterior: Any) -> dict[str, Any]:
    """Copies of everything that an update may change."""
    if posterior is None:
        return {}
    found: dict[str, Any] = {"tasks": posterior.tasks, "evidence": posterior.log_evidence}
    found["generator"] = posterior.generator.get_state()
    found |= {f"memory {name}": tensor.clone() for name, tensor in posterior.memory.items()}
    for name, state in posterior.blocks.items():
        found |= {f"{name} {part}": tensor.clone() for part, tensor in state.tensors().items()}
    return found


def _world() -> dict[str, Any]:
    """What belongs to the whole process."""
    return {
        "random numbers": torch.get_rng_state(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "dtype": torch.get_default_dtype(),
        "effects": len(runtime._PYRO_STACK),
        "plates": len(runtime._DIM_ALLOCATOR._stack),
        "parameters": len(pyro.get_param_store()),
        "validation": torch.distributions.Distribution._validate_args,
    }


def _clean() -> None:
    runtime._PYRO_STACK.clear()
    runtime._DIM_ALLOCATOR._stack.clear()
    pyro.clear_param_store()
    torch.set_grad_enabled(True)


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else bool(one == other)
