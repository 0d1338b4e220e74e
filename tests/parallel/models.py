"""Models with the habits that break strategies, their data, and the gradients that one device gives."""

import copy

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import shardwright as sw

VOCAB, DIM = 11, 6


class Tricky(nn.Module):
    """Tied weights, a buffer, a weight that the parent reads, a frozen parameter, odd lengths."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.first = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.randn(DIM), requires_grad=False)
        self.register_buffer("shift", torch.linspace(-1, 1, DIM))

    def forward(self, tokens):
        h = self.embed(tokens) * self.gain + self.frozen
        h = h + torch.tanh(self.first(self.norm(h))) + self.shift
        h = h + functional.linear(h, self.first.weight)
        return self.head(h)


def tricky():
    """The model, the same on every rank and in the test's own process."""
    torch.manual_seed(0)
    return Tricky()


def token_batch(sequences, length=4):
    """Inputs and targets of the global batch, the same everywhere."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (sequences, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def part_of(batch, counts, index):
    """The sequences of one member when member i takes `counts[i]` of them."""
    return tuple(t.split(counts)[index] for t in batch)


def sum_loss(model, batch, count):
    """Sum of the local losses over the global count: what adds up to one device's mean."""
    tokens, targets = batch
    logits = model(tokens)
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum") / count


def one_device_gradients(model, batch, backwards=1):
    """Name -> gradient of the mean loss on the whole batch, of a copy of the plain model."""
    plain = copy.deepcopy(model)
    for _ in range(backwards):
        sum_loss(plain, batch, batch[0].numel()).backward()
    return {name: p.grad for name, p in plain.named_parameters(remove_duplicate=False)}


def check_full_gradients(model, wanted, scale=1.0):
    """Every parameter has the gradient of one device, whatever its layout."""
    found = dict(model.named_parameters(remove_duplicate=False))
    for name, p in found.items():
        if wanted[name] is None:
            assert p.grad is None, name
        else:
            assert p.grad is not None, f"{name} has no gradient"
    gradients = {name: p.grad for name, p in found.items() if p.grad is not None}
    for name, full in gathered(gradients).items():
        torch.testing.assert_close(
            full, wanted[name] * scale, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def gathered(tensors):
    """Their full values, in a few messages: one by one they cost more than what is tested."""
    everywhere = {name: [sw.Replicate()] * x.device_mesh.ndim for name, x in tensors.items()}
    return {name: x.to_local() for name, x in sw.redistribute_many(tensors, everywhere).items()}


def check_pending(model, axes):
    """Every gradient is Partial(sum) on exactly these axes."""
    for name, p in model.named_parameters():
        if p.grad is None:
            continue
        assert isinstance(p.grad, DTensor), name
        names = p.grad.device_mesh.mesh_dim_names
        pending = tuple(a for a, q in zip(names, p.grad.placements, strict=True) if q.is_partial("sum"))
        assert pending == tuple(axes), f"{name}: {p.grad.placements}"


def finish(model):
    """Add up what is pending: each gradient gets its parameter's own placements."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad = p.grad.redistribute(placements=p.placements)
