"""Factor analysis and similarity of activity, where the answers are known."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from nclbayes.analysis.dynamics import (
    LatentSpace,
    explained_variance,
    in_relative_time,
    r_squared,
    separation,
    unit_r_squared,
    valid_rows,
)
from nclbayes.analysis.fishers import random_rotation
from nclbayes.errors import DataError, SettingError

UNITS, ROWS = 8, 4000


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


def factor_data(noise: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    """Latents, loadings and the activity that they make."""
    z, L = draw(ROWS, 2), draw(2, UNITS, seed=1)
    return z, L, draw(UNITS, seed=2) + z @ L + noise * draw(ROWS, UNITS, seed=3)


def test_rows_are_the_valid_steps_of_each_sequence_in_turn() -> None:
    states, lengths = draw(3, 5, 2), torch.tensor([2, 5, 1])
    expected = torch.cat([states[i, :n] for i, n in enumerate(lengths.tolist())])
    torch.testing.assert_close(valid_rows(states, lengths), expected, rtol=0, atol=0)
    with pytest.raises(DataError, match="lengths"):
        valid_rows(states, torch.tensor([1, 2]))


class TestLatentSpace:
    @pytest.fixture(autouse=True)
    def _needs_scikit_learn(self) -> None:
        pytest.importorskip("sklearn", reason="factor analysis needs scikit-learn")

    def test_known_factors_are_found_up_to_a_rotation(self) -> None:
        z, L, activity = factor_data()
        space = LatentSpace.fit(activity)
        torch.testing.assert_close(space.loadings.mT @ space.loadings, L.mT @ L, rtol=0.1, atol=0.15)
        torch.testing.assert_close(space.noise, torch.full((UNITS,), 0.09, dtype=torch.float64), rtol=0.25, atol=0)
        torch.testing.assert_close(space.mean, activity.mean(0))
        found = space.project(activity)
        # The best rotation of one to the other leaves little between them.
        U, _, V = torch.linalg.svd(found.mT @ z)
        assert float((found @ (U @ V) - z).square().mean()) < 0.05

    def test_a_rotation_of_the_latents_changes_nothing(self) -> None:
        z, L, _ = factor_data()
        noise = 0.3 * draw(ROWS, UNITS, seed=3)
        turn = random_rotation(2, torch.Generator().manual_seed(0))
        first, second = (
            LatentSpace.fit(latents @ loadings + noise) for latents, loadings in ((z, L), (z @ turn, turn.mT @ L))
        )
        torch.testing.assert_close(first.loadings, second.loadings)

    def test_it_is_the_model_that_scikit_learn_fits_to_all_rows(self) -> None:
        from sklearn.decomposition import FactorAnalysis

        _, _, activity = factor_data()
        rows = activity[:500]
        direct = FactorAnalysis(2, svd_method="lapack", tol=1e-6 * len(rows), max_iter=20_000).fit(rows.numpy())
        space = LatentSpace.fit(rows)
        covariance = space.loadings.mT @ space.loadings + space.noise.diag()
        torch.testing.assert_close(covariance, torch.from_numpy(direct.get_covariance()), rtol=1e-6, atol=1e-6)
        expected = torch.from_numpy(direct.transform(rows.numpy()))
        # The same points, turned: their inner products are equal.
        found = space.project(rows)
        torch.testing.assert_close(found @ found.mT, expected @ expected.mT, rtol=1e-5, atol=1e-5)

    def test_the_projection_is_the_expectation_under_the_joint_normal(self) -> None:
        space = LatentSpace(draw(4), draw(2, 4), draw(4, seed=1).square() + 0.1)
        r = draw(3, 5, 4)
        covariance = space.loadings.mT @ space.loadings + space.noise.diag()
        expected = (r - space.mean) @ torch.linalg.inv(covariance) @ space.loadings.mT
        torch.testing.assert_close(space.project(r), expected)

    def test_factors_are_in_order_and_uncorrelated_given_the_data(self) -> None:
        _, _, activity = factor_data()
        space = LatentSpace.fit(activity, factors=3)
        information = (space.loadings / space.noise) @ space.loadings.mT
        assert bool((information.diagonal().diff() <= 0).all())
        torch.testing.assert_close(information, information.diagonal().diag(), rtol=0, atol=1e-6)
        largest = space.loadings.gather(1, space.loadings.abs().argmax(1, keepdim=True))
        assert bool((largest > 0).all())

    def test_a_silent_unit_has_no_say_even_if_it_speaks_later(self) -> None:
        _, _, activity = factor_data()
        silent = torch.cat([activity, torch.full((ROWS, 1), 0.7, dtype=torch.float64)], dim=1)
        space, without = LatentSpace.fit(silent), LatentSpace.fit(activity)
        later = torch.cat([activity, 100 * draw(ROWS, 1)], dim=1)
        torch.testing.assert_close(space.project(later), without.project(activity))

    def test_what_cannot_be_fitted_is_refused(self) -> None:
        with pytest.raises(DataError, match="Only 1 of 3 units vary"):
            LatentSpace.fit(torch.cat([draw(20, 1), torch.zeros(20, 2)], dim=1))
        with pytest.raises(DataError, match="Only 0 of 3 units"):
            LatentSpace.fit(torch.zeros(20, 3))
        with pytest.raises(DataError, match="finite"):
            LatentSpace.fit(torch.full((20, 3), float("nan")))
        with pytest.raises(SettingError, match="factors"):
            LatentSpace.fit(draw(20, 3), factors=0)


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.decomposition", None)
    with pytest.raises(SettingError, match=r"nclbayes\[experiments\]"):
        LatentSpace.fit(draw(20, 3))


class TestSimilarity:
    def test_unchanged_dynamics(self) -> None:
        _, _, activity = factor_data()
        assert r_squared(activity, activity) == pytest.approx(1)
        assert explained_variance(activity, activity) == 1
        torch.testing.assert_close(unit_r_squared(activity, activity), torch.ones(UNITS, dtype=torch.float64))

    def test_unrelated_dynamics(self) -> None:
        # Units that are always active do not make two activities alike.
        means = 100 * draw(UNITS).abs()
        first, second = means + draw(ROWS, UNITS), means + draw(ROWS, UNITS, seed=9)
        assert r_squared(first, second) < 0.01
        assert float(unit_r_squared(first, second).max()) < 0.01
        assert explained_variance(first, second) == pytest.approx(-1, abs=0.1)

    def test_known_correlation(self) -> None:
        """With independent parts added, r^2 is the share of the variance that is common, squared over both."""
        common = draw(ROWS, UNITS)
        first, second = (common + 0.5 * draw(ROWS, UNITS, seed=seed) for seed in (5, 6))
        assert r_squared(first, second) == pytest.approx((1 / 1.25) ** 2, abs=0.02)

    def test_it_is_the_correlation_of_all_numbers_once_means_are_out(self) -> None:
        a, b = draw(50, 3), draw(50, 3, seed=1) + draw(50, 3)
        flat = torch.stack([(m - m.mean(0)).flatten() for m in (a, b)])
        assert r_squared(a, b) == pytest.approx(float(torch.corrcoef(flat)[0, 1] ** 2))
        for unit, found in enumerate(unit_r_squared(a, b).tolist()):
            expected = torch.corrcoef(torch.stack([a[:, unit], b[:, unit]]))[0, 1] ** 2
            assert found == pytest.approx(float(expected))

    def test_scale_and_means_count_for_explained_variance_only(self) -> None:
        a = draw(ROWS, UNITS)
        assert r_squared(a, 2 * a + 3) == pytest.approx(1)
        assert explained_variance(a, 2 * a) == pytest.approx(0, abs=0.01)
        assert explained_variance(a, a + 3) < -5

    def test_a_rotation_of_the_population_is_a_change(self) -> None:
        """The same latents in other units: the space is the same, the units' responses are not."""
        z, L, _ = factor_data()
        turned = L @ random_rotation(UNITS, torch.Generator().manual_seed(1))
        assert r_squared(z @ L, z @ turned) < 0.3

    def test_nothing_varies(self) -> None:
        flat, moving = torch.ones(10, 2), draw(10, 2)
        assert r_squared(flat, moving) != r_squared(flat, moving)
        assert explained_variance(flat, moving) != explained_variance(flat, moving)
        half = torch.cat([moving[:, :1], flat[:, :1]], dim=1)
        assert unit_r_squared(half, moving).isnan().tolist() == [False, True]

    def test_other_shapes_are_refused(self) -> None:
        for measure in (r_squared, unit_r_squared, explained_variance):
            with pytest.raises(DataError, match="one shape"):
                measure(torch.zeros(4, 2), torch.zeros(3, 2))


def test_separation_is_the_distance_in_standard_deviations_in_any_basis() -> None:
    labels = torch.arange(ROWS) % 2
    points = draw(ROWS, 2)
    points[:, 0] += 3.0 * labels
    assert separation(points, labels) == pytest.approx(3, rel=0.05)
    mixed = points @ draw(2, 2, seed=4) + draw(2)
    assert separation(mixed, labels) == pytest.approx(separation(points, labels))
    assert separation(draw(ROWS, 2), labels) < 0.1
    with pytest.raises(DataError, match="two examples of each"):
        separation(points, torch.zeros(ROWS))


def test_relative_time_keeps_ends_and_straight_lines() -> None:
    lengths = torch.tensor([6, 2, 1])
    start, slope = draw(3, 1, 2), draw(3, 1, 2, seed=1)
    paths = start + slope * torch.arange(6).view(1, 6, 1)
    found = in_relative_time(paths, lengths, 4)
    parts = torch.tensor([0, 1 / 3, 2 / 3, 1], dtype=torch.float64).view(1, 4, 1)
    torch.testing.assert_close(found, start + slope * parts * (lengths - 1).view(3, 1, 1))
    # A path with a bend is followed, and what lies beyond its length is not seen.
    bent = torch.tensor([0.0, 1.0, 0.0, 50.0]).view(1, 4, 1)
    assert in_relative_time(bent, torch.tensor([3]), 5).flatten().tolist() == [0, 0.5, 1, 0.5, 0]
    with pytest.raises(SettingError, match="points"):
        in_relative_time(bent, torch.tensor([3]), 1)
