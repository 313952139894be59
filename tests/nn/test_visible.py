"""Modules of torch with their linear maps in the open: the same numbers, and blocks for every weight."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_flatten, tree_unflatten

import nclbayes as ncl
from nclbayes.errors import DataError
from nclbayes.watch import MapRecorder

RECURRENT = {"LSTM": (nn.LSTM, ncl.nn.LSTM), "GRU": (nn.GRU, ncl.nn.GRU), "RNN": (nn.RNN, ncl.nn.ElmanRNN)}
CELLS = {
    "LSTMCell": (nn.LSTMCell, ncl.nn.LSTMCell),
    "GRUCell": (nn.GRUCell, ncl.nn.GRUCell),
    "RNNCell": (nn.RNNCell, ncl.nn.RNNCell),
}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What a module returns while its maps are seen."""
    recorder = MapRecorder(module)
    for name, parameter in module.named_parameters():
        recorder.track(name, parameter)
    with recorder:
        out = module(*args, **kwargs)
    used = {use.weight for use in recorder.linear} | {use.bias for use in recorder.linear}
    used |= {use.site for use in recorder.others}
    assert used - {None} == {name for name, _ in module.named_parameters()}
    assert not [use for use in recorder.others if use.is_fused]
    return out


def transformed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What a module returns inside a transform, which runs it once."""
    parameters = {name: p.unsqueeze(0) for name, p in module.named_parameters()}
    returned: list[Any] = []

    def run(weights: dict[str, Tensor]) -> list[Tensor]:
        leaves, form = tree_flatten(functional_call(module, weights, args, kwargs))
        returned.append(form)
        return [torch.zeros(()) if leaf is None else leaf for leaf in leaves]

    found = vmap(run, randomness="same")(parameters)
    return tree_unflatten([leaf.squeeze(0) for leaf in found], returned[0])


def plain(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def flat(out: Any) -> list[Tensor]:
    """The numbers of an output, of any structure, that can be differentiated."""
    leaves = tree_flatten(out)[0]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def compare(theirs: nn.Module, ours: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """The same outputs and gradients, to rounding."""
    dtype = next(theirs.parameters()).dtype
    atol = TOLERANCE[dtype]
    found, expected = flat(call(ours, *args, **kwargs)), flat(theirs(*args, **kwargs))
    assert len(found) == len(expected) > 0
    gradients = []
    for module, outs in ((ours, found), (theirs, expected)):
        total = sum((out * draw(*out.shape, dtype=dtype, seed=9)).sum() for out in outs)
        gradients.append(torch.autograd.grad(total, list(module.parameters())))  # type: ignore[arg-type]
    for one, other in zip((*found, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=10 * atol, atol=atol)


def pair(kinds: tuple[type[nn.Module], type[nn.Module]], *args: Any, **kwargs: Any) -> tuple[nn.Module, nn.Module]:
    """torch's module and ours, of the same weights."""
    torch.manual_seed(0)
    theirs, ours = kinds[0](*args, **kwargs), kinds[1](*args, **kwargs)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert isinstance(ours, kinds[0])
    return theirs, ours


OPTIONS = [
    dict(zip(("num_layers", "bidirectional", "bias", "batch_first"), values, strict=True))
    for values in itertools.product((1, 2), (False, True), (False, True), (False, True))
]


@pytest.mark.parametrize("call", [plain, watched, transformed])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_networks_agree_with_torchs(name: str, call: Callable[..., Any]) -> None:
    for options, dtype in itertools.product(OPTIONS, TOLERANCE):
        theirs, ours = pair(RECURRENT[name], 3, 4, dtype=dtype, **options)
        sides = 2 if options["bidirectional"] else 1
        states = [draw(sides * options["num_layers"], 5, 4, dtype=dtype, seed=seed) for seed in (2, 3)]
        hx = (states[0], states[1]) if name == "LSTM" else states[0]
        one = tuple(s[:, 0] for s in states) if name == "LSTM" else states[0][:, 0]
        x = draw(5, 3, 3, dtype=dtype) if options["batch_first"] else draw(3, 5, 3, dtype=dtype)
        compare(theirs, ours, call, x)
        compare(theirs, ours, call, x, hx)
        compare(theirs, ours, call, draw(3, 3, dtype=dtype), one)


@pytest.mark.parametrize("call", [plain, watched, transformed])
def test_other_settings_agree_with_torchs(call: Callable[..., Any]) -> None:
    settings = {"batch_first": True, "dtype": torch.float64}
    projected = pair(RECURRENT["LSTM"], 3, 4, proj_size=2, bidirectional=True, num_layers=2, **settings)
    compare(*projected, call, draw(5, 3, 3))
    compare(*projected, call, draw(5, 3, 3), (draw(4, 5, 2), draw(4, 5, 4)))
    compare(*pair(RECURRENT["RNN"], 3, 4, nonlinearity="relu", **settings), call, draw(5, 3, 3))


@pytest.mark.parametrize("call", [plain, watched])
@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("is_sorted", [True, False])
def test_packed_sequences_agree_with_torchs(name: str, is_sorted: bool, call: Callable[..., Any]) -> None:
    lengths = torch.tensor([6, 5, 3, 3, 1] if is_sorted else [3, 1, 6, 5, 3])
    packed = pack_padded_sequence(draw(5, 6, 3), lengths, batch_first=True, enforce_sorted=is_sorted)
    theirs, ours = pair(RECURRENT[name], 3, 4, num_layers=2, bidirectional=True, dtype=torch.float64)
    states = draw(4, 5, 4, seed=2), draw(4, 5, 4, seed=3)
    for hx in (None, states if name == "LSTM" else states[0]):
        compare(theirs, ours, call, packed, hx)
        out, expected = call(ours, packed, hx)[0], theirs(packed, hx)[0]
        assert isinstance(out, PackedSequence)
        for one, other in zip(pad_packed_sequence(out), pad_packed_sequence(expected), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("call", [plain, watched, transformed])
@pytest.mark.parametrize("name", CELLS)
def test_cells_agree_with_torchs(name: str, call: Callable[..., Any]) -> None:
    for bias, dtype in itertools.product((True, False), TOLERANCE):
        theirs, ours = pair(CELLS[name], 3, 4, bias=bias, dtype=dtype)
        states = draw(5, 4, dtype=dtype, seed=2), draw(5, 4, dtype=dtype, seed=3)
        compare(theirs, ours, call, draw(5, 3, dtype=dtype))
        compare(theirs, ours, call, draw(5, 3, dtype=dtype), states if name == "LSTMCell" else states[0])
        compare(theirs, ours, call, draw(3, dtype=dtype))
    relu = pair(CELLS["RNNCell"], 3, 4, nonlinearity="relu", dtype=torch.float64)
    compare(*relu, call, draw(5, 3))


def attention(**settings: Any) -> tuple[nn.Module, nn.Module]:
    kinds = nn.MultiheadAttention, ncl.nn.MultiheadAttention
    theirs, ours = pair(kinds, 8, 2, dtype=torch.float64, **settings)
    for module in (theirs, ours):  # torch's biases are zero at first
        for p in module.parameters():
            p.data.add_(draw(*p.shape, seed=4), alpha=0.3)
    return theirs, ours


def causal(steps: int) -> Tensor:
    return torch.ones(steps, steps, dtype=torch.bool).triu(1)


@pytest.mark.parametrize("call", [plain, watched, transformed])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("extra", [{}, {"bias": False}, {"add_bias_kv": True, "add_zero_attn": True}])
def test_attention_agrees_with_torchs(extra: dict[str, Any], batch_first: bool, call: Callable[..., Any]) -> None:
    theirs, ours = attention(batch_first=batch_first, **extra)
    x, memory = (draw(5, 4, 8), draw(5, 3, 8, seed=2)) if batch_first else (draw(4, 5, 8), draw(3, 5, 8, seed=2))
    padded = torch.arange(4) >= torch.tensor([4, 2, 3, 1, 4]).unsqueeze(1)
    of_heads = (draw(10, 4, 4, seed=3) > 0.5) & ~torch.eye(4, dtype=torch.bool)
    masks: list[dict[str, Any]] = [
        {},
        {"key_padding_mask": padded},
        {"attn_mask": causal(4)},
        {"attn_mask": of_heads},
        {"attn_mask": causal(4), "key_padding_mask": padded},
        {"attn_mask": draw(4, 4, seed=5), "key_padding_mask": draw(5, 4, seed=6)},
        {"attn_mask": of_heads, "key_padding_mask": padded & False},
    ]
    weights: list[dict[str, Any]] = [{}, {"need_weights": False}, {"average_attn_weights": False}]
    for mask, weight in itertools.product(masks, weights):
        compare(theirs, ours, call, x, x, x, **mask, **weight)
    for weight in weights:
        compare(theirs, ours, call, x, memory, memory, **weight)
        compare(theirs, ours, call, x, memory, memory * 2, **weight)
        compare(theirs, ours, call, *(draw(4, 8),) * 3, attn_mask=of_heads[:2], **weight)
        compare(theirs, ours, call, *(draw(4, 8),) * 3, key_padding_mask=padded[1], **weight)
        if not extra.get("add_bias_kv"):
            compare(theirs, ours, call, x, x, x, attn_mask=causal(4), is_causal=True, **weight)


@pytest.mark.parametrize("call", [plain, watched, transformed])
def test_attention_of_other_sizes_agrees_with_torchs(call: Callable[..., Any]) -> None:
    theirs, ours = attention(kdim=3, vdim=5, batch_first=True)
    compare(theirs, ours, call, draw(5, 4, 8), draw(5, 6, 3), draw(5, 6, 5))
    theirs, ours = pair((nn.MultiheadAttention, ncl.nn.MultiheadAttention), 8, 4)
    compare(theirs, ours, call, *(draw(4, 5, 8, dtype=torch.float32),) * 3)


def test_a_query_that_may_look_nowhere_is_as_torchs() -> None:
    theirs, ours = attention(batch_first=True)
    blocked = torch.zeros(4, 4, dtype=torch.bool)
    blocked[1] = True
    for need_weights, call in itertools.product((False, True), (plain, transformed)):
        x = draw(5, 4, 8)
        expected, _ = theirs(x, x, x, attn_mask=blocked, need_weights=need_weights)
        found, _ = call(ours, x, x, x, attn_mask=blocked, need_weights=need_weights)
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_dropout_drops_in_training_mode_only() -> None:
    for module, args in (
        (ncl.nn.LSTM(3, 4, num_layers=2, dropout=0.5), (draw(6, 5, 3, dtype=torch.float32),)),
        (ncl.nn.MultiheadAttention(8, 2, dropout=0.5), (draw(6, 5, 8, dtype=torch.float32),) * 3),
    ):
        for call in (plain, watched):
            module.train()
            assert not torch.equal(call(module, *args)[0], call(module, *args)[0])
            module.eval()
            assert torch.equal(call(module, *args)[0], call(module, *args)[0])


@pytest.mark.parametrize("call", [plain, watched, transformed])
def test_dropout_of_everything_between_layers_is_as_torchs(call: Callable[..., Any]) -> None:
    theirs, ours = pair(RECURRENT["GRU"], 3, 4, num_layers=2, dropout=1.0, dtype=torch.float64)
    torch.testing.assert_close(call(ours, draw(6, 5, 3))[0], theirs(draw(6, 5, 3))[0])


@pytest.mark.parametrize("call", [plain, watched])
def test_weights_that_are_put_in_by_a_functional_call_are_used(call: Callable[..., Any]) -> None:
    core = nn.ModuleList([kinds[1](3, 4, num_layers=2) for kinds in RECURRENT.values()])
    for module in core:
        x = draw(5, 6, 3, dtype=torch.float32)
        before = module(x)[0]
        zeros = {name: torch.zeros_like(p, requires_grad=True) for name, p in module.named_parameters()}
        if call is watched:
            with MapRecorder() as recorder:
                for name, value in zeros.items():
                    recorder.track(name, value)
                out = functional_call(module, zeros, (x,))[0]
        else:
            out = functional_call(module, zeros, (x,))[0]
        assert not out.any()
        assert torch.equal(module(x)[0], before)


def test_where_the_kernel_has_no_gradient_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda tensor: True)
    theirs, ours = pair(RECURRENT["LSTM"], 3, 4, dtype=torch.float64)
    ran: list[bool] = []
    monkeypatch.setattr(nn.LSTM, "forward", lambda *_: ran.append(True))
    for module in (ours.train(), ours.eval()):
        with torch.no_grad():
            module(draw(5, 6, 3))
    assert len(ran) == 2
    ours.train()(draw(5, 6, 3))
    assert len(ran) == 3
    out, _ = ours.eval()(draw(5, 6, 3))
    assert len(ran) == 3
    monkeypatch.undo()
    torch.testing.assert_close(out, theirs(draw(5, 6, 3))[0])


def test_jacobians_are_vectorised_as_they_are_one_by_one() -> None:
    module = ncl.nn.visible(nn.GRU(3, 2, batch_first=True, dtype=torch.float64))
    weights = {name: p.detach() for name, p in module.named_parameters()}
    x = draw(4, 5, 3)

    def last(weights: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(module, weights, (one.unsqueeze(0),))[1].flatten()

    found = vmap(jacrev(last), in_dims=(None, 0))(weights, x)
    for i, output in itertools.product(range(4), range(2)):
        each = torch.autograd.grad(module(x[i : i + 1])[1].flatten()[output], list(module.parameters()))
        for name, expected in zip(weights, each, strict=True):
            torch.testing.assert_close(found[name][i, output], expected)


def encoder(batch_first: bool = True, norm_first: bool = False) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        *(8, 2, 12), dropout=0.0, batch_first=batch_first, norm_first=norm_first, dtype=torch.float64
    )
    nested = batch_first and not norm_first
    return nn.TransformerEncoder(layer, 2, nn.LayerNorm(8, dtype=torch.float64), enable_nested_tensor=nested)


@pytest.mark.parametrize("call", [plain, watched, transformed])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("batch_first", "norm_first"), [(True, False), (True, True), (False, False)])
def test_a_transformer_agrees_with_torchs(
    batch_first: bool, norm_first: bool, training: bool, call: Callable[..., Any]
) -> None:
    theirs = encoder(batch_first, norm_first).train(training)
    ours = ncl.nn.visible(copy.deepcopy(theirs))
    x = draw(5, 4, 8) if batch_first else draw(4, 5, 8)
    padded = torch.arange(4) >= torch.tensor([4, 2, 3, 1, 4]).unsqueeze(1)
    masks: list[dict[str, Tensor]] = [{}, {"src_key_padding_mask": padded}, {"mask": causal(4)}]
    for mask in masks:
        compare(theirs, ours, call, x, **mask)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The PyTorch API of nested tensors", UserWarning)
            expected, found = theirs(x, **mask), ours(x, **mask)
        count = torch.ones(5, 4, dtype=torch.bool) if "mask" in mask or not mask else ~padded
        count = count if batch_first else count.T
        torch.testing.assert_close(found[count], expected[count])


@pytest.mark.parametrize("call", [plain, watched, transformed])
def test_a_decoder_layer_agrees_with_torchs(call: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    theirs = nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0, batch_first=True, dtype=torch.float64).eval()
    ours = ncl.nn.visible(copy.deepcopy(theirs))
    compare(theirs, ours, call, draw(5, 4, 8), draw(5, 6, 8, seed=2), tgt_mask=causal(4), tgt_is_causal=True)


def test_visible_works_in_place_once_and_leaves_other_classes_alone() -> None:
    class Own(nn.LSTM):
        pass

    nested = nn.Sequential(nn.ModuleDict({"a": nn.LSTM(3, 4), "b": nn.GRUCell(3, 4)}), Own(3, 4), nn.Linear(3, 3))
    shared = nn.MultiheadAttention(8, 2)
    net = nn.ModuleList([nested, shared, nn.ModuleList([shared]), nn.RNN(3, 4), encoder()])
    parameters, modules, text = list(net.parameters()), list(net.modules()), repr(net)
    assert ncl.nn.visible(net) is net
    kinds = [type(module) for module in net.modules()]
    assert ncl.nn.visible(net) is net
    assert kinds == [type(module) for module in net.modules()]
    assert all(a is b for a, b in zip(modules, net.modules(), strict=True))
    assert all(a is b for a, b in zip(parameters, net.parameters(), strict=True))
    for kind in (ncl.nn.LSTM, ncl.nn.GRUCell, ncl.nn.MultiheadAttention, ncl.nn.ElmanRNN, Own):
        assert kind in kinds
    assert not {nn.LSTM, nn.GRUCell, nn.RNN, nn.MultiheadAttention, nn.TransformerEncoderLayer} & set(kinds)
    assert repr(net).replace("ElmanRNN", "RNN") == text
    alone = nn.LSTM(3, 4)
    assert type(ncl.nn.visible(alone)) is ncl.nn.LSTM
    assert type(copy.deepcopy(alone)) is ncl.nn.LSTM


def test_what_does_not_fit_is_refused() -> None:
    lstm, mha, x = ncl.nn.LSTM(3, 4), ncl.nn.MultiheadAttention(8, 2), torch.zeros(5, 6, 3)
    with MapRecorder(), torch.no_grad():
        with pytest.raises(DataError, match="2 or 3 dimensions"):
            lstm(torch.zeros(3))
        with pytest.raises(DataError, match="3 inputs a step, not 2"):
            lstm(x[..., :2])
        with pytest.raises(DataError, match=r"\[\(1, 6, 4\), \(1, 6, 4\)\], not \[\(1, 5, 4\)"):
            lstm(x, (torch.zeros(1, 5, 4), torch.zeros(1, 5, 4)))
    with pytest.raises(DataError, match="pass the causal mask"):
        mha(*(torch.zeros(4, 5, 8),) * 3, is_causal=True)
    with pytest.raises(DataError, match="3 dimensions, or 2 without a batch"):
        mha(torch.zeros(4, 5, 8), torch.zeros(4, 8), torch.zeros(4, 8))
