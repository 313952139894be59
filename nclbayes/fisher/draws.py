"""Targets drawn from a distribution, as they are or on either side of its mean; also for a share of the examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from torch import Tensor
from torch import distributions as torch_dist


class Place(NamedTuple):
    """Where examples lie among others.

    Attributes:
        axis: Their dimension.
        start: How many come before them.
        examples: How many there are in all.
    """

    axis: int
    start: int
    examples: int


def drawn_from(fn: Any, place: Place | None = None) -> Tensor:
    """Values drawn from a distribution.

    Args:
        fn: The distribution.
        place: Where its examples lie among others; they get what they would have got if all had been drawn together.
            Only if :func:`is_noise` holds.

    Returns:
        One value.
    """
    if isinstance(fn, (torch_dist.Independent, dist.MaskedDistribution)):
        return drawn_from(fn.base_dist, place)
    if type(fn) is dist.Categorical:
        # The largest of the logits plus Gumbel noise: several times faster than torch.multinomial.
        return (fn.logits - _noise(torch.rand, fn.logits, place).log_().neg_().log_()).argmax(-1)
    if type(fn) is dist.Bernoulli:
        return (_noise(torch.rand, fn.probs, place) < fn.probs).to(fn.probs.dtype)
    if type(fn) is dist.Normal:
        return fn.loc + fn.scale * _noise(torch.randn, fn.loc, place)
    return fn.sample()


def signed_from(fn: Any, place: Place | None = None) -> Tensor | None:
    """A target as far from the mean of a distribution as its own are: ``E[y] + C^(1/2) s``, with random signs s.

    Where the log probability is linear in y but for what the parameters do not change, the score of such a target has
    the second moments of the score, as ``E[s s^T] = I``; and its size is about the same each time, while that of a
    drawn class which is all but certain is next to nothing mostly, and large once in a while. Of classes, whose
    covariance is ``diag(p) - p p^T``, the target is ``p + sqrt(p) s - p (sqrt(p) . s)``, one number for each.

    Args:
        fn: The distribution.
        place: As of :func:`drawn_from`.

    Returns:
        The target, [batch shape of the base, event shape or classes]; None for another distribution, or a normal one
        whose scale is learnt.
    """
    base = base_of(fn)
    kind = type(base)
    if kind is dist.Categorical:
        p = base.probs
        spread = p.sqrt() * _signs(p, place)
        return p + spread - p * spread.sum(-1, keepdim=True)
    if kind is dist.Bernoulli:
        p = base.probs
        return p + (p * (1 - p)).sqrt() * _signs(p, place)
    if kind is dist.Poisson:
        return base.rate + base.rate.sqrt() * _signs(base.rate, place)
    if kind is dist.Normal and not base.scale.requires_grad:
        return base.loc + base.scale * _signs(base.loc, place)
    return None


def is_noise(fn: Any, signs: bool = False) -> bool:
    """Whether a draw from a distribution is a function of its parameters and of noise that is the same for all of them.

    Args:
        fn: The distribution.
        signs: Whether signs are drawn, where that can be.

    Returns:
        Whether it is.
    """
    kinds = (dist.Categorical, dist.Bernoulli, dist.Normal)
    return type(base_of(fn)) in ((*kinds, dist.Poisson) if signs else kinds)


def base_of(fn: Any) -> Any:
    """The distribution under masks and independence wrappers.

    Args:
        fn: A distribution.

    Returns:
        What it is made of.
    """
    while isinstance(fn, (torch_dist.Independent, dist.MaskedDistribution)):
        fn = fn.base_dist
    return fn


def _noise(kind: Callable[..., Tensor], like: Tensor, place: Place | None) -> Tensor:
    if place is None:
        return kind(like.shape, dtype=like.dtype, device=like.device)
    shape, (axis, start, examples) = list(like.shape), place
    own = shape[axis]

    def drawn(count: int) -> Tensor:
        return kind([*shape[:axis], count, *shape[axis + 1 :]], dtype=like.dtype, device=like.device)

    if kind is not torch.rand or axis or like.device.type != "cpu":
        return drawn(examples).narrow(axis, start, own).clone()
    # Drawn number by number there: the others are passed over without taking the memory of the whole batch.
    for ahead in range(0, start, own):
        drawn(min(own, start - ahead))
    found = drawn(own)
    for behind in range(start + own, examples, own):
        drawn(min(own, examples - behind))
    return found


def _signs(like: Tensor, place: Place | None) -> Tensor:
    return (_noise(torch.rand, like, place) < 0.5).to(like.dtype).mul_(2).sub_(1)
