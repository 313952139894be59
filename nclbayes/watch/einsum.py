"""Rows of an einsum of an input and a weight, where that is a linear map or a stack of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from string import ascii_letters

import torch
from torch import Tensor


@dataclass(frozen=True)
class EinsumRows:
    """Rows of an einsum: what the weight does not know counts them.

    Attributes:
        input: The letters of the input's dimensions.
        output: Those of the output's.
        stack: Letters that all three share: the weight is a stack of maps.
        index: Letters of the input and the output: one row for each value of them.
        inner: Letters of the input and the weight, which are summed over: n.
        outer: Letters of the weight and the output: m.
        sizes: The length of each letter's dimension.
        view: The weight as a matrix, or a stack of them.
        transposed: Whether the map's matrix is the transpose of that.
    """

    input: str
    output: str
    stack: str
    index: str
    inner: str
    outer: str
    sizes: dict[str, int]
    view: tuple[int, ...]
    transposed: bool

    @property
    def is_reshaped(self) -> bool:
        """Whether the weight is seen with other dimensions than its own."""
        return len(self.stack) > 1 or len(self.inner) != 1 or len(self.outer) != 1

    @property
    def lead(self) -> tuple[int, ...]:
        """The shape of the rows' index."""
        return tuple(self.sizes[letter] for letter in self.index) or (1,)

    @property
    def count(self) -> int:
        """The number of rows, R."""
        return math.prod(self.lead)

    def inputs(self, x: Tensor) -> Iterator[Tensor]:
        """All input rows at once; what the input alone has is summed over.

        Args:
            x: The input.

        Yields:
            [R, n], or [k, R, n] for a stack.
        """
        yield self._rows(x, self.input, self.inner)

    def gradients(self, grad: Tensor) -> Tensor:
        """The gradient rows.

        Args:
            grad: The gradient of the output.

        Returns:
            [R, m], or [k, R, m] for a stack.
        """
        return self._rows(grad, self.output, self.outer)

    def mask(self, mask: Tensor) -> Tensor:
        """Which rows are valid.

        Args:
            mask: Boolean, over the first dimensions of the rows' index.

        Returns:
            [R].
        """
        return mask.reshape(mask.shape + (1,) * (len(self.lead) - mask.ndim)).expand(self.lead).flatten()

    def _rows(self, tensor: Tensor, letters: str, columns: str) -> Tensor:
        ordered = torch.einsum(f"{letters}->{self.stack}{self.index}{columns}", tensor)
        stack = [math.prod(self.sizes[letter] for letter in self.stack)] if self.stack else []
        return ordered.reshape(*stack, self.count, math.prod(self.sizes[letter] for letter in columns))


def einsum_rows(equation: str, x: Tensor, weight: Tensor, out: Tensor, *, left: bool) -> EinsumRows | None:
    """The rows of an einsum of two tensors.

    Args:
        equation: What torch.einsum was given.
        x: The input.
        weight: The weight.
        out: The output.
        left: Whether the weight is the first of the two.

    Returns:
        None if it is no linear map of the weight as a matrix, or a stack of them.
    """
    terms, _, output = equation.replace(" ", "").partition("->")
    operands = terms.split(",")
    if len(operands) != 2 or "->" not in equation:
        return None
    of_weight, of_input = operands if left else reversed(operands)
    free = [letter for letter in ascii_letters if letter not in equation]
    if "..." in of_weight:
        return None
    if "..." in of_input:
        count = x.ndim - len(of_input) + 3
        if "..." not in output or out.ndim - len(output) + 3 != count or count > len(free):
            return None
        of_input, output = (term.replace("...", "".join(free[:count])) for term in (of_input, output))
    named = [(of_weight, weight), (of_input, x), (output, out)]
    if any(len(set(letters)) != len(letters) or len(letters) != tensor.ndim for letters, tensor in named):
        return None
    sizes = {letter: size for letters, tensor in named for letter, size in zip(letters, tensor.shape, strict=True)}
    if any(tensor.shape[i] != sizes[letter] for letters, tensor in named for i, letter in enumerate(letters)):
        # A dimension of length one was broadcast.
        return None
    known = set(of_weight), set(of_input), set(output)
    stack, outer, inner = (
        "".join(letter for letter in of_weight if (letter in known[1], letter in known[2]) == where)
        for where in ((True, True), (False, True), (True, False))
    )
    if of_weight not in (stack + outer + inner, stack + inner + outer) or not inner + outer:
        return None
    index = "".join(letter for letter in output if letter not in known[0])
    transposed = of_weight != stack + outer + inner
    a, b = (inner, outer) if transposed else (outer, inner)
    view = [math.prod(sizes[letter] for letter in letters) for letters in ([stack] if stack else []) + [a, b]]
    return EinsumRows(of_input, output, stack, index, inner, outer, sizes, tuple(view), transposed)
