"""Tensors of one memory: a load treats them as the one tensor that they are, or refuses to write it twice."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.checkpoint import load, load_hf, save, save_hf
from shardwright.checkpoint.shared_memory import refuse_overlaps, span_of
from shardwright.errors import CheckpointError
from shardwright.testing import rank_mesh

Ranks = Callable[..., list[Any]]
SHARE = "share elements in memory and are not one tensor"


def model(value: float, tie: str = "") -> nn.Module:
    """Two weights, which may be one object or one memory."""
    made = nn.Module()
    made.emb, made.head = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    for number, one in enumerate(made.parameters()):
        nn.init.constant_(one, value + number)
    if tie == "object":
        made.head.weight = made.emb.weight
    elif tie:
        made.head.weight.data = made.emb.weight.data
    return made


def both(made: nn.Module) -> list[float]:
    return [one.detach().mean().item() for one in (made.emb.weight, made.head.weight)]


@pytest.mark.parametrize("tie", ["object", "data"])
@pytest.mark.parametrize("saved", ["object", "data", ""])
@pytest.mark.parametrize("in_place", [True, False])
def test_one_memory_is_one_tensor(tmp_path: Path, tie: str, saved: str, in_place: bool) -> None:
    """Of two tensors that differ in the checkpoint the last one won, in silence."""
    save(tmp_path / "c", model(5.0, saved))
    made = model(1.0, tie)
    if saved:
        load(tmp_path / "c", made, in_place=in_place)
        assert both(made) == [5.0, 5.0]
    else:
        with pytest.raises(
            CheckpointError, match=r"head\.weight is tied to model/emb\.weight in the model but"
        ):
            load(tmp_path / "c", made, in_place=in_place)
        assert both(made) == [1.0, 1.0]


def test_a_backward_over_a_load_is_an_error_by_either_name(tmp_path: Path) -> None:
    save(tmp_path / "c", model(5.0, "data"))
    save_hf(model(5.0, "object"), tmp_path / "hf")
    for load_it in (lambda one: load(tmp_path / "c", one), lambda one: load_hf(one, tmp_path / "hf")):
        made = model(1.0, "data")
        x = torch.ones(1, 3, requires_grad=True)
        loss = made.head(x).sum()
        load_it(made)
        assert both(made) == [5.0, 5.0]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_an_optimizer_of_one_memory_twice(tmp_path: Path) -> None:
    """It goes on with what it saved; two states for one that was saved are refused."""
    ours, other, tied = model(1.0, "data"), model(2.0, "data"), model(3.0, "object")
    tuned = [torch.optim.Adam(one.parameters()) for one in (ours, other, tied)]
    for one, optimizer in zip((ours, other, tied), tuned, strict=True):
        (one.emb.weight.sum() + 2 * one.head.weight.square().sum()).backward()
        optimizer.step()
    save(tmp_path / "own", ours, tuned[0])
    save(tmp_path / "tied", tied, tuned[2])
    load(tmp_path / "own", other, tuned[1])
    for one, two in zip(tuned[0].state.values(), tuned[1].state.values(), strict=True):
        assert torch.equal(one["exp_avg"], two["exp_avg"])
    with pytest.raises(CheckpointError, match=r"updates model/emb\.weight as two tensors of one memory"):
        load(tmp_path / "tied", other, tuned[1])
    assert torch.equal(ours.emb.weight, other.emb.weight)


def parts(how: str) -> dict[str, torch.Tensor]:
    """Two tensors in one buffer: of 6 elements that meet in some, or that lie between one another."""
    flat = torch.zeros(12)
    return {
        "slices": {"a": flat[:6], "b": flat[5:11]},
        "strided": {"a": flat[::2], "b": flat[1:7]},
        "inside": {"a": flat[:6], "b": flat[:6].view(torch.int16)[4:10]},
        "dtypes": {"a": flat[:6], "b": flat[:6].view(torch.int32)},
        "shapes": {"a": flat[:6].view(2, 3), "b": flat[:6].view(3, 2)},
        "numpy": {"a": flat[:6], "b": torch.from_numpy(flat.numpy()[5:11])},
        "conjugate": {"a": (z := flat.view(torch.complex64)), "b": z.conj()},
        "columns": {"a": flat.view(6, 2)[:, 0], "b": flat.view(6, 2)[:, 1]},
        "halves": {"a": flat[::2], "b": flat.view(torch.int16)[2::4]},
        "neighbours": {"a": flat[:6], "b": flat[6:]},
    }[how]


@pytest.mark.parametrize("how", ["slices", "strided", "inside", "dtypes", "shapes", "numpy", "conjugate"])
def test_tensors_that_share_elements_are_refused(tmp_path: Path, how: str) -> None:
    tensors = parts(how)
    saved = {name: torch.full_like(one, 1 + (name == "b")) for name, one in tensors.items()}
    save(tmp_path / "c", **saved, c=torch.ones(2))
    other = torch.zeros(2)
    said = rf"a and b {SHARE}" if how == "dtypes" else rf"a and b {SHARE}|b and a {SHARE}|b is tied to a"
    with pytest.raises(CheckpointError, match=said):  # numbers of two dtypes are no ties
        load(tmp_path / "c", **tensors, c=other)
    assert not other.any()
    assert not tensors["a"].any()
    load(tmp_path / "c", a=tensors["a"], c=other)
    assert tensors["a"].to(torch.complex64).real.eq(1).all()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("how", ["slices", "strided", "inside", "dtypes", "shapes", "numpy"])
def test_tensors_that_share_elements_are_loaded_where_the_checkpoint_has_the_same_of_them(
    tmp_path: Path, how: str, in_place: bool
) -> None:
    """A run had been saved that nobody could go on with."""
    first, second = parts(how), parts(how)
    for one in first.values():
        one.copy_(torch.arange(one.numel()).view(one.shape))  # the last one wins where they meet
    save(tmp_path / "c", **first)
    if in_place:  # what was read stands there before it is known to be right
        with pytest.raises(CheckpointError, match=SHARE):
            load(tmp_path / "c", **second, in_place=True)
        assert not any(one.any() for one in second.values())
        return
    load(tmp_path / "c", **second)
    assert all(torch.equal(one, first[name]) for name, one in second.items())


def of_transposed(folder: Path) -> tuple[bool, bool]:
    def made(value: float) -> nn.Module:
        module = nn.Module()
        module.register_buffer("table", torch.arange(6.0).view(2, 3) * value)
        module.register_buffer("turned", module.table.t())
        return module

    saved, other = made(1.0), made(3.0)
    save(folder / "c", saved)
    load(folder / "c", other)
    save(folder / "apart", table=torch.ones(2, 3), turned=torch.zeros(3, 2))
    with pytest.raises(CheckpointError, match=r"table and turned share .* other values of them in turned"):
        load(folder / "apart", table=other.table, turned=other.turned)
    return torch.equal(other.table, saved.table), torch.equal(other.turned, saved.turned)


def test_a_buffer_that_shows_another_one_turned_is_loaded(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, of_transposed, tmp_path) == [(True, True)] * 2


@pytest.mark.parametrize("how", ["columns", "halves", "neighbours"])
def test_tensors_that_only_lie_beside_one_another_are_loaded(tmp_path: Path, how: str) -> None:
    tensors = parts(how)
    wanted = {name: torch.rand(one.shape).mul(9).to(one.dtype) for name, one in tensors.items()}
    save(tmp_path / "c", **wanted)
    load(tmp_path / "c", **tensors)
    assert all(torch.equal(one, wanted[name]) for name, one in tensors.items())


@pytest.mark.parametrize(("shape", "strides", "meets"), [((3, 3), (1, 1), True), ((3, 2), (2, 3), False)])
@pytest.mark.parametrize("hf", [True, False])
def test_a_tensor_that_meets_itself_is_refused(
    tmp_path: Path, shape: tuple[int, int], strides: tuple[int, int], meets: bool, hf: bool
) -> None:
    source, into = nn.Module(), nn.Module()
    source.register_buffer("w", torch.rand(shape))
    into.register_buffer("w", torch.as_strided(torch.zeros(9), shape, strides))
    if hf:
        save_hf(source, tmp_path / "c")
    else:
        save(tmp_path / "c", source)
    if meets:
        with pytest.raises(CheckpointError, match=r"w has elements that share their memory .*\(1, 1\)"):
            load_hf(into, tmp_path / "c") if hf else load(tmp_path / "c", into)
        assert not into.w.any()
        return
    load_hf(into, tmp_path / "c") if hf else load(tmp_path / "c", into)
    assert torch.equal(into.w, source.w)


def sharing(how: str) -> torch.Tensor:
    """Elements of which several are one in memory."""
    return {
        "number": torch.tensor(0.0).expand(4),
        "rows": torch.zeros(3, 1).expand(3, 4),
        "windows": torch.zeros(8).unfold(0, 4, 2),
        "conjugate": torch.zeros(1, dtype=torch.complex64).conj().expand(3),
    }[how]


def filled(how: str) -> torch.Tensor:
    one = sharing(how)
    flat = one.as_strided((one.untyped_storage().nbytes() // one.element_size(),), (1,))
    flat.copy_(torch.arange(1, len(flat) + 1) * (1j if one.is_complex() else 1))
    return one


@pytest.mark.parametrize("how", ["number", "rows", "windows", "conjugate"])
def test_a_tensor_that_meets_itself_is_loaded_where_the_checkpoint_agrees_with_itself(
    tmp_path: Path, how: str
) -> None:
    """Of a buffer `torch.zeros(1).expand(4)` a run had been saved that nobody could go on with."""
    saved, into = nn.Module(), nn.Module()
    saved.register_buffer("w", filled(how))
    into.register_buffer("w", sharing(how))
    save(tmp_path / "c", saved)
    with pytest.raises(CheckpointError, match=r"w has elements that share their memory"):
        load(tmp_path / "c", into, in_place=True)
    assert not into.w.any()
    load(tmp_path / "c", into)
    assert torch.equal(into.w, filled(how))
    save(tmp_path / "d", w=torch.arange(into.w.numel()).view(into.w.shape).to(into.w.dtype))
    with pytest.raises(CheckpointError, match=r"w has elements that share .* other values of them in w"):
        load(tmp_path / "d", w=into.w)
    assert torch.equal(into.w, filled(how))


def of_expanded(folder: Path) -> list[list[float]]:
    mesh = rank_mesh((2,), ("tp",))

    def made(value: float) -> nn.Module:
        module = nn.Module()
        module.register_buffer("whole", torch.tensor(value).expand(3))
        module.register_buffer("rows", torch.full((4, 1), value))
        sw.distribute_module(module, mesh, {"rows": {"tp": sw.Shard(0)}})
        module.rows, module.whole = module.rows.expand(4, 2), module.whole.reshape(3)
        return module

    saved, other = made(2.0), made(1.0)
    save(folder / "c", saved)
    load(folder / "c", other)
    return [other.whole.full_tensor().unique().tolist(), other.rows.full_tensor().unique().tolist()]


def test_expanded_tensors_on_ranks_are_loaded(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, of_expanded, tmp_path) == [[[2.0], [2.0]]] * 2


def test_slices_of_a_model_that_meet_are_refused_for_files_of_others(tmp_path: Path) -> None:
    save_hf(model(5.0), tmp_path / "c")
    flat, made = torch.zeros(12), model(0.0)
    made.emb.weight.data, made.head.weight.data = flat[:9].view(3, 3), flat[3:].view(3, 3)
    with pytest.raises(CheckpointError, match=rf"emb\.weight and head\.weight {SHARE}"):
        load_hf(made, tmp_path / "c")
    assert not flat.any()


class Counting(torch.optim.SGD):
    """Counts in one tensor for all parameters."""

    def step(self, closure: Any = None) -> Any:
        counter = next((one["n"] for one in self.state.values()), torch.zeros(()))
        counter += 1
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one]["n"] = counter
        return super().step(closure)


def test_a_state_that_all_parameters_share_goes_on(tmp_path: Path) -> None:
    first, other = model(1.0), model(2.0)
    tuned = [Counting(one.parameters()) for one in (first, other)]
    for optimizer, steps in zip(tuned, (3, 1), strict=True):
        for _ in range(steps):
            optimizer.step()
    save(tmp_path / "c", first, tuned[0])
    load(tmp_path / "c", other, tuned[1])
    assert {one["n"].item() for one in tuned[1].state.values()} == {3}


def of_placed(folder: Path) -> list[float]:
    mesh = rank_mesh((2,), ("tp",))
    made = sw.distribute_module(model(1.0), mesh, {"*": {"tp": sw.Shard(0)}})
    made.head.weight.data = made.emb.weight.data
    save(folder / "tied", made)
    with torch.no_grad():
        made.emb.weight.zero_()
    load(folder / "tied", made)
    values = [one.full_tensor().mean().item() for one in (made.emb.weight, made.head.weight)]
    with pytest.raises(CheckpointError, match="is tied to"):
        load(folder / "apart", made)
    return values


def test_placed_weights_of_one_memory_are_one(ranks: Ranks, tmp_path: Path) -> None:
    save(tmp_path / "apart", model(5.0))
    assert ranks(2, of_placed, tmp_path) == [[1.0, 1.0]] * 2


@pytest.mark.parametrize("how", ["apart", "columns"])
def test_many_tensors_are_compared_without_pairs(how: str) -> None:
    flat = torch.zeros(20_000, 4).t() if how == "columns" else torch.zeros(20_000, 4)
    many = flat.unbind(1 if how == "columns" else 0)
    start = time.process_time()
    refuse_overlaps(((str(number), span_of(one)) for number, one in enumerate(many)), lambda *_: False)
    assert time.process_time() - start < 10  # two hundred million pairs would take minutes
