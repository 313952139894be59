"""Networks of half precision, under autocast, and compiled."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.engines import Engine
from nclbayes.errors import PriorError, UnsupportedUseError
from nclbayes.storage import open_sealed, write_file
from nclbayes.watch import watch

X = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] * X[:, 1] > 0).long()
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
ENGINES = pytest.mark.parametrize(
    "engine",
    [ncl.LaplaceNCL(steps=120, batch_size=50), ncl.VariationalNCL(steps=120, batch_size=50)],
    ids=lambda engine: type(engine).__name__,
)
METHODS: list[dict[str, Any]] = [{}, {"num_samples": 8}, {"method": "linearized"}]
# torch.func does not vectorise layer normalisation in mixed precision.
VECTORISED = pytest.mark.filterwarnings("ignore:torch.func cannot vectorise:UserWarning")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.LayerNorm(40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2))


def learnt(net: nn.Module, engine: Engine, x: Tensor = X) -> ncl.OnlinePosterior:
    posterior = ncl.OnlinePosterior(ncl.BayesianNetwork(net, ncl.Categorical()), engine)
    posterior.update(ncl.Task((x, Y), name="xor"))
    return posterior


def losses(posterior: ncl.OnlinePosterior, x: Tensor = X) -> list[float]:
    """The loss of each kind of prediction."""
    x, y, g = x[:60], Y[:60], torch.Generator()
    return [-float(posterior.predict(x, **how, generator=g.manual_seed(0)).log_prob(y).mean()) for how in METHODS]


@HALVES
@ENGINES
def test_a_network_of_half_precision_learns_as_one_of_single_precision(engine: Engine, dtype: torch.dtype) -> None:
    plain, half = learnt(network(), engine), learnt(network().to(dtype), engine, X.to(dtype))
    assert losses(plain)[0] < 0.25 < math.log(2)
    assert losses(half, X.to(dtype)) == pytest.approx(losses(plain), abs=0.02)
    assert {value.dtype for value in (*half.mean().values(), *half.sample(2).values())} == {torch.float32}
    assert half.predict(X.to(dtype)).probs.dtype is torch.float32
    for name, state in plain.blocks.items():
        assert half.blocks[name].logdet == pytest.approx(state.logdet, rel=0.02, abs=2.0)


@HALVES
def test_what_was_learnt_goes_back_into_the_network(dtype: torch.dtype) -> None:
    net = network().to(dtype)
    posterior = learnt(net, ncl.LaplaceNCL(steps=20), X.to(dtype))
    net.load_state_dict(posterior.mean())
    assert {parameter.dtype for parameter in net.parameters()} == {dtype}
    torch.testing.assert_close(net(X.to(dtype)).float().softmax(-1), posterior.predict(X.to(dtype)).probs)


def test_a_posterior_serves_the_network_in_any_precision(tmp_path: Path) -> None:
    learnt(network(), ncl.LaplaceNCL(steps=20)).save(tmp_path / "p.ncl")
    single, half = (ncl.BayesianNetwork(net, ncl.Categorical()) for net in (network(), network().bfloat16()))
    one, other = (ncl.OnlinePosterior.load(tmp_path / "p.ncl", model) for model in (single, half))
    torch.testing.assert_close(one.predict(X).probs, other.predict(X.bfloat16()).probs, rtol=0, atol=0.02)
    one.model.half()
    torch.testing.assert_close(one.predict(X.half()).probs, other.predict(X.bfloat16()).probs, rtol=0, atol=0.02)


def test_files_with_means_of_half_precision_load(tmp_path: Path) -> None:
    net = network().bfloat16()
    posterior = learnt(net, ncl.LaplaceNCL(steps=20), X.bfloat16())
    posterior.save(tmp_path / "new.ncl")
    with open_sealed(tmp_path / "new.ncl", "posterior") as file:
        tensors, settings = file.read(), file.settings
    old = {name: t.bfloat16() if name.endswith("/loc") else t for name, t in tensors.items()}
    write_file(tmp_path / "old.ncl", "posterior", old, settings)
    loaded = ncl.OnlinePosterior.load(tmp_path / "old.ncl", posterior.model)
    assert {value.dtype for value in loaded.mean().values()} == {torch.float32}
    assert torch.equal(loaded.predict(X.bfloat16()).probs, posterior.predict(X.bfloat16()).probs)
    loaded.update(ncl.Task((X.bfloat16(), Y), name="again"))


def test_a_pyro_model_is_told_to_keep_its_weights_in_single_precision() -> None:
    def model(x: Tensor, y: Tensor | None = None, narrow: bool = True) -> None:
        zeros = torch.zeros(2, 6, dtype=torch.bfloat16 if narrow else torch.float32)
        w = pyro.sample("w", dist.Normal(zeros, 1.0).to_event(2))
        pyro.sample("y", dist.Categorical(logits=nn.functional.linear(x, w.bfloat16())), obs=y)

    x, engine = X.bfloat16(), ncl.LaplaceNCL(steps=3)
    with pytest.raises(PriorError, match=r"'w'.*w\.to\(torch\.bfloat16\)"):
        ncl.OnlinePosterior(model, engine).update(ncl.Task((x, Y), name="t"))
    posterior = ncl.OnlinePosterior(model, engine)
    posterior.update(ncl.Task((x, Y), name="t", context={"narrow": False}))
    assert posterior.mean()["w"].dtype is torch.float32


@VECTORISED
@ENGINES
def test_autocast_inside_and_around_are_the_same_and_as_good_as_none(engine: Engine) -> None:
    inside = network()
    inside.forward = torch.autocast("cpu", torch.bfloat16)(inside.forward)  # type: ignore[method-assign]
    plain, within = learnt(network(), engine), learnt(inside, engine)
    with torch.autocast("cpu", torch.bfloat16):
        around = learnt(network(), engine)
        assert torch.is_autocast_enabled("cpu")
        found = losses(around)
    assert losses(within) == pytest.approx(losses(plain), abs=0.02)
    assert found == losses(within)
    for name, state in within.blocks.items():
        assert torch.equal(around.blocks[name].loc, state.loc)
        assert around.blocks[name].fingerprint() == state.fingerprint()


@VECTORISED
def test_rounded_weights_are_not_kept_from_step_to_step_by_an_autocast_around_another() -> None:
    """torch forgets them only where the outermost context ends."""
    found = []
    for outer in (nullcontext(), torch.autocast("cpu", enabled=False)):
        net = network()
        net.forward = torch.autocast("cpu", torch.bfloat16)(net.forward)  # type: ignore[method-assign]
        with outer:
            found.append(losses(learnt(net, ncl.LaplaceNCL(steps=60, batch_size=50))))
    assert found[0] == found[1]


@HALVES
@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_the_fisher_of_half_precision_is_that_of_single_precision(dtype: torch.dtype, how: str) -> None:
    plain = ncl.BayesianNetwork(network(), ncl.Categorical())
    values = plain.initial_values()
    expected = ncl.fisher(plain, values, (X, Y), kind="exact")
    if how == "weights":
        half = ncl.BayesianNetwork(network().to(dtype), ncl.Categorical())
        found = ncl.fisher(half, values, (X.to(dtype), Y), kind="exact")
    else:
        with torch.autocast("cpu", dtype):
            found = ncl.fisher(plain, values, (X, Y), kind="exact")
    eps = torch.finfo(dtype).eps
    for name, fisher in expected.items():
        for part in ("input", "output") if isinstance(fisher, ncl.KroneckerFisher) else ("diagonal",):
            one, other = getattr(fisher, part), getattr(found[name], part)
            assert other.dtype is torch.float64
            assert float((one - other).norm()) < 6 * eps * float(one.norm())


@HALVES
def test_an_unseen_use_is_found_in_half_precision_too(dtype: torch.dtype) -> None:
    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x @ w.mT

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
            x, w = ctx.saved_tensors
            return g @ w, g.mT @ x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.map = nn.Linear(6, 6, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.map(x) + Hidden.apply(x, self.map.weight)

    model = ncl.BayesianNetwork(Net().to(dtype), ncl.Categorical())
    with pytest.raises(UnsupportedUseError, match="does not add up"):
        ncl.fisher(model, model.initial_values(), (X[:8].to(dtype), Y[:8]))


def test_a_compiled_network_is_learnt_under_its_own_names(tmp_path: Path) -> None:
    engine = ncl.LaplaceNCL(steps=10)
    plain = learnt(network(), engine)
    with pytest.warns(UserWarning, match="compiled by torch.compile"):
        model = ncl.BayesianNetwork(torch.compile(network(), backend="eager"), ncl.Categorical())
    posterior = ncl.OnlinePosterior(model, engine)
    posterior.update(ncl.Task((X, Y), name="xor"))
    assert all(torch.equal(value, posterior.mean()[site]) for site, value in plain.mean().items())
    plain.save(tmp_path / "p.ncl")
    assert torch.equal(ncl.OnlinePosterior.load(tmp_path / "p.ncl", model).predict(X).probs, plain.predict(X).probs)


def test_parts_that_are_compiled_are_watched_as_they_were_written() -> None:
    net = network()
    net[0].compile(backend=_never)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = ncl.BayesianNetwork(net, ncl.Categorical())
        run = watch(model, (X, Y), model.initial_values())
    assert [use.weight for use in run.linear] == ["0.weight", "3.weight", "5.weight"]


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the compiler was called")
