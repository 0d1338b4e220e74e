"""What torch's distributed checkpoint asks of a tensor of several boxes on a rank, and who writes but one."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.pipelining._utils import _DTensorMeta
from torch.distributed.pipelining.microbatch import (
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
)

import shardwright as sw
from shardwright.errors import LayoutError, ParallelError
from shardwright.parallel import parallelize_fsdp, parallelize_tensor
from shardwright.testing import rank_mesh

ONE_BOX = [sw.Shard(0), sw.Shard(1), sw.Replicate(), sw.Owner(1), sw.Ragged((1, 3))]
SEVERAL = [sw.ZigZag(0), sw.Interleaved(0, 2), sw.BlockCyclic(0, 2)]


def _in_hugging_faces_files(path: Path) -> list[str]:
    mesh, x, said = rank_mesh((2,), ("tp",)), torch.arange(48.0).reshape(8, 6), []
    for number, placement in enumerate([*ONE_BOX, *SEVERAL]):
        placed = sw.distribute_tensor(x.clone(), mesh, [placement], src_data_rank=None)
        folder = path / str(number)
        writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
        try:
            dcp.save({"w": placed}, storage_writer=writer)
        except CheckpointException as error:
            said.append(f"{placement}: {error}")
            continue
        found = torch.full_like(x, -1)
        dcp.load({"w": found}, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
        said += [] if torch.equal(found, x) else [f"{placement}: other values"]
    return said


def test_a_writer_that_keeps_one_piece_of_a_rank_gets_no_other(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    pytest.importorskip("safetensors")
    for said in ranks(2, _in_hugging_faces_files, tmp_path, fresh=True):
        assert len(said) == len(SEVERAL)
        for one, placement in zip(said, SEVERAL, strict=True):
            assert one.startswith(str(placement))
            assert "boxes on this rank, of which torch's HuggingFaceStorageWriter would keep the last" in one
            assert "fix: shardwright.checkpoint.save_hf" in one


def _asked() -> list[str]:
    mesh, x, said = rank_mesh((2,), ("tp",)), torch.arange(48.0).reshape(8, 6), []
    for placement in (*ONE_BOX, *SEVERAL):
        placed = sw.distribute_tensor(x.clone(), mesh, [placement], src_data_rank=None)
        chunks = placed.__create_chunk_list__()
        for chunk in chunks:
            part = placed.__get_tensor_shard__(MetadataIndex("w", chunk.offsets))
            at = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            assert torch.equal(part, x[at])
        if len(chunks) == 1:
            assert torch.equal(placed.__get_tensor_shard__(MetadataIndex("w")), part)
    for offset in (None, torch.Size((1, 1))):
        with pytest.raises(LayoutError) as caught:
            placed.__get_tensor_shard__(MetadataIndex("w", offset))
        said.append(str(caught.value))
    return said


def test_a_piece_is_found_by_its_offset(ranks: Callable[..., list[Any]]) -> None:
    for several, none in ranks(2, _asked):
        assert several.endswith("holds 2 boxes on this rank, not one")
        assert none.endswith("holds 0 boxes on this rank at offset (1, 1), not one")


def _made(rows: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, rows), nn.Tanh(), nn.Linear(rows, 8))


def _placed(rows: int, *, meta: bool) -> nn.Module:
    mesh = rank_mesh((dist.get_world_size() // 2, 2), ("dp", "tp"))
    with torch.device("meta" if meta else "cpu"):
        model = _made(rows, 1)
    parallelize_tensor(model, mesh["tp"], {"0": "colwise", "2": "rowwise"})
    return parallelize_fsdp(model, mesh["dp"])


def _set(model: nn.Module, state: dict[str, Any], *, broadcast: bool) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch's own use of its process groups
        set_model_state_dict(model, state, options=options)


def _whole_states() -> None:
    """Whole tensors for a model that is cut by tensor parallelism first and then sharded."""
    for rows, meta, broadcast in product((12, 7, 5), (False, True), (False, True)):
        plain, model = _made(rows, 0), _placed(rows, meta=meta)
        state, x = plain.state_dict(), torch.randn(3, 8)
        given = dict(state) if not broadcast or dist.get_rank() == 0 else {}
        if meta and not broadcast and rows % 4:  # torch cuts these itself, from left to right
            with pytest.raises(ParallelError, match=r"would put f32.* in the place of a sharded parameter"):
                _set(model, given, broadcast=False)
            continue
        _set(model, given, broadcast=broadcast)
        for name, part in model.state_dict().items():
            where = f"{name} of {rows} rows, {meta=} {broadcast=}"
            torch.testing.assert_close(part.full_tensor(), state[name], msg=where)
        with sw.spmd(rank_mesh((2, 2), ("dp", "tp"))["tp"]):
            torch.testing.assert_close(model(x).full_tensor(), plain(x))


def test_whole_states_reach_what_two_strategies_cut(ranks: Callable[..., list[Any]]) -> None:
    ranks(4, _whole_states)


def _whole_states_that_do_not_divide() -> None:
    model = _placed(7, meta=False)
    before = {name: part.to_local().clone() for name, part in model.state_dict().items()}
    with pytest.raises(LayoutError, match=r"f32\[7@\(tp, dp\).* cannot be said with strided cuts"):
        _set(model, _made(7, 0).state_dict(), broadcast=True)
    with pytest.raises(LayoutError, match="cannot be said with strided cuts"):
        _DTensorMeta.from_dtensor(model.get_parameter("0.weight"))
    assert all(torch.equal(part.to_local(), before[name]) for name, part in model.state_dict().items())


def test_whole_states_for_cuts_that_torch_cannot_name_are_refused(ranks: Callable[..., list[Any]]) -> None:
    ranks(6, _whole_states_that_do_not_divide)


def _loads_of_meta(path: Path) -> None:
    """`dcp.load` makes tensors in place of meta ones, by their mesh and placements."""
    mesh, x = rank_mesh((2, 2), ("dp", "tp")), torch.arange(96.0).reshape(12, 8)
    saved = sw.distribute_tensor(x, mesh, [sw.Shard(0), sw.Shard(0)], order=("tp", "dp"))
    dcp.save({"w": saved}, checkpoint_id=path)
    warnings.simplefilter("ignore", UserWarning)  # of torch's own use of its process groups
    state: dict[str, Any] = {"w": torch.empty_like(saved, device="meta")}
    dcp.load(state, checkpoint_id=path)
    assert torch.equal(state["w"].full_tensor(), x)
    assert torch.equal(state["w"].to_local(), saved.to_local())


def test_loads_of_meta_tensors_know_the_order(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    ranks(4, _loads_of_meta, tmp_path)


def _through_torchs_pipelines() -> None:
    """torch's pipelining cuts a batch, joins results and makes what it received by placements."""
    mesh, x = rank_mesh((2, 2), ("dp", "tp")), torch.arange(128.0).reshape(16, 8)
    for dim in (0, 1):
        cut = sw.distribute_tensor(x, mesh, [sw.Shard(dim), sw.Shard(dim)], order=("tp", "dp"))
        chunks, _ = split_args_kwargs_into_chunks((cut,), {}, 2)
        parts = [chunk for (chunk,) in chunks]
        assert torch.equal(merge_chunks(parts, TensorChunkSpec(0)).full_tensor(), x)
        if dim == 1:
            assert torch.equal(parts[0].full_tensor(), x[:8])
        joined = merge_chunks([cut + 0, cut + 0], TensorChunkSpec(1 - dim))
        assert torch.equal(joined.full_tensor(), torch.cat([x, x], 1 - dim))
        made = _DTensorMeta.from_dtensor(cut).to_dtensor("cpu", mesh)
        made.to_local().copy_(cut.to_local())
        assert torch.equal(made.full_tensor(), x)


def test_stages_of_torchs_pipelines_know_the_order(ranks: Callable[..., list[Any]]) -> None:
    ranks(4, _through_torchs_pipelines)


def _placements_elsewhere() -> None:
    """Placements that were read from a tensor say the same of another one, its order included."""
    mesh, x = rank_mesh((2, 3), ("dp", "tp")), torch.arange(77.0).reshape(11, 7)
    placed = sw.distribute_tensor(x, mesh, [sw.Shard(0), sw.Shard(0)], order=("tp", "dp"))
    given, layout = placed.placements, sw.layout_of(placed)
    assert given == (sw.Shard(0), sw.Shard(0))
    made = [
        sw.DTensor.from_local(placed.to_local(), mesh, given, shape=x.shape, stride=x.stride()),
        sw.distribute_tensor(x, mesh, pickle.loads(pickle.dumps(given))),
        sw.distribute_tensor(x, mesh).redistribute(mesh, given),
    ]
    for one in made:
        assert sw.layout_of(one) == layout
        assert torch.equal(one.full_tensor(), x)
    assert sw.layout_of(sw.zeros(11, 7, device_mesh=mesh, placements=given)) == layout
    assert type(made[0].redistribute(mesh, [sw.Shard(0), sw.Shard(0)]).placements) is tuple


def test_placements_of_a_tensor_know_its_order(ranks: Callable[..., list[Any]]) -> None:
    ranks(6, _placements_elsewhere)


def saved_without_elements(folder: Path) -> None:
    """torch's writer left such a tensor out, and its reader missed it."""
    mesh = rank_mesh((2,), ("x",))
    for shape in ((2, 0), (0, 3), (0,)):
        for number, placement in enumerate((sw.Shard(0), sw.Replicate(), sw.ZigZag(0))):
            state = {
                "none": sw.distribute_tensor(torch.zeros(shape), mesh, [placement]),
                "some": sw.distribute_tensor(torch.ones(4), mesh, [sw.Shard(0)]),
            }
            at = folder / f"{len(shape)}-{shape[0]}-{number}"
            dcp.save(state, checkpoint_id=at)
            state["some"] = sw.distribute_tensor(torch.zeros(4), mesh, [sw.Shard(0)])
            dcp.load(state, checkpoint_id=at)
            assert state["none"].shape == shape
            assert torch.equal(state["some"].full_tensor(), torch.ones(4))


def test_tensors_without_elements_go_through_torchs_checkpoints(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    ranks(2, saved_without_elements, tmp_path)
