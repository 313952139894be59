"""What every Gaussian of a block answers, whatever its precision looks like."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from nclbayes.blocks import Block
from nclbayes.gaussians.preconditioners import Preconditioner
from nclbayes.kronecker import SumRule
from nclbayes.storage import memory_of

if TYPE_CHECKING:
    from typing_extensions import Self

LinearMap = Callable[[Tensor], Tensor]


class Structure(Enum):
    """The form of the Gaussian of a linear map.

    Attributes:
        KRONECKER: A precision A (x) G.
        DIAGONAL: Independent weights.
    """

    KRONECKER = "kronecker"
    DIAGONAL = "diagonal"


@dataclass(frozen=True)
class State(ABC):
    """A block and its Gaussian N(mu, Lambda^-1): what a posterior carries from task to task.

    Attributes:
        block: The sites and their layout.
        loc: mu, of the block's shape, in the model's dtype.
        precision: Lambda, in float64.
        log_scale: log tau, the mean log eigenvalue of the precision that the block had before any task.
    """

    structure: ClassVar[Structure]

    block: Block
    loc: Tensor
    precision: Any
    log_scale: float

    @property
    @abstractmethod
    def kind(self) -> str:
        """The form of the Gaussian, for people."""

    @property
    @abstractmethod
    def distribution(self) -> Any:
        """The Gaussian as a Pyro distribution, in the model's dtype."""

    @property
    @abstractmethod
    def logdet(self) -> float:
        """log|Lambda|, of all matrices of a stack together."""

    def here(self) -> State | None:
        """The Gaussian with all that it consists of, if this process holds it; another one may."""
        return self

    @property
    def kl_of_sum(self) -> float | None:
        """The nats lost when a sum of two precisions was replaced by this one; None where nothing can be lost."""
        return None

    @abstractmethod
    def log_prob(self, matrix: Tensor) -> Tensor:
        """The log density of the block's weights, ``[*samples]``, from ``[*samples, *block.shape]``."""

    @abstractmethod
    def whiten(self, gradients: Tensor) -> Tensor:
        """Gradients whose inner products are those of Lambda^-1."""

    @abstractmethod
    def colouring(self) -> LinearMap:
        """What gives standard normal noise the covariance Lambda^-1, ready to be used many times."""

    @abstractmethod
    def multiplication(self, factor: float) -> LinearMap:
        """What multiplies a matrix with factor Lambda, ready to be used many times, in the model's dtype."""

    @abstractmethod
    def preconditioner(self, tau: float, damping: float, held: Any = None) -> Preconditioner:
        """What multiplies a gradient with tau P, in the model's dtype.

        Args:
            tau: What P is multiplied with.
            damping: What is added to every direction's precision.
            held: The state, of the same structure, whose precision to use; None: this one's own.

        Returns:
            The preconditioner with ``P = (Lambda_held + damping I)^-1``; its pull is P Lambda.
        """

    @abstractmethod
    def quadratic(self, delta: Tensor) -> float:
        """delta^T Lambda delta."""

    @abstractmethod
    def add(self, loc: Tensor, fisher: Any, rule: SumRule, measure: bool = True) -> State:
        """The Gaussian around `loc` whose precision has a task's Fisher added.

        Args:
            loc: The new mean.
            fisher: The task's Fisher, of the same structure.
            rule: How to replace a sum of two Kronecker products by one, where that is needed.
            measure: Whether to measure what that loses.

        Returns:
            The new state.
        """

    @abstractmethod
    def faded(self, prior: Any, retention: float) -> State:
        """The Gaussian with the same mean whose precision has faded, ``phi Lambda + (1 - phi) Lambda_0``.

        Args:
            prior: The block's prior, of the same structure.
            retention: phi, above 0 and at most 1.

        Returns:
            The wider state; it is not below the prior where this one is not.
        """

    @abstractmethod
    def stiffening(self, prior: Any) -> Callable[[float], State]:
        """The Gaussian with the same mean, and a precision of the same shape that is as stiff as is asked for.

        Args:
            prior: The block's prior, of the same structure.

        Returns:
            From how many times stiffer than a free direction the mean one is to the stiffer state, or the less stiff
            one.
        """

    @abstractmethod
    def narrowed(self, precision: float) -> State:
        """The Gaussian with a multiple of the identity added to its precision.

        Args:
            precision: What to add to every direction's precision.

        Returns:
            The narrower state.
        """

    @abstractmethod
    def isotropic(self) -> State:
        """The Gaussian with the precision tau I, under which a step is one of plain training."""

    @abstractmethod
    def to(self, device: torch.device) -> State:
        """The same on another device."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Everything that it holds, by part."""

    def common(self) -> dict[str, Tensor]:
        """What every process that learns holds of it, by part."""
        return self.tensors()

    @abstractmethod
    def with_tensors(self, tensors: Mapping[str, Tensor]) -> State:
        """A state of the same block from what :meth:`tensors` gave."""

    def saved(self) -> dict[str, Tensor]:
        """What a file holds of it: no number twice, and none that follows from the others."""
        return self.tensors()

    @property
    def cost(self) -> float:
        """About how many multiplications it takes to factorise it."""
        return float(self.loc.numel())

    def handed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that another process needs to have the same state, and plain values besides."""
        return self.tensors(), {}

    def received(self, tensors: Mapping[str, Tensor], said: Mapping[str, Any]) -> State:
        """A state of the same block from what :meth:`handed` gave."""
        return self.with_tensors(tensors)

    def moved(self, loc: Tensor) -> Self:
        """The same precision around another mean.

        Args:
            loc: The new mean.

        Returns:
            The new state.
        """
        return replace(self, loc=loc)

    def fingerprint(self) -> int:
        """A checksum: whether a block is as it was left, wherever it has been since.

        Returns:
            A number of 32 bits, the same on every device and with any number of threads.
        """
        checksum = 0
        for tensor in self.tensors().values():
            checksum = zlib.crc32(memory_of(tensor), checksum)
        return checksum

    def settings(self) -> dict[str, Any]:
        """All of a state but its tensors, as plain values."""
        return {
            "kind": self.structure.value,
            "block": asdict(self.block),
            "log_scale": self.log_scale,
        }
