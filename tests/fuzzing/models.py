"""Models with their data: right ones of several kinds, and ones that are wrong in many ways."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nclbayes as ncl
from tests.fuzzing.values import MineError

FEATURES, OUTPUTS = 4, 3

TARGETS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "categorical": lambda n, g: torch.randint(OUTPUTS, (n,), generator=g),
    "bernoulli": lambda n, g: torch.randint(2, (n, OUTPUTS), generator=g).float(),
    "normal": lambda n, g: torch.randn(n, OUTPUTS, generator=g),
    "poisson": lambda n, g: torch.randint(4, (n, OUTPUTS), generator=g).float(),
}
LIKELIHOODS: dict[str, Callable[[], Any]] = {
    "categorical": ncl.Categorical,
    "bernoulli": ncl.Bernoulli,
    "normal": lambda: ncl.Normal(0.7),
    "poisson": ncl.nn.Poisson,
}


@dataclass
class Subject:
    """A model, and what fits it."""

    model: Any
    targets: str
    context: dict[str, Any] = field(default_factory=dict)

    def data(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(seed)
        return torch.randn(count, FEATURES, generator=g), TARGETS[self.targets](count, g)


def network(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, OUTPUTS))


def heads(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return ncl.MultiHead(nn.Linear(FEATURES, 5), [nn.Linear(5, OUTPUTS) for _ in range(2)])


def written_out(prior: Any = None, kind: str = "categorical") -> Callable[..., None]:
    """A model that is a function."""
    prior = dist.Normal(torch.zeros(OUTPUTS, FEATURES), 1.0).to_event(2) if prior is None else prior

    def model(x: Tensor, y: Tensor | None = None) -> None:
        w = pyro.sample("w", prior)
        with pyro.plate("data", len(x)):
            output = F.linear(x, w)
            if kind == "categorical":
                pyro.sample("y", dist.Categorical(logits=output), obs=y)
            else:
                pyro.sample("y", dist.Normal(output, 1.0).to_event(1), obs=y)

    return model


def good_subject(rng: random.Random) -> Subject:
    kind = rng.choice(list(TARGETS))
    form = rng.choice(["network", "network", "heads", "function"])
    if form == "function":
        kind = rng.choice(["categorical", "normal"])
        return Subject(written_out(kind=kind), kind)
    net = network(rng.randrange(9)) if form == "network" else heads(rng.randrange(9))
    model = ncl.BayesianNetwork(net, LIKELIHOODS[kind](), prior=dist.Normal(0.0, 1.0))
    return Subject(model, kind, {"head": rng.randrange(2)} if form == "heads" else {})


class Returning(nn.Module):
    """A network that returns something else than its outputs, perhaps only after some calls."""

    def __init__(self, change: Callable[[Tensor], Any], after: int = 0) -> None:
        super().__init__()
        self.net, self.change, self.after, self.calls = network(0), change, after, 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        output = self.net(x)
        return output if self.calls <= self.after else self.change(output)


def _raise(error: BaseException) -> Any:
    raise error


RETURNS: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda out: (out, out),
    "nothing": lambda out: None,
    "dictionary": lambda out: {"logits": out},
    "scalar": lambda out: out.sum(),
    "number": lambda out: 3.0,
    "text": lambda out: "text",
    "rows less": lambda out: out[:-1],
    "one row": lambda out: out[:1],
    "no rows": lambda out: out[:0],
    "flat": lambda out: out.flatten(),
    "no columns": lambda out: out[:, :0],
    "one column": lambda out: out[:, :1],
    "transposed": lambda out: out.mT,
    "one more axis": lambda out: out.unsqueeze(-1),
    "nan": lambda out: out * float("nan"),
    "infinity": lambda out: out + float("inf"),
    "constant": lambda out: torch.zeros_like(out),
    "detached": lambda out: out.detach(),
    "integers": lambda out: out.long(),
    "double": lambda out: out.double(),
    "complex": lambda out: out.to(torch.complex64),
    "sparse": lambda out: out.to_sparse(),
    "numpy": lambda out: out.detach().numpy(),
    "stop": lambda out: _raise(StopIteration()),
    "mine": lambda out: _raise(MineError("network")),
    "type error": lambda out: len(3),  # type: ignore[arg-type]
    "key error": lambda out: {}[3],
    "attribute": lambda out: out.no_such_thing,
    "draws": lambda out: out + torch.randn_like(out),
    "dropout": lambda out: F.dropout(out, 0.5),
    "in place": lambda out: out.mul_(2),
}
"""What a network may do instead of returning a tensor of outputs."""


def _unchecked(loc: Any, scale: Any) -> Any:
    return dist.Normal(torch.as_tensor(loc), torch.as_tensor(scale), validate_args=False)


ODD_PRIORS: dict[str, Callable[[], Any]] = {
    "scale 0": lambda: _unchecked(0.0, 0.0),
    "scale nan": lambda: _unchecked(0.0, float("nan")),
    "scale inf": lambda: _unchecked(0.0, float("inf")),
    "scale negative": lambda: _unchecked(0.0, -1.0),
    "scale tiny": lambda: _unchecked(0.0, 1e-30),
    "scale huge": lambda: _unchecked(0.0, 1e30),
    "loc nan": lambda: _unchecked(float("nan"), 1.0),
    "shape": lambda: _unchecked(torch.zeros(17), 1.0),
    "double": lambda: _unchecked(torch.tensor(0.0).double(), torch.tensor(1.0).double()),
    "not separable": lambda: lambda name, p: _unchecked(0.0, 1 + torch.arange(p.numel()).reshape(p.shape) % 5 / 5),
    "laplace": lambda: dist.Laplace(0.0, 1.0),
    "nothing": lambda: None,
    "number": lambda: 1.0,
    "class": lambda: dist.Normal,
    "returns nothing": lambda: lambda name, p: None,
    "raises": lambda: lambda name, p: _raise(MineError("prior")),
    "no pattern": lambda: {"none": dist.Normal(0.0, 1.0)},
    "pattern to text": lambda: {"*": "normal"},
    "empty mapping": lambda: {},
    "number patterns": lambda: {3: dist.Normal(0.0, 1.0)},
}


def odd_subject(rng: random.Random) -> tuple[str, Callable[[], Subject]]:
    """A model that is wrong, or unusual, in some way; made when asked, as that may be refused."""
    kind = rng.choice(list(TARGETS))
    way = rng.choice(["returns", "returns", "returns", "in time", "prior", "function", "form"])
    normal, net = dist.Normal(0.0, 1.0), network(0)
    if way in ("returns", "in time"):
        name = rng.choice(list(RETURNS))
        after = rng.randint(2, 9) if way == "in time" else 0
        return f"{way}: {name}", lambda: Subject(
            ncl.BayesianNetwork(Returning(RETURNS[name], after), LIKELIHOODS[kind](), prior=normal), kind
        )
    if way == "prior":
        name = rng.choice(list(ODD_PRIORS))
        return f"prior: {name}", lambda: Subject(
            ncl.BayesianNetwork(net, LIKELIHOODS[kind](), prior=ODD_PRIORS[name]()), kind
        )
    if way == "function":
        name, function = rng.choice(list(_functions().items()))
        return f"function: {name}", lambda: Subject(function, "normal" if name == "double" else "categorical")
    forms: dict[str, Callable[[], Any]] = {
        "frozen": lambda: ncl.BayesianNetwork(net.requires_grad_(False), LIKELIHOODS[kind](), prior=normal),
        "no weights": lambda: ncl.BayesianNetwork(nn.Identity(), LIKELIHOODS[kind](), prior=normal),
        "likelihood class": lambda: ncl.BayesianNetwork(net, ncl.Categorical, prior=normal),  # type: ignore[arg-type]
        "likelihood nothing": lambda: ncl.BayesianNetwork(net, None, prior=normal),  # type: ignore[arg-type]
        "no network": lambda: ncl.BayesianNetwork(None, LIKELIHOODS[kind](), prior=normal),  # type: ignore[arg-type]
        "function": lambda: ncl.BayesianNetwork(
            lambda x: x,  # type: ignore[arg-type]
            LIKELIHOODS[kind](),
            prior=normal,
        ),
        "two inputs": lambda: ncl.BayesianNetwork(net, LIKELIHOODS[kind](), prior=normal, inputs=2),
        "inputs text": lambda: ncl.BayesianNetwork(net, LIKELIHOODS[kind](), prior=normal, inputs="2"),  # type: ignore[arg-type]
        "no inputs": lambda: ncl.BayesianNetwork(net, LIKELIHOODS[kind](), prior=normal, inputs=0),
        "mask": lambda: ncl.BayesianNetwork(net, LIKELIHOODS[kind](), prior=normal, mask=lambda x: None),  # type: ignore[arg-type, return-value]
        "weight": lambda: ncl.BayesianNetwork(net, LIKELIHOODS[kind](), prior=normal, weight=lambda x: x[:, 0] * -1),
        "mask text": lambda: ncl.BayesianNetwork(net, LIKELIHOODS[kind](), prior=normal, mask="x"),  # type: ignore[arg-type]
        "double network": lambda: ncl.BayesianNetwork(network(0).double(), LIKELIHOODS[kind](), prior=normal),
        "half network": lambda: ncl.BayesianNetwork(network(0).half(), LIKELIHOODS[kind](), prior=normal),
        "nan weights": lambda: ncl.BayesianNetwork(_filled(float("nan")), LIKELIHOODS[kind](), prior=normal),
        "huge weights": lambda: ncl.BayesianNetwork(_filled(1e38), LIKELIHOODS[kind](), prior=normal),
        "batch norm": lambda: ncl.BayesianNetwork(
            nn.Sequential(network(0), nn.BatchNorm1d(OUTPUTS)), LIKELIHOODS[kind](), prior=normal
        ),
        "narrow": lambda: ncl.BayesianNetwork(nn.Linear(2, OUTPUTS), LIKELIHOODS[kind](), prior=normal),
        "one output": lambda: ncl.BayesianNetwork(nn.Linear(FEATURES, 1), LIKELIHOODS[kind](), prior=normal),
        "bilinear": lambda: ncl.BayesianNetwork(
            nn.Bilinear(FEATURES, FEATURES, OUTPUTS), LIKELIHOODS[kind](), prior=normal, inputs=2
        ),
        "meta": lambda: ncl.BayesianNetwork(
            nn.Linear(FEATURES, OUTPUTS, device="meta"), LIKELIHOODS[kind](), prior=normal
        ),
        "not callable": lambda: 3,
        "nothing": lambda: None,
        "plain network": lambda: net,
        "scale 0": lambda: ncl.BayesianNetwork(net, ncl.Normal(0.0), prior=normal),
        "scale nan": lambda: ncl.BayesianNetwork(net, ncl.Normal(float("nan")), prior=normal),
        "scale inf": lambda: ncl.BayesianNetwork(net, ncl.Normal(float("inf")), prior=normal),
        "scale text": lambda: ncl.BayesianNetwork(net, ncl.Normal("1"), prior=normal),  # type: ignore[arg-type]
        "scale tensor": lambda: ncl.BayesianNetwork(net, ncl.Normal(torch.tensor(0.5)), prior=normal),  # type: ignore[arg-type]
    }
    name = rng.choice(list(forms))
    return f"model: {name}", lambda: Subject(forms[name](), "normal" if name.startswith("scale") else kind)


def _filled(value: float) -> nn.Module:
    net = network(0)
    for parameter in net.parameters():
        nn.init.constant_(parameter, value)
    return net


def _functions() -> dict[str, Callable[..., Any]]:
    shape = torch.zeros(OUTPUTS, FEATURES)

    def unobserved(x: Tensor, y: Tensor | None = None) -> None:
        pyro.sample("w", dist.Normal(shape, 1.0).to_event(2))

    def local(x: Tensor, y: Tensor | None = None) -> None:
        w = pyro.sample("w", dist.Normal(shape, 1.0).to_event(2))
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Categorical(logits=F.linear(x, w) + z.unsqueeze(-1)), obs=y)

    def parameter(x: Tensor, y: Tensor | None = None) -> None:
        w = pyro.param("w", shape)
        pyro.sample("y", dist.Categorical(logits=F.linear(x, w)), obs=y)

    def twice(x: Tensor, y: Tensor | None = None) -> None:
        for _ in range(2):
            w = pyro.sample("w", dist.Normal(shape, 1.0).to_event(2))
        pyro.sample("y", dist.Categorical(logits=F.linear(x, w)), obs=y)

    def inside(x: Tensor, y: Tensor | None = None) -> None:
        w = pyro.sample("w", dist.Normal(shape, 1.0).to_event(2))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Categorical(logits=F.linear(x, w)), obs=y)
            raise MineError("inside a plate")

    def no_latent(x: Tensor, y: Tensor | None = None) -> None:
        pyro.sample("y", dist.Categorical(logits=x[:, :OUTPUTS]), obs=y)

    def no_defaults(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(shape, 1.0).to_event(2))
        pyro.sample("y", dist.Categorical(logits=F.linear(x, w)), obs=y)

    def of_nothing() -> None:
        pass

    def changing(x: Tensor, y: Tensor | None = None) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(OUTPUTS, x.shape[-1] + len(x) % 2), 1.0).to_event(2))
        pyro.sample("y", dist.Categorical(logits=F.linear(F.pad(x, (0, len(x) % 2)), w)), obs=y)

    return {
        "unobserved": unobserved,
        "local": local,
        "parameter": parameter,
        "twice": twice,
        "inside": inside,
        "no latent": no_latent,
        "no defaults": no_defaults,
        "of nothing": of_nothing,
        "changing": changing,
        "gamma": written_out(dist.Gamma(torch.ones(OUTPUTS, FEATURES), 1.0).to_event(2)),
        "uniform": written_out(dist.Uniform(torch.zeros(OUTPUTS, FEATURES), 1.0).to_event(2)),
        "scale 0": written_out(_unchecked(shape, 0.0).to_event(2)),
        "scale nan": written_out(_unchecked(shape, float("nan")).to_event(2)),
        "scale inf": written_out(_unchecked(shape, float("inf")).to_event(2)),
        "scale tiny": written_out(_unchecked(shape, 1e-30).to_event(2)),
        "loc nan": written_out(_unchecked(shape * float("nan"), 1.0).to_event(2)),
        "wrong shape": written_out(dist.Normal(torch.zeros(OUTPUTS, 2), 1.0).to_event(2)),
        "vector": written_out(dist.Normal(torch.zeros(FEATURES), 1.0).to_event(1)),
        "scalar": written_out(dist.Normal(0.0, 1.0)),
        "not separable": written_out(_unchecked(shape, 1 + torch.arange(12).reshape(3, 4) % 5 / 5.0).to_event(2)),
        "double": written_out(dist.Normal(shape.double(), 1.0).to_event(2), "normal"),
    }
