# torchrun --standalone --nproc-per-node 4 examples/experts.py
"""A mixture of experts: 4 experts over 4 ranks, the dense parameters sharded over the same ranks."""

import torch
from torch import nn
from torch.nn import functional

from shardwright.context import BATCH_DOMAIN, DeviceMeshParameters
from shardwright.grads import GradientSynchronizer, clip_grad_norm_, global_mean
from shardwright.moe import MoELayer
from shardwright.parallel import parallelize

WIDTH, CLASSES, STEPS = 16, 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dense = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = MoELayer(WIDTH, 32, num_experts=4, top_k=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts(self.dense(self.norm(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x), y, reduction="sum")


def main() -> None:
    with DeviceMeshParameters(data_parallel_shard=4, expert_parallel=4).build() as context:
        context.seed(0)
        model = Model().to(context.device)
        parallelize(model, context, {"": ["expert", "fsdp"], "blocks.*": "fsdp"})
        torch.manual_seed(0)
        one = Model().to(context.device)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, one)]
        synchronizer = GradientSynchronizer(model)
        data = context.mesh_for(BATCH_DOMAIN)["dp"]
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(10, WIDTH, generator=generator).to(context.device)
            y = torch.randint(CLASSES, (10,), generator=generator).to(context.device)
            mine = slice(context.rank, None, 4)
            loss = global_mean(model(x[mine], y[mine]), len(y[mine]), data)
            loss.backward()
            synchronizer.synchronize()
            clip_grad_norm_(model.parameters(), 1.0)

            expected = one(x, y) / len(y)
            expected.backward()
            nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
            if context.is_main:
                tokens = model.blocks[0].experts.tokens_per_expert.tolist()
                print(f"step {step}: loss {loss:.6f}, one device {expected:.6f}, to the experts {tokens}")


if __name__ == "__main__":
    main()
