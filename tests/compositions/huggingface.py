"""Tiny models of `transformers` with random weights, made without a network."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwright.moe import MoELayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB, DIM, HIDDEN = 32, 16, 24
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,  # the usual 0.02 makes layers of 16 that hardly do anything
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Logits(nn.Module):
    """A model of `transformers` as a function of tokens to logits; its parameters' names gain `inner.`."""

    def __init__(self, inner: PreTrainedModel, *, encoder: bool = False) -> None:
        super().__init__()
        self.inner = inner
        self.encoder = encoder

    def forward(self, tokens: Tensor) -> Tensor:
        """[rows, tokens] -> [rows, tokens, VOCAB]."""
        more = {"decoder_input_ids": tokens} if self.encoder else {}
        read = tokens.flip(1) if self.encoder else tokens
        out: Tensor = self.inner(input_ids=read, use_cache=False, **more).logits
        return out


def llama(*, tied: bool) -> nn.Module:
    """RMSNorm, rotary positions, grouped heads, a gated MLP."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return Logits(LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=tied)))


def qwen3(*, tied: bool) -> nn.Module:
    """Llama with norms of queries and keys."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Logits(Qwen3ForCausalLM(Qwen3Config(**_SIZES, tie_word_embeddings=tied)))


def gpt2(*, tied: bool) -> nn.Module:
    """Layer norms, learned positions, one matrix for q, k and v, biases, weights that stand transposed."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return Logits(GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=DIM, n_layer=2, n_head=4, n_inner=HIDDEN,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, initializer_range=0.3,
        bos_token_id=1, eos_token_id=2, tie_word_embeddings=tied,
    )))  # fmt: skip


def mixtral(*, tied: bool) -> nn.Module:
    """Llama with experts, stacked in parameters of three dims."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = _SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}
    return Logits(MixtralForCausalLM(MixtralConfig(**sizes, tie_word_embeddings=tied)))


def t5(*, tied: bool) -> nn.Module:
    """An encoder and a decoder that share the embedding, relative positions, attention across."""
    from transformers import T5Config, T5ForConditionalGeneration

    inner = T5ForConditionalGeneration(T5Config(
        vocab_size=VOCAB, d_model=DIM, d_kv=4, d_ff=HIDDEN, num_layers=2, num_decoder_layers=2, num_heads=4,
        dropout_rate=0.0, feed_forward_proj="gated-gelu", tie_word_embeddings=tied,
    ))  # fmt: skip
    return Logits(inner, encoder=True)


def mixtral_of_our_layers(*, tied: bool) -> nn.Module:
    """Mixtral whose expert blocks are `MoELayer`s with the same weights: what expert parallelism spreads."""
    model = mixtral(tied=tied)
    for layer in model.inner.model.layers:
        layer.mlp = _our_layer(layer.mlp)
    return model


@torch.no_grad()
def _our_layer(block: Any) -> MoELayer:
    experts = block.experts
    layer = MoELayer(DIM, HIDDEN, experts.num_experts, block.top_k)
    gate, up = experts.gate_up_proj.chunk(2, dim=1)
    layer.router.weight.copy_(block.gate.weight)
    layer.experts.gate.weight.copy_(gate.mT)
    layer.experts.up.weight.copy_(up.mT)
    layer.experts.down.weight.copy_(experts.down_proj.mT)
    return layer


FAMILIES: dict[str, Callable[..., nn.Module]] = {
    "llama": llama,
    "qwen3": qwen3,
    "gpt2": gpt2,
    "mixtral": mixtral,
    "mixtral, our experts": mixtral_of_our_layers,
    "t5": t5,
}


@functools.cache
def quiet() -> None:
    """`transformers` warns of what tiny models lack; that is known."""
    import transformers

    transformers.logging.set_verbosity_error()
