"""KroneckerPrecision against dense algebra."""

import numpy as np
import pytest
import torch

from nclbayes.errors import MatrixError
from nclbayes.kronecker import KroneckerPrecision, kronecker_sum
from tests.kronecker.matrices import kron, spd, vec

SIZES = [(1, 1), (1, 4), (3, 1), (5, 3), (4, 4), (3, 7)]


def factors(n: int, m: int, seed: int = 0, condition: float = 100.0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return spd(rng, n, condition, 3.0), spd(rng, m, condition, 0.2)


@pytest.mark.parametrize(("n", "m"), SIZES)
def test_factorise_gives_the_inverses_roots_and_log_determinant(n, m):
    A, G = factors(n, m)
    p = KroneckerPrecision.factorise(A, G)
    dense = kron(A, G)
    np.testing.assert_allclose(kron(p.input, p.output), dense)
    np.testing.assert_allclose(p.input_inverse, np.linalg.inv(A.numpy()), rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(p.output_inverse, np.linalg.inv(G.numpy()), rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(p.input_root @ p.input_root.mT, np.linalg.inv(A.numpy()), rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(p.output_root @ p.output_root.mT, np.linalg.inv(G.numpy()), rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(float(p.logdet), np.linalg.slogdet(dense)[1], rtol=1e-12, atol=1e-12)
    assert p.shape == (m, n)
    assert p.size == m * n


@pytest.mark.parametrize(("n", "m"), SIZES)
def test_times_solve_and_dense_follow_column_stacking(n, m):
    A, G = factors(n, m)
    p = KroneckerPrecision.factorise(A, G)
    V = torch.from_numpy(np.random.default_rng(1).standard_normal((m, n)))
    dense = kron(A, G)
    np.testing.assert_allclose(p.dense(), dense, rtol=1e-14)
    np.testing.assert_allclose(vec(p.times(V)), dense @ vec(V).numpy(), rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(vec(p.solve(V)), np.linalg.solve(dense, vec(V).numpy()), rtol=1e-9, atol=1e-9)


def test_a_batch_equals_its_elements():
    pairs = [[factors(4, 3, seed=10 * i + j) for j in range(3)] for i in range(2)]
    A = torch.stack([torch.stack([a for a, _ in row]) for row in pairs])
    G = torch.stack([torch.stack([g for _, g in row]) for row in pairs])
    V = torch.from_numpy(np.random.default_rng(2).standard_normal((2, 3, 3, 4)))
    batch = KroneckerPrecision.factorise(A, G)
    assert batch.logdet.shape == (2, 3)
    assert batch.shape == (3, 4)
    for i in range(2):
        for j in range(3):
            dense = kron(A[i, j], G[i, j])
            np.testing.assert_allclose(batch.dense()[i, j], dense, rtol=1e-14)
            np.testing.assert_allclose(batch.logdet[i, j], np.linalg.slogdet(dense)[1], rtol=1e-12)
            solved = np.linalg.solve(dense, vec(V[i, j]).numpy())
            np.testing.assert_allclose(vec(batch.solve(V)[i, j]), solved, rtol=1e-9, atol=1e-9)


def test_float32_comes_back_as_float32_but_is_factorised_in_float64():
    A, G = factors(6, 5, condition=1e5)
    p = KroneckerPrecision.factorise(A.float(), G.float())
    for tensor in (p.input, p.output, p.input_inverse, p.output_inverse, p.input_root, p.output_root, p.logdet):
        assert tensor.dtype == torch.float32
    exact = np.linalg.inv(A.float().double().numpy())
    # In float32 arithmetic the error would be about 1e5 times the machine epsilon.
    assert np.abs(p.input_inverse.double().numpy() - exact).max() < 3e-7 * np.abs(exact).max()
    root = p.input_root.double()
    assert np.abs((root @ root.mT).numpy() - exact).max() < 1e-6 * np.abs(exact).max()


def test_to_converts_every_tensor_and_keeps_the_class():
    A, G = factors(3, 2)
    p = KroneckerPrecision.factorise(A, G).to(torch.float32)
    assert type(p) is KroneckerPrecision
    tensors = {name: value for name, value in vars(p).items() if isinstance(value, torch.Tensor)}
    assert len(tensors) == 7
    assert {t.dtype for t in tensors.values()} == {torch.float32}
    np.testing.assert_allclose(p.input, A, rtol=1e-6)
    total = kronecker_sum(A, G, A, 2 * G).to(torch.float32)
    assert type(total).__name__ == "KroneckerSum"
    assert isinstance(total.iterations, int)
    assert total.output_root.dtype == total.kl.dtype == torch.float32
    assert KroneckerPrecision.factorise(A, G).to("meta").input_root.device.type == "meta"


def test_the_factors_are_left_as_they_were():
    A, G = factors(4, 3)
    before = A.clone(), G.clone()
    KroneckerPrecision.factorise(A, G)
    assert torch.equal(A, before[0])
    assert torch.equal(G, before[1])


@pytest.mark.usefixtures("meta_default")
def test_nothing_lands_on_the_default_device():
    A, G = factors(4, 3)
    p = KroneckerPrecision.factorise(A, G)
    np.testing.assert_allclose(p.dense(), kron(A, G), rtol=1e-14)
    np.testing.assert_allclose(p.input_inverse, np.linalg.inv(A.numpy()), rtol=1e-10, atol=1e-10)


GOOD = torch.eye(3, dtype=torch.float64)
NAN = GOOD.clone().index_fill(0, torch.tensor([1]), torch.nan)
INDEFINITE = torch.diag(torch.tensor([1.0, -1.0, 1.0]))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.ones(3, 2), r"must be a square matrix \[\.\.\., k, k\], not \(3, 2\)"),
        (torch.ones(3), r"must be a square matrix .* not \(3,\)"),
        (torch.ones(0, 0), r"must be a square matrix"),
        (torch.eye(3, dtype=torch.int64), r"must be floating point, not torch\.int64"),
        (NAN, "has NaN or infinite entries"),
        (GOOD / 0, "has NaN or infinite entries"),
        (INDEFINITE, r"is not positive definite \(its leading minor of order 2 is not positive\)"),
        (torch.zeros(3, 3), r"is not positive definite"),
        (torch.stack([torch.eye(3), INDEFINITE]), r"is not positive definite"),
    ],
)
def test_a_bad_factor_is_named(bad, message):
    with pytest.raises(MatrixError, match=f"^the input factor {message}"):
        KroneckerPrecision.factorise(bad, GOOD)
    with pytest.raises(MatrixError, match=f"^the output factor {message}"):
        KroneckerPrecision.factorise(GOOD, bad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_diagonal_factors_are_inverted_as_others_are(dtype: torch.dtype) -> None:
    """With a number off the diagonal that is too small to count, they take the way of all others."""
    diagonal = torch.tensor([[0.5, 2.0, 1e-3], [7.0, 1e4, 3.0]], dtype=dtype)
    plain = torch.diag_embed(diagonal)
    other = plain.clone()
    other[..., 0, 1] = other[..., 1, 0] = 1e-12
    first, second = (
        KroneckerPrecision.factorise(matrix, torch.eye(2, dtype=dtype).expand(2, 2, 2)) for matrix in (plain, other)
    )
    for name in ("input_inverse", "input_root", "output_inverse", "output_root", "logdet"):
        torch.testing.assert_close(getattr(first, name), getattr(second, name), rtol=1e-6, atol=1e-8)


def test_a_diagonal_factor_that_is_not_positive_is_refused() -> None:
    with pytest.raises(MatrixError, match="not positive definite"):
        KroneckerPrecision.factorise(torch.diag(torch.tensor([1.0, -1.0])), torch.eye(2))
    with pytest.raises(MatrixError, match="not positive definite"):
        KroneckerPrecision.factorise(torch.diag(torch.tensor([1.0, 0.0])), torch.eye(2))
