"""How much of a linear map's two factors is held: all of it, or blocks along the diagonal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from nclbayes.blocks.finding import find_blocks
from nclbayes.blocks.layout import Block, DiagonalBlock, KroneckerBlock
from nclbayes.errors import SettingError
from nclbayes.watch import ModelRun

# A factor is held whole up to this size: its factorisation takes seconds.
_WHOLE = 2048
# Beyond it, in blocks that are at most so wide, and so many times as wide as the other factor: they then hold no more
# than so many numbers for each weight.
_WIDEST, _TIMES = 1024, 4

Side = str | int
"""What is held of one factor: "dense", "diagonal", "auto", or the width that blocks may have."""


@dataclass(frozen=True)
class Structures:
    """What is held of the factors of each block, by patterns of their names.

    Attributes:
        patterns: Patterns, each with the side of the inputs and that of the outputs; the first that matches the name of
            a block, or of one of its sites, counts, and "auto" where none does.

    Example:
        >>> from nclbayes.blocks.structures import Structures
        >>> Structures.of({"head*": ("dense", "diagonal"), "*": "auto"}).patterns
        (('head*', ('dense', 'diagonal')), ('*', ('auto', 'auto')))
    """

    patterns: tuple[tuple[str, tuple[Side, Side]], ...] = ()

    @classmethod
    def of(cls, given: Any) -> Structures:
        """What a user says.

        Args:
            given: "auto", "dense", "diagonal" or the width of blocks; a pair of these for inputs and outputs; or a
                mapping from patterns of names to them.

        Returns:
            The structures.

        Raises:
            SettingError: If it is none of these.
        """
        named = given if isinstance(given, Mapping) else {"*": given}
        for pattern in named:
            if not isinstance(pattern, str):
                raise SettingError(f"structure has the pattern {pattern!r}: it must be a string, such as 'head*'.")
        return cls(tuple((pattern, _sides(value)) for pattern, value in named.items()))

    def applied(self, block: Block, *, whole: bool = False) -> Block:
        """A block with the widths that its factors have.

        Args:
            block: The block, as it was found.
            whole: Whether "auto" means all of a factor, however large it is.

        Returns:
            The same, or one with other widths.

        Raises:
            SettingError: If all of a factor is needed, and less was asked for.
        """
        if not isinstance(block, KroneckerBlock):
            return block
        m, n = block.shape[-2:]
        sides = next((sides for pattern, sides in self.patterns if _matches(pattern, block)), ("auto", "auto"))
        widths = (_width(sides[0], n, m, whole), _width(sides[1], m, n, whole))
        if whole and any(widths):
            raise SettingError(
                f"The structure of block '{block.name}' is {sides}, and this engine needs its factors whole: say "
                "'dense', or use another engine, such as LaplaceNCL."
            )
        return replace(block, widths=widths)


def known_blocks(run: ModelRun, known: Mapping[str, Block]) -> dict[str, Block]:
    """The blocks of the sites that a run used, in the form in which they are known.

    What is known as diagonal stays so, whatever it is used for: an earlier release may have seen no linear map in it.

    Args:
        run: A watched run of the model.
        known: Those that are known, by name.

    Returns:
        Blocks by name; of those that are known, as they are if they can be, and otherwise as the run shows them.
    """
    found: dict[str, Block] = {}
    diagonal = {name for name, block in known.items() if isinstance(block, DiagonalBlock)}
    for block in find_blocks(run, diagonal).values():
        found |= as_known(block, known)
    return found


def as_known(block: Block, known: Mapping[str, Block]) -> dict[str, Block]:
    """A block in the form in which it is known.

    Args:
        block: The block.
        known: Those that are known, by name.

    Returns:
        The block, or one with other widths; or the diagonal blocks of its sites, if those are known. By name.
    """
    diagonal = [other for site in block.sites if isinstance(other := known.get(site), DiagonalBlock)]
    if len(diagonal) == len(block.sites):
        # Another shape is for the caller to refuse.
        return {other.name: replace(other, shape=block.site_shapes[other.name]) for other in diagonal}
    other = known.get(block.name)
    if isinstance(block, KroneckerBlock) and isinstance(other, KroneckerBlock):
        block = replace(block, widths=other.widths)
    return {block.name: block}


def _sides(value: Any) -> tuple[Side, Side]:
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return _side(value[0]), _side(value[1])
    return _side(value), _side(value)


def _side(value: Any) -> Side:
    if isinstance(value, str) and value in ("auto", "dense", "diagonal"):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise SettingError(
        "structure must be 'auto', 'dense', 'diagonal' or the width of blocks, a pair of these for inputs and outputs, "
        f"or a mapping from patterns of names to them, not {value!r}."
    )


def _matches(pattern: str, block: KroneckerBlock) -> bool:
    return any(fnmatchcase(name, pattern) for name in (block.name, *block.sites))


def _width(side: Side, size: int, other: int, whole: bool) -> int:
    """How wide the blocks of a factor may be; 0: as wide as the factor."""
    if side == "auto":
        if whole or size <= _WHOLE:
            return 0
        return min(_WIDEST, _TIMES * other)
    width = {"dense": size, "diagonal": 1}.get(side, side) if isinstance(side, str) else side
    return 0 if int(width) >= size else int(width)
