"""What a posterior and its calls are given, checked before anything is done with it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from nclbayes.blocks.layout import quoted
from nclbayes.data.checking import check_tensor, flag, generator_or_none, shown, whole_number
from nclbayes.data.task import Task
from nclbayes.engines.base import Engine
from nclbayes.errors import DataError, FileError, SettingError
from nclbayes.gaussians import Factors
from nclbayes.isolation.failures import of_task
from nclbayes.watch.nesting import tensors_of

METHODS = ("mean", "samples", "linearized", "probit", "last-layer")
"""How to predict."""


def check_posterior(model: object, engine: object, initial: object, generator: object, example: object) -> None:
    """Refuse what no posterior can be made of.

    Args:
        model: The model.
        engine: The engine.
        initial: Where learning starts.
        generator: The generator.
        example: A task that shows the model's sites.

    Raises:
        SettingError: If one of them is of another kind, or `initial` names what is no site of a model that knows its
            sites.
    """
    if not callable(model) or isinstance(model, type):
        raise SettingError(f"The model must be a Pyro model, which can be called, not {shown(model)}.")
    checked_engine(engine)
    is_values = isinstance(initial, Mapping) and all(isinstance(value, Tensor) for value in initial.values())
    if initial is not None and not is_values:
        raise SettingError(f"initial must be a mapping from sites to tensors, not {shown(initial)}.")
    if isinstance(initial, Mapping) and hasattr(model, "initial_values"):
        unknown = sorted(set(initial) - set(model.initial_values()))
        if unknown:
            raise SettingError(
                f"initial has values of {quoted(unknown)}, and the model has no such sites: those that it has are in "
                "model.initial_values()."
            )
    generator_or_none(generator)
    if example is not None:
        checked_task(example, "example")


def checked_factors(factors: object) -> Factors:
    """Where factors are to be.

    Args:
        factors: What was given.

    Returns:
        The same, as a member of its enumeration.

    Raises:
        SettingError: If it is none.
    """
    try:
        return Factors(factors)
    except ValueError:
        known = " or ".join(repr(where.value) for where in Factors)
        raise SettingError(f"factors must be {known}, not {shown(factors)}.") from None


def checked_engine(engine: object) -> Engine:
    """An engine.

    Args:
        engine: What was given.

    Returns:
        The same.

    Raises:
        SettingError: If it is none.
    """
    if not isinstance(engine, Engine):
        kind = f"the class {engine.__name__}" if isinstance(engine, type) else f"a {type(engine).__name__}"
        raise SettingError(f"engine must be one such as LaplaceNCL(...), not {kind}.")
    return engine


def checked_task(task: object, what: str = "What is learnt") -> Task:
    """A task.

    Args:
        task: What was given.
        what: What to call it.

    Returns:
        The same.

    Raises:
        SettingError: If it is none.
    """
    if not isinstance(task, Task):
        raise SettingError(f"{what} must be a Task, such as Task((x, y), name='a'), not {shown(task)}.")
    return task


def check_update(task: object, progress: object, generator: object, every: object, callbacks: object) -> None:
    """Refuse arguments of an update that cannot be meant.

    Args:
        task: What to learn.
        progress: Whether to show a bar.
        generator: Decides the draws.
        every: How many steps lie between snapshots.
        callbacks: Called after each step.

    Raises:
        SettingError: If one of them is of another kind, or out of range.
    """
    with of_task(checked_task(task).name):
        if progress is not None:
            flag("progress", progress)
        generator_or_none(generator)
        whole_number("checkpoint_every", every)
        if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
            raise SettingError(f"callbacks must be a list of functions of the progress, not {shown(callbacks)}.")


def checked_path(path: str | os.PathLike[str]) -> Path:
    """A place where a file can be.

    Args:
        path: Where snapshots are to be kept.

    Returns:
        The same, as a path.

    Raises:
        FileError: If there can be no file: its name is too long or empty, it is a folder, or its folder is not there.
        SettingError: If it is no path.
    """
    try:
        target = Path(path)
        is_folder, has_folder = target.is_dir(), target.parent.is_dir()
        os.lstat(target)
    except TypeError:
        raise SettingError(f"checkpoint must be a path, not {shown(path)}.") from None
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        raise FileError(f"There can be no checkpoint at {shown(str(path))}: {error}.") from error
    if is_folder:
        raise FileError(f"The checkpoint '{target}' is a folder: name a file in it.")
    if not has_folder:
        raise FileError(f"The folder of the checkpoint '{target}' is not there: make it first.")
    return target


def check_predict(inputs: tuple[Any, ...], num_samples: object, method: object, generator: object) -> None:
    """Refuse arguments of a prediction that cannot be meant.

    Args:
        inputs: What the model is called with.
        num_samples: How many samples of the weights.
        method: How to predict.
        generator: Decides the samples.

    Raises:
        DataError: If an input is an array, or a tensor that cannot be computed with.
        SettingError: If another argument is of another kind, or out of range.
    """
    if num_samples is not None:
        whole_number("num_samples", num_samples)
    if method not in (None, *METHODS):
        raise SettingError(
            f"method is {shown(method)}; choose {', '.join(map(repr, METHODS[:-1]))} or '{METHODS[-1]}'."
        )
    if method in ("mean", "probit", "last-layer") and num_samples is not None:
        what = "a prediction at the mean" if method == "mean" else "a closed form"
        raise SettingError(f"num_samples has no effect on {what}: leave it out, or method='{method}'.")
    generator_or_none(generator)
    for _, tensor in tensors_of(inputs):
        check_tensor(tensor, "An input")
    for item in inputs:
        if hasattr(item, "__array__") and not isinstance(item, Tensor):
            raise DataError(f"An input is a {type(item).__name__}: make a tensor of it with torch.as_tensor.")
