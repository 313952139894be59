"""Which sites of a model belong together, and how they are laid out as a matrix."""

from nclbayes.blocks.finding import find_blocks
from nclbayes.blocks.layout import Block, DiagonalBlock, KroneckerBlock

__all__ = ["Block", "DiagonalBlock", "KroneckerBlock", "find_blocks"]
