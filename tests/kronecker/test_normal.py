"""KroneckerNormal against the dense multivariate normal (vec stacks columns)."""

import copy
import pickle

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from torch import Tensor
from torch.distributions import Independent, kl_divergence

from nclbayes.errors import MatrixError
from nclbayes.kronecker import KroneckerNormal, KroneckerPrecision, kronecker_sum
from tests.kronecker.matrices import kron, spd, vec

M, N = 2, 3


def parameters(seed: int = 0, m: int = M, n: int = N) -> tuple[Tensor, Tensor, Tensor]:
    """loc, A and G."""
    rng = np.random.default_rng(seed)
    scales = rng.uniform(0.3, 3.0, 2)
    return torch.from_numpy(rng.standard_normal((m, n))), spd(rng, n, 20, scales[0]), spd(rng, m, 20, scales[1])


def batched(shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """The same with batch dimensions."""
    count = int(np.prod(shape))
    stacked = (torch.stack(ts) for ts in zip(*(parameters(100 * seed + i) for i in range(count)), strict=True))
    return tuple(t.reshape(shape + t.shape[1:]) for t in stacked)


def dense(loc: Tensor, A: Tensor, G: Tensor) -> torch.distributions.MultivariateNormal:
    """The same Gaussian over vec(theta)."""
    precision = torch.from_numpy(
        np.stack([kron(a, g) for a, g in zip(A.reshape(-1, N, N), G.reshape(-1, M, M), strict=True)])
    )
    return torch.distributions.MultivariateNormal(
        vec(loc), precision_matrix=precision.reshape(*loc.shape[:-2], M * N, M * N)
    )


def normal(shape: tuple[int, ...] = (), seed: int = 0) -> tuple[torch.distributions.Normal, Tensor, Tensor]:
    """Independent entries: the distribution, and its mean and variances."""
    rng = np.random.default_rng(seed + 50)
    loc = torch.from_numpy(rng.standard_normal((*shape, M, N)))
    scale = torch.from_numpy(rng.uniform(0.3, 3.0, (*shape, M, N)))
    return torch.distributions.Normal(loc, scale), loc, scale


def noise(*shape: int, seed: int = 9) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


@pytest.fixture
def no_factorisation(monkeypatch) -> None:
    """Make every routine that could factorise or invert a matrix raise."""

    def refuse(*_args, **_kwargs):
        raise AssertionError("a matrix was factorised")

    for name in ("cholesky_ex", "cholesky", "eigh", "inv", "inv_ex", "qr", "svd", "solve", "solve_triangular"):
        monkeypatch.setattr(torch.linalg, name, refuse)
    monkeypatch.setattr(torch, "cholesky_inverse", refuse)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
def test_density_moments_and_entropy_equal_the_dense_normal(shape):
    loc, A, G = batched(shape) if shape else parameters()
    q, expected = KroneckerNormal(loc, A, G), dense(loc, A, G)
    assert q.batch_shape == shape
    assert q.event_shape == (M, N)
    value = noise(5, *shape, M, N)
    np.testing.assert_allclose(q.log_prob(value), expected.log_prob(vec(value)), rtol=1e-10)
    np.testing.assert_allclose(q.entropy(), expected.entropy(), rtol=1e-10)
    np.testing.assert_allclose(vec(q.mean), expected.mean)
    np.testing.assert_allclose(vec(q.mode), expected.mean)
    np.testing.assert_allclose(vec(q.variance), expected.variance, rtol=1e-9)
    np.testing.assert_allclose(vec(q.stddev), expected.stddev, rtol=1e-9)
    np.testing.assert_allclose(q.logdet, torch.logdet(expected.precision_matrix), rtol=1e-9)


def test_the_samples_have_the_dense_covariance():
    loc, A, G = parameters(1)
    expected = dense(loc, A, G)
    count = 200_000
    with torch.random.fork_rng():
        torch.manual_seed(0)
        samples = vec(KroneckerNormal(loc, A, G).sample((count,))).numpy()
    covariance = expected.covariance_matrix.numpy()
    variances = np.diag(covariance)
    error = np.sqrt((np.outer(variances, variances) + covariance**2) / count)
    assert (np.abs(np.cov(samples.T) - covariance) < 4 * error).all()
    assert (np.abs(samples.mean(0) - vec(loc).numpy()) < 4 * np.sqrt(variances / count)).all()
    # The order of vec matters to this test: the other one would be many standard errors away.
    other = np.linalg.inv(np.kron(G.numpy(), A.numpy()))
    assert (np.abs(other - covariance) > 20 * error).any()


def test_transform_maps_noise_to_the_dense_covariance():
    loc, A, G = parameters(2)
    q = KroneckerNormal(loc, A, G)
    columns = vec(q.transform(torch.eye(M * N, dtype=torch.float64).reshape(M * N, M, N)) - loc)
    np.testing.assert_allclose(columns.mT @ columns, np.linalg.inv(kron(A, G)), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("shape", [(), (4,)])
def test_kl_between_two_equals_the_dense_one(shape):
    p, q = (batched(shape, seed) if shape else parameters(seed) for seed in (1, 2))
    expected = kl_divergence(dense(*p), dense(*q))
    np.testing.assert_allclose(kl_divergence(KroneckerNormal(*p), KroneckerNormal(*q)), expected, rtol=1e-9)
    zero = kl_divergence(KroneckerNormal(*p), KroneckerNormal(*p))
    np.testing.assert_allclose(zero, torch.zeros(shape), atol=1e-10)


@pytest.mark.parametrize("shape", [(), (4,)])
@pytest.mark.parametrize("of_pyro", [False, True])
def test_kl_with_independent_entries_equals_the_dense_one(shape, of_pyro):
    parts = batched(shape, 3) if shape else parameters(3)
    base, loc, scale = normal(shape)
    r = dist.Normal(loc, scale).to_event(2) if of_pyro else Independent(base, 2)
    q, dense_q = KroneckerNormal(*parts), dense(*parts)
    dense_r = torch.distributions.MultivariateNormal(vec(loc), scale_tril=torch.diag_embed(vec(scale)))
    np.testing.assert_allclose(kl_divergence(q, r), kl_divergence(dense_q, dense_r), rtol=1e-9)
    np.testing.assert_allclose(kl_divergence(r, q), kl_divergence(dense_r, dense_q), rtol=1e-9)


@pytest.mark.parametrize(
    "other",
    [
        Independent(torch.distributions.Laplace(torch.zeros(M, N), torch.ones(M, N)), 2),
        dist.Cauchy(torch.zeros(M, N), torch.ones(M, N)).to_event(2),
        Independent(torch.distributions.Normal(torch.zeros(N), torch.ones(N)), 1),
        Independent(torch.distributions.Normal(torch.zeros(1, M, N), torch.ones(1, M, N)), 3),
    ],
)
def test_kl_with_anything_else_is_not_implemented(other):
    q = KroneckerNormal(*parameters())
    for pair in ((q, other), (other, q)):
        with pytest.raises(NotImplementedError, match="Independent"):
            kl_divergence(*pair)


def test_kl_between_matrices_of_different_shapes_is_refused():
    q = KroneckerNormal(*parameters())
    other = dist.Normal(torch.zeros(1, N).double(), 1.0).to_event(2)
    for pair in ((q, other), (other, q)):
        with pytest.raises(ValueError, match=r"different shapes: KroneckerNormal \(2, 3\), Independent \(1, 3\)"):
            kl_divergence(*pair)


def test_gradients_reach_the_mean():
    loc, A, G = parameters(4)
    loc.requires_grad_()
    weight = noise(6, M, N)
    q = KroneckerNormal(loc, A, G)
    (gradient,) = torch.autograd.grad((weight * q.rsample((6,))).sum(), loc)
    np.testing.assert_allclose(gradient, weight.sum(0), rtol=1e-12)
    assert not q.sample().requires_grad

    value = noise(M, N)
    (gradient,) = torch.autograd.grad(KroneckerNormal(loc, A, G).log_prob(value), loc)
    residual = vec(value - loc.detach()).numpy()
    np.testing.assert_allclose(vec(gradient), kron(A, G) @ residual, rtol=1e-10)


def test_gradients_reach_the_factors():
    loc, A, G = parameters(5)
    A.requires_grad_()
    G.requires_grad_()
    value = noise(M, N)
    mine = torch.autograd.grad(KroneckerNormal(loc, A, G).log_prob(value), (A, G))
    precision = torch.einsum("ij,kl->ikjl", A, G).reshape(M * N, M * N)
    oracle = torch.distributions.MultivariateNormal(vec(loc), precision_matrix=precision)
    theirs = torch.autograd.grad(oracle.log_prob(vec(value)), (A, G))
    for actual, expected in zip(mine, theirs, strict=True):
        # Off the diagonal a gradient may sit on either of two mirror entries.
        np.testing.assert_allclose(actual + actual.mT, expected + expected.mT, rtol=1e-9, atol=1e-9)


RESHAPES = {
    "itself": lambda d: d,
    "expand": lambda d: d.expand((5, 4)),
    "expand twice": lambda d: d.expand((5, 4)).expand((2, 5, 4)),
    "expand_by": lambda d: d.expand_by([3]),
    "to_event": lambda d: d.to_event(1),
    "expand, to_event": lambda d: d.expand((5, 4)).to_event(2),
    "masked": lambda d: d.mask(torch.tensor([True, False, True, True])),
    "masked away": lambda d: d.mask(False),
    "expand, mask, to_event": lambda d: d.expand((5, 4)).mask(torch.tensor([True, False, True, True])).to_event(1),
}


@pytest.mark.parametrize("reshape", RESHAPES)
@pytest.mark.parametrize("cached", [False, True])
def test_reshaping_does_what_it_does_to_pyro_s_multivariate_normal(reshape, cached):
    parts = batched((4,), 6)
    theirs = dist.MultivariateNormal(vec(parts[0]), precision_matrix=dense(*parts).precision_matrix)
    mine = KroneckerNormal(*parts, validate_args=None if cached else False)
    if cached:
        mine.log_prob(parts[0])
    mine, theirs = RESHAPES[reshape](mine), RESHAPES[reshape](theirs)
    assert mine.batch_shape == theirs.batch_shape
    assert mine.event_shape == (*theirs.event_shape[:-1], M, N)
    for sample_shape in ((), (7,), (6, 7)):
        x = mine.sample(sample_shape)
        assert x.shape == (*theirs.sample(sample_shape).shape[:-1], M, N)
        assert mine.log_prob(x).shape == theirs.log_prob(vec(x)).shape
        np.testing.assert_allclose(mine.log_prob(x), theirs.log_prob(vec(x)), rtol=1e-9)
    np.testing.assert_allclose(vec(mine.mean), theirs.mean)
    np.testing.assert_allclose(vec(mine.variance), theirs.variance, rtol=1e-9)


@pytest.mark.parametrize("validate", [False, True])
def test_an_expanded_distribution_validates_as_before(validate):
    q = KroneckerNormal(*parameters(), validate_args=validate).expand((2,))
    bad = torch.full((M, N), torch.nan, dtype=torch.float64)
    if validate:
        with pytest.raises(ValueError, match="support"):
            q.log_prob(bad)
    else:
        assert bool(q.log_prob(bad).isnan().all())


def test_an_expanded_distribution_draws_independently():
    q = KroneckerNormal(*parameters()).expand((2,))
    x = q.sample()
    assert not torch.equal(x[0], x[1])
    np.testing.assert_allclose(q.entropy(), dense(*parameters()).entropy().expand(2), rtol=1e-10)


def test_arguments_broadcast_to_one_batch_shape():
    loc, A, G = batched((4,), 7)
    q = KroneckerNormal(loc.unsqueeze(1), A[:3], G[0])
    assert q.batch_shape == (4, 3)
    value = noise(4, 3, M, N)
    for i, j in ((0, 0), (3, 1), (2, 2)):
        expected = dense(loc[i], A[j], G[0]).log_prob(vec(value[i, j]))
        np.testing.assert_allclose(q.log_prob(value)[i, j], expected, rtol=1e-10)


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("roots", [False, True])
def test_a_copy_is_the_same_distribution(clone, used, roots):
    loc, A, G = parameters(8)
    if roots:
        q = KroneckerNormal.from_precision(loc, KroneckerPrecision.factorise(A, G))
    else:
        q = KroneckerNormal(loc, A, G)
    if used:
        q.entropy()
    twin = clone(q)
    value = noise(M, N)
    expected = dense(loc, A, G)
    assert twin.loc.data_ptr() != loc.data_ptr()
    assert twin.event_shape == (M, N)
    assert float(twin.log_prob(value)) == pytest.approx(float(expected.log_prob(vec(value))), rel=1e-10)
    np.testing.assert_allclose(vec(twin.variance), expected.variance, rtol=1e-9)
    np.testing.assert_allclose(twin.transform(value), q.transform(value))


def test_given_roots_nothing_is_factorised(request):
    loc, A, G = parameters(10)
    p = KroneckerPrecision.factorise(A, G)
    value, expected = noise(M, N), dense(loc, A, G)
    variance, log_prob, entropy = expected.variance, expected.log_prob(vec(value)), expected.entropy()
    request.getfixturevalue("no_factorisation")
    q = KroneckerNormal(loc, A, G, input_root=p.input_root, output_root=p.output_root)
    for _ in range(3):
        assert q.rsample((2,)).shape == (2, M, N)
    np.testing.assert_allclose(vec(q.variance), variance, rtol=1e-9)
    assert q.expand((4,)).sample().shape == (4, M, N)

    whole = KroneckerNormal.from_precision(loc, p)
    for _ in range(3):
        whole.rsample()
    assert float(whole.log_prob(value)) == pytest.approx(float(log_prob), rel=1e-10)
    assert float(whole.entropy()) == pytest.approx(float(entropy), rel=1e-10)
    assert float(kl_divergence(whole, whole)) == pytest.approx(0, abs=1e-10)
    with pytest.raises(AssertionError, match="a matrix was factorised"):
        KroneckerNormal(loc, A, G)


def test_without_roots_a_matrix_is_factorised_once(monkeypatch):
    calls = []
    real = torch.linalg.cholesky_ex

    def counted(*args, **kwargs):
        calls.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", counted)
    q = KroneckerNormal(*parameters())
    for _ in range(3):
        q.rsample()
        q.log_prob(q.loc)
        q.expand((2,)).entropy()
    assert len(calls) == 2


def test_a_kronecker_sum_becomes_a_distribution():
    loc, A, G = parameters(11)
    total = kronecker_sum(A, G, 3 * A, G)  # exactly 4 A (x) G
    q, expected = KroneckerNormal.from_precision(loc, total), dense(loc, 4 * A, G)
    value = noise(M, N)
    assert float(q.log_prob(value)) == pytest.approx(float(expected.log_prob(vec(value))), rel=1e-10)
    np.testing.assert_allclose(vec(q.variance), expected.variance, rtol=1e-9)


def test_float32_stays_float32():
    loc, A, G = (t.float() for t in parameters(12))
    q, expected = KroneckerNormal(loc, A, G), dense(loc, A.double(), G.double())
    for tensor in (q.sample(), q.log_prob(loc), q.entropy(), q.variance, q.input_root, q.logdet):
        assert tensor.dtype == torch.float32
    assert float(q.log_prob(loc)) == pytest.approx(float(expected.log_prob(vec(loc).double())), rel=1e-5)


@pytest.mark.usefixtures("meta_default")
def test_nothing_lands_on_the_default_device():
    loc, A, G = parameters(13)
    expected = dense(loc, A, G)
    value = noise(M, N)
    for q in (KroneckerNormal(loc, A, G), KroneckerNormal.from_precision(loc, KroneckerPrecision.factorise(A, G))):
        assert q.rsample((2,)).device.type == "cpu"
        assert float(q.log_prob(value)) == pytest.approx(float(expected.log_prob(vec(value))), rel=1e-10)
        assert float(q.entropy()) == pytest.approx(float(expected.entropy()), rel=1e-10)
        np.testing.assert_allclose(vec(q.variance), expected.variance, rtol=1e-9)
        r, _, _ = normal()
        assert kl_divergence(q, Independent(r, 2)).device.type == "cpu"
        assert kl_divergence(q, q.expand((2,))).device.type == "cpu"


BAD_SHAPES = [
    ({"loc": torch.zeros(3)}, r"^loc must be a matrix \[\.\.\., m, n\], not \(3,\)"),
    ({"input_precision": torch.eye(2)}, r"^input_precision must be \[\.\.\., 3, 3\] .* not \(2, 2\)"),
    ({"output_precision": torch.eye(3)}, r"^output_precision must be \[\.\.\., 2, 2\] .* not \(3, 3\)"),
    ({"input_precision": torch.ones(3)}, r"^input_precision must be \[\.\.\., 3, 3\] .* not \(3,\)"),
    ({"input_root": torch.eye(4)}, r"^input_root must be \[\.\.\., 3, 3\] to go with loc \(2, 3\), not \(4, 4\)"),
    ({"output_root": torch.ones(2, 1)}, r"^output_root must be \[\.\.\., 2, 2\] .* not \(2, 1\)"),
]
BAD_FACTORS = [
    ({"input_precision": -torch.eye(N)}, "^input_precision is not positive definite"),
    ({"output_precision": torch.zeros(M, M)}, "^output_precision is not positive definite"),
    ({"input_precision": torch.eye(N) * torch.nan}, "^input_precision has NaN or infinite entries"),
    ({"output_precision": torch.eye(M) / 0}, "^output_precision has NaN or infinite entries"),
]


@pytest.mark.parametrize(("change", "message"), BAD_SHAPES + BAD_FACTORS)
def test_bad_arguments_are_named(change, message):
    good = {"loc": torch.zeros(M, N), "input_precision": torch.eye(N), "output_precision": torch.eye(M)}
    with pytest.raises(MatrixError, match=message):
        KroneckerNormal(**(good | change))


def test_what_validation_skips_is_found_when_it_is_used():
    q = KroneckerNormal(torch.zeros(M, N), -torch.eye(N), torch.eye(M), validate_args=False)
    with pytest.raises(MatrixError, match=r"^input_precision is not positive definite"):
        q.sample()


def test_a_bad_mean_or_value_is_refused():
    loc, A, G = parameters()
    with pytest.raises(ValueError, match="loc"):
        KroneckerNormal(loc * torch.nan, A, G)
    q = KroneckerNormal(loc, A, G)
    with pytest.raises(ValueError, match="event_shape"):
        q.log_prob(loc.mT)
    with pytest.raises(ValueError, match="support"):
        q.log_prob(loc * torch.nan)


class TestInPyro:
    """Linear regression with known noise: prior A_0 (x) G, posterior (A_0 + Z^T Z) (x) G exactly."""

    @pytest.fixture(autouse=True)
    def clean_param_store(self):
        pyro.clear_param_store()
        with torch.random.fork_rng():
            pyro.set_rng_seed(0)
            yield
        pyro.clear_param_store()

    @pytest.fixture
    def problem(self):
        rng = np.random.default_rng(0)
        A, G, Z = spd(rng, N, 5), spd(rng, M, 5), noise(20, N)
        Y = Z @ noise(M, N, seed=1).mT + noise(20, M, seed=2)
        prior = torch.zeros(M, N, dtype=torch.float64), A, G
        posterior = torch.linalg.solve(A + Z.mT @ Z, Z.mT @ Y).mT, A + Z.mT @ Z, G

        def model():
            W = pyro.sample("W", KroneckerNormal(*prior))
            with pyro.plate("data", len(Z)):
                pyro.sample("y", dist.MultivariateNormal(Z @ W.mT, precision_matrix=G), obs=Y)

        # The marginal likelihood: vec of Y's rows is Gaussian with mean zero.
        covariance = np.kron(
            np.eye(len(Z)) + Z.numpy() @ np.linalg.inv(A.numpy()) @ Z.numpy().T, np.linalg.inv(G.numpy())
        )
        evidence = torch.distributions.MultivariateNormal(
            torch.zeros(Y.numel(), dtype=torch.float64), torch.from_numpy(covariance)
        ).log_prob(Y.flatten())
        return model, posterior, float(evidence)

    def test_a_traced_model_scores_the_site(self, problem):
        model, _, _ = problem
        trace = pyro.poutine.trace(model).get_trace()
        trace.compute_log_prob()
        site = trace.nodes["W"]
        assert site["value"].shape == (M, N)
        assert site["log_prob"].shape == ()
        prior = dense(site["fn"].loc, site["fn"].input_precision, site["fn"].output_precision)
        assert float(site["log_prob_sum"]) == pytest.approx(float(prior.log_prob(vec(site["value"]))), rel=1e-10)
        assert trace.nodes["y"]["log_prob"].shape == (20,)

    def test_a_plate_expands_the_site(self):
        def model():
            with pyro.plate("networks", 5):
                return pyro.sample("W", KroneckerNormal(*parameters()))

        assert model().shape == (5, M, N)
        trace = pyro.poutine.trace(model).get_trace()
        trace.compute_log_prob()
        assert trace.nodes["W"]["log_prob"].shape == (5,)

    def test_the_exact_posterior_as_guide_gives_the_evidence_at_every_draw(self, problem):
        model, posterior, evidence = problem

        def guide():
            pyro.sample("W", KroneckerNormal(*posterior))

        for _ in range(3):
            assert Trace_ELBO().loss(model, guide) == pytest.approx(-evidence, rel=1e-10)

    def test_the_mean_field_elbo_uses_the_closed_form_divergence(self, problem):
        model, posterior, _ = problem
        wider = posterior[0], 0.3 * posterior[1], posterior[2]

        def guide():
            return pyro.sample("W", KroneckerNormal(*wider))

        prior = pyro.poutine.trace(model).get_trace().nodes["W"]["fn"]
        divergence = kl_divergence(dense(*wider), dense(prior.loc, prior.input_precision, prior.output_precision))
        pyro.set_rng_seed(1)
        drawn = pyro.poutine.trace(guide).get_trace()
        likelihood = pyro.poutine.trace(pyro.poutine.replay(model, drawn)).get_trace()
        likelihood.compute_log_prob(lambda name, _: name == "y")
        expected = float(divergence - likelihood.nodes["y"]["log_prob_sum"])
        pyro.set_rng_seed(1)
        assert TraceMeanField_ELBO().loss(model, guide) == pytest.approx(expected, rel=1e-9)

    def test_training_the_mean_finds_the_posterior_mean(self, problem):
        model, posterior, evidence = problem
        precision = KroneckerPrecision.factorise(*posterior[1:])

        def guide():
            loc = pyro.param("loc", torch.zeros(M, N, dtype=torch.float64))
            pyro.sample("W", KroneckerNormal.from_precision(loc, precision))

        svi = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 0.1, "lrd": 0.98}), Trace_ELBO())
        losses = [svi.step() for _ in range(250)]
        assert np.mean(losses[:5]) > -evidence + 5
        assert np.mean(losses[-20:]) == pytest.approx(-evidence, abs=0.5)
        away = vec(pyro.param("loc").detach() - posterior[0]).numpy()
        # In posterior standard deviations; it starts about ten away.
        assert np.sqrt(away @ kron(*posterior[1:]) @ away) < 0.5
