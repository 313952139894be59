"""The paper's tables and figures, each a recipe that can be run."""

from nclbayes.experiments.figures.recipe import SCALES, Recipe, Results, Row, Statement, Workplace, make

__all__ = ["SCALES", "Recipe", "Results", "Row", "Statement", "Workplace", "make"]
