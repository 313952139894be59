"""The command line's view of what is there: data, versions, devices."""

from __future__ import annotations

import json
import os
import platform
from typing import Annotated

import torch
import typer

from nclbayes.cli.options import AsJson, version_of
from nclbayes.errors import DataError
from nclbayes.tasks import files
from nclbayes.tasks.cifar_features import pretrain

data_app = typer.Typer(help="The data sets: what is here, fetching and checking them.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="mnist, fashion-mnist, cifar10, cifar100 or stroke-mnist.")]


@data_app.command("list", epilog="Example: `nclbayes data list`")
def list_data(as_json: AsJson = False) -> None:
    """Which data sets are here, and where."""
    found = files.status()
    if as_json:
        print(json.dumps([{**s._asdict(), "where": None if s.where is None else str(s.where)} for s in found]))
        return
    for status in found:
        place = str(status.where) if status.found else f"missing: {', '.join(status.missing)}"
        print(f"{status.dataset:15} {place}")


@data_app.command(epilog="Example: `nclbayes data fetch mnist`")
def fetch(name: Name) -> None:
    """Download a data set into the cache, unless it is here."""
    for path in files.fetch(name).values():
        print(path)


@data_app.command(epilog="Example: `nclbayes data check mnist`")
def check(name: Name) -> None:
    """Compare a data set's files with their known hashes."""
    for file, known in files.check(name).items():
        print(f"{file}: {'right' if known else 'here, but its hash is not known'}")
    missing = [file for status in files.status() if status.dataset == name for file in status.missing]
    if missing:
        raise DataError(f"Of {name} these are not here: {', '.join(missing)}. `nclbayes data fetch {name}` gets them.")


@data_app.command("pretrain-cifar", epilog="Example: `nclbayes data pretrain-cifar --epochs 20`")
def pretrain_cifar(
    epochs: Annotated[int, typer.Option(help="How often each image is seen.")] = 100,
    seed: Annotated[int, typer.Option(help="Decides initial weights, order and shifts.")] = 0,
    size: Annotated[int | None, typer.Option(help="Use so many of the training images only.")] = None,
    lr: Annotated[float, typer.Option(help="The learning rate of Adam.")] = 1e-4,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress bar.")] = False,
) -> None:
    """Train the layers that turn CIFAR images into features, on CIFAR-10, and keep them in the cache."""
    done = pretrain(epochs, seed, size=size, lr=lr, progress=False if quiet else None)
    print(f"test accuracy on CIFAR-10: {done.accuracy:.1%}")
    print(done.path)


def info(as_json: AsJson = False) -> None:
    """Versions, devices, and the data found."""
    facts = {name: version_of(name) for name in ("nclbayes", "torch", "pyro-ppl", "numpy", "scipy")}
    facts["python"] = platform.python_version()
    devices = ["cpu", *(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))]
    data = [status.dataset for status in files.status() if status.found]
    if as_json:
        print(json.dumps({"versions": facts, "devices": devices, "threads": torch.get_num_threads(), "data": data}))
        return
    for name, number in facts.items():
        print(f"{name:10} {number}")
    print(f"devices    {', '.join(devices)} ({torch.get_num_threads()} threads)")
    print(f"data       {', '.join(data) or 'none'} ($NCLBAYES_DATA is {os.environ.get('NCLBAYES_DATA', 'not set')})")
