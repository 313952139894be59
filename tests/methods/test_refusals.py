"""What methods refuse: other engines before them, weights without inputs of their own, settings without effect."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import nclbayes as ncl
from nclbayes.engines.base import Engine
from nclbayes.errors import NonFiniteError, SettingError, UnsupportedUseError
from nclbayes.methods import EWC, GPM, KFAC, METHODS, OWM, VCL, PlainTraining, SynapticIntelligence
from tests.engines.test_laplace import classification_task, classifier


@pytest.mark.parametrize("engine", [OWM(steps=5), GPM(steps=5)], ids=["owm", "gpm"])
def test_methods_that_protect_what_they_saw_do_not_go_on_from_another_engine(engine: OWM | GPM) -> None:
    posterior = ncl.OnlinePosterior(classifier(), ncl.LaplaceNCL(steps=5))
    posterior.update(classification_task(0))
    with pytest.raises(SettingError, match="Another engine than"):
        posterior.update(classification_task(1), engine=engine)
    assert posterior.tasks == ("classes 0",)


@pytest.mark.parametrize("engine", [OWM(steps=5), GPM(steps=5)], ids=["owm", "gpm"])
@pytest.mark.parametrize("between", [ncl.LaplaceNCL(steps=5), PlainTraining(steps=5)], ids=["ncl", "plain"])
def test_nor_do_they_come_back_after_another_engine(engine: OWM | GPM, between: Engine) -> None:
    posterior = ncl.OnlinePosterior(classifier(), engine)
    for k in range(2):
        posterior.update(classification_task(k))
    posterior.update(classification_task(2), engine=between)
    with pytest.raises(SettingError, match="Another engine than"):
        posterior.update(classification_task(3))
    assert len(posterior.tasks) == 3


@pytest.mark.parametrize("method", ["owm", "dowm", "laplace-owm", "laplace-dowm", "gpm"])
def test_a_weight_used_straight_and_transposed_has_no_activity_of_its_own(method: str) -> None:
    def tied(x: Tensor, y: Tensor | None = None) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(4, 6), 1.0).to_event(2))
        pyro.sample("y", dist.Normal(torch.tanh(x @ w.T) @ w, 1.0).to_event(1), obs=y)

    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    learner = METHODS[method].build(tied, {"steps": 3}, torch.Generator().manual_seed(0))
    with pytest.raises(UnsupportedUseError, match="'w' is used straight here and transposed there"):
        learner.update(ncl.Task((x, x), name="copy"))


def test_settings_without_effect_are_refused() -> None:
    for engine in (KFAC, EWC, VCL, PlainTraining, GPM, SynapticIntelligence):
        with pytest.raises(SettingError, match=f"{engine.__name__} has no trust region"):
            engine(trust_radius=0.1)
    for plain in (PlainTraining, GPM):
        with pytest.raises(SettingError, match=f"{plain.__name__} has no pull of the prior"):
            plain(prior_weight=2.0)
    with pytest.raises(NonFiniteError) as error:
        ncl.OnlinePosterior(classifier(), KFAC(steps=50, lr=1e38)).update(classification_task(0))
    assert "trust_radius" not in str(error.value)


@pytest.mark.parametrize("between", [EWC(steps=20, decay=0.1), VCL(steps=20)], ids=["ewc", "vcl"])
def test_synaptic_intelligence_after_another_engine_keeps_precisions_positive(between: EWC | VCL) -> None:
    si = SynapticIntelligence(steps=50, batch_size=60)
    posterior = ncl.OnlinePosterior(classifier(), si)
    posterior.update(ncl.Task(classification_task(0).train, name="large", size=10_000))
    posterior.update(classification_task(1), engine=between)
    posterior.update(ncl.Task(classification_task(2).train, name="small", size=20))
    assert all(bool((state.precision > 0).all()) for state in posterior.blocks.values())
