"""Degrees are checked with one line that says what, why and what to do, before any group is made."""

import pytest
import torch.distributed as dist

from shardwright.context import DeviceMeshParameters, register_domain, submesh
from shardwright.errors import MeshError, ShardwrightError


@pytest.mark.parametrize("bad", [0, -1, 2.0, "2", True, None])
def test_a_degree_that_is_no_positive_int_is_refused(bad):
    with pytest.raises(MeshError, match=r"^tensor_parallel=.*; give a number of ranks, 1 to leave it out$"):
        DeviceMeshParameters(tensor_parallel=bad)


def test_experts_that_do_not_divide_the_data_ranks_are_refused():
    with pytest.raises(MeshError) as caught:
        DeviceMeshParameters(data_parallel_shard=3, context_parallel_replicate=2, expert_parallel=4)
    assert str(caught.value) == (
        "expert_parallel=4 does not divide the 6 data and context ranks, over which experts are spread; "
        "use one of 1, 2, 3, 6"
    )


def test_degrees_that_do_not_multiply_to_the_world_are_refused_before_a_group_is_made(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MeshError) as caught:
        DeviceMeshParameters(data_parallel_shard=2, tensor_parallel=3).build()
    assert str(caught.value) == (
        "data_parallel_shard=2 x tensor_parallel=3 = 6 ranks, but the world has 4; "
        "choose degrees that multiply to 4, or start 6 processes"
    )
    assert not dist.is_initialized()


def test_ranks_that_cannot_meet_are_refused_in_one_line(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x", "MASTER_PORT": "one"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MeshError, match=r"^the ranks cannot meet at x:one .*start with torchrun"):
        DeviceMeshParameters().build()


def test_a_half_set_launch_environment_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(MeshError, match="sets RANK but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT; start with"):
        DeviceMeshParameters().build()


def test_a_device_that_is_not_there_is_refused_before_a_group_is_made():
    with pytest.raises(MeshError, match="device 'tpu' is unknown; use one of cpu, cuda"):
        DeviceMeshParameters().build(device="tpu")
    assert not dist.is_initialized()


def test_degrees_are_a_value():
    assert DeviceMeshParameters(tensor_parallel=2) == DeviceMeshParameters(tensor_parallel=2)
    assert DeviceMeshParameters(data_parallel_shard=4, expert_parallel=2).world_size == 4


@pytest.mark.parametrize("timeout", ["x", 0, -1, float("nan"), float("inf"), True])
def test_a_timeout_that_is_no_time_is_refused_before_a_group_is_made(timeout):
    with pytest.raises(MeshError, match=r"timeout=.* is no number above 0"):
        DeviceMeshParameters().build(device="cpu", timeout=timeout)
    assert not dist.is_initialized()


@pytest.mark.parametrize("device", [[], 3])
def test_a_device_that_is_no_text_is_refused(device):
    with pytest.raises(MeshError, match="is unknown; use one of cpu, cuda"):
        DeviceMeshParameters().build(device=device)


@pytest.mark.parametrize("axes", [5, None, "ab", [1]])
def test_axes_of_a_domain_that_are_no_mapping_are_refused(axes):
    with pytest.raises(MeshError, match="is no mapping of axis names to sizes"):
        register_domain("mine", axes)
    with pytest.raises(MeshError, match="is no name; choose another"):
        register_domain(3, {"a": 1})


def _refusals():
    with DeviceMeshParameters().build(device="cpu") as context:
        calls = {
            "unknown axis 3": lambda: submesh(context.mesh_for("batch"), 3),
            "unknown domain": lambda: context.mesh_for([]),
            "no axis None": lambda: context.seed(1, shared=None),
        }
        return [_said(call) for call in calls.values()], list(calls)


def _said(call):
    try:
        call()
    except ShardwrightError as error:
        return str(error)
    return ""


def test_axes_and_domains_that_are_no_names_are_refused(ranks):
    for said, words in ranks(1, _refusals):
        assert [word in text for text, word in zip(said, words, strict=True)] == [True] * len(words), said
