"""What a Kronecker sum accepts: Fisher factors of float32, batches, rounding errors; and what it refuses."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from nclbayes.errors import MatrixError, NCLError, SettingError
from nclbayes.kronecker import KroneckerSum, SummedPrecision, SumRule, kronecker_sum
from tests.kronecker.matrices import inverse_error, kron, psd, spd, sum_kl

RULES = [rule.value for rule in SumRule]
TENSORS = ["input", "output", "input_inverse", "output_inverse", "input_root", "output_root", "logdet"]


def gram(seed: int, rows: int, columns: int, scale: float = 1.0) -> Tensor:
    """Z^T Z in float32, as a Fisher factor is summed."""
    Z = torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, columns)) * scale).float()
    return Z.mT @ Z


def mixed_batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four sums of 4-by-3 matrices: full rank, C = 0, D = 0, both of rank one."""
    rng = np.random.default_rng(5)
    A = torch.stack([spd(rng, 4, 50, scale) for scale in (1.0, 10.0, 0.1, 1.0)])
    B = torch.stack([spd(rng, 3, 50, scale) for scale in (1.0, 0.1, 2.0, 1.0)])
    C = torch.stack([psd(rng, 4, 4, 10, 30.0), psd(rng, 4, 0), psd(rng, 4, 2), psd(rng, 4, 1, scale=1e3)])
    D = torch.stack([psd(rng, 3, 3, 10, 0.2), psd(rng, 3, 3), psd(rng, 3, 0), psd(rng, 3, 1, scale=1e-2)])
    return A, B, C, D


@pytest.mark.parametrize("rule", RULES)
def test_a_rank_deficient_float32_gram_is_summed_as_in_float64(rule):
    rng = np.random.default_rng(0)
    n, m = 40, 25
    A, B = spd(rng, n, 100, 2.0).float(), spd(rng, m, 100, 2.0).float()
    C, D = gram(1, 12, n), gram(2, 8, m)
    total = kronecker_sum(A, B, C, D, rule)
    for name in TENSORS:
        assert getattr(total, name).dtype == torch.float32, name
    assert total.kl.dtype == torch.float64

    rtol = n * torch.finfo(torch.float32).eps
    exact = kronecker_sum(A.double(), B.double(), C.double(), D.double(), rule, rtol=rtol)
    assert exact.input.dtype == torch.float64
    for name in TENSORS:
        actual, expected = getattr(total, name).double(), getattr(exact, name)
        assert float((actual - expected).abs().amax()) <= 1e-6 * float(expected.abs().amax()), name
    # The oracle sees C and D with their rounding errors, which D and C magnify.
    assert float(total.kl) == pytest.approx(sum_kl(exact.input, exact.output, A, B, C, D), rel=1e-3)


@pytest.mark.parametrize("rule", RULES)
def test_a_dead_layer_adds_nothing(rule):
    rng = np.random.default_rng(1)
    A, B, C = spd(rng, 9).float(), spd(rng, 6).float(), gram(3, 4, 9)
    for f in ((A, B, C, torch.zeros(6, 6)), (B, A, torch.zeros(6, 6), C)):
        total = kronecker_sum(*f, rule)
        if rule == "naive":
            torch.testing.assert_close(total.input, f[0] + f[2])  # it adds C although D is zero
            continue
        exact = kron(f[0], f[1])
        np.testing.assert_allclose(kron(total.input, total.output), exact, rtol=0, atol=1e-6 * np.abs(exact).max())
        assert float(total.kl) == pytest.approx(0, abs=1e-12)
        for name in TENSORS:
            assert bool(getattr(total, name).isfinite().all()), name


@pytest.mark.parametrize("rule", RULES)
def test_a_batch_equals_its_elements(rule):
    batch = mixed_batch()
    together = kronecker_sum(*batch, rule)
    for i, f in enumerate(zip(*batch, strict=True)):
        alone = kronecker_sum(*f, rule)
        for name in [*TENSORS, "kl", "start_kl", "clipped"]:
            actual, expected = getattr(together, name)[i], getattr(alone, name)
            assert actual.shape == expected.shape
            # A zero C or D adds a multiple of zero: which one, is free, and the factors are equal all the same.
            np.testing.assert_allclose(actual, expected, rtol=1e-7, atol=1e-11, err_msg=f"{name} of {i}")
        assert float(together.kl[i]) == pytest.approx(sum_kl(alone.input, alone.output, *f), rel=1e-7, abs=1e-9)


@pytest.mark.parametrize("rule", RULES)
def test_batch_dimensions_broadcast(rule):
    A, B, C, D = mixed_batch()
    total = kronecker_sum(A.unsqueeze(1), B[:3], C.unsqueeze(1), D[:3], rule)
    assert total.kl.shape == total.logdet.shape == (4, 3)
    assert total.dense().shape == (4, 3, 12, 12)
    for i in range(4):
        for j in range(3):
            alone = kronecker_sum(A[i], B[j], C[i], D[j], rule)
            np.testing.assert_allclose(total.dense()[i, j], alone.dense(), rtol=1e-6, atol=1e-9)
            np.testing.assert_allclose(total.logdet[i, j], alone.logdet, rtol=1e-6, atol=1e-9)


def clipped_sum(rule: str) -> tuple[KroneckerSum, Tensor, Tensor]:
    """A weak prior next to a large rank-deficient gram whose float32 rounding errors dwarf the prior."""
    n, m = 60, 8
    A, B = 1e-5 * torch.eye(n, dtype=torch.float64), torch.eye(m, dtype=torch.float64)
    C = gram(4, 20, n, scale=1.0)
    C = (C * (1e6 / torch.linalg.matrix_norm(C, 2))).double()
    total = kronecker_sum(A, B, C, spd(np.random.default_rng(6), m), rule, rtol=n * torch.finfo(torch.float32).eps)
    return total, A, C


@pytest.mark.parametrize("rule", RULES)
def test_negative_rounding_errors_are_clipped_and_reported(rule):
    total, _, C = clipped_sum(rule)
    lowest = float(torch.linalg.eigvalsh(C)[0])
    assert lowest < -1e-2  # the rounding errors are there
    assert float(total.clipped) == pytest.approx(-lowest / 1e-5, rel=1e-3)
    values = torch.linalg.eigvalsh(total.input)
    assert float(values[0]) > 0
    assert torch.equal(total.input_root, total.input_root.triu())
    condition = float(values[-1] / values[0])
    assert inverse_error(total.input, total.input_inverse) < 1e-14 * condition
    assert float((total.input_root @ total.input_root.mT - total.input_inverse).norm()) < 1e-12 * float(
        total.input_inverse.norm()
    )


@pytest.mark.parametrize("rule", RULES)
def test_a_well_conditioned_sum_is_not_lowered_by_rounding_errors_either(rule):
    C = torch.diag(torch.tensor([10.0, 1.0, -0.4], dtype=torch.float64))
    eye = torch.eye(3, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    total = kronecker_sum(*eye, C, eye[1], rule, rtol=0.1)
    clean = kronecker_sum(*eye, C.clamp(min=0.0), eye[1], rule)
    assert float(total.clipped) == pytest.approx(0.4)
    assert float(total.input[2, 2] / clean.input[2, 2]) == pytest.approx(1.0, rel=0.1)  # not 0.6: traces see C itself


@pytest.mark.parametrize("rule", RULES)
def test_an_unmeasured_sum_is_the_same_product(rule):
    rng = np.random.default_rng(8)
    f = spd(rng, 5), spd(rng, 4), spd(rng, 5), spd(rng, 4)
    total, measured = kronecker_sum(*f, rule, measure=False), kronecker_sum(*f, rule)
    for name in TENSORS:
        assert torch.equal(getattr(total, name), getattr(measured, name))
    assert all(math.isnan(float(v)) for v in (total.kl, total.start_kl, total.clipped))


def test_nothing_is_reported_where_nothing_was_clipped():
    rng = np.random.default_rng(7)
    total = kronecker_sum(spd(rng, 5), spd(rng, 4), spd(rng, 5), spd(rng, 4))
    assert float(total.clipped) == 0


def test_a_matrix_summed_from_float32_products_needs_rtol():
    C = gram(4, 20, 60).double()
    eye = torch.eye(60, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    with pytest.raises(MatrixError, match=r"^C is indefinite: it has an eigenvalue below"):
        kronecker_sum(*eye, C, eye[1])
    with pytest.raises(MatrixError, match=r"^D is indefinite"):
        kronecker_sum(eye[1], eye[0], eye[1], C)
    assert float(kronecker_sum(*eye, C, eye[1], rtol=1e-5).clipped) > 0


@pytest.mark.parametrize("rule", RULES)
def test_the_inputs_are_left_as_they_were(rule):
    batch = mixed_batch()
    C = gram(4, 20, 60).double()  # one that is clipped
    eye = torch.eye(60, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    for f in (batch, (*eye, C, torch.eye(3, dtype=torch.float64))):
        before = [t.clone() for t in f]
        kronecker_sum(*f, rule, rtol=1e-5)
        SummedPrecision.of(*f, rtol=1e-5)
        assert all(torch.equal(now, then) for now, then in zip(f, before, strict=True))


@pytest.mark.parametrize("rule", RULES)
def test_the_results_own_their_memory(rule):
    A, B, C, D = (t[0] for t in mixed_batch())
    total = kronecker_sum(A, B, 0 * C, D, rule)
    A.zero_()
    B.zero_()
    assert float(total.input.abs().amax()) > 0
    assert float(total.output.abs().amax()) > 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.usefixtures("meta_default")
def test_nothing_lands_on_the_default_device(rule):
    f = mixed_batch()
    total = kronecker_sum(*f, rule)
    assert {getattr(total, name).device.type for name in [*TENSORS, "kl", "start_kl", "clipped"]} == {"cpu"}
    np.testing.assert_allclose(total.input[0] @ total.input_inverse[0], np.eye(4), atol=1e-10)
    assert float(total.kl[0]) == pytest.approx(
        sum_kl(total.input[0], total.output[0], *(t[0] for t in f)), rel=1e-7, abs=1e-9
    )


def _poisoned(value: float) -> Tensor:
    matrix = torch.eye(3)
    matrix[1, 1] = value
    return matrix


BAD = {
    "NaN": (_poisoned(float("nan")), "has NaN or infinite entries"),
    "infinite": (_poisoned(float("inf")), "has NaN or infinite entries"),
    "not square": (torch.ones(3, 2), r"must be a square matrix .* not \(3, 2\)"),
    "a vector": (torch.ones(3), r"must be a square matrix .* not \(3,\)"),
    "integers": (torch.eye(3, dtype=torch.int64), "must be floating point"),
    "asymmetric": (torch.eye(3) + torch.ones(3, 3).triu(1), "is not symmetric: .* differ by 1"),
    "indefinite": (_poisoned(-1e-2), "is (indefinite|not positive definite)"),
    "indefinite in a batch": (torch.stack([torch.eye(3), _poisoned(-1e-2)]), "is (indefinite|not positive definite)"),
    "asymmetric in a batch": (
        torch.stack([1e6 * torch.eye(3), torch.eye(3) + 0.5 * torch.ones(3, 3).triu(1)]),
        "is not symmetric: .* differ by 0.5",
    ),
}


@pytest.mark.parametrize("rule", ["kl", "naive"])
@pytest.mark.parametrize("defect", BAD)
@pytest.mark.parametrize("name", ["A", "B", "C", "D"])
def test_a_bad_matrix_is_named(name, defect, rule):
    bad, message = BAD[defect]
    f = dict.fromkeys("ABCD", torch.eye(3)) | {name: bad}
    with pytest.raises(MatrixError, match=f"^{name} {message}"):
        kronecker_sum(**f, rule=rule)
    with pytest.raises(MatrixError, match=f"^{name} {message}"):
        SummedPrecision.of(**f)


@pytest.mark.parametrize("name", ["A", "B"])
def test_a_singular_first_product_is_refused(name):
    f = dict.fromkeys("ABCD", torch.eye(3)) | {name: torch.zeros(3, 3)}
    with pytest.raises(MatrixError, match=f"^{name} is not positive definite"):
        kronecker_sum(**f)


@pytest.mark.parametrize(("name", "pair"), [("A", "A and C"), ("C", "A and C"), ("B", "B and D"), ("D", "B and D")])
def test_sizes_that_do_not_match_are_named(name, pair):
    f = dict.fromkeys("ABCD", torch.eye(3)) | {name: torch.eye(4)}
    with pytest.raises(MatrixError, match=f"^{pair} must have the same size, not (3 and 4|4 and 3)"):
        kronecker_sum(**f)


@pytest.mark.parametrize("rule", ["KL", "average", "", None])
def test_an_unknown_rule_is_refused_with_the_list_of_rules(rule):
    with pytest.raises(SettingError, match="'kl', 'additive', 'bound', 'mse', 'naive'") as error:
        kronecker_sum(*[torch.eye(2)] * 4, rule=rule)
    assert repr(rule) in str(error.value)
    assert isinstance(error.value, NCLError)
