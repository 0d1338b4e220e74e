# torchrun --standalone --nproc-per-node 4 examples/pipeline.py
"""A pipeline: two stages of a decoder as it is, each sharded over two ranks, with tied weights."""

import torch
from torch import nn
from torch.nn import functional

from shardwright.context import BATCH_DOMAIN, REGULAR_DOMAIN, DeviceMeshParameters
from shardwright.grads import GradientSynchronizer, clip_grad_norm_
from shardwright.parallel import Pipeline, parallelize_fsdp, parallelize_pipeline

WIDTH, VOCABULARY, LENGTH, STEPS = 16, 40, 6, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def main() -> None:
    with DeviceMeshParameters(pipeline_parallel=2, data_parallel_shard=2).build() as context:
        torch.manual_seed(0)
        model, one = (Decoder().to(context.device) for _ in range(2))
        one.load_state_dict(model.state_dict())
        mesh, data = context.mesh_for(REGULAR_DOMAIN), context.mesh_for(BATCH_DOMAIN)["dp"]
        parallelize_pipeline(model, mesh["pp"], ["layers.2"])  # the first module of each later stage
        parallelize_fsdp(model, mesh["dp_shard"])
        pipeline = Pipeline(model, loss_sum, micro_batches=2, data=data)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, one)]
        synchronizer = GradientSynchronizer(model)
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            text = torch.randint(VOCABULARY, (8, LENGTH + 1), generator=generator).to(context.device)
            tokens, labels = text[:, :-1], text[:, 1:]
            mine = slice(4 * data.get_local_rank(), 4 * data.get_local_rank() + 4)
            loss = pipeline.step(tokens[mine], target=labels[mine], count=labels[mine].numel())
            synchronizer.synchronize()
            norm = clip_grad_norm_(model, 1.0)

            expected = loss_sum(one(tokens), labels) / labels.numel()
            expected.backward()
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(one.parameters(), 1.0))
            torch.testing.assert_close(loss, expected.detach())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if context.is_main:
                print(f"step {step}: loss {loss:.6f}, one device {expected:.6f}, norm {norm:.4f}")


if __name__ == "__main__":
    main()
