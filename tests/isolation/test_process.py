"""What an update or a prediction finds in the process, it leaves; and threads do not meet."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.poutine import runtime
from torch import nn

import nclbayes as ncl
from nclbayes.errors import ModelError, SettingError
from tests.isolation.learners import LEARNERS, Process, contents, network, same, task

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(7))
MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("learner", LEARNERS)
def test_an_update_sets_its_own_grad_mode_and_puts_the_callers_back(learner: str, mode: str) -> None:
    plain, other = (LEARNERS[learner](network()) for _ in range(2))
    for k in range(2):
        plain.update(task(str(k), k), progress=False)
        with MODES[mode]():
            process = Process(other.model)
            report = other.update(task(str(k), k), progress=False)
            assert process.changed() == []
        assert report.steps == 4
    assert other.blocks
    assert same(contents(plain), contents(other))


@pytest.mark.parametrize("method", ["mean", "samples", "linearized"])
def test_predictions_are_those_of_any_grad_mode(method: str) -> None:
    posterior = LEARNERS["laplace"](network())
    posterior.update(task("a", 0), progress=False)
    plain = posterior.predict(X, method=method, generator=torch.Generator().manual_seed(1)).probs
    for mode in MODES.values():
        with mode():
            inside = posterior.predict(X.clone(), method=method, generator=torch.Generator().manual_seed(1)).probs
        assert torch.equal(plain, inside)


def test_a_fisher_is_that_of_any_grad_mode() -> None:
    model, (x, y) = network(), task("a", 0).train
    values = model.initial_values()
    plain = ncl.fisher(model, values, (x, y))
    with torch.no_grad():
        inside = ncl.fisher(model, values, (x, y))
    assert plain.keys() == inside.keys()
    assert torch.equal(plain["0"].output, inside["0"].output)


def test_a_model_made_in_inference_mode_is_refused_in_words() -> None:
    with torch.inference_mode():
        model = network()
    with pytest.raises(ModelError, match="inference_mode"):
        LEARNERS["laplace"](model).update(task("a", 0), progress=False)


def test_a_posterior_that_was_loaded_in_inference_mode_goes_on(tmp_path: object) -> None:
    posterior = LEARNERS["laplace"](network())
    posterior.update(task("a", 0), progress=False)
    posterior.save(f"{tmp_path}/posterior.ncl")
    model = network()
    with torch.inference_mode():
        again = ncl.OnlinePosterior.load(f"{tmp_path}/posterior.ncl", model)
    for each in (posterior, again):
        each.update(task("b", 1), progress=False)
    assert same(contents(posterior), contents(again))


def test_a_task_that_leaves_no_block_is_an_error() -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).detach()

    model = ncl.BayesianNetwork(Detached(), ncl.Categorical(), prior=dist.Normal(0.0, 1.0))
    posterior = LEARNERS["laplace"](model)
    with pytest.raises(ncl.errors.NCLError, match="'a'"):
        posterior.update(task("a", 0), progress=False)
    assert posterior.tasks == ()


def together(*works: Callable[[], None]) -> None:
    """Run functions in a thread each; what one raises is raised here."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def predictions_in_threads(count: int) -> None:
    posteriors = []
    for k in range(4):
        posteriors.append(LEARNERS["laplace" if k % 2 else "variational"](network(k)))
        posteriors[-1].update(task("a", k), progress=False)
    seeds = [torch.Generator().manual_seed(k) for k in range(4)]
    right = [p.predict(X).probs for p in posteriors]
    sampled = [
        p.predict(X, num_samples=2, generator=g.clone_state()).probs for p, g in zip(posteriors, seeds, strict=True)
    ]

    def predict(k: int) -> None:
        for i in range(count):
            assert torch.equal(posteriors[k].predict(X).probs, right[k])
            if i % 10 == 0:
                found = posteriors[k].predict(X, num_samples=2, generator=seeds[k].clone_state()).probs
                assert torch.equal(found, sampled[k])

    together(*(lambda k=k: predict(k) for k in range(4)))
    assert runtime._PYRO_STACK == []


def updates_in_threads(count: int) -> None:
    names = ("laplace", "variational", "ewc", "replay")

    def learn(posterior: ncl.OnlinePosterior) -> None:
        for i in range(count):
            posterior.update(task(str(i), i % 5), progress=False)

    alone, beside = ([LEARNERS[name](network(k)) for k, name in enumerate(names)] for _ in range(2))
    for posterior in alone:
        learn(posterior)
    together(*(lambda p=p: learn(p) for p in beside))
    for one, other in zip(alone, beside, strict=True):
        assert same(contents(one), contents(other))
    assert runtime._PYRO_STACK == []


def test_threads_get_the_predictions_of_their_own_posteriors() -> None:
    predictions_in_threads(60)


def test_updates_in_threads_end_where_each_alone_does() -> None:
    updates_in_threads(4)


@pytest.mark.exhaustive
def test_a_thousand_predictions_and_a_hundred_updates_in_each_of_four_threads() -> None:
    predictions_in_threads(1000)
    updates_in_threads(100)


def test_two_threads_teach_one_posterior_one_after_the_other() -> None:
    posterior = LEARNERS["laplace"](network())
    together(*(lambda k=k: posterior.update(task(str(k), k), progress=False) for k in range(3)))
    assert sorted(posterior.tasks) == ["0", "1", "2"]


def test_a_prediction_does_not_wait_for_the_end_of_an_update_elsewhere() -> None:
    posterior = LEARNERS["laplace"](network())
    posterior.update(task("a", 0), progress=False)
    before, predicted = posterior.predict(X).probs, threading.Event()

    def wait(progress: ncl.engines.Progress) -> None:
        if progress.step == 2:
            assert predicted.wait(60)

    def predict() -> None:
        assert torch.equal(posterior.predict(X).probs, before)
        predicted.set()

    together(lambda: posterior.update(task("b", 1), progress=False, callbacks=[wait]), predict)
    assert posterior.tasks == ("a", "b")


def test_an_update_of_the_same_posterior_in_a_callback_is_refused_and_of_another_is_not() -> None:
    posterior, other = (LEARNERS["laplace"](network()) for _ in range(2))

    def nested(progress: ncl.engines.Progress) -> None:
        other.update(task("inner", 1), progress=False)
        with pytest.raises(SettingError, match="in a callback"):
            posterior.update(task("inner", 1), progress=False)
        with pytest.raises(SettingError, match="moved in a callback"):
            posterior.to("cpu")

    posterior.update(task("outer", 0), progress=False, callbacks=[nested])
    assert posterior.tasks == ("outer",)
    assert other.tasks == ("inner",) * 4
    plain = LEARNERS["laplace"](network())
    plain.update(task("outer", 0), progress=False)
    assert same(contents(plain), contents(posterior))


def test_handlers_of_the_caller_stay_in_place() -> None:
    posterior = LEARNERS["laplace"](network())
    with pyro.poutine.trace() as outer:
        posterior.update(task("a", 0), progress=False)
        assert runtime._PYRO_STACK == [outer]
    assert runtime._PYRO_STACK == []
    assert set(outer.trace.nodes) <= {"_INPUT"}


def test_a_posterior_can_be_copied() -> None:
    posterior = LEARNERS["laplace"](network())
    posterior.update(task("a", 0), progress=False)
    twin = copy.deepcopy(posterior)
    for each in (posterior, twin):
        each.update(task("b", 1), progress=False)
    assert same(contents(posterior), contents(twin))
