"""Small Pyro models of every kind that the Fisher must see through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
import torch.nn.functional as F
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn

import nclbayes as ncl


@dataclass
class Case:
    model: Callable[..., Any]
    values: dict[str, Tensor]
    batch: tuple[Tensor, ...]
    context: dict[str, Any] = field(default_factory=dict)

    def rows(self, index: slice) -> tuple[Tensor, ...]:
        return tuple(item[index] for item in self.batch)


def normal(shape: tuple[int, ...], scale: float = 1.0) -> Any:
    return dist.Normal(torch.zeros(shape), scale).to_event(len(shape))


def make_bayesian(module: nn.Module) -> None:
    """Replace every parameter of a PyroModule tree by a PyroSample site."""
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False)):
            setattr(child, name, PyroSample(normal(tuple(parameter.shape))))


def random_values(shapes: dict[str, tuple[int, ...]], seed: int = 0, scale: float = 0.5) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=g) for name, shape in shapes.items()}


def inputs(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(count: int, *shape: int, seed: int = 2) -> Tensor:
    return torch.randint(count, shape, generator=torch.Generator().manual_seed(seed))


class Classifier(PyroModule):
    """A network of PyroModules with a Categorical output, with or without a plate."""

    def __init__(self, net: nn.Module, plate: int | None = None) -> None:
        super().__init__()
        self.net = net
        make_bayesian(self.net)
        self.plate = plate

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        logits = self.net(x)
        if self.plate is None:
            pyro.sample("y", dist.Categorical(logits=logits), obs=y)
        else:
            with pyro.plate("data", self.plate, subsample_size=len(x)):
                pyro.sample("y", dist.Categorical(logits=logits), obs=y)
        return logits


def pyro_mlp(plate: int | None = None) -> Case:
    net = PyroModule[nn.Sequential](
        PyroModule[nn.Linear](5, 7),
        PyroModule[nn.ReLU](inplace=True),
        PyroModule[nn.Linear](7, 6),
        PyroModule[nn.Tanh](),
        PyroModule[nn.Linear](6, 3),
    )
    shapes = {f"net.{i}.weight": (b, a) for i, a, b in ((0, 5, 7), (2, 7, 6), (4, 6, 3))}
    shapes |= {f"net.{i}.bias": (b,) for i, b in ((0, 7), (2, 6), (4, 3))}
    return Case(Classifier(net, plate), random_values(shapes), (inputs(12, 5), labels(3, 12)))


def functional() -> Case:
    def model(x: Tensor, y: Tensor | None = None) -> None:
        w1, b1 = pyro.sample("w1", normal((5, 4))), pyro.sample("b1", normal((4,)))
        w2, b2 = pyro.sample("w2", normal((3, 4))), pyro.sample("b2", normal((3,)))
        w3 = pyro.sample("w3", normal((3, 2)))
        h = torch.tanh(x @ w1 + b1)
        h = F.relu(h @ w2.T + b2)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(h @ w3, 0.5).to_event(1), obs=y)

    shapes = {"w1": (5, 4), "b1": (4,), "w2": (3, 4), "b2": (3,), "w3": (3, 2)}
    return Case(model, random_values(shapes), (inputs(12, 5), inputs(12, 2, seed=3)))


def cnn() -> Case:
    net = PyroModule[nn.Sequential](
        PyroModule[nn.Conv2d](2, 4, 3, stride=2, padding=1),
        PyroModule[nn.ReLU](),
        PyroModule[nn.Conv2d](4, 6, (1, 3), dilation=(1, 2), groups=2, padding="same"),
        PyroModule[nn.ReLU](),
        PyroModule[nn.Flatten](),
        PyroModule[nn.Linear](6 * 16, 3),
    )
    shapes = {
        "net.0.weight": (4, 2, 3, 3),
        "net.0.bias": (4,),
        "net.2.weight": (6, 2, 1, 3),
        "net.2.bias": (6,),
        "net.5.weight": (3, 96),
        "net.5.bias": (3,),
    }
    return Case(Classifier(net), random_values(shapes, scale=0.3), (inputs(10, 2, 8, 8), labels(3, 10)))


def rnn(padding: int = 0, lengths: tuple[int, ...] = (5, 3, 4, 5, 1, 2, 4, 3)) -> Case:
    """A loop over concatenated (r, x), with masked padding."""
    n_rec, n_in, n_out, steps = 6, 3, 2, max(lengths) + padding

    def model(x: Tensor, length: Tensor, y: Tensor | None = None) -> None:
        w = pyro.sample("w", normal((n_rec, n_rec + n_in)))
        c = pyro.sample("c", normal((n_out, n_rec)))
        r = x.new_zeros(x.shape[0], n_rec)
        means = []
        for t in range(x.shape[1]):
            with ncl.valid_steps(t < length):
                r = F.relu(F.linear(torch.cat([r, x[:, t]], dim=-1), w))
            means.append(r)
        mask = torch.arange(x.shape[1], device=x.device) < length[:, None]
        with ncl.valid_steps(mask):
            mean = F.linear(torch.stack(means, 1), c)
        pyro.sample("y", dist.Normal(mean, 1.0).to_event(1).mask(mask).to_event(1), obs=y)

    x, y = inputs(len(lengths), max(lengths), n_in), inputs(len(lengths), max(lengths), n_out, seed=3)
    if padding:
        x = torch.cat([x, 7.0 + inputs(len(lengths), padding, n_in, seed=4)], 1)
        y = torch.cat([y, inputs(len(lengths), padding, n_out, seed=5)], 1)
    values = random_values({"w": (n_rec, n_rec + n_in), "c": (n_out, n_rec)})
    assert x.shape[1] == steps
    return Case(model, values, (x, torch.tensor(lengths), y))


def multi_head() -> Case:
    """Both heads are sampled, one is used."""

    def model(x: Tensor, y: Tensor | None = None, head: int = 0) -> None:
        w = pyro.sample("body", normal((4, 5)))
        heads = [pyro.sample(f"head{k}", normal((3, 4))) for k in range(2)]
        pyro.sample("y", dist.Categorical(logits=F.linear(torch.tanh(F.linear(x, w)), heads[head])), obs=y)

    values = random_values({"body": (4, 5), "head0": (3, 4), "head1": (3, 4)})
    return Case(model, values, (inputs(12, 5), labels(3, 12)), {"head": 1})


def tied() -> Case:
    """One square weight in two layers, and one weight as encoder and transposed decoder."""

    def model(x: Tensor, y: Tensor | None = None) -> None:
        w, u = pyro.sample("w", normal((4, 4))), pyro.sample("u", normal((4, 6)))
        b, c = pyro.sample("b", normal((4,))), pyro.sample("c", normal((6,)))
        h = torch.tanh(F.linear(x, u, b))
        h = torch.tanh(F.linear(torch.tanh(F.linear(h, w)), w))
        pyro.sample("y", dist.Normal(F.linear(h, u.T, c), 1.0).to_event(1), obs=y)

    values = random_values({"w": (4, 4), "u": (4, 6), "b": (4,), "c": (6,)})
    return Case(model, values, (inputs(12, 6), inputs(12, 6, seed=3)))


def sequences() -> Case:
    """Inputs [batch, time, features] into one linear map."""

    def model(x: Tensor, y: Tensor | None = None) -> None:
        w, b = pyro.sample("w", normal((4, 5))), pyro.sample("b", normal((4,)))
        v = pyro.sample("v", normal((4, 3)))
        logits = torch.tanh(F.linear(x, w, b)) @ v
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Categorical(logits=logits).to_event(1), obs=y)

    values = random_values({"w": (4, 5), "b": (4,), "v": (4, 3)})
    return Case(model, values, (inputs(10, 6, 5), labels(3, 10, 6)))


def gains() -> Case:
    """Everything that is no linear map: a gain, a scalar, an embedding, a normalisation, a shared bias."""

    def model(x: Tensor, token: Tensor, y: Tensor | None = None) -> None:
        w = pyro.sample("w", normal((4, 5)))
        v = pyro.sample("v", normal((4, 4)))
        shared = pyro.sample("shared", normal((4,)))
        gain, log_scale = pyro.sample("gain", normal((4,))), pyro.sample("log_scale", dist.Normal(0.0, 1.0))
        table = pyro.sample("table", normal((7, 4)))
        norm = pyro.sample("norm", normal((4,)))
        h = F.linear(x, w, shared) * gain + F.embedding(token, table)
        h = F.linear(F.layer_norm(h, (4,), weight=norm), v, shared)
        pyro.sample("y", dist.Normal(h, log_scale.exp()).to_event(1), obs=y)

    shapes = {"w": (4, 5), "v": (4, 4), "shared": (4,), "gain": (4,), "log_scale": (), "table": (7, 4), "norm": (4,)}
    batch = (inputs(10, 5), labels(7, 10), inputs(10, 4, seed=3))
    return Case(model, random_values(shapes), batch)


def two_sites() -> Case:
    """Two observed sites, one masked, one with an obs_mask, and a user's scale."""

    def model(x: Tensor, keep: Tensor, y: Tensor | None = None) -> None:
        w, v = pyro.sample("w", normal((4, 5))), pyro.sample("v", normal((3, 4)))
        h = torch.tanh(F.linear(x, w))
        logits = F.linear(h, v)
        z = None if y is None else y.float()
        with pyro.plate("data", len(x)):
            with poutine.mask(mask=keep), poutine.scale(scale=2.0):
                pyro.sample("y", dist.Categorical(logits=logits), obs=y)
            pyro.sample("z", dist.Normal(h.sum(-1), 0.7), obs=z, obs_mask=~keep)
        pyro.factor("extra", h.sum())
        pyro.deterministic("h", h)

    keep = torch.arange(12) % 3 > 0
    values = random_values({"w": (4, 5), "v": (3, 4)})
    return Case(model, values, (inputs(12, 5), keep, labels(3, 12)))


ZOO: dict[str, Callable[[], Case]] = {
    "pyro_mlp": pyro_mlp,
    "pyro_mlp_plate": lambda: pyro_mlp(plate=600),
    "functional": functional,
    "cnn": cnn,
    "rnn": rnn,
    "multi_head": multi_head,
    "tied": tied,
    "sequences": sequences,
    "gains": gains,
    "two_sites": two_sites,
}
