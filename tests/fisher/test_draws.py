"""Targets: draws, those of a share of the examples, and those that are signs only."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import nclbayes as ncl
from nclbayes.fisher import draws
from nclbayes.fisher.draws import Place, drawn_from, is_noise, signed_from
from nclbayes.fisher.targets import Target, score
from nclbayes.fisher.whole import WholeBatch
from nclbayes.isolation import drawing_from
from nclbayes.ranks import Share
from nclbayes.watch import Observed, watch


def parameters(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


OUTPUTS = {
    "classes": lambda k: dist.Categorical(logits=parameters(0, 7, 4)[k]),
    "classes by step": lambda k: dist.Categorical(logits=parameters(0, 7, 3, 4)[k]).to_event(1),
    "binary": lambda k: dist.Bernoulli(logits=parameters(1, 7, 3)[k]).to_event(1),
    "masked": lambda k: dist.Bernoulli(logits=parameters(1, 7)[k]).mask(parameters(2, 7)[k] > 0),
    "normal": lambda k: dist.Normal(parameters(3, 7, 2)[k], 0.3).to_event(1),
}


@pytest.mark.parametrize("name", [*OUTPUTS, "signs of counts", *(f"signs of {name}" for name in OUTPUTS)])
def test_a_share_draws_what_it_would_get_of_the_whole(name: str) -> None:
    of_name = name.removeprefix("signs of ")
    of = OUTPUTS.get(of_name, lambda k: dist.Poisson(parameters(4, 7, 2)[k].exp()).to_event(1))

    def drawn(which: slice, place: Place | None) -> Tensor:
        torch.manual_seed(5)
        found = drawn_from(of(which), place) if name == of_name else signed_from(of(which), place)
        assert found is not None
        return found

    assert is_noise(of(slice(None)), signs=name != of_name)
    whole = drawn(slice(None), None)
    shares = [drawn(slice(a, b), Place(0, a, 7)) for a, b in ((0, 3), (3, 5), (5, 7))]
    assert torch.equal(torch.cat(shares), whole)


def test_examples_may_lie_along_another_dimension() -> None:
    scale = parameters(0, 4, 7).exp()
    torch.manual_seed(5)
    whole = drawn_from(dist.Normal(0.0, scale))
    torch.manual_seed(5)
    assert torch.equal(drawn_from(dist.Normal(0.0, scale[:, 2:5]), Place(1, 2, 7)), whole[:, 2:5])


@pytest.mark.parametrize("own", [1, 2, 3, 8])
def test_the_noise_of_others_is_passed_over(own: int) -> None:
    """Also where it is not drawn all at once; and what is drawn afterwards is the same."""
    fn = dist.Categorical(logits=parameters(0, 8, 3))
    torch.manual_seed(5)
    whole, after = drawn_from(fn), torch.rand(3)
    for start in range(0, 8 - own + 1):
        torch.manual_seed(5)
        part = dist.Categorical(logits=fn.logits[start : start + own])
        assert torch.equal(drawn_from(part, Place(0, start, 8)), whole[start : start + own])
        assert torch.equal(torch.rand(3), after)


def sites(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("count", dist.Poisson((x @ w).exp()), obs=y.abs().round())
        pyro.sample("heavy", dist.TransformedDistribution(dist.Normal(x @ w, 1.0), []), obs=y)
        pyro.sample("class", dist.Bernoulli(logits=x @ w), obs=(y > 0).float())


def test_what_is_no_function_of_noise_is_each_parts_own_and_leaves_the_rest() -> None:
    x, y = torch.ones(50, 2), parameters(1, 50)

    def drawn(share: Share) -> list[Target]:
        run = watch(sites, (x, y), {"w": torch.ones(2)})
        with drawing_from(torch.Generator().manual_seed(0), x.device):
            draws = WholeBatch(run.observed, run, share)
            return [draws.draw() for _ in range(2)]

    first, second = (drawn(Share(start=50 * k, examples=100, part=k + 1)) for k in range(2))
    for name in ("count", "heavy"):
        values = [target.values[name] for target in (*first, *second)]
        assert not any(torch.equal(a, b) for a, b in combinations(values, 2)), name
    base = dist.Bernoulli(logits=torch.full((100,), 2.0))
    with drawing_from(torch.Generator().manual_seed(0), x.device):
        for a, b in zip(first, second, strict=True):
            assert torch.equal(torch.cat([a.values["class"], b.values["class"]]), drawn_from(base))


@pytest.mark.parametrize(
    "fn",
    [dist.Categorical(probs=torch.tensor([0.1, 0.6, 0.3])), dist.Bernoulli(0.3), dist.Normal(2.0, 0.5)],
    ids=["classes", "binary", "normal"],
)
def test_draws_have_the_moments_of_their_distribution(fn: Any) -> None:
    torch.manual_seed(0)
    values, own = drawn_from(fn.expand([40_000])).double(), fn.sample([40_000]).double()
    # Four standard errors.
    assert abs(float(values.mean() - own.mean())) < 4 * (2 / 40_000) ** 0.5 * float(own.std())
    assert abs(float(values.std() / own.std()) - 1) < 0.03
    if fn.support.is_discrete:
        assert torch.equal(values.unique(), own.unique())


def test_other_distributions_are_not_noise() -> None:
    assert not is_noise(dist.Poisson(torch.ones(3)))
    assert not is_noise(dist.StudentT(4.0, torch.ones(3)))


SIGNED = {
    "classes": lambda f: dist.Categorical(logits=f),
    "a class that is ruled out": lambda f: dist.Categorical(logits=torch.cat([f, torch.full((1, 1), -torch.inf)], -1)),
    "binary": lambda f: dist.Bernoulli(logits=f).to_event(1),
    "counts": lambda f: dist.Poisson(f.exp()).to_event(1),
    "normal": lambda f: dist.Normal(f, torch.tensor([0.3, 1.0, 2.0])).to_event(1),
}


@pytest.mark.parametrize("name", SIGNED)
def test_scores_of_signs_have_the_second_moments_of_the_score(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Averaged over all signs that there are, exactly."""
    f = torch.tensor([[1.5, -2.0, 0.3]], dtype=torch.float64)

    def model(w: Tensor, y: Tensor | None = None) -> Any:
        return pyro.sample("y", SIGNED[name](f + w), obs=y)

    def gradient(target: Target) -> Tensor:
        w = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
        observed = pyro.poutine.trace(model).get_trace(w).nodes["y"]
        site = Observed("y", observed["fn"], observed["value"], None, 1.0, ())
        return torch.autograd.grad(score({"y": site}, target), w)[0][0]

    size = 4 if "ruled out" in name else 3
    total = torch.zeros(3, 3, dtype=torch.float64)
    for signs in product((-1.0, 1.0), repeat=size):
        monkeypatch.setattr(draws, "_signs", lambda like, place, s=signs: like.new_tensor([s]))
        fn = SIGNED[name](f)
        value = signed_from(fn)
        assert value is not None
        g = gradient(Target({"y": value}, {}, drawn=True, between=frozenset({"y"})))
        total += torch.outer(g, g) / 2**size
    p = torch.softmax(f[0], -1)
    expected = {
        "classes": p.diag() - torch.outer(p, p),
        "a class that is ruled out": p.diag() - torch.outer(p, p),
        "binary": (torch.sigmoid(f[0]) * torch.sigmoid(-f[0])).diag(),
        "counts": f[0].exp().diag(),
        "normal": torch.tensor([0.3, 1.0, 2.0], dtype=torch.float64).square().reciprocal().diag(),
    }
    torch.testing.assert_close(total, expected[name], rtol=1e-6, atol=1e-9)


def classifier(scale: float) -> tuple[ncl.BayesianNetwork, dict[str, Tensor], tuple[Tensor, Tensor]]:
    """One that is the surer, the larger the scale."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    network = ncl.BayesianNetwork(net, ncl.Categorical())
    values = {name: value.detach() for name, value in net.named_parameters()}
    values["2.weight"] = values["2.weight"] * scale
    return network, values, (parameters(1, 100, 6), torch.zeros(100, dtype=torch.int64))


@pytest.mark.parametrize(("scale", "share"), [(1.0, 1.3), (20.0, 0.75)])
def test_signs_estimate_the_fisher_of_a_sure_classifier_with_less_noise(scale: float, share: float) -> None:
    """Than drawn targets do; that of one which knows nothing with a little more."""
    network, values, batch = classifier(scale)
    exact = ncl.fisher(network, values, batch, kind="exact")["2"].output

    def found(kind: str, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return ncl.fisher(network, values, batch, kind=kind, generator=generator)["2"].output

    signs, drawn = (torch.stack([found(kind, k) for k in range(30)]) for kind in ("signs", "model"))
    # Four standard errors, of each entry.
    within = 4 * signs.std(0) / 30**0.5 + 1e-6 * exact.abs().max()
    assert bool(((signs.mean(0) - exact).abs() <= within).all())
    assert (signs - exact).norm() < share * (drawn - exact).norm()


def test_the_sign_of_a_normal_output_does_not_matter() -> None:
    """One output for each example: an outer product is free of signs, and exact."""
    network = ncl.BayesianNetwork(torch.nn.Linear(3, 1), ncl.Normal(0.5))
    values = {"weight": torch.ones(1, 3), "bias": torch.zeros(1)}
    batch = (parameters(0, 9, 3), torch.zeros(9, 1))
    (found,), (exact,) = (ncl.fisher(network, values, batch, kind=kind).values() for kind in ("signs", "exact"))
    torch.testing.assert_close(found.output, exact.output)


@pytest.mark.parametrize(
    "of",
    [lambda w: dist.Normal(0.0, w.exp()), lambda w: dist.StudentT(4.0, w), lambda w: dist.Gamma(2.0, w.exp())],
    ids=["a learnt scale", "heavy tails", "gamma"],
)
def test_where_signs_are_not_enough_targets_are_drawn(of: Any) -> None:
    def model(x: Tensor, y: Tensor | None = None) -> Any:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", of(x @ w), obs=y)

    batch, values = (parameters(0, 5, 2), torch.ones(5)), {"w": torch.ones(2)}
    (signs,), (drawn,) = (ncl.fisher(model, values, batch, kind=kind).values() for kind in ("signs", "model"))
    assert torch.equal(signs.output, drawn.output)
