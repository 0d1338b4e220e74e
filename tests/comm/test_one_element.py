"""One element whose stride is not 1 is contiguous to torch, which shows none of its bytes."""

import torch

from shardwright.comm.dtype import as_bytes


def test_its_bytes_are_its_own_memory() -> None:
    whole = torch.arange(12.0).reshape(2, 6)
    held = as_bytes(whole[1:, 2])
    assert held.tolist() == as_bytes(torch.tensor([8.0])).tolist()
    held.zero_()
    assert whole[1, 2] == 0
    assert as_bytes(whole[:0, 2]).numel() == 0
