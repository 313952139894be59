"""What a recurrent network does in response to a set of stimuli, and whether it still does the same later.

The activity of a network of n units is a matrix of rows r_t, one for each valid step of each example. It is summarised
by factor analysis, r = mu + z L + noise with z ~ N(0, I) and noise ~ N(0, Psi), Psi diagonal: the latent trajectories
are E[z | r_t]. How alike two activities are is measured on all units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nclbayes.errors import DataError, SettingError

_SILENT = 1e-10
"""A unit whose variance is below this part of the largest one's says nothing."""


def valid_rows(states: Tensor, lengths: Tensor) -> Tensor:
    """The states of all sequences as one matrix, without the padding.

    Args:
        states: [examples, time, n].
        lengths: How many steps of each sequence are valid, [examples].

    Returns:
        [the sum of the lengths, n], one sequence after the other.

    Raises:
        DataError: If the shapes do not fit.

    Example:
        >>> import torch
        >>> from nclbayes.analysis.dynamics import valid_rows
        >>> valid_rows(torch.arange(6.0).view(2, 3, 1), torch.tensor([1, 3])).flatten().tolist()
        [0.0, 3.0, 4.0, 5.0]
    """
    if states.ndim != 3 or lengths.shape != states.shape[:1]:
        raise DataError(
            f"States must be [examples, time, units] and lengths [examples], not {tuple(states.shape)} and "
            f"{tuple(lengths.shape)}."
        )
    steps = torch.arange(states.shape[1], device=states.device)
    return states[steps < lengths.to(states.device).unsqueeze(-1)]


@dataclass(frozen=True)
class LatentSpace:
    """A factor analysis model of activity: r = mean + z loadings + noise.

    Attributes:
        mean: mu, [n].
        loadings: L, [factors, n]; zero for units that were silent.
        noise: The diagonal of Psi, [n]; infinite for units that were silent, which then have no say.

    Example:
        >>> import torch
        >>> from nclbayes.analysis.dynamics import LatentSpace
        >>> space = LatentSpace(torch.tensor([1.0, 0.0]), torch.tensor([[1.0, 1.0]]), torch.tensor([0.5, 0.5]))
        >>> round(float(space.project(torch.tensor([3.0, 2.0]))), 6)
        1.6
    """

    mean: Tensor
    loadings: Tensor
    noise: Tensor

    @classmethod
    def fit(cls, activity: Tensor, factors: int = 2) -> LatentSpace:
        """The model of greatest likelihood.

        Factors are only determined up to a rotation; these are the ones for which L Psi^-1 L^T is diagonal, the
        largest entry first and the largest loading of each positive.

        Args:
            activity: [rows, n].
            factors: How many.

        Returns:
            The latent space, float64 on the CPU.

        Raises:
            DataError: If the activity is not a matrix of finite numbers, or fewer units than factors vary.
            SettingError: If there is no factor, or scikit-learn is missing.
        """
        if factors < 1:
            raise SettingError(f"factors must be at least 1, not {factors}.")
        rows = activity.detach().cpu().double()
        if rows.ndim != 2 or not len(rows) or not bool(rows.isfinite().all()):
            raise DataError("Factor analysis needs a matrix [rows, units] of finite numbers.")
        centred = rows - rows.mean(0)
        variance = centred.square().mean(0)
        active = variance > _SILENT * variance.max()
        if int(active.sum()) < factors:
            raise DataError(f"Only {int(active.sum())} of {rows.shape[1]} units vary: too few for {factors} factors.")
        # Only the covariance counts: few rows that have the same stand in for all of them, R of X = Q R and its
        # negative.
        R = torch.linalg.qr(centred[:, active], mode="r").R * math.sqrt(1 / len(rows))
        found = _factor_analysis(math.sqrt(len(R)) * torch.cat([R, -R]), factors)
        loadings, noise = rows.new_zeros(factors, rows.shape[1]), torch.full_like(variance, math.inf)
        loadings[:, active], noise[active] = _in_order(*found)
        return cls(rows.mean(0), loadings, noise)

    def project(self, states: Tensor) -> Tensor:
        """The expected factors, E[z | r] = (r - mu) Psi^-1 L^T (I + L Psi^-1 L^T)^-1.

        Args:
            states: [..., n].

        Returns:
            [..., factors].
        """
        weighted = self.loadings / self.noise
        precision = weighted @ self.loadings.mT
        precision = precision + torch.eye(len(precision), dtype=precision.dtype, device=precision.device)
        return (states.to(self.mean) - self.mean) @ torch.linalg.solve(precision, weighted).mT


def r_squared(reference: Tensor, activity: Tensor) -> float:
    """The squared correlation of two activities over all rows and units, each unit's mean taken out.

    Args:
        reference: [rows, n].
        activity: The responses of the same units at the same steps of the same examples, [rows, n].

    Returns:
        1 if all units respond as before, up to a common scale and to what each of them adds always; about 0 if the
        responses have nothing in common. NaN if nothing varies.

    Raises:
        DataError: If the shapes differ.

    Example:
        >>> import torch
        >>> from nclbayes.analysis.dynamics import r_squared
        >>> before = torch.tensor([[1.0, 0.0], [0.0, 2.0], [2.0, 1.0]])
        >>> round(r_squared(before, 2 * before + torch.tensor([5.0, 0.0])), 6)
        1.0
    """
    a, b = _centred(reference, activity)
    return _ratio((a * b).sum().square(), a.square().sum() * b.square().sum())


def unit_r_squared(reference: Tensor, activity: Tensor) -> Tensor:
    """The squared correlation of each single unit's responses.

    Args:
        reference: [rows, n].
        activity: The responses of the same units at the same steps of the same examples, [rows, n].

    Returns:
        [n]; NaN for units that are constant before or after.

    Raises:
        DataError: If the shapes differ.
    """
    a, b = _centred(reference, activity)
    return (a * b).sum(0).square() / (a.square().sum(0) * b.square().sum(0))


def explained_variance(reference: Tensor, activity: Tensor) -> float:
    """How much of an activity a later one accounts for as it is: ``1 - |R - R_0|^2 / |R_0 - mean R_0|^2``.

    Unlike :func:`r_squared` it counts every change, also one of scale or of a unit's mean, and may be negative.

    Args:
        reference: R_0, [rows, n].
        activity: R, [rows, n].

    Returns:
        At most 1; NaN if the reference does not vary.

    Raises:
        DataError: If the shapes differ.
    """
    a, _ = _centred(reference, activity)
    return 1 - _ratio((activity.double() - reference.double()).square().sum(), a.square().sum())


def separation(points: Tensor, labels: Tensor) -> float:
    """How far two classes are apart: the Mahalanobis distance of their means, in units of the spread within classes.

    It does not depend on the basis of the space. Directions without any spread do not count.

    Args:
        points: [examples, k].
        labels: 0 or 1, [examples].

    Returns:
        sqrt(d^T S^-1 d) with d the difference of the means and S the pooled covariance within classes.

    Raises:
        DataError: If a class has fewer than two examples.

    Example:
        >>> import torch
        >>> from nclbayes.analysis.dynamics import separation
        >>> points = torch.tensor([[-2.0], [0.0], [2.0], [9.0], [11.0], [13.0]])
        >>> round(separation(points, torch.tensor([0, 0, 0, 1, 1, 1])), 6)
        5.5
    """
    classes = [points[labels == label].double() for label in (0, 1)]
    if min(map(len, classes)) < 2:
        raise DataError("The separation of two classes needs at least two examples of each.")
    centred = torch.cat([c - c.mean(0) for c in classes])
    S = centred.mT @ centred / (len(centred) - 2)
    d = classes[1].mean(0) - classes[0].mean(0)
    return float((d @ torch.linalg.pinv(S, hermitian=True) @ d).sqrt())


def in_relative_time(trajectories: Tensor, lengths: Tensor, points: int) -> Tensor:
    """Trajectories of different lengths at the same parts of their time, by linear interpolation.

    Args:
        trajectories: [examples, time, k].
        lengths: How many steps of each are valid, [examples].
        points: At how many times, from the first step to the last one, evenly spaced.

    Returns:
        [examples, points, k].

    Raises:
        SettingError: If there are fewer than two points.

    Example:
        >>> import torch
        >>> from nclbayes.analysis.dynamics import in_relative_time
        >>> path = torch.tensor([0.0, 2.0, 4.0, 9.0]).view(1, 4, 1)
        >>> in_relative_time(path, torch.tensor([3]), 5).flatten().tolist()
        [0.0, 1.0, 2.0, 3.0, 4.0]
    """
    if points < 2:
        raise SettingError(f"points must be at least 2, not {points}.")
    parts = torch.linspace(0, 1, points, dtype=trajectories.dtype, device=trajectories.device)
    last = (lengths - 1).to(trajectories).unsqueeze(-1)
    times = parts * last  # [examples, points]
    before = times.floor()
    after = torch.minimum(before + 1, last)
    start, end = (
        trajectories.gather(1, steps.long().unsqueeze(-1).expand(-1, -1, trajectories.shape[-1]))
        for steps in (before, after)
    )
    return torch.lerp(start, end, (times - before).unsqueeze(-1))


def _factor_analysis(rows: Tensor, factors: int) -> tuple[Tensor, Tensor]:
    """The loadings and noise variances that scikit-learn finds."""
    try:
        from sklearn.decomposition import FactorAnalysis
    except ImportError as error:
        raise SettingError("Factor analysis needs scikit-learn: pip install 'nclbayes[experiments]'") from error
    # Until a step gains less than a millionth of a nat a row; some noise variances approach zero for ever.
    model = FactorAnalysis(factors, svd_method="lapack", tol=1e-6 * len(rows), max_iter=20_000).fit(rows.numpy())
    return torch.from_numpy(model.components_).to(rows), torch.from_numpy(model.noise_variance_).to(rows)


def _in_order(loadings: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The same model with its factors in the order and of the signs that `LatentSpace.fit` promises."""
    _, _, V = torch.linalg.svd((loadings / noise.sqrt()).mT, full_matrices=False)
    turned = V @ loadings
    largest = turned.abs().argmax(1, keepdim=True)
    return turned * turned.gather(1, largest).sign(), noise


def _centred(reference: Tensor, activity: Tensor) -> tuple[Tensor, Tensor]:
    if reference.ndim != 2 or reference.shape != activity.shape:
        raise DataError(
            f"Two activities must be matrices of one shape, not {tuple(reference.shape)} and {tuple(activity.shape)}."
        )
    a, b = reference.double(), activity.double()
    return a - a.mean(0), b - b.mean(0)


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part / whole) if float(whole) > 0 else math.nan
