"""KFAC with decoupled Adam: one weight of the prior in the gradient, another in the preconditioner."""

from __future__ import annotations

from dataclasses import dataclass

from nclbayes.methods.kfac import KFAC


@dataclass(frozen=True, kw_only=True)
class DecoupledKFAC(KFAC):
    """KFAC whose prior counts lambda_m in Adam's first moment and lambda_v in its second (Kao et al. 2021).

        m <- beta_1 m + (1 - beta_1) grad L(lambda_m)
        v <- beta_2 v + (1 - beta_2) (grad L(lambda_v))^2

    With lambda_m = 1 and a large lambda_v the optimum is that of Bayes' rule, and only the preconditioner is made more
    like NCL's; in the paper's recurrent networks that alone retains earlier tasks. With equal weights it is KFAC.

    Attributes:
        prior_weight: lambda_m.
        preconditioner_weight: lambda_v.

    Example:
        >>> from nclbayes.methods import DecoupledKFAC
        >>> DecoupledKFAC(preconditioner_weight=100.0).prior_weight
        1.0
    """

    preconditioner_weight: float = 100.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("preconditioner_weight", lambda v: v >= 0, "at least 0")

    @property
    def second_weight(self) -> float:
        """lambda_v."""
        return self.preconditioner_weight


@dataclass(frozen=True, kw_only=True)
class ReverseDecoupledKFAC(DecoupledKFAC):
    """The reverse: a large lambda_m in the gradient, and lambda_v = 1 in the preconditioner (Kao et al. 2021).

    Example:
        >>> from nclbayes.methods import ReverseDecoupledKFAC
        >>> ReverseDecoupledKFAC().preconditioner_weight
        1.0
    """

    prior_weight: float = 100.0
    preconditioner_weight: float = 1.0
