"""Ratios of running times, measured side by side in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


def best_times(contestants: Mapping[str, Callable[[], object]], rounds: int = 5) -> dict[str, float]:
    """The best of several interleaved rounds for each contestant, in seconds, after one round to warm up."""
    best = dict.fromkeys(contestants, float("inf"))
    for round_ in range(rounds + 1):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            if round_ > 0:
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def table(title: str, header: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    """A plain text table."""
    cells = [header, *[tuple(f"{c:.3g}" if isinstance(c, float) else str(c) for c in row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([title, "", lines[0], rule, *lines[1:], ""])
