"""A stream finds its changes, learns as within tasks, and survives whatever is done to it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pyro import distributions as dist
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.errors import DataError, FileError, NCLError, NonFiniteError, SettingError
from nclbayes.methods import BGD, EWC, FOOVB, IVON, KFAC, OWM, DiagonalNCL, PlainTraining, ReplayLearner
from nclbayes.stream import Changed, Consolidated, Opened, Reason
from nclbayes.tasks import split_digits
from nclbayes.tasks.streams import hard
from tests.processes import run_apart
from tests.stream.data import Batch, changes, draws, model, stream

ENGINES = [
    ncl.LaplaceNCL(),
    ncl.LaplaceNCL(steps_by="adam", retention=0.9),
    ncl.VariationalNCL(),
    DiagonalNCL(),
    EWC(lr=0.003),
    KFAC(lr=0.003),
    PlainTraining(),
    BGD(particles=2, init_scale=0.3),
    FOOVB(particles=2),
    IVON(second_momentum=0.99),
]


def content(found: ncl.Stream, path: Path) -> bytes:
    found.save(path)
    return path.read_bytes()


def observed(found: ncl.Stream, batches: list[Batch]) -> ncl.Stream:
    for batch in batches:
        found.observe(*batch)
    return found


@pytest.mark.parametrize("kind", ["normal", "poisson", "bernoulli", "categorical"])
def test_a_change_is_found_whatever_the_outputs(kind: str) -> None:
    found = observed(stream(kind), draws(kind, 0, 120) + draws(kind, 1, 60))
    (change,) = changes(found)
    assert 119 <= change.first <= 125
    assert change.batch - change.first < 8
    assert change.odds >= 10_000
    assert change.score < change.expected
    opened, ended, _, again = (e for e in found.events)
    assert [type(e) for e in (opened, ended, again)] == [Opened, Changed, Opened]
    assert found.posterior.tasks == ("segment 1",)


def test_split_digits_are_found_and_kept() -> None:
    """Not told where tasks end, and as good as if it had been: as the batches are held, it ends in the same weights."""
    tasks = split_digits("domain")[:3]
    batches = list(hard(tasks, batches=100, batch_size=16))
    ends = []
    for is_told in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 2))
        posterior = ncl.OnlinePosterior(
            ncl.BayesianNetwork(net, ncl.Categorical(), prior=dist.Normal(0.0, 1.0)), ncl.LaplaceNCL()
        )
        every = None if is_told else 10_000.0
        found = ncl.Stream(posterior, segment_size=1600, false_alarm_every=every)
        for i, item in enumerate(batches):
            if is_told and i in (100, 200):
                found.consolidate()
            found.observe(*item.batch)
        ends.append(found)
    told, itself = ends
    assert [change.first for change in changes(itself)] == [101, 201]
    assert all(change.batch - change.first <= 4 for change in changes(itself))
    for site, value in told.present().mean().items():
        assert torch.equal(value, itself.present().mean()[site])
    now = itself.present()
    right = [float((now.predict(t.test[0]).probs.argmax(-1) == t.test[1]).float().mean()) for t in tasks]
    assert min(right) > 0.8


@pytest.mark.slow
@pytest.mark.parametrize(("size", "told"), [(500, [61]), (5000, [])])
def test_a_segment_is_not_found_to_end_in_the_first_eighth_of_its_size(size: int, told: list[int]) -> None:
    model = ncl.BayesianNetwork(torch.nn.Linear(2, 1), ncl.Normal(0.3), prior=dist.Normal(0.0, 1.0))
    found, draw = ncl.Stream(ncl.OnlinePosterior(model, ncl.LaplaceNCL()), segment_size=size), torch.Generator()
    draw.manual_seed(0)
    for k in range(76):
        x = torch.randn(8, 2, generator=draw)
        found.observe(x, (1.0 if k < 60 else -1.0) * x.sum(-1, keepdim=True))
    # 76 batches of 8 are less than an eighth of 5,000.
    assert [event.first for event in found.events if isinstance(event, Changed)] == told


@pytest.mark.parametrize("kind", ["normal", "poisson", "categorical"])
def test_a_stream_that_does_not_change_has_no_boundary(kind: str) -> None:
    assert changes(observed(stream(kind), draws(kind, 0, 3000))) == []


@pytest.mark.parametrize("kind", ["poisson", "categorical"])
def test_a_short_stream_that_does_not_change_has_no_boundary(kind: str) -> None:
    found = observed(stream(kind), draws(kind, 0, 400))
    assert changes(found) == []
    assert [type(event) for event in found.events] == [Opened]


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: type(engine).__name__)
def test_a_restart_at_any_moment_changes_nothing(engine: Any, tmp_path: Path) -> None:
    """Across a change, with batches that are held, and while the first segment has learnt a single batch."""
    batches = draws("categorical", 0, 45) + draws("categorical", 1, 30)
    settings = {"segment_size": 500, "false_alarm_every": 200.0}
    whole = observed(stream("categorical", engine, **settings), batches)
    parts, held = stream("categorical", engine, **settings), 0
    for i, batch in enumerate(batches):
        if i in (0, 1, 20) or 44 <= i <= 56:
            parts.save(tmp_path / "part")
            parts = ncl.Stream.load(tmp_path / "part", model("categorical"))
            held = max(held, parts.held)
        parts.observe(*batch)
    assert content(whole, tmp_path / "a") == content(parts, tmp_path / "b")
    assert whole.events == parts.events
    if not isinstance(engine, KFAC):
        assert held
        assert changes(whole)


def test_a_restart_may_come_before_any_batch_and_after_a_segment(tmp_path: Path) -> None:
    found = stream("categorical")
    for count in (0, 3):
        observed(found, draws("categorical", 0, count))
        found.consolidate()
        again = ncl.Stream.load(_saved(found, tmp_path), model("categorical"))
        assert again.events == found.events
        assert content(again, tmp_path / "a") == content(found, tmp_path / "b")


def _saved(found: ncl.Stream, folder: Path) -> Path:
    found.save(folder / "stream")
    return folder / "stream"


def test_a_file_that_is_no_stream_is_refused(tmp_path: Path) -> None:
    found = observed(stream("categorical"), draws("categorical", 0, 5))
    found.consolidate()
    path = tmp_path / "posterior"
    found.posterior.save(path)
    with pytest.raises(FileError, match="holds a posterior, not a stream"):
        ncl.Stream.load(path, model("categorical"))
    damaged = bytearray(_saved(found, tmp_path).read_bytes())
    damaged[-10] ^= 1
    (tmp_path / "damaged").write_bytes(damaged)
    with pytest.raises(FileError, match="damaged"):
        ncl.Stream.load(tmp_path / "damaged", model("categorical"))


def nan_input(x: Tensor, y: Tensor) -> Batch:
    return x.index_fill(0, torch.tensor([3]), torch.nan), y


ODD: dict[str, tuple[Callable[[Tensor, Tensor], Any], type[NCLError]]] = {
    "NaN": (nan_input, NonFiniteError),
    "another shape": (lambda x, y: (x[:, :3], y), DataError),
    "labels out of range": (lambda x, y: (x, y + 5), DataError),
    "negative labels": (lambda x, y: (x, y - 5), DataError),
    "different lengths": (lambda x, y: (x, y[:-1]), DataError),
    "nothing": (lambda x, y: (x[:0], y[:0]), DataError),
    "an array": (lambda x, y: (x.numpy(), y), DataError),
    "numbers too large": (lambda x, y: (x * 1e38, y), NonFiniteError),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("engine", [ncl.LaplaceNCL(), ncl.VariationalNCL(), EWC()], ids=lambda e: type(e).__name__)
def test_what_is_refused_leaves_the_stream_as_it_was(odd: str, engine: Any, tmp_path: Path) -> None:
    change, error = ODD[odd]
    found = stream("categorical", engine)
    with pytest.raises(error):
        found.observe(*change(*draws("categorical", 0, 1)[0]))
    assert found.batches == 0
    assert found.events == ()
    observed(found, draws("categorical", 0, 30))
    before = content(found, tmp_path / "a")
    with pytest.raises(error):
        found.observe(*change(*draws("categorical", 0, 1)[0]))
    assert content(found, tmp_path / "b") == before
    observed(found, draws("categorical", 0, 2))


@pytest.mark.parametrize("every", [10_000.0, None])
def test_an_interrupt_in_the_midst_leaves_the_stream_as_it_was(every: float | None, tmp_path: Path) -> None:
    """At every call of the network: of the score if there is one, of the step, of the Fisher."""
    settings = {"fisher_every": 1, "false_alarm_every": every}
    found = observed(stream("categorical", **settings), draws("categorical", 0, 10))
    before, network = content(found, tmp_path / "a"), found.posterior.model.network
    batch, calls = draws("categorical", 3, 1)[0], 0
    while True:
        left = calls

        def stop(*_: Any) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt

        handle = network.register_forward_pre_hook(stop)
        try:
            found.observe(*batch)
            break
        except KeyboardInterrupt:
            assert content(found, tmp_path / "b") == before
        finally:
            handle.remove()
        calls += 1
    assert calls == (2 if every is None else 3)


def test_a_batch_whose_fisher_overflows_is_refused_when_it_comes(tmp_path: Path) -> None:
    """Saturated units let no gradient through: score and weights stay finite, and only E[z z^T] does not."""
    net = nn.Sequential(nn.Linear(20, 12), nn.Tanh(), nn.Linear(12, 2))
    wide = ncl.BayesianNetwork(net, ncl.Categorical(), prior=dist.Normal(0.0, 1.0))
    found = ncl.Stream(ncl.OnlinePosterior(wide, ncl.LaplaceNCL()), fisher_every=2, false_alarm_every=None)
    batches = [(x.repeat(1, 4), y) for x, y in draws("categorical", 0, 12)]
    observed(found, batches[:10])
    x, y = batches[10]
    odd = x.index_fill(0, torch.tensor([3]), 1e25)
    before = content(found, tmp_path / "a")
    with pytest.raises(NonFiniteError, match=r"inputs of the map with weight '0\.weight'"):
        found.observe(odd, y)
    assert content(found, tmp_path / "b") == before
    observed(found, batches[10:])
    found.consolidate()


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: type(engine).__name__)
def test_a_step_is_the_same_whether_its_batch_was_scored_before(engine: Any) -> None:
    """With draws of the network's own, too: a score takes none of those of the step."""
    batches = draws("categorical", 0, 12)
    ends = []
    for every in (10_000.0, None):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Dropout(0.3), nn.Linear(12, 2))
        noisy = ncl.BayesianNetwork(net, ncl.Categorical(), prior=dist.Normal(0.0, 1.0))
        found = ncl.Stream(ncl.OnlinePosterior(noisy, engine), false_alarm_every=every)
        ends.append(observed(found, batches).present().mean())
    for site, value in ends[0].items():
        assert torch.equal(value, ends[1][site])


@pytest.mark.parametrize(("examples", "every"), [(64, 1), (127, 1), (128, 2), (200, 3)])
def test_of_a_large_batch_a_part_is_scored(examples: int, every: int) -> None:
    """All of it is learnt, and NaN in any of it is refused."""
    g = torch.Generator().manual_seed(0)
    found = stream("categorical")
    for _ in range(3):
        x, y = torch.randn(examples, 5, generator=g), torch.randint(2, (examples,), generator=g)
        expected = found.predict(x).log_prob(y)[::every].mean().item() if found.batches else None
        found.observe(x, y)
        if expected is not None:
            assert found.judged[-1].score == pytest.approx(expected, rel=1e-5)
    assert found._segment is not None
    assert found._segment.examples == 3 * examples
    x[1] = torch.nan
    with pytest.raises(NonFiniteError):
        found.observe(x, y)


def test_the_fisher_is_that_of_the_batches_weighted_by_the_cube_of_their_place() -> None:
    """Of a linear map, E[z z^T] is of the inputs alone; as batches are added, and as a file is taken up again."""
    g, every = torch.Generator().manual_seed(0), 3
    linear = ncl.BayesianNetwork(nn.Linear(3, 1), ncl.Normal(0.5), prior=dist.Normal(0.0, 2.0))
    found = ncl.Stream(ncl.OnlinePosterior(linear, ncl.LaplaceNCL(lr=0.05, fisher="exact")), fisher_every=every)
    total, weights, place = torch.zeros(4, 4, dtype=torch.float64), 0.0, 0
    for i in range(33):
        x = torch.randn(16, 3, generator=g)
        found.observe(x, x.sum(-1, keepdim=True) + 0.5 * torch.randn(16, 1, generator=g))
        # Of a short segment, too, more than the first.
        if i % every == 0 or i in (1, 2):
            place += 1
            z = nn.functional.pad(x.double(), (0, 1), value=1.0)
            total += place**3 * z.mT @ z / 16
            weights += place**3
    assert found._segment is not None
    assert found._segment._fisher is not None
    (factors,) = found._segment._fisher.factors().values()
    torch.testing.assert_close(factors.input, total / weights, rtol=1e-5, atol=1e-6)


def test_memory_does_not_grow(tmp_path: Path) -> None:
    found = stream("categorical", false_alarm_every=100.0, longest=400, segment_size=400)
    sizes = []
    for k in range(4):
        observed(found, draws("categorical", k % 2, 600, size=4))
        sizes.append(len(content(found, tmp_path / "stream")))
        assert found.held < 8
        assert len(found.events) <= 1000
        assert len(found.judged) <= 2000
    assert sizes[3] <= sizes[2] * 1.1 + 20_000


@pytest.mark.parametrize("engine", [ncl.LaplaceNCL(), ncl.VariationalNCL()], ids=lambda e: type(e).__name__)
def test_the_memory_of_an_open_segment_does_not_grow(engine: Any) -> None:
    """Beyond `segment_size` examples even the losses are no longer kept."""
    found, sizes = stream("poisson", engine, segment_size=800), []
    for _ in range(3):
        observed(found, draws("poisson", 0, 100))
        assert found._segment is not None
        segment = found._segment
        held = [*segment.tensors().values(), *segment._spare.values(), *(segment._idle or {}).values()]
        sizes.append(sum(tensor.numel() * tensor.element_size() for tensor in held))
    assert len(found.events) == 1
    assert sizes[2] == sizes[1]


def learn_and_save(engine: Any, path: Path, kill_at: int) -> None:
    """Observe from where the file is, saving as it goes; the process kills itself at a call of the network."""
    torch.set_num_threads(1)
    batches = draws("categorical", 0, 45) + draws("categorical", 1, 25)
    if path.exists():
        found = ncl.Stream.load(path, model("categorical"))
    else:
        found = stream("categorical", engine, segment_size=500, false_alarm_every=200.0)
    left = kill_at

    def kill(*_: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    found.posterior.model.network.register_forward_pre_hook(kill)
    for batch in batches[found.batches :]:
        found.observe(*batch)
        if found.batches % 3 == 0 or found.batches == len(batches):
            found.save(path)


@pytest.mark.parametrize("engine", [ncl.LaplaceNCL(), ncl.VariationalNCL()], ids=lambda e: type(e).__name__)
def test_a_process_that_is_killed_goes_on_and_ends_the_same(engine: Any, tmp_path: Path) -> None:
    assert run_apart(learn_and_save, engine, tmp_path / "whole", 0) == 0
    for kill_at in (61, 47, 30):
        assert run_apart(learn_and_save, engine, tmp_path / "parts", kill_at) == -signal.SIGKILL
    assert run_apart(learn_and_save, engine, tmp_path / "parts", 0) == 0
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "parts").read_bytes()
    found = ncl.Stream.load(tmp_path / "whole", model("categorical"))
    assert changes(found)


def test_a_window_of_one_holds_nothing_back() -> None:
    found = stream("categorical", window=1)
    for batch in draws("categorical", 0, 120) + draws("categorical", 1, 40):
        found.observe(*batch)
        assert found.held == 0
    (change,) = changes(found)
    assert change.first == change.batch
    assert 121 <= change.first <= 126


def test_what_is_held_is_a_copy() -> None:
    one, other = stream("categorical"), stream("categorical")
    x, y = torch.empty(16, 5), torch.empty(16, dtype=torch.int64)
    for batch in draws("categorical", 0, 100) + draws("categorical", 1, 20):
        one.observe(*batch)
        x.copy_(batch[0])
        y.copy_(batch[1])
        other.observe(x, y)
    assert changes(one)
    for site, value in one.present().mean().items():
        assert torch.equal(value, other.present().mean()[site])


class Root(nn.Module):
    """Has no derivative at zero."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs().sqrt()


def rooted(count: int) -> tuple[ncl.Stream, Batch]:
    """A stream after so many batches, and a batch that it can score, low, but not learn: its gradient is NaN."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 12, bias=False), Root(), nn.Linear(12, 2))
    network = ncl.BayesianNetwork(net, ncl.Normal(0.3), prior=dist.Normal(0.0, 1.0))
    found = ncl.Stream(ncl.OnlinePosterior(network, ncl.LaplaceNCL(lr=0.01)), segment_size=100)
    return observed(found, draws("normal", 0, count)), (torch.zeros(16, 5), torch.full((16, 2), 9.0))


@pytest.mark.parametrize("what", ["the suspicion passes", "a change is told", "the end is asked for"])
def test_a_batch_that_is_held_and_cannot_be_learnt_is_left_out(what: str) -> None:
    found, faulty = rooted(40)
    found.observe(*faulty)
    assert found.held == 1
    follow = {"the suspicion passes": draws("normal", 0, 50)[40:], "a change is told": [faulty] * 3}.get(what, [])

    held, before = 1, found.present().mean()

    def go_on() -> None:
        nonlocal held
        held = found.held
        if follow:
            found.observe(*follow[0])
            follow.pop(0)
        else:
            found.consolidate()

    def until_refused() -> None:
        while True:
            go_on()

    with pytest.raises(DataError, match=r"Batch 1 of the \d that are held cannot be learnt, .* call this again"):
        until_refused()
    assert found.held == held - 1
    assert all(torch.equal(value, found.present().mean()[site]) for site, value in before.items())
    if what == "a change is told":
        # Each of those that are held is left out in its turn, and the last one is refused.
        with pytest.raises(DataError, match="Batch 1 of the 1"):
            go_on()
        with pytest.raises(NonFiniteError):
            go_on()
        follow.clear()
    go_on()
    assert found.held == 0


def test_a_segment_ends_where_it_is_asked_to_and_where_it_is_long() -> None:
    found = observed(stream("categorical", longest=160), draws("categorical", 0, 25))
    found.consolidate()
    assert found.consolidate() == ()
    ends = [event for event in found.events if isinstance(event, Consolidated)]
    expected = [(10, 10, 160, Reason.LENGTH), (20, 10, 160, Reason.LENGTH), (25, 5, 80, Reason.ASKED)]
    assert [(e.batch, e.batches, e.examples, e.reason) for e in ends] == expected
    assert found.posterior.tasks == ("segment 1", "segment 2", "segment 3")


def test_to_look_changes_nothing(tmp_path: Path) -> None:
    found = stream("categorical")
    with pytest.raises(ncl.errors.ModelError, match="nothing to predict from"):
        found.predict(torch.randn(2, 5))
    observed(found, draws("categorical", 0, 40))
    before = content(found, tmp_path / "a")
    x = draws("categorical", 0, 1)[0][0]
    torch.testing.assert_close(found.predict(x).probs, found.present().predict(x).probs)
    found.predict(x, num_samples=5)
    assert found.predict(x).probs.requires_grad is False
    assert content(found, tmp_path / "b") == before
    assert found.posterior.tasks == ()


def test_what_a_segment_leaves_is_what_a_task_would() -> None:
    """Of a linear Gaussian model the Fisher is the same at all weights: the exact posterior's precision."""
    g = torch.Generator().manual_seed(0)
    linear = ncl.BayesianNetwork(nn.Linear(3, 1), ncl.Normal(0.5), prior=dist.Normal(0.0, 2.0))
    engine = ncl.LaplaceNCL(lr=0.05, fisher="exact", likelihood_weight=1.0, kronecker_sum="kl")
    found = ncl.Stream(ncl.OnlinePosterior(linear, engine), segment_size=3200, fisher_every=1)
    z = []
    for _ in range(200):
        x = torch.randn(16, 3, generator=g)
        found.observe(x, x.sum(-1, keepdim=True) + 0.5 * torch.randn(16, 1, generator=g))
        z.append(nn.functional.pad(x.double(), (0, 1), value=1.0))
    found.consolidate()
    (state,) = found.posterior.blocks.values()
    rows = torch.cat(z)
    expected = torch.eye(4, dtype=torch.float64) / 4 + rows.T @ rows / 0.25
    precision = torch.kron(state.precision.input, state.precision.output)
    torch.testing.assert_close(precision, expected, rtol=0.1, atol=0.05 * float(expected.max()))
    torch.testing.assert_close(state.loc.flatten(), torch.tensor([1.0, 1.0, 1.0, 0.0]), rtol=0.0, atol=0.08)


def test_mappings_are_batches_too(tmp_path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 2)

        def forward(self, features: Tensor) -> Tensor:
            return self.layer(features)

    def new() -> ncl.BayesianNetwork:
        torch.manual_seed(0)
        return ncl.BayesianNetwork(Named(), ncl.Categorical(), prior=dist.Normal(0.0, 1.0))

    found = ncl.Stream(ncl.OnlinePosterior(new(), ncl.LaplaceNCL()), false_alarm_every=100.0, segment_size=2000)
    for x, y in draws("categorical", 0, 60) + draws("categorical", 1, 30):
        found.observe({"features": x}, y)
        if found.held:
            found.save(tmp_path / "held")
            found = ncl.Stream.load(tmp_path / "held", new())
    assert changes(found)


def test_settings_and_posteriors_that_cannot_be_are_refused() -> None:
    posterior = ncl.OnlinePosterior(model("categorical"), ncl.LaplaceNCL())
    for name, value in (("window", 0), ("segment_size", 0.5), ("false_alarm_every", 3), ("longest", 0)):
        with pytest.raises(SettingError, match=name):
            ncl.Stream(posterior, **{name: value})
    with pytest.raises(SettingError, match="settings of a stream are segment_size"):
        ncl.Stream(posterior, speed=3)
    with pytest.raises(SettingError, match="needs an OnlinePosterior"):
        ncl.Stream("posterior")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=r"OWM learns whole tasks only. Of a stream can learn: .*LaplaceNCL"):
        ncl.Stream(ncl.OnlinePosterior(model("categorical"), OWM()))
    with pytest.raises(SettingError, match="schedule"):
        ncl.Stream(ncl.OnlinePosterior(model("categorical"), ncl.LaplaceNCL(schedule=lambda done: 1.0)))
    with pytest.raises(SettingError, match="ReplayLearner"):
        ncl.Stream(ReplayLearner(model("categorical"), PlainTraining()))


def test_a_posterior_that_learns_elsewhere_is_noticed() -> None:
    found = observed(stream("categorical"), draws("categorical", 0, 3))
    x, y = draws("categorical", 0, 1)[0]
    found.posterior.update(ncl.Task((x, y), name="other"), engine=replace(ncl.LaplaceNCL(), steps=2), progress=False)
    with pytest.raises(SettingError, match="make a new stream"):
        found.observe(x, y)
