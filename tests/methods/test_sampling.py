"""Methods whose Gaussian moves with every step: boundaries mean nothing to them, and nothing is lost at one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import nclbayes as ncl
from nclbayes.gaussians import KroneckerState
from nclbayes.methods import BGD, FOOVB, IVON
from tests.stream.data import draws, stream

# Those of which the posterior of a step is the prior of the next one.
ONLINE = [BGD(particles=2), FOOVB(particles=2, init_scale=0.3, solution="joint"), FOOVB(particles=2)]
IDS = ["bgd", "joint", "published"]
ALL = [*ONLINE, IVON(particles=2, second_momentum=0.99)]


def covariance(state: Any) -> torch.Tensor:
    if isinstance(state, KroneckerState):
        return torch.linalg.inv(state.precision.dense())
    return 1 / state.precision


def test_where_a_stream_is_cut_changes_nothing() -> None:
    """To rounding: what a segment leaves is held in other numbers than what moves with the steps."""
    ends = []
    for cuts in ((), (5, 17, 18)):
        found = stream("categorical", BGD(particles=2), false_alarm_every=None)
        found.posterior.generator.manual_seed(3)
        for i, batch in enumerate(draws("categorical", 0, 40)):
            if i in cuts:
                found.consolidate()
            found.observe(*batch)
        ends.append(found.present())
    whole, cut = ends
    assert (whole.tasks, len(cut.tasks)) == (("segment 1",), 4)
    for name, state in whole.blocks.items():
        other = cut.blocks[name]
        torch.testing.assert_close(state.loc, other.loc, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(covariance(state), covariance(other), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("engine", ALL, ids=[*IDS, "ivon"])
def test_a_segment_leaves_the_weights_of_its_last_step(engine: Any) -> None:
    found = stream("categorical", engine, false_alarm_every=None)
    before = found.posterior.model.network[0].weight.detach().clone()
    ways = []
    for batch in draws("categorical", 0, 12):
        found.observe(*batch)
        assert found._segment is not None
        for site, value in found.present().mean().items():
            assert torch.equal(value, found._segment._stepper.values()[site])
        ways.append(found.present().mean()["0.weight"] - before)
    assert all(not torch.equal(one, other) for one, other in pairwise(ways))


@pytest.mark.parametrize("engine", ONLINE, ids=IDS)
def test_a_likelihood_that_counts_twice_is_every_example_twice(engine: Any) -> None:
    x, y = draws("categorical", 0, 1, size=12)[0]
    found = []
    for weight, batch in ((2.0, (x, y)), (1.0, (torch.cat([x, x]), torch.cat([y, y])))):
        settings = {**engine.to_dict(), "likelihood_weight": weight}
        own = stream("categorical", type(engine)(**settings), false_alarm_every=None)
        own.posterior.generator.manual_seed(3)
        for _ in range(3):
            own.observe(*batch)
        found.append(own.present())
    for name, state in found[0].blocks.items():
        torch.testing.assert_close(state.loc, found[1].blocks[name].loc, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(covariance(state), covariance(found[1].blocks[name]), rtol=1e-4, atol=1e-7)


def test_a_setting_without_effect_is_refused() -> None:
    with pytest.raises(ncl.errors.SettingError, match="BGD has no momentum"):
        BGD(momentum=0.9)
    with pytest.raises(ncl.errors.SettingError, match="BGD has no pull of the prior"):
        BGD(prior_weight=2.0)
    for name, value in (("prior_weight", 0.0), ("clip_radius", 0.0), ("hess_init", 0.0), ("second_momentum", 1.0)):
        with pytest.raises(ncl.errors.SettingError, match=name):
            IVON(**{name: value})
