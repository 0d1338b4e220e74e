"""What cannot be put into place is found before anything is changed."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import shardwright as sw
from shardwright.checkpoint import async_save, load, load_hf, save, save_hf
from shardwright.errors import CheckpointError
from shardwright.testing import rank_mesh


class Keeper:
    """Anything with a state of its own: here, what is no state of a generator."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def state_dict(self) -> Any:
        return self.kept

    def load_state_dict(self, state: Any) -> None:
        self.kept = state


def model_of(value: float, *, expanded: bool) -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(torch.full((4,), value))
    one = torch.full((1,), value).expand(4)
    model.register_buffer("several", one if expanded else one.clone())
    return model


def test_what_is_loaded_in_inference_mode_can_be_trained(tmp_path: Path) -> None:
    """The states of the optimizer, and parameters that had no memory, were of that mode for ever."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    save(tmp_path / "c", model, optimizer)
    save_hf(model, tmp_path / "hf")
    with torch.inference_mode():
        other = nn.Linear(2, 2, device="meta")
        load_hf(other, tmp_path / "hf")
        tuned = torch.optim.AdamW(other.parameters())
        load(tmp_path / "c", other, tuned)
    other(torch.ones(2)).sum().backward()
    tuned.step()
    optimizer.step()
    assert torch.equal(other.weight, model.weight)


def test_an_expanded_tensor_is_refused_for_files_of_others_and_nothing_changes(tmp_path: Path) -> None:
    other, model = model_of(1.0, expanded=False), model_of(0.0, expanded=True)
    save_hf(other, tmp_path / "c")
    with pytest.raises(CheckpointError, match="several has elements that share their memory"):
        load_hf(model, tmp_path / "c")
    assert not model.weight.any()


def without_memory(how: str) -> torch.Tensor:
    if how == "wraps":
        return TwoTensor(torch.ones(4), torch.ones(4))
    if how == "freed":
        freed = torch.ones(4)
        freed.untyped_storage().resize_(0)
        return freed
    return torch.ones(4, device="meta") if how == "meta" else torch.ones(4).to_sparse()


@pytest.mark.parametrize("how", ["wraps", "freed", "meta", "sparse"])
def test_a_tensor_without_elements_in_memory_is_refused(tmp_path: Path, how: str) -> None:
    words = {"meta": "meta device", "sparse": "make it dense"}.get(how, "has no memory of its own")
    with pytest.raises(CheckpointError, match=words):
        async_save(tmp_path / "c", x=without_memory(how))
    save(tmp_path / "c", x=torch.ones(4))
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path / "c", x=without_memory(how))


@pytest.mark.parametrize("saved", [3, torch.zeros(5, dtype=torch.uint8)], ids=["a number", "too short"])
def test_a_state_of_no_generator_is_refused_and_nothing_changes(tmp_path: Path, saved: Any) -> None:
    save(tmp_path / "c", model_of(1.0, expanded=False), g=Keeper(saved))
    model = model_of(0.0, expanded=False)
    with pytest.raises(CheckpointError, match="g is no state of a generator"):
        load(tmp_path / "c", model, g=torch.Generator())
    assert not model.weight.any()


def pending(device: str = "cpu") -> nn.Module:
    """A weight that is ones on each rank, and their sum."""
    model = nn.Linear(2, 2, bias=False)
    ones = torch.ones(2, 2, device=device)
    model.weight = nn.Parameter(sw.DTensor.from_local(ones, rank_mesh((2,), ("a",)), {"a": sw.Partial()}))
    return model


def loads_into_pending(folder: Path) -> list[str]:
    """Loads that put the whole value on every rank would make a sum of copies of it."""
    whole = nn.Linear(2, 2, bias=False)
    nn.init.constant_(whole.weight, 3.0)
    save(folder / "ours", whole)
    save_hf(whole, folder / "hf")
    model, said = pending(), []
    for call in (
        lambda: load(folder / "ours", model),
        lambda: load(folder / "ours", model, in_place=True),
        lambda: load_hf(model, folder / "hf"),
        lambda: load_hf(pending("meta"), folder / "hf"),
    ):
        try:
            call()
        except CheckpointError as error:
            said.append(str(error))
        else:
            said.append("was loaded")
    assert model.weight.to_local().eq(1).all()
    return said


def test_nothing_is_loaded_into_a_sum_that_is_pending(ranks: Callable[..., Any], tmp_path: Path) -> None:
    for said in ranks(2, loads_into_pending, tmp_path):
        for text in said:
            assert "is not finished: reduce it first" in text, said


def copied_views(folder: Path) -> None:
    """What was saved of such a view was old, and what was loaded into it never reached its base."""
    mesh = rank_mesh((2,), ("a",))
    x = sw.distribute_tensor(torch.zeros(2, 3), mesh, [sw.Ragged((1, 2), (0, 1))])
    view, shared = x[:, ::2], x[:, :]
    x.add_(1)
    copied = r"x is a view whose part on this rank is a copy of what it shows"
    with pytest.raises(CheckpointError, match=copied):
        save(folder / "c", x=view)
    with pytest.raises(CheckpointError, match=copied):
        save(folder / "c", x=view[:1])
    save(folder / "c", x=view.clone(), y=shared)
    with pytest.raises(CheckpointError, match=copied):
        load(folder / "c", x=view, y=shared)
    kept = pickle.loads(pickle.dumps(x[:, ::2]))
    assert torch.equal(kept.full_tensor(), torch.ones(2, 2))
    x.zero_()
    assert torch.equal(pickle.loads(pickle.dumps(view)).full_tensor(), torch.zeros(2, 2))
    into = torch.zeros(2, 2)
    load(folder / "c", x=into, y=shared)
    assert torch.equal(into, torch.ones(2, 2))
    assert torch.equal(x.full_tensor(), torch.ones(2, 3))
    assert torch.equal(view.full_tensor(), torch.ones(2, 2))


def test_views_that_had_to_copy_are_refused(ranks: Callable[..., Any], tmp_path: Path) -> None:
    ranks(2, copied_views, tmp_path)
