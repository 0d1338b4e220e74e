"""What context parallelism refuses, in words that teach; and that a module is then as it was."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.functional import scaled_dot_product_attention

import shardwright as sw
from shardwright.errors import ImplicitRedistributionError, ParallelError, RuleError
from shardwright.grads import GradientSynchronizer
from shardwright.parallel import cut_sequence, parallelize_context, parallelize_fsdp, parallelize_replicate
from shardwright.tensor.attention.asked import asked_here, attention_by
from shardwright.testing import rank_mesh


class Block(nn.Module):
    """Attention among the positions of a batch, and a way to fail."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.mix, self.dropout, self.fails = nn.Linear(8, 24), dropout, False

    def forward(self, x, mask=None):
        if self.fails:
            raise ValueError("in the middle")
        heads = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.mix(x).chunk(3, -1))
        out = scaled_dot_product_attention(*heads, attn_mask=mask, dropout_p=self.dropout)
        return out.transpose(1, 2).flatten(-2)


def _said(call, *args, **kwargs):
    with pytest.raises((ParallelError, RuleError, ImplicitRedistributionError)) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def _state(module):
    return {n: (type(p), p) for n, p in module.named_parameters()}, dict(module._forward_pre_hooks)


def _refused_before_anything_changes():
    line, grid = rank_mesh((4,), ("cp",)), rank_mesh((2, 2), ("dp", "cp"))
    module, found = Block(), []
    before = _state(module)
    for call in (
        lambda: parallelize_context(module, grid),
        lambda: parallelize_context(module, line, attention="rings"),
        lambda: parallelize_context(module, line, output="plain"),
        lambda: parallelize_context(module, line, cut={"tokens": 1}),
        lambda: parallelize_context(module, line, cut={"x": "a"}),
        lambda: parallelize_context(module, line, placement="ZigZag"),
    ):
        found.append(_said(call))
        assert _state(module) == before
    sharded = parallelize_fsdp(Block(), grid["dp"])
    kept = _state(sharded)
    found.append(_said(parallelize_context, sharded, grid["cp"]))
    assert _state(sharded) == kept
    parallelize_context(module, line)
    found.append(_said(parallelize_context, nn.Sequential(module), line))
    return found


def test_what_cannot_be_placed_is_refused_before_anything_is_changed(ranks):
    several, way, output, argument, dim, placement, sharded, twice = ranks(
        4, _refused_before_anything_changes
    )[0]
    assert "takes one axis, got ('dp', 'cp'); slice the mesh" in several
    assert "attention='rings'; there are 'auto', 'ring', 'all_to_all'" in way
    assert "output='plain'; there are 'cut', 'whole'" in output
    assert "Block.forward takes no argument 'tokens'; it takes x, mask" in argument
    assert "cut['x']='a' is no dim" in dim
    assert "placement='ZigZag' makes no partition of a dim" in placement
    assert "call parallelize_context before parallelize_fsdp" in sharded
    assert "0 computes on sequences that are cut over 'cp' already" in twice


def _parameters_on_different_axes():
    grid = rank_mesh((2, 2), ("cp", "tp"))
    module = nn.Sequential(Block(), nn.Linear(8, 3))
    sw.distribute_module(module[1], grid["tp"], {"weight": {"tp": sw.Shard(0)}})
    before = _state(module)
    said = _said(parallelize_context, module, grid["cp"])
    assert _state(module) == before
    return said


def test_parameters_that_compute_on_different_axes_are_refused(ranks):
    said = ranks(4, _parameters_on_different_axes)[0]
    assert "one program runs on one mesh" in said
    assert "place every parameter on the tensor-parallel axis first" in said


def _rows_first():
    """Replicas over the rows may be placed before: their axis stays local, this one does not."""
    grid = rank_mesh((2, 2), ("dp", "cp"))
    torch.manual_seed(0)
    plain, module = Block(), Block()
    module.load_state_dict(plain.state_dict())
    x = torch.randn(2, 7, 8)
    plain(x).sin().sum().backward()
    parallelize_replicate(module, grid["dp"])
    parallelize_context(module, grid["cp"])
    module(x.chunk(2)[grid.get_local_rank("dp")]).sin().sum().backward()
    GradientSynchronizer(module).synchronize()
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


def test_replicas_over_rows_may_be_placed_before(ranks):
    ranks(4, _rows_first)


def _refused_calls():
    line, found = rank_mesh((4,), ("cp",)), []
    x = torch.randn(2, 6, 8)
    for module, way in ((Block(dropout=0.5), "ring"), (Block(), "all_to_all")):
        parallelize_context(module, line, attention=way)
        found.append(_said(module, x))
    ring = parallelize_context(Block(), line, attention="ring")
    with sw.spmd(line):
        found.append(_said(ring, x, sw.ones(6, 6, device_mesh=line).requires_grad_()))
    found.append(_said(ring))
    found.append(_said(ring, x[0, 0]))
    q = sw.distribute_tensor(torch.randn(1, 2, 8, 4), line, [sw.ZigZag(2)]).requires_grad_()
    with sw.explicit():
        found.append(_said(scaled_dot_product_attention, q, q, q))
        with attention_by("ring"):
            out = scaled_dot_product_attention(q, q, q)
    (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
    return found


def test_a_call_that_no_way_serves_says_what_to_do(ranks):
    dropout, heads, mask, nothing, flat, silent = ranks(4, _refused_calls)[0]
    assert "dropout inside attention is drawn for whole rows" in dropout
    assert "2 heads of keys (of 2) cannot be shared out over 4 ranks" in heads
    assert "attention='ring', which cuts no heads" in heads
    assert "without a gradient of its own" in mask
    assert "no tensor among the arguments (none)" in nothing
    assert "argument 'x' has shape (8,), and no dim 1 for a sequence" in flat
    assert "explicit mode allows no implicit communication" in silent


def _after_an_error():
    """The blocks that a call opens are closed, whatever ends it; the next call is right."""
    line, module = rank_mesh((2,), ("cp",)), Block()
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    wanted = module(x)
    parallelize_context(module, line, attention="ring", src_data_rank=0)
    module.fails = True
    with pytest.raises(ValueError, match="in the middle"):
        module(x)
    assert asked_here().way == "auto"
    assert not torch.overrides._get_current_function_mode_stack()
    module.fails = False
    torch.testing.assert_close(module(x).full_tensor(), wanted.detach())


def test_an_error_in_the_forward_leaves_nothing_behind(ranks):
    ranks(2, _after_an_error)


def _ranks_read_different_batches():
    module = parallelize_context(Block(), rank_mesh((2,), ("cp",)))
    with pytest.raises(sw.errors.SpmdError, match="differs between the ranks"):
        module(torch.randn(2, 6, 8) + torch.distributed.get_rank())


def test_ranks_that_are_given_different_sequences_are_told(ranks):
    ranks(2, _ranks_read_different_batches)


def _a_part_of_a_plain_model():
    """Attention alone is parallel; what is around it is plain, and whole on every rank."""
    line = rank_mesh((2,), ("cp",))
    x = torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 3))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 3))
    parallelize_context(model[1], line, output="whole")
    out, wanted = model(x), plain(x)
    assert type(out) is torch.Tensor
    out.sin().sum().backward()
    wanted.sin().sum().backward()
    torch.testing.assert_close(out, wanted)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        got = mine.grad.full_tensor() if isinstance(mine, sw.DTensor) else mine.grad
        torch.testing.assert_close(got, theirs.grad)


def test_one_submodule_of_a_plain_model(ranks):
    ranks(2, _a_part_of_a_plain_model)


def _a_batch_that_was_cut():
    """The batch is cut by one call; the module takes its parts as they are."""
    line, module = rank_mesh((2,), ("cp",)), Block()
    torch.manual_seed(0)
    batch = {"x": torch.randn(2, 7, 8), "mask": None}
    wanted = module(**batch)
    parallelize_context(module, line)
    placed = cut_sequence(batch, line)
    assert placed["x"].placements == (sw.ZigZag(1),)
    torch.testing.assert_close(module(**placed).full_tensor(), wanted.detach())


def test_a_batch_is_cut_by_one_call(ranks):
    ranks(2, _a_batch_that_was_cut)


def _under_autocast():
    """Attention runs in the type that autocast runs it in on one device; its gradients have the operands'."""
    line = rank_mesh((2,), ("cp",))
    q = torch.randn(1, 2, 6, 4, generator=torch.Generator().manual_seed(0))
    found = []
    for made in (q.clone(), sw.distribute_tensor(q, line, [sw.ZigZag(2)])):
        x = made.requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = scaled_dot_product_attention(x, x, x, is_causal=True)
        out.float().sin().sum().backward()
        found.append([y.full_tensor() if isinstance(y, sw.DTensor) else y for y in (out.detach(), x.grad)])
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


def test_autocast_chooses_the_type(ranks):
    ranks(2, _under_autocast)


def _erased():
    """A replay sends what its recording sent: through the group of the axis, which a program can hold."""
    line = rank_mesh((3,), ("cp",))

    def step(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    found = []
    with attention_by("ring"):
        erased = sw.erase(step)
        for seed in range(4):
            made = torch.Generator().manual_seed(seed)
            plain = [torch.randn(2, h, 13, 4, generator=made).requires_grad_() for h in (4, 2, 2)]
            placed = [sw.distribute_tensor(x.detach(), line, [sw.ZigZag(2)]).requires_grad_() for x in plain]
            step(*plain).sin().sum().backward()
            out = erased(*placed)
            out.sin().sum().backward()
            torch.testing.assert_close(out.full_tensor(), step(*plain))
            for x, y in zip(placed, plain, strict=True):
                torch.testing.assert_close(x.grad.full_tensor(), y.grad)
            found.append(str(erased.report()))
    return found[-1]


def test_an_erased_function_replays_a_ring(ranks):
    assert "not replayed" not in ranks(3, _erased, fresh=True)[0]


def _within_torchs_own():
    line = rank_mesh((2,), ("cp",))
    module = parallelize_context(Block(), line)
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    q = sw.distribute_tensor(torch.randn(2, 2, 8, 4), line, [sw.Shard(2)])
    with context_parallel(line, buffers=[torch.zeros(1, 8)], buffer_seq_dims=[1]):
        called = _said(module, x)
        attention = [
            _said(torch.nn.functional.scaled_dot_product_attention, x, x, x)
            for x in (q, q.redistribute(line, [sw.Replicate()]))
        ]
        assert q._spec.placements == q.placements == (sw.Shard(2),)
        assert q._spec.placements != [sw.Shard(2)]
    buffer = sw.distribute_tensor(torch.randn(2, 8, 8), line, [sw.Replicate()])
    return called, _said(context_parallel(line, buffers=[buffer], buffer_seq_dims=[1]).__enter__), attention


def test_torchs_context_parallel_names_ours(ranks):
    called, buffer, attention = ranks(2, _within_torchs_own, fresh=True)[0]
    assert "a module that parallelize_context placed needs no such block" in called
    assert "shardwright.parallel.cut_sequence(batch, mesh) cuts a batch" in buffer
    for each in attention:
        assert "takes each rank's plain part" in each
        assert "parallelize_context(module, mesh) takes the place of the block" in each


def _compiled():
    """The module, and one inside of it, whose graphs had sent on each rank in an order of its own."""
    mesh, x = rank_mesh((2,), ("cp",)), torch.randn(2, 6, 8)
    module, outer = (parallelize_context(nn.Sequential(Block()), mesh) for _ in range(2))
    outer[0].compile(backend="eager")
    return _said(torch.compile(module, backend="eager"), x), _said(outer, x)


def test_a_compiled_module_is_refused(ranks):
    for said in ranks(2, _compiled, fresh=True)[0]:
        assert "runs as it is, not under torch.compile" in said
