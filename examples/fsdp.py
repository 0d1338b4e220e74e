# torchrun --standalone --nproc-per-node 4 examples/fsdp.py
"""A module of your own under FSDP: made without memory, placed by a table, trained beside one device."""

import torch
from torch import nn
from torch.nn import functional

from shardwright.context import BATCH_DOMAIN, DeviceMeshParameters
from shardwright.grads import GradientSynchronizer, clip_grad_norm_, global_mean
from shardwright.parallel import parallelize

WIDTH, CLASSES, STEPS = 32, 10, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x), y, reduction="sum")


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step; each rank takes some of its rows."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(10, WIDTH, generator=generator)
    return x, torch.randint(CLASSES, (10,), generator=generator)


def main() -> None:
    with DeviceMeshParameters(data_parallel_shard=4).build() as context:
        context.seed(0)
        with torch.device("meta"):
            model = Model()
        parallelize(model, context, {"blocks.*": "fsdp", "": "fsdp"})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        synchronizer = GradientSynchronizer(model)
        data = context.mesh_for(BATCH_DOMAIN)["dp"]

        torch.manual_seed(0)
        one = Model().to(context.device)
        beside = torch.optim.AdamW(one.parameters(), lr=1e-2)
        for step in range(STEPS):
            x, y = (t.to(context.device) for t in batch(step))
            mine = slice(context.rank, None, 4)  # 3, 3, 2 and 2 rows
            loss = global_mean(model(x[mine], y[mine]), len(y[mine]), data)
            loss.backward()
            synchronizer.synchronize()
            norm = clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

            expected = one(x, y) / len(y)
            expected.backward()
            nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            beside.step()
            beside.zero_grad()
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
            if context.is_main:
                print(f"step {step}: loss {loss:.6f}, one device {expected:.6f}, norm {float(norm):.4f}")


if __name__ == "__main__":
    main()
