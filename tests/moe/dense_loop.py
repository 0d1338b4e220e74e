"""The mixture written as its definition: every expert a dense network, one token at a time."""

import torch
from torch.nn import functional


def dense_loop(layer_state, x, top_k, normalize=True):
    """The value of a MoELayer with these full parameters (name -> tensor):  [..., dim] -> [..., dim]."""
    tokens = x.reshape(-1, x.shape[-1])
    scores = (tokens @ layer_state["router.weight"].T).softmax(-1)
    out = []
    for token, score in zip(tokens, scores, strict=True):
        chosen = sorted(range(len(score)), key=lambda e: (-score[e].item(), e))[:top_k]
        total = sum(score[e] for e in chosen) if normalize else 1.0
        out.append(
            sum(score[e] / total * _expert(layer_state, e, token) for e in chosen)
            + _shared(layer_state, token)
        )
    if not out:
        return tokens.view(x.shape) * 0
    return torch.stack(out).view(x.shape)


def _expert(state, e, token):
    gate, up, down = (state[f"experts.{name}.weight"][e] for name in ("gate", "up", "down"))
    return (functional.silu(token @ gate) * (token @ up)) @ down


def _shared(state, token):
    if "shared_expert.gate.weight" not in state:
        return 0.0
    gate, up, down = (state[f"shared_expert.{name}.weight"].T for name in ("gate", "up", "down"))
    return (functional.silu(token @ gate) * (token @ up)) @ down


def leaves(layer, dtype=None):
    """The parameters of a layer as fresh leaves of the reference."""
    return {
        name: p.detach().clone().to(dtype or p.dtype).requires_grad_() for name, p in layer.named_parameters()
    }
