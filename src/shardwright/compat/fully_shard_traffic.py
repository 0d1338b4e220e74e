"""How torch's `fully_shard` gathers and scatters where nobody says otherwise."""

from __future__ import annotations

from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather as DefaultAllGather
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter as DefaultReduceScatter
