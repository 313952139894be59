"""Which of several processes has the factors of a precision."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from nclbayes.errors import RankError
from nclbayes.gaussians.kronecker import KroneckerState
from nclbayes.gaussians.sharded import ShardedState
from nclbayes.gaussians.state import State
from nclbayes.ranks import Ranks


class Factors(str, Enum):
    """Where the factors of a precision are, if several processes learn together.

    Attributes:
        REPLICATE: Every rank holds those of all blocks.
        SHARD: A rank holds those of its own blocks, and hands round what they are needed for.

    Example:
        >>> from nclbayes.gaussians import Factors
        >>> [where.value for where in Factors]
        ['replicate', 'shard']
    """

    REPLICATE = "replicate"
    SHARD = "shard"


class Shards:
    """Which rank holds which block.

    Args:
        ranks: The ranks.
        states: The Gaussians so far; those that a rank holds stay with it.
    """

    def __init__(self, ranks: Ranks, states: Mapping[str, State]) -> None:
        self._ranks = ranks
        self._owners = {name: s.owner for name, s in states.items() if isinstance(s, ShardedState)}
        self._loads = [0.0] * ranks.count
        for name, owner in self._owners.items():
            self._loads[owner] += states[name].cost
        self.deal({name: s.cost for name, s in states.items() if isinstance(s, KroneckerState)})

    def deal(self, costs: Mapping[str, float]) -> None:
        """Give blocks to ranks, the longest first, each to whoever has least.

        Args:
            costs: What each of them takes, by name.
        """
        self._owners |= self._ranks.owners(costs, self._loads)

    def of(self, state: State) -> State:
        """A Gaussian as it is held from now on.

        Args:
            state: The Gaussian, of a block that has been dealt.

        Returns:
            The same, held by one rank if it has factors.
        """
        if not isinstance(state, KroneckerState):
            return state
        return ShardedState.of(state, self._ranks, self._owners[state.block.name])


def placed(states: Mapping[str, State], factors: Factors, ranks: Ranks) -> dict[str, State]:
    """Gaussians with their factors where they are to be.

    Args:
        states: The Gaussians.
        factors: Where the factors are to be.
        ranks: The ranks.

    Returns:
        The same Gaussians.

    Raises:
        RankError: If their factors are with other processes, of which there are none any more.
    """
    sharded = {name: state for name, state in states.items() if isinstance(state, ShardedState)}
    if any(state.ranks.count != ranks.count or state.ranks.rank != ranks.rank for state in sharded.values()):
        raise RankError(
            "The factors of the posterior are with the ranks of another process group. Save it while that is there, "
            "and load the file."
        )
    if factors is Factors.REPLICATE:
        return {**states, **{name: state.whole() for name, state in sharded.items()}}
    shards = Shards(ranks, states)
    return {name: shards.of(state) for name, state in states.items()}
