"""Where the stream between blocks is gathered and cut; torch's own block for a loss of cut logits."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

import shardwright as sw
from shardwright.errors import ParallelError, RuleError
from shardwright.parallel import parallelize_tensor
from shardwright.parallel.tensor import borders
from shardwright.parallel.tensor.borders import Border
from shardwright.parallel.tensor.said import spoken
from shardwright.parallel.tensor.sequence import read_blocks
from shardwright.testing.meshes import rank_mesh
from tests.tiers import one_in


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)


class Block(nn.Module):
    """Norms, a part, and two matrices that the block multiplies itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.drop = nn.LayerNorm(4), Mlp(), nn.Dropout()
        self.more_norms = nn.RMSNorm(4)
        self.wide, self.narrow = nn.Linear(4, 6), nn.Linear(6, 4)


class Nested(nn.Module):
    """A block whose parts stand in a list, each with a norm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList([Block()])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(8, 4), nn.Embedding(8, 4)
        self.blocks, self.norm = nn.ModuleList([Block(), Block()]), nn.LayerNorm(4)
        self.more, self.head = nn.ModuleList([Nested()]), nn.Linear(4, 8)


PART, INTO, OUT_OF = Border(gathers=True, leaves=True), Border(gathers=True), Border(leaves=True)
CUTS, AS_IT_IS = Border(cuts=True), Border()


class Adapted(nn.Module):
    """What stands in place of a matrix, by the name that PEFT gives it."""

    def __init__(self, base) -> None:
        super().__init__()
        self.base_layer = base


def _adapted():
    model = Model()
    for name in ("wide", "narrow"):
        setattr(model.blocks[0], name, Adapted(getattr(model.blocks[0], name)))
    return model


def _borders(words, model=None):
    model = Model() if model is None else model
    said = spoken(model, words, strict=True)
    placements = {
        "colwise": sw.Shard(0), "rowwise": sw.Shard(1), "sequence_parallel": sw.Replicate(),
        "embedding_rowwise": sw.Shard(0),
    }  # fmt: skip
    cuts = {each.name: placements[words[each.pattern]] for each in said.parameters}
    names = {module: name for name, module in model.named_modules()}
    return {names[module]: border for module, border in read_blocks(model, said, cuts).items()}


def test_parts_gather_and_leave_and_so_do_matrices_of_the_block_itself():
    words = {"blocks.0.mlp.up": "colwise", "blocks.0.wide": "colwise", "blocks.0.narrow": "rowwise"}
    found = {
        "blocks.0": CUTS, "blocks.0.mlp": PART, "blocks.0.wide": INTO, "blocks.0.narrow": OUT_OF,
        "blocks.1": PART,  # whole, but the stream goes through it
        "head": INTO,
    }  # fmt: skip
    found |= {f"more.0.layer.0.{name}": INTO for name in ("mlp.up", "mlp.down", "wide", "narrow")}
    assert _borders(words) == found
    assert _borders(words, _adapted()) == found  # by its wrapper
    begun = _borders({**words, "table": "embedding_rowwise"})
    assert begun == {**found, "table": OUT_OF, "positions": OUT_OF, "blocks.0": AS_IT_IS}


def test_a_head_reads_all_tokens_and_a_list_of_parts_is_a_list_of_blocks():
    layer = "more.0.layer.0"
    words = {f"{layer}.mlp.up": "colwise", f"{layer}.wide": "colwise", f"{layer}.narrow": "rowwise"}
    found = _borders({**words, "head": "colwise"})
    assert found["head"] == INTO
    assert {name for name in found if name.startswith("more")} == {
        "more.0", "more.0.layer.0.mlp", "more.0.layer.0.wide", "more.0.layer.0.narrow",
    }  # fmt: skip


def test_parts_with_fewer_norms_stand_side_by_side_unless_a_word_says_where_the_stream_is_cut():
    assert _borders({"blocks.0.mlp.up": "colwise"})["blocks.0"] == PART
    found = _borders({"blocks.0.mlp.up": "colwise", "blocks.0.norm": "sequence_parallel"})
    assert found["blocks.0.norm"] == Border(cuts=True)
    assert found["blocks.0.mlp"] == PART
    assert found["blocks.0"] == CUTS


def test_a_word_cuts_what_a_module_reads():
    found = _borders({"blocks.0.mlp.up": "colwise", "norm": "sequence_parallel"})
    assert found["norm"] == Border(cuts=True)


def _loss():
    """torch's `loss_parallel` and ours say the same: the rules serve the loss inside as outside."""
    mesh = rank_mesh((2,), ("tp",))
    full, labels = torch.randn(6, 41, generator=torch.Generator().manual_seed(1)), torch.arange(6)
    plain = full.clone().requires_grad_()
    functional.cross_entropy(plain, labels).backward()
    logits = sw.distribute_tensor(full, mesh, [sw.Shard(1)]).requires_grad_()
    with loss_parallel(), sw.spmd(mesh):
        loss = functional.cross_entropy(logits, labels)
        loss.backward()
    torch.testing.assert_close(loss.detach().full_tensor(), functional.cross_entropy(full, labels))
    torch.testing.assert_close(logits.grad.full_tensor(), plain.grad)
    assert logits.grad.placements == (sw.Shard(1),)


def test_torchs_loss_parallel_works_on_our_logits(ranks):
    ranks(2, _loss)


def _plain_labels():
    """Law: inside `loss_parallel` plain labels and weights beside whole rows are the same everywhere."""
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    source = torch.Generator().manual_seed(1)
    weight = torch.rand(7, generator=source)
    for shape in ((6, 7), (3, 7, 5), (7,)):
        full, classes = torch.randn(shape, generator=source), min(1, len(shape) - 1)
        labels = torch.randint(7, (*shape[:classes], *shape[classes + 1 :]), generator=source)
        plain = full.clone().requires_grad_()
        wanted = functional.cross_entropy(plain, labels, weight)
        wanted.backward()
        logits = sw.distribute_tensor(full, mesh, {"tp": sw.Shard(classes)}).requires_grad_()
        with loss_parallel():
            loss = functional.cross_entropy(logits, labels, weight)
            loss.backward()
            each = functional.cross_entropy(input=logits, target=labels, reduction="none")
        assert loss.placements == each.placements == (sw.Replicate(), sw.Replicate())
        torch.testing.assert_close(loss.to_local(), wanted)
        torch.testing.assert_close(each.to_local(), functional.cross_entropy(full, labels, reduction="none"))
        torch.testing.assert_close(logits.grad.full_tensor(), plain.grad)
        with pytest.raises(RuleError, match="beside a DTensor"):
            functional.cross_entropy(logits, labels, weight)


def _plain_beside_cut_rows():
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    full, labels, weight = torch.randn(6, 7, generator=torch.Generator()), torch.arange(6), torch.rand(7)
    logits = sw.distribute_tensor(full, mesh, {"dp": sw.Shard(0), "tp": sw.Shard(1)})
    where = sw.distribute_tensor(labels, mesh, {"dp": sw.Shard(0)})
    with loss_parallel():
        with pytest.raises(RuleError, match="or this rank's part of one"):
            functional.cross_entropy(logits, labels)
        with pytest.raises(RuleError, match="beside a DTensor"):
            logits + full
        weight = sw.distribute_tensor(weight, mesh).to_local()
        loss = functional.cross_entropy(logits, where, weight)
        added = functional.cross_entropy(logits, where, reduction="sum")
    assert added.placements == (sw.Partial(), sw.Replicate())
    wanted = functional.cross_entropy(logits.full_tensor(), labels, weight)
    torch.testing.assert_close(loss.full_tensor(), wanted)


def test_plain_labels_in_torchs_loss_parallel(ranks):
    ranks(4, _plain_labels)
    ranks(4, _plain_beside_cut_rows)


class _SideBySide(nn.Module):
    """Two parts that read one stream, as in Phi and Cohere; with two norms, as in GPT-NeoX."""

    def __init__(self, norms):
        super().__init__()
        self.norm, self.other = nn.LayerNorm(8), nn.LayerNorm(8) if norms == 2 else None
        self.one, self.two = (nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(2))
        self.use_parallel_residual = norms == 2

    def forward(self, x):
        y = self.norm(x)
        z = y if self.other is None else self.other(x)
        return x + self.one(y) + self.two(z), "no stream"


class _Gated(nn.Module):
    """Matrices of the block itself, of which several read one stream; in evaluation it is written between."""

    def __init__(self, _):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        y = self.norm(x)
        gate = self.gate(y)
        up = self.up(y if self.training else y.mul_(0.5))
        return x + self.down(gate.sigmoid() * up), "no stream"


class _Flat(nn.Module):
    """Its part returns rows and tokens as one dim, as the experts of Llama 4 do."""

    def __init__(self, _):
        super().__init__()
        self.norm, self.part = nn.LayerNorm(8), _Flattens()

    def forward(self, x):
        return x + self.part(self.norm(x))[0].view(x.shape), "no stream"


class _Flattens(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return self.down(self.up(x.flatten(0, 1)).sigmoid()), None


class _Adds(nn.Module):
    """Its part is handed the stream, and adds to it what its matrix makes (BLOOM)."""

    def __init__(self, _):
        super().__init__()
        self.norm, self.part = nn.LayerNorm(8), _AddsItself()

    def forward(self, x):
        return self.part(self.norm(x), x), "no stream"


class _AddsItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x, residual):
        return residual + self.down(self.up(x).sigmoid())


class _NormsBehind(nn.Module):
    """Its part norms the sum of the stream and what its matrix makes (BERT)."""

    def __init__(self, _):
        super().__init__()
        self.part = _NormsItself()

    def forward(self, x):
        return self.part(x), "no stream"


class _NormsItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 12), nn.Linear(12, 8), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x + self.down(self.up(x).sigmoid()))


class _Crosses(nn.Module):
    """A part that reads another stream as well, the same in all blocks, as a decoder does."""

    def __init__(self, _):
        super().__init__()
        self.norm, self.part = nn.LayerNorm(8), _ReadsTwo()

    def forward(self, x, other=None):
        return x + self.part(self.norm(x), other=x if other is None else other), "no stream"


class _ReadsTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x, other):
        return self.down(self.up(x) * self.gate(other).sigmoid())


class _Stack(nn.Module):
    def __init__(self, block, norms):
        super().__init__()
        self.blocks = nn.ModuleList(block(norms) for _ in range(4))

    def forward(self, x):
        first, *others = self.blocks
        beside = (first(x)[0],) if isinstance(first, _Crosses) else ()
        for at, block in enumerate(others if beside else self.blocks):
            x, _ = block(x, *beside[:at])
        self.left = x
        return x.square().sum()


_PLAN = {
    **{f"blocks.*.{part}.{i}": w for part in ("one", "two") for i, w in ((0, "colwise"), (2, "rowwise"))},
    **{f"blocks.*.{part}": w for part, w in (("gate", "colwise"), ("up", "colwise"), ("down", "rowwise"))},
    **{
        f"blocks.*.part.{part}": w
        for part, w in (("up", "colwise"), ("gate", "colwise"), ("down", "rowwise"))
    },
}


def _plan_of(model):
    names = [name.replace(".0", ".*", 1) for name, _ in model.blocks[:1].named_modules(prefix="blocks")]
    return {pattern: word for pattern, word in _PLAN.items() if pattern in names}


def _against_one_device(block, *, norms=1, training=True, sequence=True, tokens=6):
    """What the second step sent; values and gradients are those of one device."""
    mesh = rank_mesh((2,), ("tp",))
    torch.manual_seed(0)
    plain = _Stack(block, norms).train(training)
    ours = copy.deepcopy(plain)
    parallelize_tensor(ours, mesh, _plan_of(ours), sequence_parallel=sequence)
    x = torch.randn(2, tokens, 8)
    for recorded in (True, False, True) if training else (False, False):
        for model in (plain, ours):
            model.zero_grad()
        with torch.set_grad_enabled(recorded):
            expected = plain(x)
            with sw.spmd(mesh, check=False), sw.trace() as sent:
                loss = ours(x)
                if recorded:
                    loss.backward()
        torch.testing.assert_close(loss.full_tensor(), expected)
        if recorded:
            expected.backward()
            for (n, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-4, msg=n)
    if sequence:
        assert ours.left.placements == (sw.Shard(1),)
    return sent


def _gathers_once(training):
    sent = _against_one_device(_Gated, training=training)
    reasons = [event.reason for event in sent.collectives]
    gathers = [each for each in reasons if each.startswith("redistribute:") and "terms" not in each]
    assert len(gathers) == (3 if training else 6), sent  # what the first block reads is whole


@pytest.mark.parametrize("training", [False, True])
def test_matrices_that_read_one_stream_share_what_was_gathered(ranks, training):
    """In evaluation the stream is written for the second, which is handed what was written."""
    ranks(2, _gathers_once, training)


def _sends_no_more(block, norms, tokens):
    whole, cut = (
        _against_one_device(block, norms=norms, sequence=sequence, tokens=tokens)
        for sequence in (False, True)
    )
    assert cut.bytes == whole.bytes, (whole, cut)
    assert len(cut.collectives) == 2 * len(whole.collectives)


_BLOCKS = [_SideBySide, _Flat, _Gated, _Adds, _NormsBehind, _Crosses]
_SENDING = [
    (block, norms, tokens)
    for block, norms in [(_SideBySide, 2), *((block, 1) for block in _BLOCKS)]
    for tokens in (6, 7)
]


@pytest.mark.parametrize(("block", "norms", "tokens"), one_in(2, _SENDING, first=1))
def test_no_block_sends_more_when_the_stream_is_cut(ranks, block, norms, tokens):
    """Halves of all-reduces in place of all-reduces: parts side by side, parts that flatten their rows."""
    ranks(2, _sends_no_more, block, norms, tokens)


def _keeps_shapes():
    mesh = rank_mesh((2,), ("tp",))
    stream, *others = (
        sw.distribute_tensor(torch.randn(shape), mesh) for shape in ((2, 6, 8), (2, 48), (6, 16), (12, 8))
    )
    *kept, cut = (borders._after("tp", nn.Identity(), (stream,), {}, out) for out in others)
    assert all(mine is given for mine, given in zip(kept, others, strict=False))
    assert cut.shape == (12, 8)
    assert cut.placements != stream.placements


def test_what_only_has_as_many_elements_as_the_stream_is_returned_as_it_is(ranks):
    ranks(2, _keeps_shapes)


class _Reads(nn.Module):
    """A table, blocks and a head, of which a plan cuts the blocks alone."""

    def __init__(self, rows, block):
        super().__init__()
        self.table, self.head = nn.Embedding(rows, 8), nn.Linear(8, 16)
        self.blocks = nn.ModuleList(block(1) for _ in range(2))

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x, _ = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def _gradients_of_what_is_whole(rows, sequence, block=_NormsBehind, compiled=False):
    mesh = rank_mesh((2,), ("tp",))
    torch.manual_seed(0)
    plain = _Reads(rows, block)
    ours, tokens = copy.deepcopy(plain), torch.arange(12).view(2, 6)
    plain(tokens).backward()
    parallelize_tensor(ours, mesh, _plan_of(ours), sequence_parallel=sequence)
    called = torch.compile(ours, backend="aot_eager") if compiled else ours
    with sw.spmd(mesh, check=False), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute")  # torch's compiler asks for it
        called(tokens).backward()
    for (n, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-4, msg=n)
    return [p.grad.placements for p in (ours.table.weight, ours.head.weight)]


@pytest.mark.parametrize("sequence", [False, True])
def test_tables_and_heads_that_are_whole_get_whole_gradients_where_tokens_are_fewer(ranks, sequence):
    """Gradients of what tokens look up and read are reduced, and not those of the table and the head."""
    whole, pending = (sw.Replicate(),), (sw.Partial(),)
    assert ranks(2, _gradients_of_what_is_whole, 64, sequence)[0] == [whole, whole]
    small = ranks(2, _gradients_of_what_is_whole, 16, sequence)[0]
    assert small == [whole if sequence else pending, whole]


@pytest.mark.parametrize("block", [_Flat, pytest.param(_SideBySide, marks=pytest.mark.slow)])
def test_a_compiled_model_is_cut_between_its_blocks(ranks, block):
    """Its graph breaks at what is plain in `spmd`; what is called from there on is no graph of its own."""
    assert ranks(2, _gradients_of_what_is_whole, 64, True, block, True)[0] == [(sw.Replicate(),)] * 2


def _refused():
    mesh, model = rank_mesh((2,), ("tp",)), _Reads(64, _NormsBehind)
    plan = {**_plan_of(model), "nothing.weight": {"tp": sw.Shard(0)}}
    with pytest.raises(ParallelError, match="nothing"):
        parallelize_tensor(model, mesh, plan, sequence_parallel=True)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_plan_that_is_refused_hangs_no_hook(ranks):
    ranks(2, _refused)
