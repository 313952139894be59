"""Weights that a task reaches only after it has begun, as those of an expert that no example was sent to before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict

from nclbayes.blocks import Block, DiagonalBlock, KroneckerBlock
from nclbayes.blocks.layout import quoted
from nclbayes.blocks.structures import known_blocks
from nclbayes.errors import ModelError
from nclbayes.ranks import Ranks, Stopped
from nclbayes.storage import fitted
from nclbayes.watch import ModelRun


class LatecomersError(Exception):
    """A task must begin anew, with blocks that were not known to take part; never seen outside of an update.

    Attributes:
        blocks: They, by name.
        kept: Whether a snapshot of the task with these blocks is there to go on from.
    """

    def __init__(self, blocks: Mapping[str, Block], *, kept: bool = False) -> None:
        super().__init__(f"Blocks {quoted(blocks)} take part only now.")
        self.blocks = dict(blocks)
        self.kept = kept


@contextmanager
def begun_anew(ranks: Ranks) -> Iterator[None]:
    """What one rank meets late, all of them begin anew with.

    Args:
        ranks: The ranks.

    Yields:
        Nothing.

    Raises:
        LatecomersError: On every rank, with the blocks that any of them has met.
        Stopped: If a rank has failed meanwhile.
    """
    try:
        yield
    except LatecomersError as error:
        if not ranks.are_many:
            raise
        late = {name: asdict(block) for name, block in error.blocks.items()}
        said = ranks.stop({"late": late, "kept": error.kept})
    except Stopped as stopped:
        said = stopped.said
    else:
        return
    if any(one and "late" not in one for one in said):
        raise Stopped(said)
    found, kept = dict[str, Block](), True
    for one in filter(None, said):
        found |= {name: fitted(KroneckerBlock | DiagonalBlock, block) for name, block in one["late"].items()}
        kept = kept and one["kept"]
    raise LatecomersError(found, kept=kept)


def meet(run: ModelRun, blocks: Mapping[str, Block], fixed: Mapping[str, object]) -> None:
    """See whether a run reaches weights that do not take part in the task yet.

    Args:
        run: A watched run.
        blocks: Those that do.
        fixed: The other sites that the model is known to have.

    Raises:
        LatecomersError: If it reaches any.
        ModelError: If it meets a site that the model did not have, or one that makes no block of its own.
    """
    known = {site for block in blocks.values() for site in block.sites}
    unknown = [site for site in run.latents if site not in known and site not in fixed]
    if unknown:
        raise ModelError(
            f"The model samples {quoted(unknown)} for some examples only, and not for those that the task was begun "
            "with. Sample every weight in every call, whether it is used or not."
        )
    used = {use.weight for use in run.linear} | {use.bias for use in run.linear} | {use.site for use in run.others}
    late = [site for site in fixed if site in used]
    if late:
        found = {name: block for name, block in known_blocks(run, blocks).items() if name not in blocks}
        if not set(late) <= {site for block in found.values() for site in block.sites}:
            raise ModelError(
                f"Sites {quoted(late)} are used by some examples only, together with weights that others use without "
                "them. Use them for all examples, or none."
            )
        raise LatecomersError(found)
