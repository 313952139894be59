"""How much faster a step would be with more processes, by a small model of what it costs.

``python -m tests.benchmarks.scaling`` measures two constants here, the multiplications a second of one thread and what
a meeting of two processes takes, and prints the table of docs/guide/scale-out.md.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from tests.benchmarks.ranks import meeting_time
from tests.benchmarks.timing import best_times, table

PROCESSES = (1, 2, 4, 8, 16, 32, 64)
LINKS = {"10 Gbit/s": 10e9 / 8, "200 Gbit/s": 200e9 / 8}
MEETINGS = 1


@dataclass(frozen=True)
class Network:
    """What a step is about.

    Attributes:
        name: What to call it.
        blocks: Outputs and inputs of each map.
        rows: Rows that a batch has in each of them.
    """

    name: str
    blocks: Sequence[tuple[int, int]]
    rows: int

    def seconds(self, processes: int, rate: float, meeting: float, bandwidth: float) -> float:
        """How long a step takes: what is shared, what every rank does, a meeting, and one all-reduce."""
        own = self.rows / processes
        # Forward and backward; then rows are preconditioned by those that have them, or the gradient by everybody.
        shared = sum(3 * own * m * n for m, n in self.blocks)
        shared += sum(min(own * (m * m + n * n + m * n), m * n * (m + n)) for m, n in self.blocks)
        exchanged = 4 * sum(m * n for m, n in self.blocks) * 2 * (processes - 1) / processes
        rounds = math.ceil(math.log2(processes)) if processes > 1 else 0
        return shared / rate + MEETINGS * meeting * rounds + exchanged / bandwidth


def layers(*widths: int) -> list[tuple[int, int]]:
    """The maps of a feedforward network."""
    return [(m, n + 1) for n, m in pairwise(widths)]


def transformer(depth: int, width: int) -> list[tuple[int, int]]:
    """The maps of a transformer's layers: query, key, value, output, and the two of four times the width."""
    return [(width, width + 1)] * (4 * depth) + [(4 * width, width + 1), (width, 4 * width + 1)] * depth


NETWORKS = (
    Network("784-400-400-10, batches of 256", layers(784, 400, 400, 10), 256),
    Network("1024-2000-2000-100, batches of 256", layers(1024, 2000, 2000, 100), 256),
    Network("transformer of 12 layers, 768 wide, 32 sequences of 128", transformer(12, 768), 32 * 128),
)


def measured_rate(size: int = 1500) -> float:
    """Multiplications a second of one thread, in single precision."""
    torch.set_num_threads(1)
    a, b = torch.randn(size, size), torch.randn(size, size)
    return size**3 / best_times({"product": lambda: a @ b})["product"]


def run(rate: float | None = None, meeting: float | None = None) -> str:
    """The table."""
    rate, meeting = rate or measured_rate(), meeting or meeting_time()
    rows: list[tuple[object, ...]] = []
    for network in NETWORKS:
        for link, bandwidth in LINKS.items():
            alone = network.seconds(1, rate, meeting, bandwidth)
            gains = [alone / network.seconds(count, rate, meeting, bandwidth) for count in PROCESSES]
            rows.append((network.name, link, f"{1000 * alone:.0f}", *(f"{gain:.1f}" for gain in gains)))
    title = f"Predicted: {rate / 1e9:.1f}e9 multiplications a second, {1e6 * meeting:.0f} us for a meeting of two"
    return table(title, ("network", "link", "one process (ms)", *map(str, PROCESSES)), rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, help="multiplications a second; by default measured")
    parser.add_argument("--meeting", type=float, help="seconds; by default measured")
    given = parser.parse_args()
    print(run(given.rate, given.meeting))
