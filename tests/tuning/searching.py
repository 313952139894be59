"""A process that searches together with others: ``python -m tests.tuning.searching STORAGE FOLDER COUNT SAMPLER``.

It begins once so many are ready, and writes a line a trial of its own, then all trials of the search.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.tuning import trials
from nclbayes.tuning.pilot import Pilot


def slowly(predicted: Any, batch: Any) -> Tensor:
    """What counts takes a while to be found out."""
    time.sleep(0.3)
    return (predicted.logits.argmax(-1) == batch[-1]).double()


def main(storage: str, folder: Path, count: int, sampler: str) -> None:
    """Search, with pulses that are looked for sooner."""
    trials._PULSE, trials._DEAD, trials._GLANCE = 0.3, 6.0, 0.2
    own, score = folder / f"own-{os.getpid()}.txt", Pilot.score

    def told(self: Pilot, values: dict[str, float]) -> float | None:
        with own.open("a") as file:
            file.write(json.dumps(values) + "\n")
        return score(self, values)

    Pilot.score = told  # type: ignore[method-assign]
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = ncl.BayesianNetwork(nn.Linear(3, 2), ncl.Categorical())
    task = ncl.Task((x, (x[:, 0] > 0).long()), name="sign")
    (folder / f"ready-{os.getpid()}").touch()
    while len(list(folder.glob("ready-*"))) < count:
        time.sleep(0.02)
    engine, ranges = ncl.LaplaceNCL(steps=3), {"lr": (1e-4, 1e-1), "stiffness": (20.0, 2000.0)}
    number = None if sampler == "grid" else 12
    begun = time.perf_counter()
    found = ncl.tune(model, task, engine, ranges, storage=storage, sampler=sampler, trials=number, metric=slowly)
    result = {"values": found.values, "trials": found.trials, "seconds": time.perf_counter() - begun}
    (folder / f"result-{os.getpid()}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
