"""Print every benchmark's table: ``make bench``."""

from __future__ import annotations

import torch

from tests.benchmarks import engines, fisher, observe, ranks, scaling, soak, sums


def main() -> None:
    default = torch.get_num_threads()
    print(f"torch {torch.__version__}, {default} threads by default\n")
    # First: a process starts with the peak of the one that it comes from.
    print(fisher.run_memory())
    print(ranks.run())
    print(scaling.run())
    print(soak.run(tasks=300, seeds=1, drift=0.0, learners=soak.contestants(), jobs=default))
    for threads in dict.fromkeys((1, default)):
        torch.set_num_threads(threads)
        label = "1" if threads == 1 else f"{threads} (default)"
        print(sums.run(label))
        print(fisher.run(label))
        print(engines.run(label))
        print(engines.run_deciding(label))
        print(engines.run_wide(label))
        print(engines.run_recurrent(label))
        if threads == 1:
            print(observe.run(label))


if __name__ == "__main__":
    main()
