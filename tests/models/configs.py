"""Tiny architectures of `transformers`: one row each, random weights, nothing is fetched.

Attention and experts are what a configuration chooses by default.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

TOKENS = "tokens"  # a row of token ids, and the same as labels
CLASSES = "token classes"  # token ids, and one class per row
PAIRS = "token pairs"  # token ids of a source, labels of a target
IMAGES = "images"  # images, and one class each
IMAGES_AND_TEXTS = "images and texts"
SPEECH = "speech"  # features of a sound, labels of a target
WAVES = "waves"  # samples of a sound

_DECODER: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS_OF_4 = {"head_dim": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_ENCODER: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}
_PAIRS: dict[str, Any] = {
    "vocab_size": 40,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}


@dataclass(frozen=True)
class Architecture:
    """A row of the table: which configuration, its sizes, and what its model reads.

    Args:
        kind: the name of the configuration, as `AutoConfig.for_model` takes it.
        sizes: what makes it tiny.
        head: the automatic class that chooses the model.
        reads: what a batch holds.
        generates: whether `generate()` is compared as well.
    """

    kind: str
    sizes: dict[str, Any] = field(default_factory=dict)
    head: str = "AutoModelForCausalLM"
    reads: str = TOKENS
    generates: bool = True

    @property
    def name(self) -> str:
        """How the command line calls it."""
        return f"{self.kind} classifier" if self.reads == CLASSES else self.kind

    def config(self) -> Any:
        return transformers.AutoConfig.for_model(self.kind, **self.sizes)

    def build(self, seed: int = 0) -> nn.Module:
        """The same random weights for the same seed, in training mode."""
        torch.manual_seed(seed)
        model: nn.Module = getattr(transformers, self.head).from_config(self.config())
        return spread(model).train()


def spread(model: nn.Module) -> nn.Module:
    """Weights large enough that a wrong one shows: the usual 0.02 hides a layer behind the residual."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.add_((0.1 * noise).to(parameter.dtype))
    return model


def _decoder(kind: str, **sizes: Any) -> Architecture:
    return Architecture(kind, {**_DECODER, **sizes})


def _encoder(kind: str, **sizes: Any) -> Architecture:
    return Architecture(kind, {**_ENCODER, **sizes}, "AutoModelForMaskedLM", TOKENS, generates=False)


_GPT = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1}
_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
_TEXT_PART = {**_ENCODER, "bos_token_id": 1, "eos_token_id": 2, "projection_dim": 8, "attention_dropout": 0.0}

CHOSEN = [
    _decoder("llama"),
    _decoder("qwen3", **_HEADS_OF_4),
    _decoder("mistral", sliding_window=4, **_HEADS_OF_4),
    _decoder("phi3", tie_word_embeddings=True),
    _decoder("gemma2", sliding_window=4, **_HEADS_OF_4),
    _decoder("gemma3_text", sliding_window=4, **_HEADS_OF_4),
    _decoder("smollm3"),
    _decoder("cohere2", sliding_window=4),
    _decoder("qwen3_moe", **_EXPERTS, **_HEADS_OF_4),
    _decoder("mixtral", num_local_experts=4, num_experts_per_tok=2),
    _decoder(
        "deepseek_v3",
        **{**_MLA, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
        moe_intermediate_size=12,
        n_shared_experts=1,
        first_k_dense_replace=1,
        num_key_value_heads=4,
    ),
    _decoder(
        "llama4_text",
        num_local_experts=4,
        num_experts_per_tok=1,
        intermediate_size_mlp=24,
        attention_chunk_size=4,
        **_HEADS_OF_4,
    ),
    _decoder("gpt_oss", num_local_experts=4, num_experts_per_tok=2, sliding_window=4, **_HEADS_OF_4),
    _decoder("olmoe", num_experts=4, num_experts_per_tok=2),
    Architecture("gpt2", {**_GPT, **_NO_DROPOUT, "eos_token_id": 2, "pad_token_id": 0}),
    _decoder("gpt_neox", hidden_dropout=0.0, attention_dropout=0.0),
    Architecture(
        "t5",
        {
            "vocab_size": 40,
            "d_model": 16,
            "d_kv": 4,
            "d_ff": 24,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "eos_token_id": 2,
        },
        "AutoModelForSeq2SeqLM",
        PAIRS,
    ),
    Architecture("bart", _PAIRS, "AutoModelForSeq2SeqLM", PAIRS),
    _encoder("bert"),
    Architecture(
        "vit",
        {**_VISION, "num_labels": 6, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        "AutoModelForImageClassification",
        IMAGES,
        generates=False,
    ),
]

MORE = [
    _decoder("qwen2"),
    _decoder("qwen2_moe", **_EXPERTS, shared_expert_intermediate_size=12, decoder_sparse_step=1),
    _decoder(
        "deepseek_v2",
        **_MLA,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        topk_method="greedy",
        num_key_value_heads=4,
    ),
    _decoder("gemma", **_HEADS_OF_4),
    _decoder("granite"),
    _decoder("granitemoe", num_local_experts=4, num_experts_per_tok=2),
    _decoder("cohere"),
    _decoder("olmo2"),
    _decoder("glm4", **_HEADS_OF_4),
    _decoder("starcoder2", residual_dropout=0.0, embedding_dropout=0.0),
    _decoder("stablelm"),
    _decoder("phi"),
    _decoder("nemotron", **_HEADS_OF_4),
    _decoder("ernie4_5"),
    _decoder("seed_oss", **_HEADS_OF_4, attention_dropout=0.0, residual_dropout=0.0),
    _decoder("falcon", new_decoder_architecture=True, num_kv_heads=2, alibi=False),
    Architecture(
        "bloom",
        {
            "vocab_size": 40,
            "hidden_size": 16,
            "n_layer": 2,
            "n_head": 4,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    Architecture("gptj", {**_GPT, **_NO_DROPOUT, "rotary_dim": 2, "eos_token_id": 2, "pad_token_id": 0}),
    Architecture(
        "gpt_neo",
        {
            "vocab_size": 40,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 4,
            "intermediate_size": 24,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "max_position_embeddings": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
    ),
    Architecture(
        "opt",
        {
            "vocab_size": 40,
            "hidden_size": 16,
            "word_embed_proj_dim": 16,
            "ffn_dim": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "dropout": 0.0,
            "pad_token_id": 1,
            "bos_token_id": 2,
            "eos_token_id": 2,
        },
    ),
    Architecture(
        "mamba",
        {
            "vocab_size": 40,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "state_size": 4,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    Architecture(
        "mamba2",
        {
            "vocab_size": 40,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "state_size": 4,
            "num_heads": 8,
            "head_dim": 4,
            "n_groups": 2,
            "chunk_size": 4,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    Architecture("mbart", _PAIRS, "AutoModelForSeq2SeqLM", PAIRS),
    Architecture("pegasus", _PAIRS, "AutoModelForSeq2SeqLM", PAIRS),
    Architecture(
        "whisper",
        {
            **_PAIRS,
            "num_mel_bins": 4,
            "max_source_positions": 6,
            "max_target_positions": 24,
            "begin_suppress_tokens": None,
        },
        "AutoModelForSpeechSeq2Seq",
        SPEECH,
    ),
    _encoder("roberta"),
    _encoder("electra", embedding_size=16),
    _encoder("albert", embedding_size=8),
    _encoder("modernbert", local_attention=4),
    _encoder("deberta-v2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=4),
    Architecture(
        "distilbert",
        {
            "vocab_size": 40,
            "dim": 16,
            "hidden_dim": 24,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 64,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "AutoModelForMaskedLM",
        TOKENS,
        generates=False,
    ),
    Architecture(
        "bert", {**_ENCODER, "num_labels": 6}, "AutoModelForSequenceClassification", CLASSES, generates=False
    ),
    Architecture(
        "clip",
        {"text_config": _TEXT_PART, "vision_config": {**_VISION, "projection_dim": 8}, "projection_dim": 8},
        "AutoModel",
        IMAGES_AND_TEXTS,
        generates=False,
    ),
    Architecture(
        "siglip",
        {"text_config": {**_TEXT_PART, "projection_size": 16}, "vision_config": _VISION},
        "AutoModel",
        IMAGES_AND_TEXTS,
        generates=False,
    ),
    Architecture(
        "dinov2", {**_VISION, "num_labels": 6}, "AutoModelForImageClassification", IMAGES, generates=False
    ),
    _decoder("olmo"),
    _decoder("olmo3", sliding_window=4),
    _decoder("glm", **_HEADS_OF_4),
    _decoder("helium", **_HEADS_OF_4),
    _decoder("arcee"),
    _decoder("exaone4", sliding_window=4, sliding_window_pattern=2),
    _decoder("persimmon", hidden_dropout=0.0, attention_dropout=0.0),
    _decoder("hunyuan_v1_dense", **_HEADS_OF_4),
    _decoder(
        "dots1",
        moe_intermediate_size=12,
        num_experts_per_tok=2,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    Architecture("gpt_bigcode", {**_GPT, **_NO_DROPOUT, "eos_token_id": 2, "pad_token_id": 0}),
    Architecture("codegen", {**_GPT, **_NO_DROPOUT, "rotary_dim": 2, "eos_token_id": 2, "pad_token_id": 0}),
    Architecture("marian", _PAIRS, "AutoModelForSeq2SeqLM", PAIRS),
    Architecture(
        "m2m_100",
        {**_PAIRS, "attention_dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
        "AutoModelForSeq2SeqLM",
        PAIRS,
    ),
    Architecture("blenderbot", _PAIRS, "AutoModelForSeq2SeqLM", PAIRS),
    _encoder("mpnet"),
    _encoder("ernie"),
    Architecture(
        "vit_msn", {**_VISION, "num_labels": 6}, "AutoModelForImageClassification", IMAGES, generates=False
    ),
]

BY_NAME = {row.name: row for row in CHOSEN + MORE}


def batch_of(
    architecture: Architecture, rows: int, length: int = 7, seed: int = 2
) -> dict[str, torch.Tensor]:
    """A batch of `rows`, with labels where the model computes a loss from them."""
    make = torch.Generator().manual_seed(seed)

    def ids(*shape: int) -> torch.Tensor:
        return torch.randint(3, 40, shape, generator=make)

    match architecture.reads:
        case "tokens":
            tokens = ids(rows, length)
            return {"input_ids": tokens, "labels": tokens.clone()}
        case "token classes":
            return {"input_ids": ids(rows, length), "labels": ids(rows) % 6}
        case "token pairs":
            return {"input_ids": ids(rows, length), "labels": ids(rows, 5)}
        case "images":
            return {"pixel_values": torch.randn(rows, 3, 8, 8, generator=make), "labels": ids(rows) % 6}
        case "images and texts":
            return {
                "pixel_values": torch.randn(rows, 3, 8, 8, generator=make),
                "input_ids": ids(rows, length),
            }
        case "speech":
            return {"input_features": torch.randn(rows, 4, 12, generator=make), "labels": ids(rows, 5)}
        case _:
            return {"input_values": torch.randn(rows, 64, generator=make)}
