"""Groups of processes on this machine, each of which does the same work."""

from __future__ import annotations

import datetime
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.processes import CONTEXT

Work = Callable[..., object]


def member(work: Work, folder: Path, rank: int, count: int, seconds: float, arguments: tuple[Any, ...]) -> None:
    """One process of a group; its failure is left in a file."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=count, timeout=timeout
    )
    try:
        work(rank, folder, *arguments)
    except BaseException:
        (folder / f"failure-{rank}").write_text(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()


def together(count: int, work: Work, folder: Path, *arguments: Any, seconds: float = 60.0) -> list[int]:
    """The exit codes of processes that call ``work(rank, folder, *arguments)``, each as a rank of one group."""
    folder.mkdir(parents=True, exist_ok=True)
    processes = [
        CONTEXT.Process(target=member, args=(work, folder, rank, count, seconds, arguments)) for rank in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(4 * seconds)
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def failures(folder: Path) -> str:
    """What the processes left that failed."""
    return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(folder.glob("failure-*")))
