"""The field's benchmarks, cell by cell, and the ledger of what came of them."""

from nclbayes.experiments.benchmarks.cells import CELLS, Cell, find_cells
from nclbayes.experiments.benchmarks.ledger import Ledger, Result, run_cells, verdict

__all__ = ["CELLS", "Cell", "Ledger", "Result", "find_cells", "run_cells", "verdict"]
