"""What torch's distributed checkpoint asks of a tensor of several boxes on a rank, and who writes but one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex

import shardwright as sw
from shardwright.errors import LayoutError
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
