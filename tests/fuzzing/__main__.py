"""``python -m tests.fuzzing --cases 10000``: many odd inputs, and a table of what was said to them."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

from tests.fuzzing.cases import temporary_folder
from tests.fuzzing.judging import run_case


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--show", type=int, default=20, help="how many faults to print")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    outcomes: Counter[tuple[str, str]] = Counter()
    faults: Counter[tuple[str, str, str]] = Counter()
    shown, started = 0, time.perf_counter()
    with temporary_folder() as folder:
        for seed in range(options.seed, options.seed + options.cases):
            result = run_case(seed, Path(folder))
            for verdict in result.verdicts:
                outcomes[verdict.stage, verdict.outcome] += 1
                if verdict.fault:
                    faults[verdict.stage, verdict.outcome, verdict.fault] += 1
            if result.faults and shown < options.show:
                shown += 1
                print(result, "\n")
    stages = list(dict.fromkeys(stage for stage, _ in outcomes))
    classes = sorted({outcome for _, outcome in outcomes}, key=lambda c: -sum(outcomes[s, c] for s in stages))
    print(f"{options.cases} cases in {time.perf_counter() - started:.0f} s")
    print(f"{'':26}" + "".join(f"{stage:>14}" for stage in [*stages, "all"]))
    for outcome in classes:
        counts = [outcomes[stage, outcome] for stage in stages]
        print(f"{outcome:26}" + "".join(f"{count:14,}" for count in [*counts, sum(counts)]))
    print(f"faults: {sum(faults.values())}")
    for (stage, outcome, fault), count in faults.most_common():
        print(f"  {count:6} {stage}: {outcome}: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
