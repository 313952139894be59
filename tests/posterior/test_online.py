"""The rules of the object: transactions, explicit state, seeds, heads, files, and what Pyro does with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro.infer import Predictive, Trace_ELBO
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import nclbayes as ncl
from nclbayes.data.mixture import TaskMixture
from nclbayes.errors import (
    DataError,
    FileError,
    ModelError,
    NonFiniteError,
    SettingError,
    UnsupportedUseError,
    ValuesError,
)
from nclbayes.methods import EWC, KFAC, LaplaceOWM, PlainTraining, ReplayLearner
from tests.engines.test_laplace import classification_task, classifier, conjugate, regression_task
from tests.storage.small import rewrite
from tests.zoo import gains, inputs, labels, normal, rnn

LAPLACE = ncl.LaplaceNCL(steps=30, batch_size=20)
VARIATIONAL = ncl.VariationalNCL(steps=30, batch_size=20, refresh_every=10)


def learnt(engine: ncl.LaplaceNCL | ncl.VariationalNCL = LAPLACE, tasks: int = 1) -> ncl.OnlinePosterior:
    posterior = ncl.OnlinePosterior(classifier(), engine)
    for k in range(tasks):
        posterior.update(classification_task(k + 1))
    return posterior


def snapshot(posterior: ncl.OnlinePosterior) -> dict[str, tuple[Tensor, ...]]:
    parts = ("input", "output", "input_root", "output_root")
    return {
        name: (s.loc.clone(), *(getattr(s.precision, p).clone() for p in parts)) for name, s in posterior.blocks.items()
    }


def same(first: dict[str, tuple[Tensor, ...]], second: dict[str, tuple[Tensor, ...]]) -> bool:
    return list(first) == list(second) and all(
        torch.equal(a, b) for name in first for a, b in zip(first[name], second[name], strict=True)
    )


@pytest.mark.parametrize("engine", [LAPLACE, VARIATIONAL], ids=["laplace", "variational"])
def test_the_same_seed_gives_the_same_posterior_and_the_global_state_is_untouched(engine: object) -> None:
    state = torch.get_rng_state()
    model = classifier()
    torch.set_rng_state(state)
    found = []
    for _ in range(2):
        posterior = ncl.OnlinePosterior(model, engine, generator=torch.Generator().manual_seed(4))  # type: ignore[arg-type]
        posterior.update(classification_task())
        found.append(snapshot(posterior))
    assert same(*found)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("order", [(LAPLACE, VARIATIONAL), (VARIATIONAL, LAPLACE)], ids=["lv", "vl"])
def test_engines_may_be_switched_between_tasks(order: tuple[ncl.LaplaceNCL, ncl.VariationalNCL]) -> None:
    posterior = ncl.OnlinePosterior(classifier(), order[0])
    posterior.update(classification_task(1))
    before = {name: state.logdet for name, state in posterior.blocks.items()}
    report = posterior.update(classification_task(2), engine=order[1])
    assert report.engine == type(order[1]).__name__
    assert posterior.tasks == ("classes 1", "classes 2")
    assert all(posterior.blocks[name].logdet > before[name] for name in before)


def test_an_example_shows_the_prior_before_any_task() -> None:
    task = classification_task()
    posterior = ncl.OnlinePosterior(classifier(), LAPLACE, example=task)
    assert posterior.tasks == ()
    assert {name: tuple(s.loc.shape) for name, s in posterior.blocks.items()} == {"0": (8, 6), "2": (3, 9)}
    g = torch.Generator().manual_seed(7)
    draws = posterior.sample(4000, generator=g)["0.weight"]
    assert float(draws.std()) == pytest.approx(1.0, rel=0.02)
    assert posterior.predict(task.train[0][:4], num_samples=3, generator=g).probs.shape == (4, 3)
    posterior.update(task)
    plain = ncl.OnlinePosterior(classifier(), LAPLACE)
    plain.update(task)
    assert same(snapshot(posterior), snapshot(plain))


def test_a_noisy_network_predicts_without_touching_the_global_state() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.randn(len(x), 1)

    model = ncl.BayesianNetwork(Noisy(3, 1), ncl.Normal(0.5), prior=dist.Normal(0.0, 1.0))
    posterior = ncl.OnlinePosterior(model, LAPLACE)
    x = inputs(40, 3)
    posterior.update(ncl.Task((x, x.sum(-1, keepdim=True)), name="sum"))
    state, own = torch.get_rng_state(), posterior.generator.get_state()
    first, second = (posterior.predict(x).mean for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(posterior.generator.get_state(), own)
    other = posterior.predict(x, generator=torch.Generator().manual_seed(5)).mean
    assert not torch.equal(first, other)
    posterior.predict(x, num_samples=3)
    assert torch.equal(torch.get_rng_state(), state)


def multi_head() -> ncl.BayesianNetwork:
    torch.manual_seed(0)
    net = ncl.MultiHead(nn.Sequential(nn.Linear(5, 6), nn.ReLU()), [nn.Linear(6, 3) for _ in range(3)])
    return ncl.BayesianNetwork(net, ncl.Categorical(), prior=dist.Normal(0.0, 1.0))


@pytest.mark.parametrize("engine", [LAPLACE, VARIATIONAL], ids=["laplace", "variational"])
def test_heads_join_with_their_prior_and_keep_their_posterior(engine: object) -> None:
    model = multi_head()
    posterior = ncl.OnlinePosterior(model, engine)  # type: ignore[arg-type]
    tasks = [ncl.Task(classification_task(k).train, name=f"t{k}", context={"head": k}) for k in range(3)]
    posterior.update(tasks[0])
    assert list(posterior.blocks) == ["body.0", "heads.0"]
    first = snapshot(posterior)
    posterior.update(tasks[1])
    assert list(posterior.blocks) == ["body.0", "heads.0", "heads.1"]
    second = snapshot(posterior)
    assert all(torch.equal(a, b) for a, b in zip(first["heads.0"], second["heads.0"], strict=True))
    assert not torch.equal(first["body.0"][0], second["body.0"][0])
    assert posterior.predict(inputs(4, 5), head=1).probs.shape == (4, 3)
    with pytest.raises(DataError, match="no head 7"):
        posterior.predict(inputs(4, 5), head=7)


def test_two_posteriors_do_not_meet_and_the_param_store_stays_empty() -> None:
    pyro.clear_param_store()
    model = classifier()
    first, second = ncl.OnlinePosterior(model, LAPLACE), ncl.OnlinePosterior(model, LAPLACE)
    first.update(classification_task(1))
    before = snapshot(first)
    second.update(classification_task(2))
    assert same(before, snapshot(first))
    assert len(pyro.get_param_store()) == 0
    assert all(torch.equal(p, classifier().initial_values()[n]) for n, p in model.network.named_parameters())


@pytest.mark.parametrize("engine", [LAPLACE, VARIATIONAL], ids=["laplace", "variational"])
def test_any_pyro_model_works(engine: object) -> None:
    for case in (gains(), rnn()):
        posterior = ncl.OnlinePosterior(case.model, engine)  # type: ignore[arg-type]
        report = posterior.update(ncl.Task(case.batch, name="zoo"))
        assert report.steps == 30
        assert set(posterior.mean()) == set(case.values)
    assert "diagonal" in repr(learnt_gains())


def learnt_gains() -> ncl.OnlinePosterior:
    case = gains()
    posterior = ncl.OnlinePosterior(case.model, LAPLACE)
    posterior.update(ncl.Task(case.batch, name="gains"))
    return posterior


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_an_update_that_fails_midway_changes_nothing(error: type[BaseException]) -> None:
    posterior = learnt()
    before, tasks = snapshot(posterior), posterior.tasks

    def fail(progress: ncl.engines.Progress) -> None:
        if progress.step == 7:
            raise error

    with pytest.raises(error):
        posterior.update(classification_task(2), callbacks=[fail])
    assert same(before, snapshot(posterior))
    assert posterior.tasks == tasks


def test_a_weight_that_cannot_be_seen_is_refused_before_the_first_step() -> None:
    def model(x: Tensor, y: Tensor | None = None) -> None:
        w = pyro.sample("w", normal((5, 3)))
        pyro.sample("y", dist.Categorical(logits=torch.vmap(lambda row: row @ w)(x)), obs=y)

    steps: list[int] = []
    posterior = ncl.OnlinePosterior(model, LAPLACE, initial={"w": torch.ones(5, 3)})
    with pytest.raises(UnsupportedUseError, match="'w'"):
        posterior.update(classification_task(), callbacks=[lambda p: steps.append(p.step)])
    assert not steps


# Densities, draws and predictions


def test_log_prob_and_entropy_are_those_of_the_blocks() -> None:
    posterior = learnt()
    draws = posterior.sample(3)
    expected = sum(
        torch.distributions.MultivariateNormal(
            s.loc.double().mT.reshape(-1), precision_matrix=torch.kron(s.precision.input, s.precision.output)
        ).log_prob(s.block.pack(draws).double().mT.reshape(3, -1))
        for s in posterior.blocks.values()
    )
    torch.testing.assert_close(posterior.log_prob(draws).double(), expected, rtol=1e-4, atol=1e-3)
    many = posterior.sample(4000)
    assert posterior.entropy() == pytest.approx(-float(posterior.log_prob(many).mean()), rel=0.02, abs=1.0)
    with pytest.raises(ValuesError, match="no sites 'bogus'"):
        posterior.log_prob({**draws, "bogus": torch.zeros(3)})


def test_the_divergence_of_two_posteriors() -> None:
    first, second = learnt(), learnt(tasks=2)
    assert first.kl(first) == pytest.approx(0.0, abs=1e-3)
    draws = first.sample(20_000)
    estimate = float((first.log_prob(draws) - second.log_prob(draws)).mean())
    assert first.kl(second) == pytest.approx(estimate, rel=0.05)
    with pytest.raises(ModelError, match="same blocks"):
        first.kl(ncl.OnlinePosterior(classifier(), LAPLACE))


@pytest.mark.parametrize("engine", [LAPLACE, VARIATIONAL], ids=["laplace", "variational"])
def test_no_tensor_is_made_without_a_device(engine: object, tmp_path: Path) -> None:
    task = classification_task()

    def flow() -> ncl.OnlinePosterior:
        posterior = ncl.OnlinePosterior(model, engine, generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]
        posterior.update(task)
        posterior.update(ncl.Task(task.train, name="again"), checkpoint=tmp_path / "c", checkpoint_every=7)
        posterior.predict(task.train[0], num_samples=4)
        posterior.predict(task.train[0])
        posterior.log_prob(posterior.sample(2))
        posterior.save(tmp_path / "p")
        return ncl.OnlinePosterior.load(tmp_path / "p", model)

    model = classifier()
    expected = snapshot(flow())
    torch.set_default_device("meta")
    try:
        found = flow()
    finally:
        torch.set_default_device(None)
    assert same(expected, snapshot(found))


def test_the_plug_in_prediction_is_the_network_at_the_mean() -> None:
    posterior, x = learnt(), inputs(6, 5)
    w = posterior.mean()
    logits = F.linear(torch.tanh(F.linear(x, w["0.weight"], w["0.bias"])), w["2.weight"], w["2.bias"])
    torch.testing.assert_close(posterior.predict(x).probs, F.softmax(logits, -1))


def drawn_in_chunks(posterior: ncl.OnlinePosterior, count: int, seed: int) -> dict[str, Tensor]:
    """The samples that a prediction draws: eight at a time."""
    g = torch.Generator().manual_seed(seed)
    torch.randint(2**63 - 1, (), generator=g)  # seeds the network's own noise
    chunks = [posterior.sample(min(8, count - i), generator=g) for i in range(0, count, 8)]
    return {site: torch.cat([chunk[site] for chunk in chunks]) for site in chunks[0]}


def test_the_monte_carlo_prediction_averages_the_networks() -> None:
    posterior, x = learnt(), inputs(6, 5)
    found = posterior.predict(x, num_samples=20, generator=torch.Generator().manual_seed(1))
    draws = drawn_in_chunks(posterior, 20, seed=1)
    probs = [
        F.softmax(
            F.linear(torch.tanh(F.linear(x, draws["0.weight"][i], draws["0.bias"][i])), draws["2.weight"][i])
            + draws["2.bias"][i],
            -1,
        )
        for i in range(20)
    ]
    torch.testing.assert_close(found.probs, torch.stack(probs).mean(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "likelihood", [ncl.Normal(0.3), ncl.Poisson(), ncl.Bernoulli()], ids=["normal", "poisson", "bern"]
)
def test_other_likelihoods_learn_and_predict_as_mixtures(likelihood: object) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    model = ncl.BayesianNetwork(net, likelihood, prior=dist.Normal(0.0, 0.5))  # type: ignore[arg-type]
    x = inputs(50, 5)
    y = labels(2, 50, 2).float()
    posterior = ncl.OnlinePosterior(model, LAPLACE)
    posterior.update(ncl.Task((x, y), name="y"))
    mixture = posterior.predict(x[:7], num_samples=40, generator=torch.Generator().manual_seed(1))
    draws = drawn_in_chunks(posterior, 40, seed=1)
    outs = [
        F.linear(torch.tanh(F.linear(x[:7], draws["0.weight"][i], draws["0.bias"][i])), draws["2.weight"][i])
        + draws["2.bias"][i]
        for i in range(40)
    ]
    terms = torch.stack([likelihood.distribution(o).log_prob(y[:7]).sum(-1) for o in outs])  # type: ignore[attr-defined]
    expected = torch.logsumexp(terms, 0) - torch.tensor(40.0).log()
    torch.testing.assert_close(mixture.log_prob(y[:7]), expected, rtol=1e-4, atol=1e-4)


def test_the_linearised_prediction_is_exact_for_a_linear_model() -> None:
    task = regression_task(0)
    model = ncl.BayesianNetwork(nn.Linear(3, 1), ncl.Normal(0.5), prior=dist.Normal(0.0, 2.0))
    posterior = ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=1500, batch_size=40, lr=0.1, fisher="exact"))
    posterior.update(task)
    mean, precision = conjugate([task], 0.5, 2.0)
    z = F.pad(inputs(5, 3).double(), (0, 1), value=1.0)
    found = posterior.predict(inputs(5, 3), method="linearized")
    variance = (z @ torch.linalg.inv(precision) * z).sum(-1) + 0.25
    torch.testing.assert_close(found.mean.double().squeeze(-1), (z @ mean).squeeze(-1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.variance.double().squeeze(-1), variance, rtol=1e-4, atol=1e-4)


def test_the_linearised_prediction_of_linear_logits_is_the_monte_carlo_one() -> None:
    torch.manual_seed(0)
    model = ncl.BayesianNetwork(nn.Linear(5, 3), ncl.Categorical(), prior=dist.Normal(0.0, 1.0))
    posterior = ncl.OnlinePosterior(model, LAPLACE)
    posterior.update(classification_task())
    x = 3 * inputs(6, 5)
    linearised = posterior.predict(x, method="linearized", num_samples=20_000)
    sampled = posterior.predict(x, num_samples=20_000)
    torch.testing.assert_close(linearised.probs, sampled.probs, rtol=0, atol=0.01)


def test_the_linearised_prediction_of_a_network_uses_its_jacobian() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    model = ncl.BayesianNetwork(net, ncl.Normal(0.3), prior=dist.Normal(0.0, 0.5))
    posterior = ncl.OnlinePosterior(model, LAPLACE)
    x = inputs(50, 5)
    posterior.update(ncl.Task((x, inputs(50, 2)), name="y"))
    found = posterior.predict(x[:3], method="linearized")
    for i in range(3):
        expected = 0.09 * torch.eye(2).double()
        for state in posterior.blocks.values():
            rows = []
            for k in range(2):
                leaves = {s: v.double().requires_grad_() for s, v in posterior.mean().items()}
                hidden = torch.tanh(F.linear(x[i].double(), leaves["0.weight"], leaves["0.bias"]))
                out = F.linear(hidden, leaves["2.weight"], leaves["2.bias"])[k]
                grads = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values())), strict=True))
                rows.append(state.block.pack(grads).mT.reshape(-1))
            J = torch.stack(rows)
            expected = expected + J @ torch.linalg.solve(torch.kron(state.precision.input, state.precision.output), J.T)
        torch.testing.assert_close(found.covariance_matrix[i].double(), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(SettingError, match="'linearized'"):
        posterior.predict(x, method="best")
    with pytest.raises(SettingError, match="num_samples must be a whole number of at least 1, not 0"):
        posterior.predict(x, num_samples=0)


def test_predicting_before_learning_is_an_error() -> None:
    with pytest.raises(ModelError, match="call update"):
        ncl.OnlinePosterior(classifier(), LAPLACE).predict(inputs(2, 5))


def test_pyros_predictive_and_elbo_run_on_the_guide() -> None:
    posterior = learnt()
    x, y = classification_task().train
    draws = Predictive(posterior.model, guide=posterior.guide, num_samples=5)(x)
    assert draws["y"].shape == (5, 60)
    loss = Trace_ELBO(num_particles=20).loss(posterior.model, posterior.guide, x, y)
    prior = learnt_prior_kl(posterior)
    fit = -float(posterior.predict(x).log_prob(y).sum())
    assert fit < loss < fit + prior + 100
    assert len(pyro.get_param_store()) == 0


def learnt_prior_kl(posterior: ncl.OnlinePosterior) -> float:
    total = 0.0
    for state in posterior.blocks.values():
        prior = dist.Normal(torch.zeros(state.loc.shape), 1.0).to_event(2)
        total += float(torch.distributions.kl_divergence(state.distribution, prior))
    return total


def test_the_repr_tells_blocks_tasks_and_approximations() -> None:
    text = repr(learnt_gains())
    assert "LaplaceNCL" in text
    assert "tasks seen: gains" in text
    assert "gain: 4, diagonal (used by torch.Tensor.mul)" in text
    assert "w: 4 x 5, Kronecker" in text


# Files


@pytest.mark.parametrize("engine", [LAPLACE, VARIATIONAL], ids=["laplace", "variational"])
def test_save_and_load_give_the_same_posterior_back(tmp_path: Path, engine: object) -> None:
    posterior = learnt(engine, tasks=2)  # type: ignore[arg-type]
    posterior.save(tmp_path / "p")
    back = ncl.OnlinePosterior.load(tmp_path / "p", classifier())
    assert same(snapshot(posterior), snapshot(back))
    assert back.engine == posterior.engine
    assert back.tasks == posterior.tasks
    assert back.log_evidence == posterior.log_evidence
    posterior.update(classification_task(5))
    back.update(classification_task(5))
    assert same(snapshot(posterior), snapshot(back))


def test_diagonal_blocks_are_saved_too(tmp_path: Path) -> None:
    posterior = learnt_gains()
    posterior.save(tmp_path / "p")
    back = ncl.OnlinePosterior.load(tmp_path / "p", gains().model)
    assert all(torch.equal(posterior.mean()[k], v) for k, v in back.mean().items())
    assert torch.equal(posterior.blocks["gain"].precision, back.blocks["gain"].precision)


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p"
    learnt().save(path)
    good = path.read_bytes()
    model = classifier()
    for cut in (0, 7, 200, len(good) - 1):
        path.write_bytes(good[:cut])
        with pytest.raises(FileError, match=r"truncated|no file"):
            ncl.OnlinePosterior.load(path, model)
    for at in (3, 60, 300, len(good) // 2, len(good) - 5):
        flipped = bytearray(good)
        flipped[at] ^= 0x10
        path.write_bytes(bytes(flipped))
        with pytest.raises(FileError, match=r"damaged|truncated|not write"):
            ncl.OnlinePosterior.load(path, model)
    path.write_bytes(b"PK\x03\x04 something else entirely")
    with pytest.raises(FileError, match="not a file of nclbayes"):
        ncl.OnlinePosterior.load(path, model)
    with pytest.raises(FileError, match="no file"):
        ncl.OnlinePosterior.load(tmp_path / "nowhere", model)


def test_a_newer_format_and_another_model_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p"
    posterior = learnt()
    posterior.save(path)
    other = ncl.BayesianNetwork(
        nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)), ncl.Categorical(), normal(())
    )
    with pytest.raises(
        FileError, match=r"another model: its site '0\.weight' is \(8, 5\), torch\.float32; that of the model \(9, 5\)"
    ):
        ncl.OnlinePosterior.load(path, other)
    monkeypatch.setattr("nclbayes.storage.sealed.FORMAT_VERSION", 4)
    posterior.save(path)
    monkeypatch.undo()
    with pytest.raises(FileError, match="has format 4"):
        ncl.OnlinePosterior.load(path, classifier())


def test_a_wrong_engine_is_refused() -> None:
    with pytest.raises(SettingError, match="LaplaceNCL"):
        ncl.OnlinePosterior(classifier(), "laplace")  # type: ignore[arg-type]


def dropout_model() -> ncl.BayesianNetwork:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, 3))
    return ncl.BayesianNetwork(net, ncl.Categorical(), prior=dist.Normal(0.0, 1.0))


@pytest.mark.parametrize("engine", [ncl.LaplaceNCL, ncl.VariationalNCL, PlainTraining])
def test_a_networks_own_noise_is_decided_by_the_generator(engine: type[ncl.LaplaceNCL], tmp_path: Path) -> None:
    def stop(progress: Any) -> None:
        if progress.step == 5:
            raise KeyboardInterrupt

    task = classification_task()
    ends = []
    for seed in (1, 2):
        posterior = ncl.OnlinePosterior(dropout_model(), engine(steps=8, batch_size=20))
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        if seed == 2:
            with pytest.raises(KeyboardInterrupt):
                posterior.update(task, checkpoint=tmp_path / "c", checkpoint_every=3, callbacks=[stop])
            posterior.update(task, checkpoint=tmp_path / "c", checkpoint_every=3)
        else:
            posterior.update(task)
        assert torch.equal(torch.get_rng_state(), state)
        ends.append(posterior.mean())
    for site, value in ends[0].items():
        assert torch.equal(value, ends[1][site]), site


def test_a_network_and_its_loader_draw_other_numbers() -> None:
    of_network: list[float] = []
    of_loader: list[float] = []

    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            of_network.extend(torch.rand(8, dtype=torch.float64).tolist())
            return super().forward(x)

    class Augmented(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            of_loader.append(float(torch.rand((), dtype=torch.float64)))
            return super().__getitem__(index)

    model = ncl.BayesianNetwork(Noisy(5, 3), ncl.Categorical(), prior=dist.Normal(0.0, 1.0))
    task = ncl.Task(DataLoader(Augmented(*classification_task().train), batch_size=8), name="noisy")
    ncl.OnlinePosterior(model, PlainTraining(steps=3)).update(task)
    # Those of the steps: what was looked at before is of a stream of its own.
    assert not set(of_network[-24:]) & set(of_loader[-24:])


def test_a_failed_update_leaves_the_generator_as_it_was() -> None:
    def fail(progress: Any) -> None:
        raise KeyboardInterrupt

    first, second = (ncl.OnlinePosterior(classifier(), ncl.LaplaceNCL(steps=3, batch_size=20)) for _ in range(2))
    with pytest.raises(KeyboardInterrupt):
        first.update(classification_task(), callbacks=[fail])
    for posterior in (first, second):
        posterior.update(classification_task())
    for site, value in first.mean().items():
        assert torch.equal(value, second.mean()[site])


def test_what_is_handed_out_is_a_copy() -> None:
    seen: list[Tensor] = []
    posterior = ncl.OnlinePosterior(classifier(), LAPLACE)
    posterior.update(classification_task(), callbacks=[lambda p: seen.append(p.values()["0.weight"])])
    assert not torch.equal(seen[0], seen[-1])
    posterior.mean()["0.weight"].zero_()
    assert bool(posterior.mean()["0.weight"].any())


@pytest.mark.parametrize("engine", [ncl.LaplaceNCL, ncl.VariationalNCL, PlainTraining, EWC, KFAC])
def test_weights_that_end_infinite_are_not_taken(engine: type[ncl.LaplaceNCL]) -> None:
    model = ncl.BayesianNetwork(nn.Linear(5, 3), ncl.Categorical(), prior=dist.Normal(0.0, 1.0))
    posterior = ncl.OnlinePosterior(model, engine(steps=5, lr=1e-3))
    posterior.update(classification_task())
    before = posterior.mean()
    x, y = classification_task(2).train
    with pytest.raises(NonFiniteError, match=r"became NaN or infinite with the last step of task 'large'"):
        posterior.update(ncl.Task((1e4 * x, y), name="large"), engine=engine(steps=1, lr=3e38, schedule=None))
    assert all(torch.equal(value, before[site]) for site, value in posterior.mean().items())


def test_a_schedule_that_a_file_cannot_hold_is_missed(tmp_path: Path) -> None:
    posterior = ncl.OnlinePosterior(classifier(), ncl.LaplaceNCL(steps=5, schedule=lambda done: 1 - done))
    posterior.update(classification_task())
    posterior.save(tmp_path / "p")
    with pytest.warns(UserWarning, match="had a schedule") as warned:
        ncl.OnlinePosterior.load(tmp_path / "p", classifier())
    # Said of the line that called.
    assert [warning.filename for warning in warned] == [__file__]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device would be here")
def test_so_is_a_generator_of_a_device_that_is_not_here(tmp_path: Path) -> None:
    learnt().save(tmp_path / "p")
    rewrite(tmp_path / "p", "posterior", lambda tensors, settings: settings.update(generator="cuda"))
    with pytest.warns(UserWarning, match=r"of a device that is not here \(cuda\)") as warned:
        loaded = ncl.OnlinePosterior.load(tmp_path / "p", classifier())
    assert [warning.filename for warning in warned] == [__file__]
    assert loaded.generator.initial_seed() == 0


def test_labels_out_of_range_are_found_wherever_they_are() -> None:
    x, y = classification_task().train
    y = y.clone()
    y[37] = 3
    with pytest.raises(DataError, match=r"range from 0 to 3.*3 outputs"):
        ncl.OnlinePosterior(classifier(), LAPLACE).update(ncl.Task((x, y), name="t"))


def test_parts_of_a_mixture_must_agree_on_a_weight() -> None:
    def model(x: Tensor, y: Tensor, gain: bool = False) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(1, 5), 1.0).to_event(2))
        pyro.sample("y", dist.Normal(F.linear(x, w * 2 if gain else w), 1.0).to_event(1), obs=y)

    data = inputs(20, 5), inputs(20, 1)
    parts = [ncl.Task(data, name=str(gain), context={"gain": gain}) for gain in (False, True)]
    with pytest.raises(ModelError, match="'w'"):
        ncl.OnlinePosterior(model, LAPLACE).update(TaskMixture(parts, name="both"))


def test_every_part_of_a_mixture_can_be_predicted() -> None:
    def model(x: Tensor, y: Tensor | None = None, *, site: str) -> None:
        w = pyro.sample(f"w_{site}", normal((1, 3)))
        pyro.sample(site, dist.Normal(F.linear(x, w), 0.5).to_event(1), obs=y)

    x = inputs(20, 3)
    parts = [ncl.Task((x, x[:, :1]), name=site, context={"site": site}) for site in ("a", "b")]
    posterior = ncl.OnlinePosterior(model, LAPLACE)
    posterior.update(TaskMixture(parts, name="both"))
    for site in ("a", "b"):
        assert posterior.predict(x, site=site).mean.shape == (20, 1)


def test_a_line_with_an_intercept_is_a_block() -> None:
    """Weights [n] and a bias of no dimensions: one output."""

    def model(x: Tensor, y: Tensor | None = None) -> None:
        w, b = pyro.sample("w", normal((3,))), pyro.sample("b", dist.Normal(torch.zeros(()), 1.0))
        pyro.sample("y", dist.Normal(x @ w + b, 0.5), obs=y)

    x = inputs(40, 3)
    y = x @ torch.tensor([1.0, -1.0, 0.5]) + 2
    posterior = ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=2000, batch_size=40, lr=0.05, fisher="exact"))
    posterior.update(ncl.Task((x, y), name="line"))
    z = torch.cat([x, torch.ones(40, 1)], -1)
    exact = torch.linalg.solve(z.T @ z / 0.25 + torch.eye(4), z.T @ y / 0.25)
    mean = posterior.mean()
    torch.testing.assert_close(torch.cat([mean["w"], mean["b"].reshape(1)]), exact, rtol=1e-4, atol=1e-4)
    assert posterior.sample(2)["b"].shape == (2,)


@pytest.mark.parametrize("engine", [LAPLACE, VARIATIONAL, KFAC(steps=30, batch_size=20)], ids=["l", "v", "kfac"])
def test_a_model_of_plain_products_goes_on_bit_for_bit_after_a_file(engine: Any, tmp_path: Path) -> None:
    """Its weights are transposed matrices, and must lie in memory as they do when read from a file."""

    def model(x: Tensor, y: Tensor | None = None) -> None:
        h = torch.tanh(x @ pyro.sample("w", normal((5, 20))))
        logits = h @ pyro.sample("v", normal((20, 3)))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    whole, parts = (ncl.OnlinePosterior(model, engine) for _ in range(2))
    for posterior in (whole, parts):
        posterior.update(classification_task(1))
    parts.save(tmp_path / "p")
    loaded = ncl.OnlinePosterior.load(tmp_path / "p", model)
    for posterior in (whole, loaded):
        posterior.update(classification_task(7))
    assert all(torch.equal(value, loaded.mean()[site]) for site, value in whole.mean().items())


def test_a_loader_with_a_generator_of_its_own_is_looked_at_without_a_trace(tmp_path: Path) -> None:
    def task() -> ncl.Task:
        data = TensorDataset(*classification_task(1).train)
        own = torch.Generator().manual_seed(5)
        return ncl.Task(DataLoader(data, batch_size=20, shuffle=True, generator=own), name="t")

    def stop(progress: Any) -> None:
        if progress.step == 17:
            raise KeyboardInterrupt

    plain, kept, stopped = (ncl.OnlinePosterior(classifier(), LAPLACE) for _ in range(3))
    plain.update(task())
    kept.update(task(), checkpoint=tmp_path / "a")
    interrupted = task()
    with pytest.raises(KeyboardInterrupt):
        stopped.update(interrupted, checkpoint=tmp_path / "b", checkpoint_every=10, callbacks=[stop])
    stopped.update(interrupted, checkpoint=tmp_path / "b", checkpoint_every=10)
    assert same(snapshot(plain), snapshot(kept))
    assert same(snapshot(plain), snapshot(stopped))


def test_where_new_heads_start_survives_a_file(tmp_path: Path) -> None:
    def model(x: Tensor, y: Tensor | None = None, head: int = 0) -> None:
        mean = x @ pyro.sample(f"w{head}", normal((5, 1)))
        pyro.sample(f"y{head}", dist.Normal(mean, 1.0).to_event(1), obs=y)

    initial = {"w0": torch.full((5, 1), 0.1), "w1": torch.full((5, 1), 0.3)}
    engine = ncl.LaplaceNCL(steps=1, batch_size=20, lr=1e-12)
    posterior = ncl.OnlinePosterior(model, engine, initial=initial)
    x = inputs(20, 5)
    posterior.update(ncl.Task((x, x[:, :1]), name="a", context={"head": 0}))
    posterior.save(tmp_path / "p")
    loaded = ncl.OnlinePosterior.load(tmp_path / "p", model)
    loaded.update(ncl.Task((x, x[:, 1:2]), name="b", context={"head": 1}))
    torch.testing.assert_close(loaded.mean()["w1"], initial["w1"])
    # each head has an output site of its own
    for head in (0, 1):
        expected = x @ loaded.mean()[f"w{head}"]
        torch.testing.assert_close(loaded.predict(x, head=head).mean, expected)


def test_an_engine_must_be_made_not_named() -> None:
    posterior = learnt()
    with pytest.raises(SettingError, match=r"such as LaplaceNCL\(\.\.\.\), not the class LaplaceNCL"):
        posterior.update(classification_task(2), engine=ncl.LaplaceNCL)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{"likelihood_weight": 2.0}, {"prior_weight": 2.0}])
def test_there_is_no_evidence_of_what_is_not_bayes_rule(settings: dict[str, float]) -> None:
    posterior = ncl.OnlinePosterior(classifier(), ncl.LaplaceNCL(steps=3, batch_size=20, **settings))
    assert posterior.update(classification_task(1)).log_evidence is None


def test_a_file_is_checked_against_the_model_not_against_where_it_started(tmp_path: Path) -> None:
    """Initial values may name the sites of some blocks only, and say nothing of another model."""
    initial = {"0.weight": torch.zeros(8, 5), "0.bias": torch.zeros(8)}
    posterior = ncl.OnlinePosterior(classifier(), ncl.LaplaceNCL(steps=3, batch_size=20), initial=initial)
    posterior.update(classification_task(1))
    posterior.save(tmp_path / "p")
    assert ncl.OnlinePosterior.load(tmp_path / "p", classifier()).tasks == posterior.tasks
    other = ncl.BayesianNetwork(nn.Linear(5, 3), ncl.Categorical(), prior=dist.Normal(0.0, 1.0))
    with pytest.raises(FileError, match="is of another model"):
        ncl.OnlinePosterior.load(tmp_path / "p", other)


def test_a_file_says_which_kind_of_posterior_and_which_dtype_it_holds(tmp_path: Path) -> None:
    learner = ReplayLearner(classifier(), PlainTraining(steps=2), keep=3)
    learner.update(classification_task(0))
    learner.save(tmp_path / "replay")
    with pytest.raises(FileError, match=r"was written by ReplayLearner, not OnlinePosterior: use ReplayLearner\.load"):
        ncl.OnlinePosterior.load(tmp_path / "replay", classifier())
    assert len(ReplayLearner.load(tmp_path / "replay", classifier()).tasks) == 1
    with pytest.raises(FileError, match=r"torch\.float32; that of the model .*torch\.float64"):
        ReplayLearner.load(tmp_path / "replay", classifier().double())


@pytest.mark.parametrize(
    "changed", [{"fisher_temperature": 4.0}, {"fisher": "empirical"}, {"prior_weight": 2.0}, {"likelihood_weight": 2.0}]
)
def test_there_is_an_evidence_only_where_bayes_rule_is_approximated(changed: dict[str, Any]) -> None:
    settings = {"steps": 5, "likelihood_weight": 1.0}
    posterior = ncl.OnlinePosterior(classifier(), ncl.LaplaceNCL(**settings))  # type: ignore[arg-type]
    assert posterior.update(classification_task(0)).log_evidence is not None
    weighted = ncl.LaplaceNCL(**{**settings, **changed})
    assert posterior.update(classification_task(1), engine=weighted).log_evidence is None
    assert ncl.OnlinePosterior(classifier(), LaplaceOWM(steps=5)).update(classification_task(0)).log_evidence is None
