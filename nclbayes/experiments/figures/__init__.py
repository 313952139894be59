"""The paper's tables and figures, each a recipe that can be run."""

from nclbayes.experiments.figures import (
    dynamics,
    feedforward,
    fisher,
    kronecker_sums,
    nvcl,
    prior_weight,
    sequences,
    streams,
    toy,
    uncertainty,
)
from nclbayes.experiments.figures.recipe import SCALES, Recipe, Results, Statement, Workplace, make
from nclbayes.methods.registry import named

FIGURES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        toy.RECIPE,
        feedforward.RECIPE,
        sequences.STIMULUS_RESPONSE,
        sequences.STROKE_MNIST,
        prior_weight.RECIPE,
        fisher.RECIPE,
        kronecker_sums.RECIPE,
        dynamics.RECIPE,
        nvcl.RECIPE,
        streams.RECIPE,
        uncertainty.RECIPE,
    )
}
"""Every recipe by its name."""


def find_figure(name: str) -> Recipe:
    """A recipe by its name.

    Args:
        name: Such as "toy".

    Returns:
        The recipe.

    Raises:
        SettingError: If there is none; the nearest name is suggested.

    Example:
        >>> from nclbayes.experiments.figures import find_figure
        >>> find_figure("lambda").name
        'lambda'
    """
    return named(name, FIGURES, "figure")


__all__ = ["FIGURES", "SCALES", "Recipe", "Results", "Statement", "Workplace", "find_figure", "make"]
