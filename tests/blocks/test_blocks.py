"""From a model's run to blocks, their priors and conversions, and what is refused."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pyro.nn import PyroModule
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.blocks import DiagonalBlock, KroneckerBlock, find_blocks
from nclbayes.errors import LatentError, PriorError, UnsupportedUseError, ValuesError
from nclbayes.watch import ModelRun, watch
from tests.zoo import ZOO, inputs, labels, make_bayesian, normal


def blocks_of(name: str) -> dict[str, KroneckerBlock | DiagonalBlock]:
    case = ZOO[name]()
    return find_blocks(watch(case.model, case.batch, case.values, case.context))


def test_weight_and_bias_form_one_block_named_after_the_layer() -> None:
    blocks = blocks_of("pyro_mlp")
    assert list(blocks) == ["net.0", "net.2", "net.4"]
    assert blocks["net.0"].sites == ("net.0.weight", "net.0.bias")
    assert blocks["net.0"].shape == (7, 6)
    assert [block.size for block in blocks.values()] == [42, 48, 21]


def test_the_orientation_of_a_product_decides_the_inputs() -> None:
    blocks = blocks_of("functional")
    assert {name: block.shape for name, block in blocks.items()} == {"w1": (4, 6), "w2": (3, 5), "w3": (2, 3)}


def test_a_convolution_is_a_matrix_and_groups_are_a_stack() -> None:
    blocks = blocks_of("cnn")
    assert blocks["net.0"].shape == (4, 2 * 3 * 3 + 1)
    assert blocks["net.2"].shape == (2, 3, 2 * 3 + 1)


def test_a_head_that_is_not_used_has_no_block() -> None:
    assert list(blocks_of("multi_head")) == ["body", "head1"]


def test_what_is_no_linear_map_is_diagonal_and_says_why() -> None:
    blocks = blocks_of("gains")
    diagonal = {name: block.reason for name, block in blocks.items() if isinstance(block, DiagonalBlock)}
    assert set(diagonal) == {"gain", "table", "norm", "log_scale", "shared"}
    assert "mul" in diagonal["gain"]
    assert "embedding" in diagonal["table"]
    assert "bias" in diagonal["shared"]


def test_a_bias_of_a_transposed_tie_stays_apart() -> None:
    blocks = blocks_of("tied")
    assert blocks["u"].sites == ("u", "b")
    assert isinstance(blocks["c"], DiagonalBlock)


def test_a_weight_used_as_map_and_elementwise_is_diagonal() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", normal((5, 5)))
        pyro.sample("y", dist.Normal((x @ w * w.exp().mean()).sum(-1), 1.0), obs=y)

    (block,) = find_blocks(watch(model, (inputs(4, 5), inputs(4)))).values()
    assert isinstance(block, DiagonalBlock)
    assert "matmul" in block.reason
    assert "torch.Tensor.mul" in block.reason


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    a=st.integers(1, 5),
    b=st.integers(1, 5),
    stack=st.integers(0, 3),
    transposed=st.booleans(),
    bias=st.booleans(),
    samples=st.lists(st.integers(1, 3), max_size=2),
    seed=st.integers(0, 1000),
)
def test_pack_and_unpack_are_inverse(
    a: int, b: int, stack: int, transposed: bool, bias: bool, samples: list[int], seed: int
) -> None:
    view = (stack, a, b) if stack else (a, b)
    m, n = (b, a) if transposed else (a, b)
    outputs = m * (stack or 1)
    block = KroneckerBlock("k", "w", view, view, transposed, "b" if bias else None, (outputs,) if bias else ())
    g = torch.Generator().manual_seed(seed)
    values = {"w": torch.randn(*samples, *view, generator=g)}
    if bias:
        values["b"] = torch.randn(*samples, outputs, generator=g)
    matrix = block.pack(values)
    assert matrix.shape == (*samples, *block.shape)
    assert block.shape[-2:] == (m, n + bias)
    back = block.unpack(matrix)
    assert set(back) == set(values)
    for site, value in values.items():
        assert torch.equal(back[site], value)
    # the map itself: rows z (with a trailing one) times the matrix are what the layer computes
    if not stack and not samples:
        z = torch.randn(7, n, generator=g)
        out = z @ (values["w"] if transposed else values["w"].T) + (values["b"] if bias else 0.0)
        rows = F.pad(z, (0, 1), value=1.0) if bias else z
        torch.testing.assert_close(rows @ matrix.T, out)


def test_conversions_name_what_is_missing_or_misshapen() -> None:
    block = KroneckerBlock("k", "w", (3, 4), (3, 4), False, "b", (3,))
    with pytest.raises(ValuesError, match="no value for site 'b'"):
        block.pack({"w": torch.zeros(3, 4)})
    with pytest.raises(ValuesError, match=r"site 'w' must end in shape \(3, 4\), not \(4, 3\)"):
        block.pack({"w": torch.zeros(4, 3), "b": torch.zeros(3)})
    with pytest.raises(ValuesError, match=r"block 'k' must end in shape \(3, 5\)"):
        block.unpack(torch.zeros(3, 4))
    with pytest.raises(ValuesError, match="block 'd'"):
        DiagonalBlock("d", (2,), "gain").unpack(torch.zeros(3))


def linear_run(weight_prior: dist.Distribution, bias_prior: dist.Distribution | None = None) -> ModelRun:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", weight_prior)
        b = None if bias_prior is None else pyro.sample("b", bias_prior)
        pyro.sample("y", dist.Normal(F.linear(x, w, b), 1.0).to_event(1), obs=y)

    return watch(model, (inputs(6, 4), inputs(6, 3)))


def test_the_prior_of_a_block_is_the_models() -> None:
    loc = inputs(3, 4)
    run = linear_run(dist.Normal(loc, 0.5).to_event(2), dist.Normal(1.0, 2.0).expand([3]).to_event(1))
    block = find_blocks(run)["w"]
    prior = block.prior(run.latents)
    torch.testing.assert_close(prior.loc, torch.cat([loc, torch.ones(3, 1)], 1))
    torch.testing.assert_close(prior.input_precision, torch.diag(torch.tensor([4.0] * 4 + [0.25])))
    torch.testing.assert_close(prior.output_precision, torch.eye(3))
    value = {"w": inputs(3, 4, seed=5), "b": inputs(3, seed=6)}
    sites = sum(run.latents[s].fn.log_prob(value[s]) for s in value)
    torch.testing.assert_close(prior.log_prob(block.pack(value)), sites)


def test_a_separable_prior_is_represented_exactly() -> None:
    scale = torch.outer(torch.tensor([1.0, 2.0, 0.1]), torch.tensor([0.5, 3.0, 1.0, 7.0]))
    run = linear_run(dist.Normal(torch.zeros(3, 4), scale).to_event(2))
    block = find_blocks(run)["w"]
    prior = block.prior(run.latents)
    torch.testing.assert_close(prior.variance, scale.square(), rtol=1e-4, atol=0)
    value = inputs(3, 4, seed=5)
    torch.testing.assert_close(prior.log_prob(value), run.latents["w"].fn.log_prob(value), rtol=1e-4, atol=0)


def test_the_prior_of_a_diagonal_block_may_have_any_scale() -> None:
    case = ZOO["gains"]()
    run = watch(case.model, case.batch, case.values)
    prior = find_blocks(run)["table"].prior(run.latents)
    assert prior.event_shape == (7, 4)
    torch.testing.assert_close(prior.variance, torch.ones(7, 4))


def test_an_inseparable_prior_is_refused() -> None:
    scale = torch.ones(3, 4)
    scale[0, 0] = 2.0
    run = linear_run(dist.Normal(torch.zeros(3, 4), scale).to_event(2))
    with pytest.raises(PriorError, match=r"'w' do not separate.*constant scale"):
        find_blocks(run)["w"].prior(run.latents)


def test_a_prior_whose_bias_scales_do_not_follow_the_rows_is_refused() -> None:
    rows = torch.tensor([[1.0], [2.0], [3.0]])
    run = linear_run(dist.Normal(torch.zeros(3, 4), rows).to_event(2), dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pytest.raises(PriorError, match="'w', 'b'"):
        find_blocks(run)["w"].prior(run.latents)


def test_a_half_normal_latent_is_refused() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", normal((5,)))
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        pyro.sample("y", dist.Normal(x @ w, scale), obs=y)

    with pytest.raises(LatentError, match=r"'scale' has a HalfNormal prior.*Normal prior"):
        find_blocks(watch(model, (inputs(6, 5), inputs(6))))


def test_a_local_latent_in_the_data_plate_is_refused() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", normal((5,)))
        with pyro.plate("examples", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(x @ w + z, 1.0), obs=y)

    with pytest.raises(LatentError, match=r"'z' lies inside the data plate 'examples'.*out of the plate"):
        find_blocks(watch(model, (inputs(6, 5), inputs(6))))


def test_a_plate_of_weights_is_no_data_plate() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        with pyro.plate("features", 5):
            w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("examples", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    assert find_blocks(watch(model, (inputs(6, 5), inputs(6))))["w"].shape == (1, 5)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_fused_recurrent_kernel_is_refused(kind: type[nn.Module]) -> None:
    class Net(PyroModule):
        def __init__(self) -> None:
            super().__init__()
            self.core = PyroModule[kind](5, 4, batch_first=True)
            make_bayesian(self.core)

        def forward(self, x: Tensor, y: Tensor) -> None:
            pyro.sample("y", dist.Normal(self.core(x)[0].sum((-1, -2)), 1.0), obs=y)

    with pytest.raises(
        UnsupportedUseError, match=r"'core\.\w+' enters torch\.\w+, a fused kernel.*ncl\.nn\.visible\(net\)"
    ):
        find_blocks(watch(Net(), (inputs(6, 3, 5), inputs(6))))


@pytest.mark.parametrize("affine", [True, False])
def test_statistics_of_the_batch_are_refused(affine: bool) -> None:
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, affine=affine), nn.Linear(4, 2))
    model = ncl.BayesianNetwork(net, ncl.Categorical(), prior=dist.Normal(0.0, 1.0))
    batch = inputs(6, 5), labels(2, 6)
    with pytest.raises(UnsupportedUseError, match=r"batch normalisation in training mode.*Call eval\(\)"):
        watch(model, batch)
    net.eval()
    assert set(find_blocks(watch(model, batch))) == {"0", "2", *(("1.weight", "1.bias") if affine else ())}


def test_looking_at_a_weight_is_no_use_of_it() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", normal((3, 5)))
        assert w.shape == (3, 5)
        assert w.size(0) == 3
        assert len(w) == 3
        assert bool(torch.isfinite(w).all())
        assert float(w.detach().norm()) >= 0
        pyro.sample("y", dist.Categorical(logits=x @ w.T), obs=y)

    assert isinstance(find_blocks(watch(model, (inputs(6, 5), labels(3, 6))))["w"], KroneckerBlock)
