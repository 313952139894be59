"""What a posterior makes of visible modules: blocks for every weight, and the right Fisher in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pack_padded_sequence

import nclbayes as ncl
from nclbayes.blocks import KroneckerBlock, find_blocks
from nclbayes.errors import DataError, UnsupportedUseError
from nclbayes.fisher import DiagonalFisher, KroneckerFisher
from nclbayes.isolation import drawing_from
from nclbayes.watch import watch
from tests.zoo import inputs, labels, make_bayesian


class Read(nn.Module):
    """A core on sequences [batch, time, 4], and a readout of its mean output."""

    def __init__(self, core: nn.Module, width: int, call: Callable[[nn.Module, Tensor], Any], outputs: int = 3) -> None:
        super().__init__()
        self.core, self.out, self.call = core, nn.Linear(width, outputs), call

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.call(self.core, x).mean(1))


def first(core: nn.Module, x: Tensor) -> Tensor:
    return core(x)[0]


def time_first(core: nn.Module, x: Tensor) -> Tensor:
    return core(x.transpose(0, 1))[0].transpose(0, 1)


def to_itself(core: nn.Module, x: Tensor) -> Tensor:
    return core(x, x, x)[0]


def to_others(core: nn.Module, x: Tensor) -> Tensor:
    return core(x, 2 * x[:, 1:], x[:, 1:], need_weights=False)[0]


def whole(core: nn.Module, x: Tensor) -> Tensor:
    return core(x)


def decoded(core: nn.Module, x: Tensor) -> Tensor:
    return core(x, x[:, :3] * 2)


def by_cells(core: nn.Module, x: Tensor) -> Tensor:
    state, states = None, []
    for x_t in x.unbind(1):
        state = core(x_t, state)
        states.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(states, 1)


def packed(core: nn.Module, x: Tensor) -> Tensor:
    lengths = 1 + torch.arange(len(x)) % x.shape[1]
    _, last = core(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
    return last.transpose(0, 1)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


NETS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Read(nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True), 6, first),
    "lstm, projected": lambda: Read(nn.LSTM(4, 3, proj_size=2, batch_first=True), 2, first),
    "gru": lambda: Read(nn.GRU(4, 3), 3, time_first),
    "rnn": lambda: Read(nn.RNN(4, 3, batch_first=True, bias=False), 3, first),
    "packed": lambda: Read(nn.GRU(4, 3, batch_first=True, bidirectional=True), 3, packed),
    "lstm cell": lambda: Read(nn.LSTMCell(4, 3), 3, by_cells),
    "gru cell": lambda: Read(nn.GRUCell(4, 3), 3, by_cells),
    "attention": lambda: Read(nn.MultiheadAttention(4, 2, batch_first=True), 4, to_itself),
    "attention, more": lambda: Read(
        nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True), 4, to_itself
    ),
    "attention to others": lambda: Read(nn.MultiheadAttention(4, 2, batch_first=True), 4, to_others),
    "encoder": lambda: Read(encoder(), 4, whole),
    "encoder, eval": lambda: Read(encoder(), 4, whole).eval(),
    "decoder": lambda: Read(nn.TransformerDecoderLayer(4, 2, 5, dropout=0.0, batch_first=True), 4, decoded),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return ncl.nn.visible(NETS[name]())


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@pytest.mark.parametrize("engine", [ncl.LaplaceNCL, ncl.VariationalNCL])
@pytest.mark.parametrize("name", NETS)
def test_every_weight_is_learnt(name: str, engine: type[ncl.LaplaceNCL]) -> None:
    net = made(name)
    names = {name for name, _ in net.named_parameters()}
    posterior = ncl.OnlinePosterior(ncl.BayesianNetwork(net, ncl.Categorical()), engine(steps=3, batch_size=6))
    x = inputs(12, 5, 4)
    for i in range(2):
        posterior.update(ncl.Task((x, labels(3, 12, seed=i)), name=f"task {i}"))
    held = {site: state for state in posterior.blocks.values() for site in state.block.sites}
    assert held.keys() == names
    maps = {site for site, state in held.items() if isinstance(state.block, KroneckerBlock)}
    others = {site for site in names if "norm" in site or ".bias_k" in site or ".bias_v" in site}
    assert maps == names - others
    assert posterior.predict(x).probs.shape == (12, 3)
    assert posterior.predict(x, num_samples=3).probs.shape == (12, 3)
    if name != "packed":  # whose lengths are those of a batch
        assert posterior.predict(x, method="linearized").probs.shape == (12, 3)


@pytest.mark.parametrize("name", ["lstm", "gru", "packed", "attention", "attention to others", "encoder, eval"])
def test_samples_of_weights_are_predicted_with(name: str) -> None:
    """A vectorised prediction is the average of those of one sample at a time."""
    net = made(name)
    posterior = ncl.OnlinePosterior(ncl.BayesianNetwork(net, ncl.Categorical()), ncl.LaplaceNCL(steps=2, batch_size=6))
    x = inputs(6, 5, 4)
    posterior.update(ncl.Task((x, labels(3, 6)), name="task"))
    found = posterior.predict(x, num_samples=4, generator=torch.Generator().manual_seed(5)).probs
    generator = torch.Generator().manual_seed(5)
    with drawing_from(generator, torch.device("cpu")):
        samples = posterior.sample(4, generator)
    with torch.no_grad():
        each = [functional_call(net, {k: v[i] for k, v in samples.items()}, (x,)).softmax(-1) for i in range(4)]
    torch.testing.assert_close(found, torch.stack(each).mean(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in NETS if name != "packed"])
def test_squares_are_those_of_one_example_at_a_time(name: str) -> None:
    net = made(name).double()
    x, y = inputs(6, 5, 4).double(), inputs(6, 3, seed=2).double()
    model = ncl.BayesianNetwork(net, ncl.Normal(1.0))
    accumulator = ncl.FisherAccumulator(model, model.initial_values(), kind="empirical", diagonal=True)
    accumulator.update((x, y))
    found: dict[str, Tensor] = {}
    for key, fisher in accumulator.factors().items():
        assert isinstance(fisher, DiagonalFisher)
        found |= accumulator.blocks[key].unpack(fisher.diagonal)
    expected = {site: torch.zeros_like(p) for site, p in net.named_parameters()}
    for x_i, y_i in zip(x.split(1), y.split(1), strict=True):
        grads = torch.autograd.grad(-0.5 * (net(x_i) - y_i).square().sum(), list(net.parameters()))
        for total, g in zip(expected.values(), grads, strict=True):
            total += g.square()
    assert found.keys() == expected.keys()
    for site, value in found.items():
        torch.testing.assert_close(value, expected[site], rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_of_one_step_of_one_sequence_the_fisher_is_exact(kind: type[nn.RNNBase]) -> None:
    states = 2 if kind is nn.LSTM else 1
    start = [inputs(1, 1, 3, seed=seed).double() for seed in range(states)]

    def from_start(core: nn.Module, x: Tensor) -> Tensor:
        return core(x, (start[0], start[1]) if states == 2 else start[0])[0]

    torch.manual_seed(0)
    net = ncl.nn.visible(Read(kind(4, 3, batch_first=True), 3, from_start, outputs=2)).double()
    model = ncl.BayesianNetwork(net, ncl.Normal(1.0))
    x = inputs(1, 1, 4).double()
    accumulator = ncl.FisherAccumulator(model, model.initial_values(), kind="exact")
    accumulator.update((x, torch.zeros(1, 2).double()))
    names, parameters = zip(*net.named_parameters(), strict=True)
    for key, fisher in accumulator.factors().items():
        assert isinstance(fisher, KroneckerFisher)
        dense: Any = 0.0
        for output in net(x).flatten():
            grads = torch.autograd.grad(output, parameters, retain_graph=True)
            s = accumulator.blocks[key].pack(dict(zip(names, grads, strict=True))).mT.reshape(-1)
            dense = dense + torch.outer(s, s)
        torch.testing.assert_close(torch.kron(fisher.input, fisher.output), dense)


def counts(net: nn.Module, x: Tensor, **context: Any) -> dict[str, int]:
    """How many valid rows each map had."""
    model = ncl.BayesianNetwork(net, ncl.Normal(1.0))
    run = watch(model, (x, inputs(len(x), 3)), model.initial_values(), context)
    found: dict[str, int] = {}
    for use in run.linear:
        found[use.weight] = found.get(use.weight, 0) + int(use.count())
    return found


def test_padding_is_no_row_of_the_fisher() -> None:
    found = counts(made("packed"), inputs(12, 5, 4))
    steps = sum(1 + i % 5 for i in range(12))
    assert found.pop("out.weight") == 12
    assert len(found) == 4
    assert set(found.values()) == {steps}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["lstm", "attention"])
def test_steps_that_are_declared_invalid_are_no_rows_of_the_fisher(kind: str, batch_first: bool) -> None:
    lengths = 1 + torch.arange(12) % 5
    mask = torch.arange(5) < lengths.unsqueeze(1)

    def masked(core: nn.Module, x: Tensor) -> Tensor:
        x = x if batch_first else x.transpose(0, 1)
        with ncl.valid_steps(mask if batch_first else mask.T):
            out = core(x)[0] if kind == "lstm" else core(x, x, x, key_padding_mask=~mask)[0]
        out = out if batch_first else out.transpose(0, 1)
        return out * mask.unsqueeze(-1)

    core = nn.LSTM(4, 3, batch_first=batch_first) if kind == "lstm" else nn.MultiheadAttention(4, 1, 0.0)
    core.batch_first = batch_first
    net = ncl.nn.visible(Read(core, 3 if kind == "lstm" else 4, masked))
    found = counts(net, inputs(12, 5, 4))
    del found["out.weight"]
    assert set(found.values()) == {int(mask.sum())}
    model = ncl.BayesianNetwork(net, ncl.Normal(1.0))
    ncl.fisher(model, model.initial_values(), (inputs(12, 5, 4), inputs(12, 3)))  # which verifies what it saw
    with pytest.raises(DataError, match=r"mask of shape \(\d+, \d+\)"):
        counts(net, inputs(12, 4, 4))


@pytest.mark.parametrize("kind", [ncl.nn.LSTM, ncl.nn.GRU, ncl.nn.ElmanRNN])
def test_a_pyro_module_of_it_has_its_weights_as_sites(kind: type[nn.Module]) -> None:
    class Net(PyroModule):
        def __init__(self) -> None:
            super().__init__()
            self.core = PyroModule[kind](5, 4, batch_first=True)
            make_bayesian(self.core)

        def forward(self, x: Tensor, y: Tensor) -> None:
            pyro.sample("y", dist.Normal(self.core(x)[0].sum((-1, -2)), 1.0), obs=y)

    blocks = find_blocks(watch(Net(), (inputs(6, 3, 5), inputs(6))))
    assert set(blocks) == {"core.weight_ih_l0", "core.weight_hh_l0"}


@pytest.mark.parametrize("name", [name for name in NETS if name != "encoder, eval"])
def test_torchs_own_are_refused_with_the_remedy(name: str) -> None:
    model = ncl.BayesianNetwork(NETS[name](), ncl.Categorical())
    with pytest.raises(UnsupportedUseError, match=r"a fused kernel.*ncl\.nn\.visible\(net\)"):
        find_blocks(watch(model, (inputs(6, 5, 4), labels(3, 6)), model.initial_values()))
