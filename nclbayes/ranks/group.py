"""A group of processes: what each of them has a share of, and how they exchange it."""

from __future__ import annotations

import json
import math
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nclbayes.errors import RankError
from nclbayes.interrupts import deferred

# What a rank says in place of where it is, if it cannot go on.
_STOP = -1.0
# How many numbers a meeting has room for, where it is among them.
_NUMBERS = 4
# From so many bytes on a tensor is exchanged by itself.
_LARGE = 2**20


class Stopped(Exception):
    """Some rank cannot go on; never seen outside of an update.

    Attributes:
        said: What each rank says of it; None for those that could.
    """

    def __init__(self, said: Sequence[Any]) -> None:
        super().__init__("Some rank cannot go on.")
        self.said = list(said)


class Ranks:
    """The processes that learn a task together.

    Whatever they exchange, they meet first: each says where it is, so that one which has failed can say that instead,
    and none waits for it. Whoever has met takes part in what follows: what may fail is done before, and Ctrl-C waits.

    Args:
        rank: The number of this process.
        count: How many there are.
        device: Where the tensors are that they exchange.

    Attributes:
        rank: The number of this process.
        count: How many there are.
        moved: How many bytes this process has handed over for exchange so far.
    """

    def __init__(self, rank: int = 0, count: int = 1, device: torch.device | None = None) -> None:
        self.rank, self.count, self.moved = rank, count, 0
        self._noted, self._mark = "", 0
        self._device = torch.device("cpu") if device is None else device

    @property
    def is_first(self) -> bool:
        """Whether this process writes, and shows, what all of them have."""
        return self.rank == 0

    @property
    def are_many(self) -> bool:
        """Whether there are others."""
        return self.count > 1

    def note(self, what: str, mark: int) -> None:
        """Have something compared when the ranks meet next, wherever that is, with all else that was noted since.

        Args:
            what: What they must have in common.
            mark: A checksum of it.
        """
        if self.are_many:
            self._mark = zlib.crc32(f"{what} {mark}".encode(), self._mark)
            self._noted = f", after {what} with the checksum {self._mark:08x}"

    def meet(self, where: str, *numbers: float) -> list[list[float]]:
        """Wait for the others, and exchange a few numbers.

        Args:
            where: Where this process is; the others must be there too, and have noted the same.
            *numbers: The numbers.

        Returns:
            Those of each rank.

        Raises:
            RankError: If they are not there, or one is gone.
            Stopped: If one cannot go on.
        """
        if not self.are_many:
            return [list(numbers)]
        where, self._noted, self._mark = where + self._noted, "", 0
        own = torch.tensor([float(zlib.crc32(where.encode())), *numbers], dtype=torch.float64)
        at: list[Any] | None = None
        with deferred():
            table = self._all(own)
            if any(row[0] == _STOP for row in table):
                raise Stopped(self._said(None))
            if any(row[0] != table[0][0] for row in table):
                at = self._said(where)
        if at is not None:
            raise RankError(
                "The processes are out of step: "
                + "; ".join(f"rank {rank} is at '{place}'" for rank, place in enumerate(at))
                + ". Call update on every rank, with the same task and settings."
            )
        return [row[1:] for row in table]

    def stop(self, said: Any) -> list[Any]:
        """Tell the others, wherever they meet next, that this process cannot go on.

        Args:
            said: Why, in plain values.

        Returns:
            What each rank says; None for those that could go on.

        Raises:
            RankError: If one of them is gone.
        """
        if not self.are_many:
            return [said]
        self._noted, self._mark = "", 0
        with deferred():
            self._all(torch.tensor([_STOP], dtype=torch.float64))
            return self._said(said)

    def gather(self, where: str, said: Any) -> list[Any]:
        """What each rank says, in plain values.

        Args:
            where: Where this process is.
            said: What this one says.

        Returns:
            By rank.
        """
        text = _written(said)
        with deferred():
            self.meet(where)
            return self._texts(text)

    def sum(self, where: str, tensors: Sequence[Tensor], number: float = 0.0) -> tuple[list[Tensor], float]:
        """The sums of tensors over all ranks, bit for bit the same on each.

        Args:
            where: Where this process is.
            tensors: Of the same shapes and dtypes on every rank; they may be overwritten.
            number: One more number to sum.

        Returns:
            The sums, and that of the number.
        """
        if not self.are_many:
            return list(tensors), number
        # Large ones go as they are; to lay the small ones end to end costs less than an exchange of each.
        large = {i: t.to(self._device).contiguous() for i, t in enumerate(tensors) if t.nbytes >= _LARGE}
        small = {i: t for i, t in enumerate(tensors) if i not in large}
        kinds = sorted({t.dtype for t in small.values()}, key=str)
        flat = [
            torch.cat([t.reshape(-1) for t in small.values() if t.dtype == kind]).to(self._device) for kind in kinds
        ]
        with deferred():
            total = sum(row[0] for row in self.meet(where, number))
            self._all_reduce([*large.values(), *flat])
        found = large
        for kind, whole in zip(kinds, flat, strict=True):
            some = {i: t for i, t in small.items() if t.dtype == kind}
            pieces = whole.split([t.numel() for t in some.values()])
            found |= {i: piece.view(some[i].shape) for i, piece in zip(some, pieces, strict=True)}
        return [found[i].to(tensor.device) for i, tensor in enumerate(tensors)], total

    def gather_rows(self, where: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of which each rank has some rows, put together in the order of the ranks.

        Args:
            where: Where this process is.
            tensors: [rows, ...], at least one, all of one dtype; a rank's all have the same number of rows.

        Returns:
            [all rows, ...].
        """
        if not self.are_many:
            return list(tensors)
        wide = [tensor.reshape(len(tensor), math.prod(tensor.shape[1:])) for tensor in tensors]
        own = torch.cat(wide, dim=1).to(self._device)
        counts = [int(row[0]) for row in self.meet(where, float(len(own)))]
        padded = own.new_zeros(max(counts), own.shape[1])
        padded[: len(own)] = own
        found = [torch.empty_like(padded) for _ in counts]
        with deferred():
            self.meet(f"{where}, with room for them")
            self._exchange(lambda: dist.all_gather(found, padded))
        self.moved += padded.numel() * padded.element_size()
        whole = torch.cat([piece[:count] for piece, count in zip(found, counts, strict=True)]).to(tensors[0].device)
        pieces = whole.split([piece.shape[1] for piece in wide], dim=1)
        return [piece.reshape(len(piece), *t.shape[1:]) for piece, t in zip(pieces, tensors, strict=True)]

    def broadcast(
        self, where: str, tensors: Mapping[str, Tensor] | None, said: Any, source: int, device: torch.device
    ) -> tuple[dict[str, Tensor], Any]:
        """Tensors and plain values of one rank.

        Args:
            where: Where this process is.
            tensors: What that rank has; of the others nothing is asked.
            said: Likewise.
            source: Which rank.
            device: Where the tensors are to be.

        Returns:
            What it had.
        """
        if not self.are_many:
            return dict(tensors or {}), said
        forms = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in (tensors or {}).items()}
        forms, said = self.gather(where, [forms, said] if self.rank == source else None)[source]
        if self.rank == source:
            buffers = {name: tensor.to(self._device).contiguous() for name, tensor in (tensors or {}).items()}
        else:
            buffers = {
                name: torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
                for name, (dtype, shape) in forms.items()
            }
        with deferred():
            self.meet(f"{where}, with room for it")
            self._broadcast(list(buffers.values()), source)
        return {name: buffer.to(device) for name, buffer in buffers.items()}, said

    def hand(self, where: str, own: Tensor | None, like: Tensor, source: int) -> Tensor:
        """A tensor of one rank, whose form the others know.

        Args:
            where: Where this process is.
            own: The tensor, on that rank; of the others nothing is asked.
            like: One of the same shape and dtype.
            source: Which rank.

        Returns:
            The tensor.
        """
        found = torch.empty_like(like, device=self._device) if own is None else own.to(self._device)
        found = found.contiguous()
        with deferred():
            self.meet(where)
            self._broadcast([found], source)
        return found.to(like.device)

    def owners(self, costs: Mapping[str, float], loads: list[float] | None = None) -> dict[str, int]:
        """Deal work to the ranks, the longest first, each to whoever has least so far.

        Args:
            costs: What each piece of work takes, by name.
            loads: What each rank has to do already, to which its share is added; None: nothing.

        Returns:
            Who does it.
        """
        loads, found = [0.0] * self.count if loads is None else loads, dict[str, int]()
        for name in sorted(costs, key=lambda name: (-costs[name], name)):
            found[name] = min(range(self.count), key=loads.__getitem__)
            loads[found[name]] += costs[name]
        return found

    def _said(self, said: Any) -> list[Any]:
        """What every rank says, without meeting first."""
        return self._texts(_written(said))

    def _texts(self, text: Tensor) -> list[Any]:
        """The same, of what is written already."""
        if not self.are_many:
            return [_read(text)]
        lengths = [int(row[0]) for row in self._all(torch.tensor([float(len(text))], dtype=torch.float64))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=self._device)
        padded[: len(text)] = text
        found = [torch.empty_like(padded) for _ in lengths]
        self._exchange(lambda: dist.all_gather(found, padded))
        return [_read(t[:n]) for t, n in zip(found, lengths, strict=True)]

    def _all(self, own: Tensor) -> list[list[float]]:
        # Always of one length: a rank that stops does not know how many numbers the others bring.
        wide = own.new_zeros(_NUMBERS)
        wide[: len(own)] = own
        wide = wide.to(self._device)
        found = [torch.empty_like(wide) for _ in range(self.count)]
        self._exchange(lambda: dist.all_gather(found, wide))
        return [row[: len(own)].tolist() for row in found]

    def _all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors in place, all at once."""

        def exchanged() -> None:
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()

        self._exchange(exchanged)
        self.moved += sum(tensor.nbytes for tensor in tensors)

    def _broadcast(self, tensors: Sequence[Tensor], source: int) -> None:
        """Tensors of one rank, in place."""
        for tensor in tensors:
            self._exchange(lambda tensor=tensor: dist.broadcast(tensor, source))  # type: ignore[misc]
            self.moved += tensor.nbytes if self.rank == source else 0

    def _exchange(self, call: Callable[[], object]) -> None:
        try:
            call()
        except (RuntimeError, ValueError) as error:
            raise RankError(
                f"Rank {self.rank} cannot reach the other processes any more: one of them has ended, or the group's "
                f"timeout has passed ({str(error).splitlines()[0][:200]})."
            ) from error


def _written(said: Any) -> Tensor:
    """Plain values as bytes."""
    return torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)


def _read(text: Tensor) -> Any:
    return json.loads(bytes(text.tolist()).decode())


ALONE = Ranks()
"""One process."""


class Share(NamedTuple):
    """Which examples of a batch this process runs at once.

    Attributes:
        ranks: The ranks that share the batch.
        start: How many of its examples come before these.
        examples: How many it has; 0 if nobody has counted, as of a batch that one process runs as it is.
        part: Which of its parts all ranks run at the same time, counted from 1; 0 if that is the whole of it.
        ahead: How many of that part's examples come before these.
    """

    ranks: Ranks = ALONE
    start: int = 0
    examples: int = 0
    part: int = 0
    ahead: int = 0


WHOLE = Share()
"""All of them."""
_warned = False


def present(device: torch.device | None = None) -> Ranks:
    """The processes of torch's default group, where there is one.

    Args:
        device: Where the posterior is; None: wherever the group can exchange.

    Returns:
        All of them; one process alone without a group.

    Raises:
        RankError: If the group's backend cannot exchange tensors of that device.
    """
    global _warned
    if not dist.is_available() or not dist.is_initialized():
        return ALONE
    count, backend = dist.get_world_size(), dist.get_backend()
    if count == 1:
        if not _warned:
            _warned = True
            warnings.warn(
                "The process group has one process: nothing is shared out. Launch the script by "
                "`torchrun --nproc-per-node 2 script.py`, or leave init_process_group out.",
                stacklevel=2,
            )
        return ALONE
    if backend == "nccl" and device is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if backend == "nccl" and device is not None and device.type != "cuda":
        raise RankError(
            f"The process group's backend is nccl, which exchanges tensors of GPUs, and the posterior is on the "
            f"{device.type}: move it, posterior.to('cuda'), or call init_process_group('gloo')."
        )
    return Ranks(dist.get_rank(), count, device if backend == "nccl" else None)
