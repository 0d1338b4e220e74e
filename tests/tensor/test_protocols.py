"""What torch and Python do with tensors: copies, pickles, modes, transforms, the compiler, checkpoints."""

import copy
import io
import pickle
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.testing.meshes import rank_mesh
from tests.tiers import only

from .cases import close, full, layouts_of, mesh, place


def _copies():
    for layout in layouts_of(2):
        d = place(full(5, 7), layout, requires_grad=True)
        twin = copy.deepcopy(d)
        assert type(twin) is sw.DTensor
        assert sw.layout_of(twin) == sw.layout_of(d)
        assert twin.requires_grad
        with torch.no_grad():
            twin.zero_()
        close(d.detach(), full(5, 7))
        for like in (torch.zeros_like, torch.empty_like, torch.ones_like):
            made = like(d)
            assert isinstance(made, sw.DTensor)
            assert made.shape == d.shape
        close(torch.ones_like(d), torch.ones(5, 7))
        close(d.new_zeros(3), torch.zeros(3))
        close(torch.full_like(d.detach(), 2.5), torch.full((5, 7), 2.5))
        assert isinstance(nn.Parameter(d.detach()), sw.DTensor)
        assert "DTensor(" in repr(d)
        assert "f32[" in repr(d)
        layout_again = pickle.loads(pickle.dumps(sw.layout_of(d)))
        assert layout_again == sw.layout_of(d)
        assert hash(layout_again) == hash(sw.layout_of(d))
        assert pickle.loads(pickle.dumps(d.placements)) == d.placements
        for again in (copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
            assert again(d.detach()[2:, 1:]).storage_offset() == torch.ones(5, 7)[2:, 1:].storage_offset()


def test_copies_and_pickled_layouts(ranks):
    ranks(2, _copies)


_SEEN = {
    "rows": lambda x: x[1:],
    "transposed": lambda x: x.t(),
    "wider": lambda x: x[:, None].expand(4, 2, 6),
    "itself": lambda x: x,
}


def _copied_together(way):
    """What shares memory shares it in its copies, and a write into one of them reaches no original."""
    for placement in (sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Interleaved(1, 2)):
        for name, view in _SEEN.items():
            plain = full(4, 6)
            d = place(plain, [placement])
            twin, seen = way((d, view(d)))
            wanted, wanted_seen = way((plain, view(plain)))
            assert sw.layout_of(seen) == sw.layout_of(view(d)), (placement, name)
            assert seen.stride() == wanted_seen.stride()
            for x in (twin, wanted):
                x.mul_(10)
            close(twin, wanted)
            close(seen, wanted_seen)
            close(d, plain)


def _written_and_read(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", [copy.deepcopy, _written_and_read])
def test_views_that_are_copied_with_their_base_share_its_memory(ranks, way):
    ranks(2, _copied_together, way)


def _numbers_in_text():
    for plain in (torch.tensor(3), torch.tensor(1.25), torch.tensor(True)):
        d = place(plain, [sw.Replicate()])
        assert f"expert_{d}" == f"expert_{plain}"
        assert f"{d}, {d:.2f}" == f"{plain}, {plain:.2f}"
    term = sw.DTensor.from_local(torch.tensor(1.5), mesh(), [sw.Partial("sum")])
    with sw.trace() as t:
        assert "Partial(sum)" in f"{term}"  # as one rank prints it for itself
    assert not t.collectives
    assert f"{term:.1f}" == "3.0"


def test_a_number_in_a_text_is_that_number(ranks):
    """Names of layers are made so (`expert_{i}`, in Switch Transformers)."""
    ranks(2, _numbers_in_text)


def _saved():
    """torch.save of a DTensor and of a module's state, loaded on the same mesh."""
    d = place(full(5, 7), [sw.Shard(0)])
    buffer = io.BytesIO()
    torch.save({"d": d, "n": 3}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert type(loaded["d"]) is sw.DTensor
    assert sw.layout_of(loaded["d"]) == sw.layout_of(d)
    assert torch.equal(loaded["d"].to_local(), d.to_local())
    close(loaded["d"], full(5, 7))


def test_torch_save_and_load(ranks):
    ranks(2, _saved)


def _modes():
    layer = nn.Linear(7, 3)
    x = full(5, 7)
    wanted = layer(x).detach()
    placed = sw.distribute_module(copy.deepcopy(layer), mesh())
    for batch in layouts_of(2):
        with torch.inference_mode():
            d = place(x, batch)
            out = placed(d)
            assert out.is_inference()
            close(out.clone(), wanted)
            out.add_(1)
            close(out, wanted + 1)
        with torch.no_grad():
            out = placed(place(x, batch))
            assert not out.requires_grad
            close(out, wanted)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = placed(place(x, batch))
            assert out.dtype == torch.bfloat16
            torch.testing.assert_close(out.full_tensor().float(), wanted, rtol=0.05, atol=0.05)


def test_inference_mode_no_grad_and_autocast(ranks):
    ranks(2, _modes)


def _higher_order():
    """A second derivative, and the gradient with respect to an intermediate DTensor."""
    x = full(4, 3)
    plain = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(plain.pow(3).sum(), plain, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), plain)
    for layout in layouts_of(2):
        d = place(x, layout, requires_grad=True)
        (ours,) = torch.autograd.grad(d.pow(3).sum(), d, create_graph=True)
        close(ours.detach(), first.detach())
        (again,) = torch.autograd.grad(ours.square().sum(), d)
        close(again, second)
    d = place(x, [sw.Shard(0)], requires_grad=True)
    middle = d * 2
    middle.retain_grad()
    middle.exp().sum().backward()
    close(middle.grad, (2 * x).exp())
    moved = place(x, [sw.Shard(0)], requires_grad=True)
    (g,) = torch.autograd.grad(moved.redistribute({"tp": sw.Shard(1)}).pow(3).sum(), moved, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), moved)
    close(h, 6 * x)


def test_second_derivatives(ranks):
    ranks(2, _higher_order)


def _checkpointing():
    x, w = full(5, 7), full(7, 7, seed=1)

    def block(a, b):
        return torch.nn.functional.dropout((a @ b).relu(), 0.5) @ b

    plain = w.clone().requires_grad_()
    torch.manual_seed(1)
    block(x, plain).sum().backward()
    for reentrant in (True, False):
        d = place(x, [sw.Shard(0)], requires_grad=True)
        dw = place(w, [sw.Shard(1)], requires_grad=True)
        torch.manual_seed(1)
        checkpoint(block, d, dw, use_reentrant=reentrant).sum().backward()
        close(dw.grad, plain.grad)


def test_activation_checkpointing_with_dropout(ranks):
    ranks(2, _checkpointing)


def _vmap():
    x = full(4, 6)
    d = place(x, [sw.Shard(1)])
    close(torch.func.vmap(lambda row: (row * 2).exp())(d), (x * 2).exp())
    close(torch.func.vmap(lambda row: row.sum())(d), x.sum(1))
    close(torch.func.vmap(torch.dot)(d, d), (x * x).sum(1))


def test_vmap(ranks):
    ranks(2, _vmap)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))


def _compiles(backend):
    warnings.simplefilter("ignore")  # torch's own, while it traces
    torch._dynamo.reset()
    torch.manual_seed(0)
    grid = rank_mesh((2,), ("tp",))
    plain = Mlp()
    one = copy.deepcopy(plain)
    x = full(3, 4)
    one(x).square().sum().backward()
    cut = {"up.*": {"tp": sw.Shard(0)}, "down.weight": {"tp": sw.Shard(1)}}
    model = sw.distribute_module(plain, grid, cut)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for times in (1, 2):
        d = place(x, [sw.Replicate()])
        out = compiled(d)
        close(out.detach(), one(x).detach())
        out.square().sum().backward()
        for (n, p), q in zip(model.named_parameters(), one.parameters(), strict=True):
            close(p.grad, times * q.grad, n)
            assert isinstance(p.grad, sw.DTensor)
    with torch.no_grad():
        close(compiled(d), one(x))


@pytest.mark.parametrize("backend", only(["aot_eager"], ["eager", "aot_eager", "inductor"]))
def test_a_tensor_parallel_mlp_compiles_into_one_graph(ranks, backend):
    ranks(2, _compiles, backend, timeout=170)


def _saved_by_torch(folder):
    """torch's distributed checkpoint: written in one layout, read in others, uneven and tp first."""
    grid = mesh()
    x, y = full(7, 5), full(3, seed=1)
    source = {
        "x": sw.distribute_tensor(x, grid, [sw.Shard(0), sw.Shard(0)], order=("tp", "dp")),
        "y": sw.distribute_tensor(y, grid, [sw.Shard(0), sw.Replicate()]),
        "z": sw.distribute_tensor(x, grid, [sw.Shard(1), sw.Shard(0)]),
    }
    dcp.save(source, checkpoint_id=folder)
    for placements, order in [
        ([sw.Replicate(), sw.Replicate()], None),
        ([sw.Shard(0), sw.Shard(0)], None),
        ([sw.Shard(0), sw.Shard(0)], ("tp", "dp")),
        ([sw.Shard(0), sw.Replicate()], None),
    ]:
        target = {
            name: sw.distribute_tensor(torch.zeros_like(v), grid, placements, order=order)
            for name, v in (("x", x), ("y", y), ("z", x))
        }
        dcp.load(target, checkpoint_id=folder)
        assert torch.equal(target["x"].full_tensor(), x)
        assert torch.equal(target["y"].full_tensor(), y)
        assert torch.equal(target["z"].full_tensor(), x)
    dist.barrier()


@pytest.mark.parametrize("world", only([4], [4, 6]))
def test_torchs_distributed_checkpoint_goes_round(ranks, world):
    with tempfile.TemporaryDirectory() as folder:
        ranks(world, _saved_by_torch, folder)
        assert list(Path(folder).iterdir())


def _pending_is_not_saved(folder):
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.save({"p": place(full(4, 4), [sw.Partial("sum")])}, checkpoint_id=folder)
    assert "not finished" in str(caught.value.failures)


def test_a_pending_value_is_not_saved(ranks, tmp_path):
    ranks(2, _pending_is_not_saved, str(tmp_path))
