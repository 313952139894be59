"""Writes the tables of the page on reproducibility from ``docs/ledger.json``, with the results of folders given.

``python docs/ledger.py FOLDER ...`` takes up the ledgers that ``nclbayes bench --out FOLDER`` has left.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from nclbayes.experiments.benchmarks import Ledger
from nclbayes.experiments.benchmarks.ledger import missing, tables

DOCS = Path(__file__).parent
PAGE, LEDGER = DOCS / "reproducibility.md", DOCS / "ledger.json"
BEGIN, END = "% The ledger begins.\n", "% The ledger ends.\n"


def page(text: str, ledger: Ledger) -> str:
    """The page with the tables of a ledger.

    Args:
        text: The page.
        ledger: The ledger.

    Returns:
        The page.
    """
    made = f"{BEGIN}\n{tables(ledger)}\nNot among the cells:\n\n{missing()}\n{END}"
    return re.sub(f"{BEGIN}.*{END}", lambda _: made, text, flags=re.DOTALL)


if __name__ == "__main__":
    ledger = Ledger.load(LEDGER) if LEDGER.exists() else Ledger()
    for folder in sys.argv[1:]:
        ledger = ledger.extended(Ledger.load(Path(folder) / "ledger.json").results)
    ledger.save(LEDGER)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), ledger), encoding="utf-8")
