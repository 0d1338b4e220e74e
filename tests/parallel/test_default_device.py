"""Programs for which tensors are made elsewhere by default: `torch.set_default_device` is a user's own.

The default is the device without data, so whatever is made without a device where data is wanted fails; on
one machine it is "cuda" beside state on the CPU, or the other way round.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright import checkpoint
from shardwright.grads import GradientSynchronizer, clip_grad_norm_, global_mean
from shardwright.moe import MoELayer
from shardwright.parallel import (
    Pipeline,
    cut_sequence,
    parallelize_batch_norm,
    parallelize_context,
    parallelize_expert_parallel,
    parallelize_fsdp,
    parallelize_pipeline,
    parallelize_replicate,
    parallelize_tensor,
)
from shardwright.tensor.plain import packed_sequences
from shardwright.testing import rank_mesh


@contextlib.contextmanager
def _elsewhere():
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def _folder():
    found = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(found)
    return found[0]


def _llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes))


def _training():
    mesh, x = rank_mesh((2,), ("dp",)), torch.randn(4, 6)
    for strategy in (parallelize_fsdp, parallelize_replicate):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        alone = copy.deepcopy(model)
        with _elsewhere():
            parallelize_batch_norm(model, mesh)
            strategy(model, mesh)
            synchronizer, optimizer = GradientSynchronizer(model), torch.optim.AdamW(model.parameters())
            for step in range(2):
                with synchronizer.overlapped() if step else contextlib.nullcontext():
                    global_mean(model(x.chunk(2)[dist.get_rank()]).square().sum(), 2, mesh).backward()
                synchronizer.synchronize()
                norm = clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        theirs = torch.optim.AdamW(alone.parameters())
        for _ in range(2):
            (alone(x).square().sum() / 4).backward()
            wanted = nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
            theirs.step()
            theirs.zero_grad()
        torch.testing.assert_close(norm, wanted, rtol=1e-4, atol=1e-5)


def _models():
    mesh, ids = rank_mesh((2,), ("tp",)), torch.randint(0, 32, (2, 8))
    for cut in (False, True):
        model = _llama()
        wanted = copy.deepcopy(model)(input_ids=ids, labels=ids).loss
        with _elsewhere():
            if cut:
                parallelize_context(model, mesh)
                loss = model(**cut_sequence({"input_ids": ids, "labels": ids}, mesh)).loss
            else:
                parallelize_tensor(model, mesh, "auto", sequence_parallel=True)
                with sw.spmd(mesh):
                    loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        torch.testing.assert_close(loss.full_tensor() if isinstance(loss, sw.DTensor) else loss, wanted)


def _experts():
    mesh, x = rank_mesh((1, 2), ("ep_replicate", "ep_shard")), torch.randn(6, 8)
    layer = MoELayer(8, 16, 4, 2)
    wanted = copy.deepcopy(layer)(x)
    with _elsewhere():
        parallelize_expert_parallel(layer, mesh)
        out = layer(x)
        out.sum().backward()
    torch.testing.assert_close(out, wanted)


def _pipelines():
    mesh, x = rank_mesh((2,), ("pp",)), torch.randn(4, 6)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    wanted = copy.deepcopy(model)(x).square().sum()
    with _elsewhere():
        parallelize_pipeline(model, mesh, ["2"])
        pipeline = Pipeline(model, lambda out, _: out.square().sum(), micro_batches=2)
        found = pipeline.step(x)
        clip_grad_norm_(model.parameters(), 1.0)
    torch.testing.assert_close(found, wanted)


def _checkpoints():
    mesh, folder = rank_mesh((2,), ("dp",)), _folder()
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    other, x = copy.deepcopy(model), torch.randn(4, 6)
    with _elsewhere():
        parallelize_fsdp(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        model(x).sum().backward()
        optimizer.step()
        state = {"model": model, "optimizer": optimizer, "step": 3}
        checkpoint.save(f"{folder}/a", state)
        checkpoint.load(f"{folder}/a", state)
        checkpoint.load(f"{folder}/a", state, in_place=True)
        checkpoint.async_save(f"{folder}/b", state).wait()
        checkpoint.verify(f"{folder}/a")
        checkpoint.diff(f"{folder}/a", f"{folder}/b")
        checkpoint.save(f"{folder}/c", state, format="dcp")
        if dist.get_rank() == 0:
            checkpoint.convert(f"{folder}/c", f"{folder}/d")
        dist.barrier()
        checkpoint.load(f"{folder}/d", {"model": other})
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), other.get_parameter(name))


def _hugging_face():
    mesh, folder, model = rank_mesh((2,), ("tp",)), _folder(), _llama()
    if dist.get_rank() == 0:
        model.save_pretrained(f"{folder}/in")
    dist.barrier()
    with _elsewhere():
        parallelize_tensor(model, mesh, "auto")
        checkpoint.load_hf(model, f"{folder}/in")
        checkpoint.save_hf(model, f"{folder}/out")


def test_packed_rows_are_numbered_beside_them():
    rows, lengths = torch.randn(3, 4, 2), torch.tensor([4, 2, 1])
    wanted = nn.utils.rnn.pack_padded_sequence(rows, lengths, batch_first=True)
    whole = nn.utils.rnn.pad_packed_sequence(wanted, batch_first=True)
    with torch.device("meta"):
        data, sizes = packed_sequences._packed(rows, lengths, True)
        back, counted = packed_sequences._padded(data, sizes, True, 0.0, 4)
    assert torch.equal(data, wanted.data)
    assert torch.equal(back, whole[0])
    assert torch.equal(counted, whole[1])


CASES = {
    "training": _training, "models": _models, "experts": _experts,
    "pipelines": _pipelines, "checkpoints": _checkpoints, "hugging face": _hugging_face,
}  # fmt: skip


def _case(name):
    torch.manual_seed(7)
    CASES[name]()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_where_tensors_are_made_by_default_changes_nothing(ranks, name):
    ranks(2, _case, name)
