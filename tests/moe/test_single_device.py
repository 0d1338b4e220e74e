"""On one device a MoELayer is the loop over dense experts, in value and in every gradient."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from shardwright.errors import ConfigError
from shardwright.moe import GroupedLinear, MoELayer, TopKRouter
from tests.tiers import only

from .dense_loop import dense_loop, leaves

SIZES = [
    pytest.param({"dim": 8, "hidden_dim": 12, "num_experts": 5, "top_k": 2}, id="grouped kernel"),
    pytest.param({"dim": 7, "hidden_dim": 5, "num_experts": 5, "top_k": 2}, id="rows no kernel takes"),
    pytest.param({"dim": 8, "hidden_dim": 12, "num_experts": 4, "top_k": 4}, id="every expert"),
    pytest.param({"dim": 8, "hidden_dim": 12, "num_experts": 3, "top_k": 1}, id="top 1"),
    pytest.param(
        {"dim": 8, "hidden_dim": 4, "num_experts": 6, "top_k": 3, "shared_expert_dim": 10}, id="shared expert"
    ),
    pytest.param(
        {"dim": 8, "hidden_dim": 4, "num_experts": 6, "top_k": 2, "normalize": False},
        id="weights not normalised",
    ),
]


def _layer(**sizes):
    torch.manual_seed(3)
    return MoELayer(**sizes)


def _compare(layer, x, *, rtol=1e-5, atol=1e-6):
    state = leaves(layer)
    reference_x = x.detach().clone().requires_grad_()
    normalize = layer.router.normalize
    expected = dense_loop(state, reference_x, layer.router.top_k, normalize)
    probe = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(5))
    (expected * probe).sum().backward()
    x = x.detach().clone().requires_grad_()
    value = layer(x)
    (value * probe).sum().backward()
    torch.testing.assert_close(value, expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(x.grad, reference_x.grad, rtol=rtol, atol=atol)
    for name, parameter in layer.named_parameters():
        wanted = state[name].grad if state[name].grad is not None else torch.zeros_like(parameter)
        torch.testing.assert_close(
            parameter.grad, wanted, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("shape", [(3, 5), (11,), (1, 1)])
def test_value_and_every_gradient_are_those_of_the_loop(sizes, shape):
    layer = _layer(**sizes)
    _compare(layer, torch.randn(*shape, sizes["dim"]))


def test_double_precision_needs_no_kernel():
    layer = _layer(dim=8, hidden_dim=8, num_experts=4, top_k=2).double()
    _compare(layer, torch.randn(9, 8, dtype=torch.float64), rtol=1e-12, atol=1e-13)


def test_half_precision_stays_near_the_double_result():
    layer = _layer(dim=16, hidden_dim=16, num_experts=4, top_k=2).bfloat16()
    x = torch.randn(20, 16).bfloat16()
    expected = dense_loop(leaves(layer, torch.float64), x.double(), 2)
    agree = layer.router(x).choices.sort().values  # only where the rounded scores choose the same experts
    exact = (x.double() @ layer.router.weight.double().T).topk(2).indices.sort().values
    same = (agree == exact).all(-1)
    assert same.sum() > 15
    torch.testing.assert_close(layer(x).double()[same], expected[same], rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("sizes", SIZES[:2] + SIZES[4:5])
def test_autocast_multiplies_in_half_precision_and_returns_the_dtype_of_the_tokens(sizes):
    """Parameters and their gradients stay float32; routing differs nowhere for these tokens."""
    layer = _layer(**sizes)
    x = torch.randn(4, sizes["dim"])
    expected = layer(x)
    gradients = torch.autograd.grad(expected.square().sum(), list(layer.parameters()))
    choices = layer.choices
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = layer(x)
    assert torch.equal(layer.choices, choices)
    assert got.dtype == torch.float32
    assert not torch.equal(got, expected)
    torch.testing.assert_close(got, expected, rtol=3e-2, atol=3e-2)
    for a, b in zip(
        torch.autograd.grad(got.square().sum(), list(layer.parameters())), gradients, strict=True
    ):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=6e-2, atol=6e-2)


@pytest.mark.parametrize("shape", [(0, 8), (0, 4, 8), (3, 0, 8)])
def test_no_tokens_give_no_output_and_zero_gradients(shape):
    layer = _layer(dim=8, hidden_dim=8, num_experts=4, top_k=2, shared_expert_dim=8)
    x = torch.randn(shape, requires_grad=True)
    out = layer(x)
    out.sum().backward()
    assert out.shape == shape
    assert x.grad.shape == shape
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name
    assert layer.tokens_per_expert.tolist() == [0, 0, 0, 0]


def test_an_expert_without_tokens_gets_zeros_not_none():
    layer = _layer(dim=8, hidden_dim=8, num_experts=4, top_k=1)
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(4, 8) * 5)
    x = torch.zeros(6, 8)
    x[:, 2] = torch.rand(6) + 0.5
    _compare(layer, x)
    assert layer.tokens_per_expert.tolist() == [0, 0, 6, 0]
    assert layer.experts.gate.weight.grad[2].any()
    assert not layer.experts.gate.weight.grad[[0, 1, 3]].any()


@pytest.mark.parametrize("num_experts", [6, 64])
def test_equal_scores_go_to_the_lower_numbers(num_experts):
    """With 64 experts `torch.topk`, and a sort that is not stable, choose others."""
    router = TopKRouter(4, num_experts, 3)
    with torch.no_grad():
        router.weight.fill_(1.0)
    weights, choices = router(torch.randn(5, 4))
    assert choices.tolist() == [[0, 1, 2]] * 5
    torch.testing.assert_close(weights, torch.full((5, 3), 1 / 3))


@pytest.mark.parametrize("features", [(8, 12), (5, 7)])
@pytest.mark.parametrize("counts", [[3, 0, 4], [0, 0, 7], [7, 0, 0], [0, 0, 0], [1, 1, 5]])
def test_grouped_linear_is_one_matmul_per_group(features, counts):
    """Also with the stride-0 gradient that `sum` sends back."""
    torch.manual_seed(0)
    linear = GroupedLinear(3, *features)
    rows = torch.randn(sum(counts), features[0], requires_grad=True)
    out = linear(rows, torch.tensor(counts))
    pieces = [piece @ linear.weight[g] for g, piece in enumerate(rows.split(counts))]
    expected = torch.cat(pieces)
    torch.testing.assert_close(out, expected)
    for got, wanted in zip(
        torch.autograd.grad(out.sum(), (rows, linear.weight)),
        torch.autograd.grad(expected.sum(), (rows, linear.weight)),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_changes_nothing(reentrant):
    layer = _layer(dim=8, hidden_dim=8, num_experts=4, top_k=2)
    x = torch.randn(6, 8, requires_grad=True)
    plain = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    (checkpoint(layer, x, use_reentrant=reentrant).square().sum()).backward()
    for got, wanted in zip([x.grad, *(p.grad for p in layer.parameters())], plain, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_eval_and_no_grad_give_the_same_value():
    layer = _layer(dim=8, hidden_dim=8, num_experts=4, top_k=2)
    x = torch.randn(6, 8)
    expected = layer(x).detach()
    with torch.no_grad():
        assert torch.equal(layer.eval()(x), expected)
    with torch.inference_mode():
        assert torch.equal(layer(x), expected)


def test_two_runs_give_the_same_bits():
    layer = _layer(dim=8, hidden_dim=8, num_experts=4, top_k=3)
    x = torch.randn(50, 8)
    runs = [torch.autograd.grad(layer(x).square().sum(), list(layer.parameters())) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


# torch's tracer makes an instance of the class, which is what the warning tells users not to do.
@pytest.mark.filterwarnings(
    "ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"
)
@pytest.mark.parametrize("backend", only(["aot_eager"], ["eager", "aot_eager"]))
def test_the_layer_compiles_as_one_graph(backend):
    layer = _layer(dim=8, hidden_dim=8, num_experts=4, top_k=2)
    x = torch.randn(6, 8)
    expected = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    got = torch.autograd.grad(compiled(x).square().sum(), list(layer.parameters()))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_statistics_are_no_part_of_the_state():
    layer = _layer(dim=8, hidden_dim=8, num_experts=4, top_k=2)
    layer(torch.randn(6, 8))
    assert layer.tokens_per_expert.sum() == 12
    assert layer.choices.shape == (6, 2)
    assert sorted(layer.state_dict()) == [
        "experts.down.weight",
        "experts.gate.weight",
        "experts.up.weight",
        "router.weight",
    ]


def test_wrong_sizes_and_dtypes_are_refused():
    with pytest.raises(
        ConfigError, match="top_k=5 of 4 experts has no meaning; choose 1 <= top_k <= num_experts"
    ):
        MoELayer(8, 8, 4, 5)
    with pytest.raises(ConfigError, match="MoELayer takes rows of length 8, got a tensor of shape"):
        _layer(dim=8, hidden_dim=8, num_experts=4, top_k=2)(torch.randn(3, 7))
    for part in (_layer(dim=8, hidden_dim=8, num_experts=4, top_k=2), GroupedLinear(2, 8, 8)):
        rest = (torch.tensor([1, 2]),) if isinstance(part, GroupedLinear) else ()
        with pytest.raises(ConfigError, match=r"torch.bfloat16, and the weight of .* MixedPrecisionPolicy"):
            part.double()(torch.randn(3, 8, dtype=torch.bfloat16), *rest)
    with pytest.raises(ConfigError, match="is no whole number above 0"):
        GroupedLinear(0, 4, 4)
