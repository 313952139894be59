"""The Fisher of every model of the zoo: exact where KFAC is exact, and invariant to what must not matter."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import nclbayes as ncl
from nclbayes.blocks import find_blocks
from nclbayes.errors import DataError, ModelError, NonFiniteError, SettingError, UnsupportedUseError, ValuesError
from nclbayes.fisher import DiagonalFisher, KroneckerFisher
from nclbayes.watch import watch
from tests import dense
from tests.zoo import ZOO, Case, inputs, labels, normal, random_values, rnn

Factors = dict[str, KroneckerFisher | DiagonalFisher]


def tensors(factors: Factors) -> Iterator[tuple[str, Tensor]]:
    for name, factor in factors.items():
        if isinstance(factor, DiagonalFisher):
            yield name, factor.diagonal
        else:
            yield f"{name} input", factor.input
            yield f"{name} output", factor.output


def assert_same(first: Factors, second: Factors, rtol: float) -> None:
    assert list(first) == list(second)
    for (name, a), (_, b) in zip(tensors(first), tensors(second), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * float(a.abs().max()), msg=lambda m, n=name: f"{n}: {m}")


def kron(factor: KroneckerFisher | DiagonalFisher) -> Tensor:
    assert isinstance(factor, KroneckerFisher)
    return torch.kron(factor.input, factor.output)


def compute(case: Case, **settings: object) -> Factors:
    return ncl.fisher(case.model, case.values, case.batch, context=case.context, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["exact", "empirical"])
@pytest.mark.parametrize("name", ZOO)
def test_splitting_the_data_into_other_batches_changes_nothing(name: str, kind: str) -> None:
    case = ZOO[name]()
    count = len(case.batch[0])
    pieces = ncl.FisherAccumulator(case.model, case.values, kind=kind, context=case.context)
    for start, stop in ((0, 1), (1, count // 2), (count // 2, count)):
        pieces.update(case.rows(slice(start, stop)))
    assert pieces.examples == count
    assert_same(compute(case, kind=kind), pieces.factors(), rtol=1e-5)


@pytest.mark.parametrize("kind", ["model", "signs"])
@pytest.mark.parametrize("name", ZOO)
def test_drawn_targets_estimate_the_exact_fisher(name: str, kind: str) -> None:
    case = ZOO[name]()
    exact, drawn = compute(case, kind="exact"), compute(case, kind=kind, samples=500)
    assert list(exact) == list(drawn)
    for (label, a), (_, b) in zip(tensors(exact), tensors(drawn), strict=True):
        # a trace averages the most noise away; its relative error is a few times 1/sqrt(500 * examples)
        trace = (lambda t: t.diagonal(dim1=-2, dim2=-1).sum()) if "put" in label else torch.sum
        assert float(trace(b) / trace(a)) == pytest.approx(1.0, abs=0.06), label


@pytest.mark.parametrize("name", ZOO)
def test_size_scales_the_fisher_and_counts_are_kept(name: str) -> None:
    case = ZOO[name]()
    plain, scaled = compute(case, kind="empirical"), compute(case, kind="empirical", size=1000)
    for key, factor in plain.items():
        other = scaled[key]
        assert factor.examples == len(case.batch[0])
        if isinstance(factor, DiagonalFisher):
            torch.testing.assert_close(other.diagonal, factor.diagonal * (1000 / factor.examples))
        else:
            torch.testing.assert_close(other.output, factor.output * (1000 / factor.examples))
            torch.testing.assert_close(other.input, factor.input)


def test_rows_are_counted() -> None:
    rows = {name: f.rows for name, f in compute(ZOO["sequences"](), kind="empirical").items()}
    assert rows == {"w": 60, "v": 60}
    rows = {name: f.rows for name, f in compute(ZOO["cnn"](), kind="empirical").items()}
    assert rows == {"net.0": 160, "net.2": 160, "net.5": 10}
    rows = {name: f.rows for name, f in compute(ZOO["tied"](), kind="empirical").items() if hasattr(f, "rows")}
    assert rows == {"u": 24, "w": 24}


# Oracle: KFAC is exact for one linear layer with Gaussian output, and for deep linear networks.


@pytest.mark.parametrize("bias", [False, True])
def test_one_linear_layer_with_gaussian_output_is_exact(bias: bool) -> None:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", normal((3, 4)))
        b = pyro.sample("b", normal((3,))) if bias else None
        pyro.sample("y", dist.Normal(F.linear(x, w, b), 0.5).to_event(1), obs=y)

    values = random_values({"w": (3, 4)} | ({"b": (3,)} if bias else {}))
    x = inputs(9, 4)
    block = find_blocks(watch(model, (x, inputs(9, 3)), values))["w"]
    factors = ncl.fisher(model, values, (x, inputs(9, 3)), kind="exact")
    reference = dense.gaussian_fisher(
        lambda v, xi: F.linear(xi, v["w"], v.get("b")), values, x, 0.25 * torch.eye(3), block.pack
    )
    torch.testing.assert_close(kron(factors["w"]), reference, rtol=1e-5, atol=1e-4)


def test_one_linear_layer_with_correlated_gaussian_output_is_exact() -> None:
    root = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.7, 0.0], [-0.2, 0.3, 0.4]])

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", normal((4, 3)))
        pyro.sample("y", dist.MultivariateNormal(x @ w, scale_tril=root), obs=y)

    values, x = random_values({"w": (4, 3)}), inputs(9, 4)
    block = find_blocks(watch(model, (x, inputs(9, 3)), values))["w"]
    factors = ncl.fisher(model, values, (x, inputs(9, 3)), kind="exact")
    reference = dense.gaussian_fisher(lambda v, xi: xi @ v["w"], values, x, root @ root.T, block.pack)
    torch.testing.assert_close(kron(factors["w"]), reference, rtol=1e-5, atol=1e-4)


def test_a_deep_linear_network_with_gaussian_output_is_exact() -> None:
    shapes = {"w1": (4, 3), "w2": (5, 4), "w3": (2, 5)}

    def mean(v: dict[str, Tensor], x: Tensor) -> Tensor:
        return F.linear(F.linear(F.linear(x, v["w1"]), v["w2"]), v["w3"])

    def model(x: Tensor, y: Tensor) -> None:
        v = {name: pyro.sample(name, normal(shape)) for name, shape in shapes.items()}
        pyro.sample("y", dist.Normal(mean(v, x), 1.0).to_event(1), obs=y)

    values, x = random_values(shapes), inputs(11, 3)
    factors = ncl.fisher(model, values, (x, inputs(11, 2)), kind="exact")
    for name in shapes:
        reference = dense.gaussian_fisher(mean, values, x, torch.eye(2), lambda v, n=name: v[n])
        torch.testing.assert_close(kron(factors[name]), reference, rtol=1e-5, atol=1e-4, msg=name)


def test_a_convolution_of_one_position_is_exact_group_by_group() -> None:
    def mean(v: dict[str, Tensor], x: Tensor) -> Tensor:
        return F.conv2d(x.unsqueeze(0), v["w"], groups=2).flatten()

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", normal((4, 3, 2, 2)))
        pyro.sample("y", dist.Normal(F.conv2d(x, w, groups=2).flatten(1), 1.0).to_event(1), obs=y)

    values, x = random_values({"w": (4, 3, 2, 2)}), inputs(8, 6, 2, 2)
    factor = ncl.fisher(model, values, (x, inputs(8, 4)), kind="exact")["w"]
    assert factor.input.shape == (2, 12, 12)
    for group in range(2):
        pick = slice(2 * group, 2 * group + 2)
        reference = dense.gaussian_fisher(mean, values, x, torch.eye(4), lambda v, p=pick: v["w"][p].reshape(2, 12))
        product = torch.kron(factor.input[group], factor.output[group])
        torch.testing.assert_close(product, reference, rtol=1e-5, atol=1e-4)


def test_a_softmax_layer_on_one_input_is_exact() -> None:
    """With a single example there is nothing to factorise: the enumerated Fisher is zz^T (x) (diag p - pp^T)."""

    def log_prob(v: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.log_softmax(F.linear(x, v["w"], v["b"]), -1)[y]

    def model(x: Tensor, y: Tensor) -> None:
        w, b = pyro.sample("w", normal((3, 4))), pyro.sample("b", normal((3,)))
        pyro.sample("y", dist.Categorical(logits=F.linear(x, w, b)), obs=y)

    values, x = random_values({"w": (3, 4), "b": (3,)}), inputs(1, 4)
    block = find_blocks(watch(model, (x, labels(3, 1)), values))["w"]
    factors = ncl.fisher(model, values, (x, labels(3, 1)), kind="exact")
    reference = dense.enumerated_fisher(log_prob, values, x, [torch.tensor(k) for k in range(3)], block.pack)
    torch.testing.assert_close(kron(factors["w"]), reference, rtol=1e-5, atol=1e-6)


def test_one_row_an_example_gives_the_two_means_times_n() -> None:
    """N E[zz^T] (x) E[gg^T], each computed by hand for the last layer of a network."""
    case = ZOO["pyro_mlp"]()
    v = {k: t.double() for k, t in case.values.items()}
    h = torch.tanh(
        F.linear(
            F.relu(F.linear(case.batch[0].double(), v["net.0.weight"], v["net.0.bias"])),
            v["net.2.weight"],
            v["net.2.bias"],
        )
    )
    p = F.softmax(F.linear(h, v["net.4.weight"], v["net.4.bias"]), -1)
    z = F.pad(h, (0, 1), value=1.0)
    curvature = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    expected = 12 * torch.kron(z.T @ z / 12, curvature.mean(0))
    torch.testing.assert_close(kron(compute(case, kind="exact")["net.4"]), expected, rtol=1e-4, atol=1e-4)


def test_sequences_follow_the_recurrent_formula() -> None:
    """N E[T] E[zz^T] (x) E[gg^T] over valid steps, from the model's own run."""
    case = rnn()
    x, lengths, _ = case.batch
    w = case.values["w"].double()
    zs, rs = [], []
    for i in range(len(x)):
        r = torch.zeros(6, dtype=torch.float64)
        for t in range(int(lengths[i])):
            z = torch.cat([r, x[i, t].double()])
            r = F.relu(w @ z)
            zs.append(z)
            rs.append(r)
    z, r = torch.stack(zs), torch.stack(rs)
    factors = compute(case, kind="exact")
    assert factors["w"].rows == factors["c"].rows == int(lengths.sum())
    torch.testing.assert_close(factors["w"].input, z.T @ z / len(z), rtol=1e-5, atol=1e-5)
    # the readout's gradient has unit covariance at every step: N E[T] E[rr^T] (x) I
    torch.testing.assert_close(kron(factors["c"]), torch.kron(r.T @ r, torch.eye(2).double()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["exact", "empirical"])
def test_padding_further_changes_nothing(kind: str) -> None:
    plain, padded = compute(rnn(), kind=kind), compute(rnn(padding=7), kind=kind)
    assert [f.rows for f in plain.values()] == [f.rows for f in padded.values()]
    assert_same(plain, padded, rtol=2e-7)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_padding_may_hold_anything_where_the_model_ignores_it(poison: float) -> None:
    """Padded steps that never reach the likelihood may even be NaN."""

    def model(x: Tensor, keep: Tensor, y: Tensor) -> None:
        w, b = pyro.sample("w", normal((3, 4))), pyro.sample("b", normal((3,)))
        with ncl.valid_steps(keep):
            mean = F.linear(x, w, b)
        mean = torch.where(keep.unsqueeze(-1), mean, torch.zeros_like(mean))
        pyro.sample("y", dist.Normal(mean, 1.0).to_event(1).mask(keep).to_event(1), obs=y)

    keep = torch.arange(5) < torch.tensor([3, 5, 1])[:, None]
    x = inputs(3, 5, 4)
    values = random_values({"w": (3, 4), "b": (3,)})
    clean = ncl.fisher(model, values, (x, keep, inputs(3, 5, 3)), kind="exact")
    assert float(clean["w"].input[-1, -1]) == 1  # the constant of valid rows only
    torch.testing.assert_close(clean["w"].input[-1, :-1], x[keep].double().mean(0), rtol=1e-6, atol=1e-7)
    x = torch.where(keep.unsqueeze(-1), x, torch.full_like(x, poison))
    dirty = ncl.fisher(model, values, (x, keep, inputs(3, 5, 3)), kind="exact")
    assert_same(clean, dirty, rtol=0)


# Diagonal blocks


def test_diagonal_blocks_match_per_example_gradients() -> None:
    case = ZOO["gains"]()

    def log_prob(v: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        features, token, target = x[:5], x[5].long(), y
        h = F.linear(features, v["w"], v["shared"]) * v["gain"] + v["table"][token]
        h = F.linear(F.layer_norm(h, (4,), weight=v["norm"]), v["v"], v["shared"])
        return torch.distributions.Normal(h, v["log_scale"].exp()).log_prob(target.double()).sum()

    x = torch.cat([case.batch[0], case.batch[1].unsqueeze(-1).float()], -1)
    expected = {name: torch.zeros(case.values[name].shape).double() for name in case.values}
    for xi, yi in zip(x, case.batch[2], strict=True):
        for name, g in dense.score(log_prob, case.values, xi, yi).items():
            expected[name] += g.square()
    factors = compute(case, kind="empirical")
    for name in ("gain", "table", "norm", "log_scale", "shared"):
        torch.testing.assert_close(factors[name].diagonal, expected[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("numbers", [1, 40, 1 << 24])
def test_a_model_that_cannot_be_vectorised_is_run_one_example_after_the_other(
    numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It branches on its data; however few gradients are held at a time, the sums are the same."""

    def model(x: Tensor, y: Tensor, branches: bool = False) -> None:
        # Nothing but autograd itself can tell what becomes of the gains.
        gain = pyro.sample("gain", normal((5,)))
        if branches and float(x.abs().max()) < 0:
            gain = 2 * gain
        pyro.sample("y", dist.Normal(torch.einsum("bi,i->b", x, gain**2), 1.0), obs=y)

    batch, values = (inputs(30, 5), inputs(30)), random_values({"gain": (5,)})
    expected = ncl.fisher(model, values, batch, kind="empirical")["gain"]
    # The function nclbayes.fisher hides the package of that name.
    monkeypatch.setattr(sys.modules["nclbayes.fisher.per_example"], "NUMBERS", numbers)
    with pytest.warns(UserWarning, match=r"'gain' need.*cannot vectorise.*one after the other"):
        found = ncl.fisher(model, values, batch, kind="empirical", context={"branches": True})["gain"]
    torch.testing.assert_close(found.diagonal, expected.diagonal, rtol=1e-5, atol=1e-6)


def test_a_model_that_takes_no_example_by_itself_is_refused() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        gain = pyro.sample("gain", normal((5,)))
        if len(x) < 2:
            raise ValueError("two at least")
        pyro.sample("y", dist.Normal(torch.einsum("bi,i,i->b", x, gain, gain), 1.0), obs=y)

    with (
        pytest.warns(UserWarning, match="cannot vectorise"),
        pytest.raises(UnsupportedUseError, match="cannot take an example by itself: two at least"),
    ):
        ncl.fisher(model, {"gain": torch.ones(5)}, (inputs(6, 5), inputs(6)))


def test_the_exact_fisher_of_a_learnt_noise_scale() -> None:
    """For y ~ N(w, exp(s)^2) the Fisher of s is 2, of w exp(-2s): known in closed form."""

    def model(x: Tensor, y: Tensor) -> None:
        s, offset = pyro.sample("s", dist.Normal(0.0, 1.0)), pyro.sample("offset", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(offset * x, s.exp()), obs=y)

    values = {"s": torch.tensor(0.3), "offset": torch.tensor(1.7)}
    factors = ncl.fisher(model, values, (torch.ones(8), inputs(8)), kind="exact")
    assert float(factors["s"].diagonal) == pytest.approx(16.0, rel=1e-5)
    assert float(factors["offset"].diagonal) == pytest.approx(8 * torch.tensor(-0.6).exp().item(), rel=1e-5)


def test_a_random_model_with_diagonal_blocks_is_refused() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        gain = pyro.sample("gain", normal((5,)))
        pyro.sample("y", dist.Normal(torch.einsum("bi,i,i->b", x, gain, gain) + torch.randn_like(x[:, 0]), 1.0), obs=y)

    with pytest.raises(UnsupportedUseError, match=r"'gain' need the gradient of each example.*random"):
        ncl.fisher(model, {"gain": torch.ones(5)}, (inputs(6, 5), inputs(6)))


def test_a_lack_of_memory_passes_when_examples_are_run_one_by_one() -> None:
    runs = iter(range(2))

    def model(x: Tensor, y: Tensor) -> None:
        gain = pyro.sample("gain", normal((5,)))
        if next(runs):
            torch.empty(2**58, dtype=torch.uint8, device="cpu")
        pyro.sample("y", dist.Normal((x * gain).sum(-1), 1.0), obs=y)

    with pytest.raises(RuntimeError, match=r"allocate memory|not enough memory") as error:
        ncl.fisher(model, {"gain": torch.ones(5)}, (inputs(6, 5), inputs(6)))
    assert type(error.value) is RuntimeError


# Targets, scales, masks, temperature


def test_a_users_scale_multiplies_the_fisher_once() -> None:
    def model(x: Tensor, y: Tensor, scale: float = 1.0) -> None:
        w = pyro.sample("w", normal((5, 3)))
        with poutine.scale(scale=scale):
            pyro.sample("y", dist.Categorical(logits=x @ w), obs=y)

    values, batch = random_values({"w": (5, 3)}), (inputs(8, 5), labels(3, 8))
    one = ncl.fisher(model, values, batch, kind="exact")["w"]
    three = ncl.fisher(model, values, batch, kind="exact", context={"scale": 3.0})["w"]
    torch.testing.assert_close(kron(three), 3 * kron(one), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["exact", "empirical"])
def test_masked_examples_add_nothing_to_the_gradients(kind: str) -> None:
    def model(x: Tensor, keep: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", normal((5, 3)))
        with poutine.mask(mask=keep):
            pyro.sample("y", dist.Categorical(logits=x @ w), obs=y)

    values, x, y = random_values({"w": (5, 3)}), inputs(8, 5), labels(3, 8)
    keep = torch.arange(8) < 5
    masked = ncl.fisher(model, values, (x, keep, y), kind=kind)["w"]
    alone = ncl.fisher(model, values, (x[:5], keep[:5], y[:5]), kind=kind)["w"]
    torch.testing.assert_close(masked.output, alone.output, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inside", [True, False], ids=["mask inside the event", "mask around part of the event"])
def test_masked_steps_add_nothing_to_the_exact_gradients(inside: bool) -> None:
    keep = torch.arange(4) < torch.tensor([4, 1, 3])[:, None]

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", normal((5, 2)))
        fn = dist.Normal(x @ w, 1.0)
        fn = fn.mask(keep.unsqueeze(-1)).to_event(2) if inside else fn.to_event(1).mask(keep).to_event(1)
        pyro.sample("y", fn, obs=y)

    exact = ncl.fisher(model, random_values({"w": (5, 2)}), (inputs(3, 4, 5), inputs(3, 4, 2)), kind="exact")["w"]
    torch.testing.assert_close(exact.output, 8 * torch.eye(2).double())


def test_a_plate_changes_nothing() -> None:
    plain, plated = ZOO["pyro_mlp"](), ZOO["pyro_mlp_plate"]()
    assert_same(compute(plain, kind="exact"), compute(plated, kind="exact"), rtol=1e-6)


def test_the_temperature_divides_the_logits() -> None:
    def model(x: Tensor, y: Tensor, temperature: float = 1.0) -> None:
        w = pyro.sample("w", normal((5, 3)))
        pyro.sample("y", dist.Categorical(logits=(x @ w) / temperature).mask(True), obs=y)

    values, batch = random_values({"w": (5, 3)}, scale=3.0), (inputs(8, 5), labels(3, 8))
    tempered = ncl.fisher(model, values, batch, kind="exact", temperature=2.5)["w"]
    by_hand = ncl.fisher(model, values, batch, kind="exact", context={"temperature": 2.5})["w"]
    torch.testing.assert_close(kron(tempered), kron(by_hand), rtol=1e-5, atol=1e-6)
    case = ZOO["functional"]()
    with pytest.raises(SettingError, match="Categorical or Bernoulli outputs; site 'y' is a Normal"):
        compute(case, temperature=2.0)


@pytest.mark.parametrize(
    "output",
    [
        lambda h: dist.Bernoulli(logits=h).to_event(1),
        lambda h: dist.OneHotCategorical(logits=h),
        lambda h: dist.Binomial(4, logits=h).to_event(1),
        lambda h: dist.Normal(h[..., :2], h[..., 2:].exp()).to_event(1),
    ],
    ids=["bernoulli", "one hot", "binomial", "normal with learnt scale"],
)
def test_the_exact_kind_is_what_many_draws_tend_to(output: object) -> None:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", normal((5, 3)))
        pyro.sample("y", output(x @ w), obs=y)  # type: ignore[operator]

    values, x = random_values({"w": (5, 3)}), inputs(6, 5)
    y = output(x @ values["w"]).sample()  # type: ignore[operator]
    exact = ncl.fisher(model, values, (x, y), kind="exact")["w"]
    drawn = ncl.fisher(model, values, (x, y), samples=2000)["w"]
    torch.testing.assert_close(drawn.output, exact.output, rtol=0.15, atol=0.05 * float(exact.output.abs().max()))


def test_any_distribution_can_be_drawn_from() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", normal((5, 3)))
        pyro.sample("y", dist.StudentT(4.0, x @ w).to_event(1), obs=y)

    values, batch = random_values({"w": (5, 3)}), (inputs(6, 5), inputs(6, 3))
    # the Fisher of a Student t's location is (nu + 1) / (nu + 3)
    drawn = ncl.fisher(model, values, batch, samples=6000)["w"]
    torch.testing.assert_close(drawn.output / 6, torch.eye(3).double() * 5 / 7, rtol=0.03, atol=0.02)
    with pytest.raises(DataError, match="'y' is not known for a StudentT; use kind='model'"):
        ncl.fisher(model, values, batch, kind="exact")


# Randomness


def test_draws_come_from_the_generator_and_the_global_state_is_untouched() -> None:
    case = ZOO["pyro_mlp"]()
    state = torch.get_rng_state()
    first = compute(case, generator=torch.Generator().manual_seed(5))
    torch.rand(3)
    second = compute(case, generator=torch.Generator().manual_seed(5))
    third = compute(case, generator=torch.Generator().manual_seed(6))
    torch.set_rng_state(state)
    fourth = compute(case)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(first, second, rtol=0)
    assert not torch.equal(kron(first["net.4"]), kron(third["net.4"]))
    assert_same(fourth, compute(case), rtol=0)


def test_the_models_own_noise_comes_from_the_generator_too() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", normal((5, 3)))
        pyro.sample("y", dist.Categorical(logits=(x + torch.randn_like(x)) @ w), obs=y)

    values, batch = random_values({"w": (5, 3)}), (inputs(6, 5), labels(3, 6))
    state = torch.get_rng_state()
    first, second = (ncl.fisher(model, values, batch) for _ in range(2))
    assert_same(first, second, rtol=0)
    assert torch.equal(torch.get_rng_state(), state)


# Devices and errors


@pytest.mark.parametrize("kind", ["model", "signs", "exact", "empirical"])
@pytest.mark.parametrize("name", ZOO)
def test_no_tensor_is_made_without_a_device(name: str, kind: str) -> None:
    case = ZOO[name]()
    expected = compute(case, kind=kind)
    if name not in ("pyro_mlp", "cnn"):
        # these models build priors or subsamples inside the call, on the default device: keep that on the CPU
        inner = case.model

        def model(*args: Tensor, **context: object) -> None:
            with torch.device("cpu"):
                inner(*args, **context)

        case.model = model
    torch.set_default_device("meta")
    try:
        found = compute(case, kind=kind)
    finally:
        torch.set_default_device(None)
    assert_same(expected, found, rtol=0)


def test_a_missing_value_is_named() -> None:
    case = ZOO["functional"]()
    del case.values["w2"], case.values["b1"]
    with pytest.raises(ValuesError, match="without a value: 'b1', 'w2'"):
        compute(case)


def test_an_empty_batch_and_no_batch_are_refused() -> None:
    case = ZOO["functional"]()
    with pytest.raises(DataError, match="0 examples"):
        ncl.fisher(case.model, case.values, case.rows(slice(0, 0)))
    with pytest.raises(DataError, match="No batch"):
        ncl.FisherAccumulator(case.model, case.values).factors()


def test_non_finite_activations_and_gradients_are_named() -> None:
    case = ZOO["functional"]()
    x, y = case.batch
    with pytest.raises(NonFiniteError, match="inputs of the map with weight 'w1'"):
        ncl.fisher(case.model, case.values, (x * float("inf"), y), kind="empirical")
    with pytest.raises(NonFiniteError, match="value of site 'w2'"):
        ncl.fisher(case.model, case.values | {"w2": torch.full((3, 4), float("nan"))}, (x, y))
    with pyro.validation_enabled(False):
        with pytest.raises(NonFiniteError, match="inputs of the map with weight 'w1'"):
            ncl.fisher(case.model, case.values, (x * float("inf"), y), kind="empirical")
        with pytest.raises(NonFiniteError, match="gradients of the map with weight 'w"):
            ncl.fisher(case.model, case.values, (x, y * float("inf")), kind="empirical")


def test_settings_are_checked() -> None:
    case = ZOO["functional"]()
    with pytest.raises(SettingError, match="'model', 'signs', 'exact', 'empirical'"):
        compute(case, kind="true")
    with pytest.raises(SettingError, match="at least 1"):
        compute(case, samples=0)
    with pytest.raises(SettingError, match="positive"):
        compute(case, temperature=0.0)


def test_a_block_that_changes_its_form_is_an_error() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", normal((5, 5)))
        pyro.sample("y", dist.Normal((x @ w if len(x) > 3 else x @ w.T).sum(-1), 1.0), obs=y)

    accumulator = ncl.FisherAccumulator(model, {"w": torch.ones(5, 5)})
    accumulator.update((inputs(6, 5), inputs(6)))
    with pytest.raises(ModelError, match="'w' changed its form"):
        accumulator.update((inputs(2, 5), inputs(2)))


def test_examples_must_be_told_apart_for_the_exact_kind() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", normal((5,)))
        pyro.sample("y", dist.Normal((x @ w).sum(), 1.0), obs=y.sum())

    with pytest.raises(DataError, match=r"'y' apart.*pyro\.plate"):
        ncl.fisher(model, {"w": torch.ones(5)}, (inputs(6, 5), inputs(6)), kind="exact")


def test_a_time_plate_beside_the_data_plate() -> None:
    """Examples are found by their plate, wherever it lies."""

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", normal((5,)))
        with pyro.plate("time", 4, dim=-2), pyro.plate("data", len(x), dim=-1):
            pyro.sample("y", dist.Normal((x @ w).T, 0.5), obs=y.T)

    x = inputs(6, 4, 5)
    factors = ncl.fisher(model, {"w": torch.ones(5)}, (x, inputs(6, 4)), kind="exact")["w"]
    rows = x.reshape(-1, 5).double()
    torch.testing.assert_close(kron(factors), 4 * rows.T @ rows, rtol=1e-5, atol=1e-4)
