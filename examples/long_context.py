# torchrun --standalone --nproc-per-node 4 examples/long_context.py
"""A sequence that is cut over 2 ranks, in a model that knows nothing of it, beside 2 ranks of data."""

import torch
from torch import nn
from torch.nn import functional

import shardwright as sw
from shardwright.context import BATCH_DOMAIN, DeviceMeshParameters
from shardwright.grads import GradientSynchronizer, global_mean
from shardwright.parallel import parallelize

WIDTH, HEADS, VOCAB, LENGTH = 32, 4, 50, 301


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(512, WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=labels.device))
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.mix(x).chunk(3, -1))
        x = x + functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        following = labels[:, 1:].flatten()
        return functional.cross_entropy(self.out(x)[:, :-1].flatten(0, 1), following, reduction="sum")


def main() -> None:
    degrees = DeviceMeshParameters(data_parallel_replicate=2, context_parallel_shard=2)
    with degrees.build() as context:
        context.seed(0)
        with torch.device("meta"):
            model = Decoder()
        parallelize(model, context, {"": [{"context": {"attention": "ring"}}, "replicate"]})
        torch.manual_seed(0)
        one = Decoder().to(context.device)

        data = context.mesh_for(BATCH_DOMAIN)["dp"]
        tokens = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
        tokens = tokens.to(context.device)
        mine = tokens[data.get_local_rank() :: 2]  # the same on both ranks that cut its sequence
        count = mine.shape[0] * (LENGTH - 1)
        with sw.trace() as seen:
            loss = global_mean(model(mine, mine), count, data)
            loss.backward()
        GradientSynchronizer(model).synchronize()

        expected = one(tokens, tokens) / (2 * (LENGTH - 1))
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        for name, parameter in model.named_parameters():
            wanted = one.get_parameter(name).grad
            torch.testing.assert_close(parameter.grad.full_tensor(), wanted, rtol=1e-3, atol=1e-5)
        if context.is_main:
            print(f"loss {loss:.6f}, one device {expected:.6f}")
            print(f"{LENGTH} tokens over 2 ranks, {seen.bytes} bytes sent by this one; attention:")
            print(*{d.reason for d in seen.decisions if d.op == "scaled_dot_product_attention"}, sep="\n")


if __name__ == "__main__":
    main()
