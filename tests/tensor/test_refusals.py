"""A refusal names the op, each operand with its layout, why, and a fix; every fix that it names works."""

import re

import pytest
import torch
from torch.nn import functional

import shardwright as sw
from shardwright.errors import (
    ImplicitRedistributionError,
    LayoutError,
    ParallelError,
    PlanError,
    RuleError,
    SpmdError,
)
from shardwright.parallel import parallelize_context, parallelize_fsdp, parallelize_replicate
from shardwright.testing.meshes import rank_mesh

from .cases import close, full, place

R, P = sw.Replicate(), sw.Partial()
FIX = re.compile(r"(?:fix \(checked\)|and|or): +(\S+?)\.(redistribute\(.*?\))(?:  |$)", re.MULTILINE)

# Per case: the call, and per operand its name in the refusal, its full value and its placements on (dp, tp).
CALLS = {
    "add, cut differently": (
        torch.ops.aten.add.Tensor,
        {"self": (full(8, 4), (R, sw.Shard(0))), "other": (full(8, 4), (R, sw.Shard(1)))},
    ),
    "in place, into a finished value": (
        torch.ops.aten.add_.Tensor,
        {"self": (full(8, 4), (R, R)), "other": (full(8, 4), (R, P))},
    ),
    "relu of a pending sum": (torch.ops.aten.relu.default, {"self": (full(512, 256), (R, P))}),
    "mm": (
        torch.ops.aten.mm.default,
        {"self": (full(8, 4), (sw.Shard(0), sw.Shard(1))), "mat2": (full(4, 6), (sw.Shard(1), sw.Shard(1)))},
    ),
    "softmax over a cut dim": (
        lambda x: torch.ops.aten._softmax.default(x, 1, False),
        {"self": (full(8, 4), (R, sw.Shard(1)))},
    ),
    "a whole matrix": (
        lambda x: torch.ops.aten.linalg_inv_ex.default(x)[0],
        {"A": (full(4, 4), (R, sw.Shard(0)))},
    ),
    "windows": (
        functional.conv2d,
        {"input": (full(2, 3, 8, 8), (R, sw.Shard(2))), "weight": (full(4, 3, 3, 3), (R, R))},
    ),
    "a list": (
        lambda x, y: torch.ops.aten.cat.default([x, y]),
        {"tensors[0]": (full(8, 4), (R, sw.Shard(0))), "tensors[1]": (full(8, 4), (R, sw.Shard(1)))},
    ),
    "what a mask chooses": (
        lambda x, mask: torch.ops.aten.index.Tensor(x, [mask]),
        {"self": (full(8, 4), (R, P)), "indices[0]": (full(8, 4) > 0, (R, sw.Shard(0)))},
    ),
    "a shape that depends on the data": (torch.nonzero, {"self": (full(8, 4), (R, sw.Shard(0)))}),
    "another order": (
        torch.ops.aten.add.Tensor,
        {"self": (full(8, 4), (R, sw.Shard(0))), "other": (full(8, 4), (sw.Shard(0), sw.Shard(0)))},
    ),
}


def _refused(name):
    """The text; then each fix that it names, as it stands there, and the call without communication."""
    op, operands = CALLS[name]
    tensors = {key: place(value, placements) for key, (value, placements) in operands.items()}
    with sw.explicit(), pytest.raises(ImplicitRedistributionError) as caught:
        op(*tensors.values())
    text = str(caught.value)
    fixed = dict(tensors)
    words = {"Shard": sw.Shard, "Replicate": sw.Replicate, "Partial": sw.Partial}
    for operand, verb in FIX.findall(text):
        fixed[operand] = eval(f"x.{verb}", {"x": tensors[operand], **words})  # noqa: S307 - our text
    assert fixed != {}
    assert any(fixed[key] is not tensors[key] for key in fixed), text
    plain = [value.clone() for value, _ in operands.values()]
    with sw.explicit():
        got = op(*fixed.values())
    close(got, op(*plain), name)
    return text


@pytest.mark.parametrize("name", CALLS)
def test_the_fix_that_is_named_works(ranks, name):
    text = ranks(4, _refused, name)[0]
    for operand in CALLS[name][1]:
        assert re.search(rf"^  {re.escape(operand)} +[a-z]+\d*\[", text, re.MULTILINE), text


TEXTS = {
    "add, cut differently": """\
aten::add.Tensor: needs an implicit redistribution (explicit mode allows none): \
[*... -> ...] dp: whole; tp: cut ...-1 as S(0)
  self   f32[8@tp, 4]
  other  f32[8, 4@tp]   <- must become f32[8@tp, 4]: tp cuts it in another way
  fix (checked):  other.redistribute({"tp": Shard(0)})     128 B over all ranks""",
    "in place, into a finished value": """\
aten::add_.Tensor: needs an implicit redistribution (explicit mode allows none): \
[*... -> ...] dp: whole; tp: whole
  self   f32[8, 4]
  other  f32[8, 4] {tp: Partial(sum)}   <- must become f32[8, 4]: \
not finished: each rank of tp holds only a term of it
  fix (checked):  other.redistribute({"tp": Replicate()})     512 B over all ranks""",
    "mm": """\
aten::mm: needs an implicit redistribution (explicit mode allows none): \
[m k, k n -> m n] dp: cut m as S(0); tp: cut n as S(0)
  self  f32[8@dp, 4@tp]   <- must become f32[8@dp, 4]: the op needs it whole where tp cuts it
  mat2  f32[4, 6@(dp, tp)]   <- must become f32[4, 6@tp]: the op needs it whole where dp cuts it
  fix (checked):  self.redistribute({"tp": Replicate()})     128 B over all ranks
            and:  mat2.redistribute({"dp": Replicate()})     144 B over all ranks""",
    "a shape that depends on the data": """\
aten::nonzero: needs an implicit redistribution (explicit mode allows none): \
no rule; every operand is made whole
  self  f32[8@tp, 4]   <- must become f32[8, 4]: the op needs it whole where tp cuts it
  fix (checked):  self.redistribute({"tp": Replicate()})     256 B over all ranks""",
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_of_a_refusal(ranks, name):
    assert ranks(4, _refused, name)[0] == TEXTS[name]


def _text(function, kind):
    with pytest.raises(kind) as caught:
        function()
    return str(caught.value)


def _others():
    grid = rank_mesh((2, 2), ("dp", "tp"))
    line = rank_mesh((4,), ("all",))
    x = sw.distribute_tensor(full(8, 4), grid, [R, sw.Shard(0)])
    y = sw.distribute_tensor(full(8, 4), line, [sw.Shard(0)])
    words = {"self": x, "other": y, "Shard": sw.Shard, "Replicate": sw.Replicate}
    meshes = _text(lambda: x + y, RuleError)
    for name, verb in FIX.findall(meshes):
        with sw.explicit():
            moved = eval(f"{name}.{verb}", words)  # noqa: S307 - our text
            close(x + moved, 2 * full(8, 4))
    whole = sw.distribute_tensor(torch.ones(8, 4, dtype=torch.int64), grid, [R, R])
    return {
        "meshes": meshes,
        "plain": _text(lambda: eval("x + y", {"x": x, "y": full(8, 4)}), RuleError),  # noqa: S307 - no module
        "plain weight": _text(lambda: functional.linear(x, full(6, 4)), RuleError),
        "whole": _text(
            lambda: sw.DTensor.from_local(full(8, 4), grid, [R, sw.Shard(0)], shape=(8, 4), stride=(4, 1)),
            LayoutError,
        ),
        "part": _text(
            lambda: sw.DTensor.from_local(full(3, 4), grid, [R, sw.Shard(0)], shape=(8, 4), stride=(4, 1)),
            LayoutError,
        ),
        "nested": _text(lambda: sw.DTensor.from_local(x, grid, [R, R]), LayoutError),
        "average": _text(lambda: whole.redistribute({"tp": sw.Partial("avg")}), PlanError),
    }


def test_the_texts_of_other_refusals(ranks):
    texts = ranks(4, _others)[0]
    assert texts["meshes"] == (
        "aten::add.Tensor: the operands live on different meshes\n"
        "  self   f32[8@tp, 4] on MeshShape(dp=2, tp=2)\n"
        "  other  f32[8@all, 4] on MeshShape(all=4)   <- on another mesh\n"
        '  fix (checked):  other.redistribute(self.device_mesh, {"dp": Replicate(), "tp": Shard(0)})'
        "     192 B over all ranks"
    )
    assert re.sub("  +", "  ", texts["plain"]) == (
        "add: a plain tensor of shape (8, 4) beside a DTensor: where does it live?\n"
        "  operand 0  f32[8@tp, 4]\n"
        "  operand 1  plain tensor of shape (8, 4)  <- the whole tensor, or this rank's part of one?\n"
        '  fix (checked): sw.distribute_tensor(operand_1, mesh, {"dp": Replicate(), "tp": Shard(0)})'
        "  if every rank (or rank 0) has the whole tensor\n"
        "  or: sw.DTensor.from_local(operand_1, mesh, placements)  if each rank has its own part\n"
        "  or: with sw.spmd(mesh): ...  if the block is a single-device program"
    )
    assert '(operand_1, mesh, {"dp": Replicate(), "tp": Replicate()})' in texts["plain weight"]
    assert texts["whole"].endswith(
        "fix (checked): sw.distribute_tensor(local, mesh, placements): this is the whole tensor"
    )
    assert texts["part"].endswith("fix (checked here): shape=(6, 4), if every rank has a part of this shape")
    assert texts["nested"] == (
        "from_local takes the plain tensor of this rank, and was given a DTensor\n"
        "  fix: redistribute moves a DTensor; to_local() is this rank's part of it"
    )
    assert texts["average"] == (
        "Partial(avg) on axis 'tp' cannot be a target: it has no meaning for torch.int64; "
        'fix (checked): Replicate() or Partial("sum") or Partial("max") or Partial("bor")'
    )


def _other_things():
    """Law: what is no tensor, mesh, plan or setting is refused by name, and nothing is changed."""
    mesh, cut = rank_mesh((1,), ("tp",)), [sw.Shard(0)]
    x, module = sw.distribute_tensor(torch.ones(4, 2), mesh, cut), torch.nn.Linear(2, 2)
    before = dict(module.named_parameters())
    for call, error, said in (
        (lambda: sw.distribute_tensor([1, 2], mesh, cut), LayoutError, "given a list: torch.as_tensor"),
        (lambda: sw.distribute_tensor(module, mesh), LayoutError, "given a Linear: sw.distribute_module"),
        (
            lambda: sw.distribute_tensor(torch.ones(4), cut, mesh),
            LayoutError,
            "a list stands where the device",
        ),
        (lambda: sw.redistribute_many(x, placements=cut), LayoutError, "list or dict of DTensors, got one"),
        (lambda: sw.distribute_module(x, mesh), ParallelError, "places a module, got DTensor"),
        (lambda: sw.distribute_module(module, mesh, cut), ParallelError, "takes {pattern: placements}"),
        (lambda: sw.spmd(mesh, check="always"), SpmdError, '"first" .the default., True .always. or False'),
        (lambda: parallelize_context(module, mesh, cut=["x"]), ParallelError, "give {argument: dim"),
    ):
        with pytest.raises(error, match=said):
            call()
    assert dict(module.named_parameters()) == before
    assert str(sw.explain("aten::exp", x)) == str(sw.explain("aten::exp", sw.layout_of(x)))


def test_other_things_are_refused_by_name(ranks):
    ranks(1, _other_things)


def _sparse():
    """Law: a sparse tensor has no placement, and what would make one says so."""
    mesh = rank_mesh((1,), ("tp",))
    x = sw.distribute_tensor(torch.eye(4), mesh, [sw.Shard(0)])
    table = torch.nn.Embedding(6, 4, sparse=True)
    before = table.weight
    with pytest.raises(LayoutError, match=r"from_local takes a dense tensor, was given a torch\.sparse_coo"):
        sw.DTensor.from_local(torch.eye(4).to_sparse(), mesh, [sw.Shard(0)])
    for verb in (parallelize_replicate, parallelize_fsdp):
        with pytest.raises(ParallelError, match="weight: the gradient of a Embedding with sparse=True"):
            verb(table, mesh)
    assert table.weight is before
    sw.distribute_module(table, mesh, {"weight": {"tp": sw.Shard(1)}})
    with sw.spmd(mesh):
        y = table(torch.tensor([1, 2, 2]))
    for call in (x.to_sparse, x.to_sparse_csr, lambda: torch.sparse.softmax(x, 0), y.sum().backward):
        with pytest.raises(RuleError, match=r"sparse.*the parts of a DTensor are dense"):
            call()


def test_sparse_tensors_are_refused(ranks):
    ranks(1, _sparse)
