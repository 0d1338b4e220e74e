"""A table of calls: name -> (function, shapes of its float operands); plain torch is the reference."""

import torch
from torch.nn import functional

SHAPE, UNEVEN = (6, 4), (5, 7)

POINTWISE = {
    "add": (lambda x, y: x + y, [UNEVEN, UNEVEN]),
    "add, broadcast": (lambda x, y: x + y, [UNEVEN, (7,)]),
    "add a scalar": (lambda x: x + 3, [UNEVEN]),
    "subtract from a scalar": (lambda x: 2 - x, [UNEVEN]),
    "multiply": (lambda x, y: x * y, [UNEVEN, UNEVEN]),
    "multiply by itself": (lambda x: x * x, [UNEVEN]),
    "divide": (lambda x, y: x / (y * y + 1), [UNEVEN, UNEVEN]),
    "power": (lambda x: (x * x + 1) ** 1.5, [UNEVEN]),
    "square": (lambda x: x**2, [UNEVEN]),
    "gelu": (functional.gelu, [UNEVEN]),
    "gelu, tanh": (lambda x: functional.gelu(x, approximate="tanh"), [UNEVEN]),
    "silu": (functional.silu, [UNEVEN]),
    "relu": (functional.relu, [UNEVEN]),
    "sigmoid": (torch.sigmoid, [UNEVEN]),
    "exp and log": (lambda x: torch.log(torch.exp(x) + 1), [UNEVEN]),
    "softplus": (functional.softplus, [UNEVEN]),
    "where": (lambda x, y: torch.where(x > 0, x, y), [UNEVEN, UNEVEN]),
    "masked_fill": (lambda x: x.masked_fill(x > 0.5, -1.0), [UNEVEN]),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), [UNEVEN]),
    "maximum": (torch.maximum, [UNEVEN, UNEVEN]),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.3), [UNEVEN, UNEVEN]),
    "addcmul": (lambda x, y: torch.addcmul(x, y, y, value=0.5), [UNEVEN, UNEVEN]),
    "nan_to_num_ of complex": (lambda x: torch.view_as_real(torch.complex(x, x).nan_to_num_()), [UNEVEN]),
    "negate": (lambda x: -x, [UNEVEN]),
    "abs": (torch.abs, [UNEVEN]),
    "to double": (lambda x: x.double() * 2, [UNEVEN]),
    "to bfloat16 and back": (lambda x: x.bfloat16().float() * 0 + x, [UNEVEN]),
    "comparison": (lambda x, y: (x > y).float() + (x == y).float(), [UNEVEN, UNEVEN]),
    "clone and contiguous": (lambda x: x.clone().contiguous() * 1, [UNEVEN]),
    "cumsum": (lambda x: x.cumsum(0), [UNEVEN]),
}
MATMUL = {
    "mm": (torch.mm, [(5, 7), (7, 3)]),
    "matmul with a batch": (torch.matmul, [(2, 5, 7), (7, 3)]),
    "solve, parts as if of vectors": (torch.linalg.solve, [(4, 2, 2), (2, 2)]),
    "bmm": (torch.bmm, [(4, 5, 7), (4, 7, 3)]),
    "matrix and vector": (torch.mv, [(5, 7), (7,)]),
    "dot": (torch.dot, [(7,), (7,)]),
    "linear": (functional.linear, [(5, 7), (3, 7), (3,)]),
    "linear with a batch": (functional.linear, [(2, 5, 7), (3, 7), (3,)]),
    "addmm": (lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2.0), [(5, 3), (5, 7), (7, 3)]),
    "baddbmm": (torch.baddbmm, [(4, 5, 3), (4, 5, 7), (4, 7, 3)]),
    "transposed": (lambda x, y: x.t() @ y, [(7, 5), (7, 3)]),
    "einsum": (lambda x, y: torch.einsum("bshd,bthd->bhst", x, y), [(2, 5, 4, 3), (2, 6, 4, 3)]),
    "outer": (torch.outer, [(5,), (7,)]),
}
REDUCTIONS = {
    "sum": (lambda x: x.sum(), [UNEVEN]),
    "sum of a dim": (lambda x: x.sum(1), [UNEVEN]),
    "sum, keepdim": (lambda x: x.sum(0, keepdim=True), [UNEVEN]),
    "mean": (lambda x: x.mean(), [UNEVEN]),
    "mean of a dim": (lambda x: x.mean(0), [UNEVEN]),
    "mean of both dims": (lambda x: x.mean((0, 1)), [UNEVEN]),
    "max": (lambda x: x.max(), [UNEVEN]),
    "max of a dim": (lambda x: x.max(1).values, [UNEVEN]),
    "amax": (lambda x: x.amax(0), [UNEVEN]),
    "amin of an uneven dim": (lambda x: x.amin(1, keepdim=True), [UNEVEN]),
    "argmax": (lambda x: x.argmax(1), [UNEVEN]),
    "prod": (lambda x: x.prod(1), [UNEVEN]),
    "var": (lambda x: x.var(0), [UNEVEN]),
    "std, biased": (lambda x: x.std(1, correction=0), [UNEVEN]),
    "logsumexp": (lambda x: x.logsumexp(1), [UNEVEN]),
    "vector norm": (torch.linalg.vector_norm, [UNEVEN]),
    "norm of a dim": (lambda x: torch.linalg.vector_norm(x, 1, dim=0), [UNEVEN]),
    "any": (lambda x: (x > 1).any(), [UNEVEN]),
    "all of a dim": (lambda x: (x > -1).all(0), [UNEVEN]),
    "any over fewer rows than ranks": (lambda x: (x > 0.5).any(0), [(1, 3)]),
    "max over fewer rows than ranks": (lambda x: x.amax(0), [(1, 3)]),
    "mean over fewer rows than ranks": (lambda x: x.mean(0), [(1, 3)]),
    "count_nonzero": (lambda x: (x > 0).sum(), [UNEVEN]),
}
VIEWS = {
    "reshape": (lambda x: x.reshape(3, 2, 4), [SHAPE]),
    "flatten": (lambda x: x.flatten() * 2, [UNEVEN]),
    "unflatten": (lambda x: x.unflatten(1, (2, 2)), [SHAPE]),
    "transpose": (lambda x: x.t(), [UNEVEN]),
    "permute": (lambda x: x.permute(2, 0, 1), [(2, 5, 3)]),
    "unsqueeze and squeeze": (lambda x: x.unsqueeze(1).squeeze(1).unsqueeze(-1), [UNEVEN]),
    "select": (lambda x: x[2] + x.select(0, -1), [UNEVEN]),
    "slice": (lambda x: x[1:4], [UNEVEN]),
    "slice with a step": (lambda x: x[:, ::2], [UNEVEN]),
    "slice of an uneven dim": (lambda x: x[:, 2:], [UNEVEN]),
    "expand": (lambda x: x.unsqueeze(0).expand(3, 5, 7), [UNEVEN]),
    "split": (lambda x: x.split(2, dim=1), [UNEVEN]),
    "chunk": (lambda x: x.chunk(2, dim=0), [SHAPE]),
    "unbind": (lambda x: x.unbind(0), [SHAPE]),
    "narrow": (lambda x: x.narrow(1, 1, 3), [UNEVEN]),
    "cat": (lambda x, y: torch.cat([x, y], 0), [UNEVEN, UNEVEN]),
    "cat along the last dim": (lambda x, y: torch.cat([x, y], -1), [UNEVEN, UNEVEN]),
    "stack": (lambda x, y: torch.stack([x, y]), [UNEVEN, UNEVEN]),
    "flip": (lambda x: x.flip(0), [UNEVEN]),
    "roll": (lambda x: x.roll(2, 0), [UNEVEN]),
    "pad": (lambda x: functional.pad(x, (1, 2)), [UNEVEN]),
    "tril": (torch.tril, [UNEVEN]),
    "diagonal": (lambda x: x.diagonal(), [UNEVEN]),
    "view of heads": (lambda x: x.view(2, 3, 2, 2).transpose(1, 2), [(2, 3, 4)]),
    "repeat": (lambda x: x.repeat(2, 1), [UNEVEN]),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, dim=1), [UNEVEN]),
}
NETWORKS = {
    "softmax": (lambda x: x.softmax(-1), [UNEVEN]),
    "softmax of dim 0": (lambda x: x.softmax(0), [UNEVEN]),
    "log_softmax": (lambda x: x.log_softmax(-1), [UNEVEN]),
    "layer_norm": (lambda x, w, b: functional.layer_norm(x, (7,), w, b), [UNEVEN, (7,), (7,)]),
    "rms_norm": (lambda x, w: functional.rms_norm(x, (7,), w), [UNEVEN, (7,)]),
    "group_norm": (lambda x, w: functional.group_norm(x, 2, w), [(3, 4, 5), (4,)]),
    "embedding": (
        lambda w: (
            functional.embedding(torch.tensor([[1, 4], [0, 1]]), w)
            if type(w) is torch.Tensor
            else functional.embedding(_like(w, torch.tensor([[1, 4], [0, 1]])), w)
        ),
        [UNEVEN],
    ),
    "normalize": (lambda x: functional.normalize(x, dim=-1), [UNEVEN]),
    "mse_loss": (functional.mse_loss, [UNEVEN, UNEVEN]),
    "glu": (lambda x: functional.glu(x, -1), [(5, 6)]),
    "rotary": (lambda x, c: torch.cat([-x[..., 2:], x[..., :2]], -1) * c + x, [(2, 3, 4), (3, 4)]),
    "attention": (
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        [(2, 4, 5, 8), (2, 4, 5, 8), (2, 4, 5, 8)],
    ),
    "attention by hand": (
        lambda q, k, v: ((q @ k.transpose(-1, -2)) / 8**0.5).softmax(-1) @ v,
        [(2, 4, 5, 8), (2, 4, 5, 8), (2, 4, 5, 8)],
    ),
    "topk": (lambda x: x.topk(3, -1).values, [UNEVEN]),
    "sort": (lambda x: x.sort(0).values, [UNEVEN]),
    "conv1d": (lambda x, w: functional.conv1d(x, w, padding=1), [(3, 4, 6), (5, 4, 3)]),
}
TABLES = {
    "pointwise": POINTWISE,
    "matmul": MATMUL,
    "reductions": REDUCTIONS,
    "views": VIEWS,
    "networks": NETWORKS,
}


def _like(x, plain):
    import shardwright as sw

    return sw.distribute_tensor(plain, x.device_mesh)
