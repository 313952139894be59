"""Divergences between precisions of every kind against dense algebra."""

import itertools

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor

from nclbayes.errors import MatrixError
from nclbayes.kronecker import KroneckerPrecision, SummedPrecision, gaussian_kl, kronecker_sum, scale_free_kl
from tests.kronecker.matrices import dense_kl, kron, psd, spd

N, M = 4, 3
KINDS = ["kronecker", "summed", "dense"]


def precision(
    kind: str, seed: int, n: int = N, m: int = M
) -> tuple[KroneckerPrecision | SummedPrecision | Tensor, np.ndarray]:
    """A random precision of that kind, and the same as a dense matrix."""
    rng = np.random.default_rng(seed)
    a, b, c, d = rng.uniform(0.5, 4.0, 4)
    A, B, C, D = spd(rng, n, 30, a), spd(rng, m, 30, b), psd(rng, n, n - 1, 9, c), psd(rng, m, m, 9, d)
    if kind == "kronecker":
        return KroneckerPrecision.factorise(A, B), kron(A, B)
    if kind == "summed":
        return SummedPrecision.of(A, B, C, D), kron(A, B) + kron(C, D)
    dense = spd(rng, n * m, 50, a * b)
    return dense, dense.numpy()


def scaled(p: KroneckerPrecision | SummedPrecision | Tensor, k: float) -> KroneckerPrecision | SummedPrecision | Tensor:
    if isinstance(p, Tensor):
        return k * p
    if isinstance(p, KroneckerPrecision):
        return KroneckerPrecision.factorise(k * p.input, p.output)
    (A, B), (C, D) = p.terms()
    return SummedPrecision.of(k * A, B, C, k * D)


PAIRS = pytest.mark.parametrize(("first", "second"), list(itertools.product(KINDS, KINDS)))


@PAIRS
def test_gaussian_kl_equals_dense_algebra(first, second):
    (p, dense_p), (q, dense_q) = precision(first, 1), precision(second, 2)
    actual = gaussian_kl(p, q)
    assert actual.dtype == torch.float64
    assert actual.shape == ()
    assert float(actual) == pytest.approx(dense_kl(dense_p, dense_q), rel=1e-10)
    assert float(actual) > 0.1


@PAIRS
def test_scale_free_kl_is_the_smallest_over_scales_of_the_second(first, second):
    (p, dense_p), (q, dense_q) = precision(first, 3), precision(second, 4)
    found = scipy.optimize.minimize_scalar(
        lambda u: dense_kl(dense_p, np.exp(u) * dense_q), bounds=(-10, 10), method="bounded", options={"xatol": 1e-9}
    )
    actual = float(scale_free_kl(p, q))
    assert actual == pytest.approx(found.fun, rel=1e-9)
    assert actual < float(gaussian_kl(p, q))
    assert scale_free_kl(p, q).dtype == torch.float64


@PAIRS
@pytest.mark.parametrize("k", [1e-3, 50.0])
def test_scale_free_kl_ignores_scales(first, second, k):
    p, q = precision(first, 5)[0], precision(second, 6)[0]
    value = float(scale_free_kl(p, q))
    assert float(scale_free_kl(scaled(p, k), q)) == pytest.approx(value, rel=1e-9)
    assert float(scale_free_kl(p, scaled(q, k))) == pytest.approx(value, rel=1e-9)
    assert float(gaussian_kl(p, scaled(q, k))) != pytest.approx(float(gaussian_kl(p, q)), rel=1e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("against", ["itself", "dense"])
def test_equal_precisions_have_no_divergence(kind, against):
    p, dense = precision(kind, 7)
    q = p if against == "itself" else torch.from_numpy(dense)
    for divergence in (gaussian_kl, scale_free_kl):
        assert float(divergence(p, q)) == pytest.approx(0, abs=1e-10)
        assert float(divergence(q, p)) == pytest.approx(0, abs=1e-10)


@PAIRS
def test_a_batch_equals_its_elements(first, second):
    def batch(kind: str, seeds: list[int]):
        singles, dense = zip(*(precision(kind, seed) for seed in seeds), strict=True)
        if kind == "dense":
            return torch.stack(singles), dense
        if kind == "kronecker":
            sides = ([p.input for p in singles], [p.output for p in singles])
            return KroneckerPrecision.factorise(*(torch.stack(side) for side in sides)), dense
        factors = zip(*((*p.terms()[0], *p.terms()[1]) for p in singles), strict=True)
        return SummedPrecision.of(*(torch.stack(factor) for factor in factors)), dense

    p, dense_p = batch(first, [10, 11, 12])
    q, dense_q = batch(second, [20, 21, 22])
    expected = [dense_kl(a, b) for a, b in zip(dense_p, dense_q, strict=True)]
    np.testing.assert_allclose(gaussian_kl(p, q), expected, rtol=1e-9)
    assert scale_free_kl(p, q).shape == (3,)
    single = precision(second, 20)[0]
    np.testing.assert_allclose(gaussian_kl(p, single), [dense_kl(a, dense_q[0]) for a in dense_p], rtol=1e-9)
    single = precision(first, 11)[0]
    np.testing.assert_allclose(gaussian_kl(single, q), [dense_kl(dense_p[1], b) for b in dense_q], rtol=1e-9)


def test_a_kronecker_sum_reports_this_divergence():
    rng = np.random.default_rng(8)
    f = spd(rng, N, 30), spd(rng, M, 30), psd(rng, N, 2), psd(rng, M, 3)
    for rule in ("kl", "additive", "bound", "mse", "naive"):
        total = kronecker_sum(*f, rule)
        assert float(gaussian_kl(total, SummedPrecision.of(*f))) == pytest.approx(float(total.kl), rel=1e-9)


def test_summed_precision_is_the_dense_sum_in_its_joint_basis():
    rng = np.random.default_rng(9)
    f = spd(rng, N, 30), spd(rng, M, 30), psd(rng, N, 2), psd(rng, M, 3)
    p = SummedPrecision.of(*f)
    dense = kron(f[0], f[1]) + kron(f[2], f[3])
    assert p.shape == (M, N)
    assert float(p.logdet) == pytest.approx(np.linalg.slogdet(dense)[1], rel=1e-10)
    expected = np.linalg.eigvals(np.linalg.solve(kron(f[0], f[1]), dense)).real
    np.testing.assert_allclose(np.sort(p.eigenvalues.flatten()), np.sort(expected), rtol=1e-8)
    np.testing.assert_allclose(sum(kron(a, b) for a, b in p.terms()), dense, rtol=1e-8, atol=1e-12)


def test_a_layer_sized_pair_needs_nothing_dense():
    # 60,000 weights: a dense precision would take 29 GB.
    n, m = 300, 200
    rng = np.random.default_rng(11)
    A, B, C, D = spd(rng, n, 1e3), spd(rng, m, 1e3), psd(rng, n, 50, 1e2, 5.0), psd(rng, m, 30, 1e2, 5.0)
    exact = SummedPrecision.of(A, B, C, D)
    total = kronecker_sum(A, B, C, D)
    assert float(gaussian_kl(total, exact)) == pytest.approx(float(total.kl), rel=1e-8)
    assert 0 < float(scale_free_kl(total, exact)) <= float(total.kl) * (1 + 1e-9)
    # D proportional to B makes the sum a product, (A + 2 C) (x) B, whose divergences are known in closed form.
    product, same = SummedPrecision.of(A, B, C, 2 * B), KroneckerPrecision.factorise(A + 2 * C, B)
    assert float(gaussian_kl(same, product)) == pytest.approx(0, abs=1e-6)
    assert float(gaussian_kl(product, same)) == pytest.approx(0, abs=1e-6)
    doubled = KroneckerPrecision.factorise(A + 2 * C, 2 * B)
    assert float(gaussian_kl(product, doubled)) == pytest.approx(n * m * (1 - np.log(2)) / 2, rel=1e-8)


def test_float32_precisions_are_compared_in_float64():
    rng = np.random.default_rng(12)
    A, B, G, H = (spd(rng, k, 20).float() for k in (N, M, N, M))
    p, q = KroneckerPrecision.factorise(A, B), KroneckerPrecision.factorise(G, H)
    for first, second in ((p, q), (p, q.dense()), (p.dense(), q)):
        actual = gaussian_kl(first, second)
        assert actual.dtype == torch.float64
        assert float(actual) == pytest.approx(dense_kl(kron(A, B), kron(G, H)), rel=1e-4)


@pytest.mark.parametrize(("first", "second"), [p for p in itertools.product(KINDS, KINDS)])
@pytest.mark.parametrize("divergence", [gaussian_kl, scale_free_kl])
def test_different_sizes_are_refused(divergence, first, second):
    with pytest.raises(MatrixError, match="different sizes: 12 and 15"):
        divergence(precision(first, 0)[0], precision(second, 0, n=5)[0])


def test_a_transposed_shape_is_refused():
    with pytest.raises(MatrixError, match=r"different sizes: 12 and 12 \[\(3, 4\), \(4, 3\)\]"):
        gaussian_kl(precision("kronecker", 0)[0], precision("summed", 0, n=M, m=N)[0])


@pytest.mark.parametrize("other", KINDS)
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (-torch.eye(N * M), "is not positive definite"),
        (torch.full((N * M, N * M), torch.nan), "has NaN or infinite entries"),
        (torch.ones(5, N * M), r"must be a square matrix .* not \(5, 12\)"),
        (torch.eye(N * M, dtype=torch.int64), "must be floating point"),
    ],
)
def test_a_bad_dense_precision_is_refused(other, bad, message):
    p = precision(other, 0)[0]
    for pair in ((p, bad), (bad, p)):
        with pytest.raises(MatrixError, match=f"^the dense precision {message}"):
            gaussian_kl(*pair)


@pytest.mark.usefixtures("meta_default")
@PAIRS
def test_nothing_lands_on_the_default_device(first, second):
    (p, dense_p), (q, dense_q) = precision(first, 1), precision(second, 2)
    assert float(gaussian_kl(p, q)) == pytest.approx(dense_kl(dense_p, dense_q), rel=1e-10)
    assert scale_free_kl(p, q).device.type == "cpu"
