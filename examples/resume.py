# torchrun --standalone --nproc-per-node 4 examples/resume.py && torchrun --standalone --nproc-per-node 2 examples/resume.py
"""A run on 4 ranks of HSDP goes on, on 2 ranks of tensor parallelism: the same numbers as without a break."""

import os
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import shardwright as sw
from shardwright import checkpoint
from shardwright.context import BATCH_DOMAIN, REGULAR_DOMAIN, DeviceMeshParameters
from shardwright.grads import GradientSynchronizer, global_mean
from shardwright.parallel import parallelize

FOLDER = Path(os.environ.get("EXAMPLE_FOLDER", "runs")) / "resume"
BREAK, STEPS = 3, 6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 40), nn.Linear(40, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(functional.silu(self.up(x))) - x).square().sum()


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))


def one_device() -> list[float]:
    torch.manual_seed(0)
    model, losses = Model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        loss = model(batch(step)) / 8
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    resumes = (FOLDER / "manifest.json").exists()
    degrees = {"tensor_parallel": 2} if resumes else {"data_parallel_replicate": 2, "data_parallel_shard": 2}
    table = {"up": "colwise", "down": "rowwise", "": "replicate"} if resumes else {"": "hsdp"}
    with DeviceMeshParameters(**degrees).build(device="cpu") as context:
        expected = one_device()
        context.seed(0)
        model = parallelize(Model(), context, table)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        start = checkpoint.load(FOLDER, model, optimizer).step if resumes else 0
        data, tp = context.mesh_for(BATCH_DOMAIN)["dp"], context.mesh_for(REGULAR_DOMAIN)["tp"]
        for step in range(start or 0, STEPS if resumes else BREAK):
            mine = batch(step)[data.get_local_rank() :: data.size()]
            with sw.spmd(tp) if resumes else nullcontext():
                loss = global_mean(model(mine), len(mine), data)
                loss.backward()
            GradientSynchronizer(model).synchronize()
            optimizer.step()
            optimizer.zero_grad()
            if context.is_main:
                print(f"step {step}: loss {loss:.6f}, one device without a break {expected[step]:.6f}")
            assert abs(loss.item() - expected[step]) < 1e-4 * expected[step]
        if not resumes:
            checkpoint.save(FOLDER, model, optimizer, step=BREAK)


if __name__ == "__main__":
    main()
