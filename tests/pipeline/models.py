"""Models as people write them, with what a border must get right: masks, ties, streams beside the stream."""

from functools import partial

import torch
import transformers
from torch import nn
from torch.nn import functional

VOCABULARY, HIDDEN, LAYERS = 30, 16, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 24)
        self.down = nn.Linear(24, HIDDEN)

    def forward(self, x, mask=None):
        y = self.down(functional.gelu(self.up(self.norm(x))))
        return x + (y if mask is None else y * mask[..., None])


class Decoder(nn.Module):
    """A glue of its own: positions added outside of any module, a scale that is a parameter of the model."""

    def __init__(self, tied=False, skip=False):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(12, HIDDEN))
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.skip = skip
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens, mask=None):
        x = first = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, mask=mask)
        if self.skip:
            x = x + first
        return self.head(self.norm(x))


class TwoStreams(nn.Module):
    """Parts that return a tuple and a dict, and a first part that is trained by nobody."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.first = TwoBlocks()
        self.second = TwoBlocks()
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens, mask=None):
        state = {"x": self.embedding(tokens), "many": (tokens.float().mean(1),)}
        first = self.first(state)
        state = self.second(first)
        return self.head(state["x"] * first["scale"] + state["many"][0][:, None, None])


class TwoBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, state):
        scale = 1 + self.block.norm.weight**2  # computed from a parameter alone
        return {"x": self.block(state["x"]), "many": (state["many"][0] * 0.5,), "scale": scale}


def hugging_face(name, **more):
    """A small model of transformers."""
    config, model, sizes = {
        "llama": (
            transformers.LlamaConfig,
            transformers.LlamaForCausalLM,
            {"num_key_value_heads": 2, "intermediate_size": 24},
        ),
        "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel, {"n_positions": 32, "n_head": 4}),
        "t5": (
            transformers.T5Config,
            transformers.T5ForConditionalGeneration,
            {"d_kv": 4, "d_ff": 24, "num_heads": 4, "decoder_start_token_id": 0, "dropout_rate": 0.0},
        ),
        "mixtral": (
            transformers.MixtralConfig,
            transformers.MixtralForCausalLM,
            {"num_key_value_heads": 2, "intermediate_size": 24, "num_local_experts": 4},
        ),
        "gemma2": (
            transformers.Gemma2Config,
            transformers.Gemma2ForCausalLM,
            {"num_key_value_heads": 2, "intermediate_size": 24, "head_dim": 4, "sliding_window": 4},
        ),
    }[name]
    common = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS}
    common |= {"num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    common |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    return model(config(**{**common, **sizes, **more}))


MODELS = {
    "decoder": Decoder,
    "tied": partial(Decoder, tied=True),
    "skip": partial(Decoder, skip=True),
    "two streams": TwoStreams,
    "llama": partial(hugging_face, "llama"),
    "tied llama": partial(hugging_face, "llama", tie_word_embeddings=True),
    "gpt2": partial(hugging_face, "gpt2"),
    "t5": partial(hugging_face, "t5"),
    "mixtral": partial(hugging_face, "mixtral"),
    "gemma2": partial(hugging_face, "gemma2"),
}

CUTS = {
    "decoder": [f"layers.{i}" for i in range(1, LAYERS)],
    "tied": [f"layers.{i}" for i in range(1, LAYERS)],
    "skip": [f"layers.{i}" for i in range(1, LAYERS)],
    "two streams": ["second"],
    "llama": [f"model.layers.{i}" for i in range(1, LAYERS)],
    "tied llama": [f"model.layers.{i}" for i in range(1, LAYERS)],
    "gpt2": [f"transformer.h.{i}" for i in range(1, LAYERS)],
    "t5": ["encoder.block.2", "decoder.block.1", "decoder.block.3"],
    "mixtral": [f"model.layers.{i}" for i in range(1, LAYERS)],
    "gemma2": [f"model.layers.{i}" for i in range(1, LAYERS)],
}


def stages_for(name, stages):
    """What other stages compute with too: the skip reads the positions again in the last one."""
    return {"positions": (0, stages - 1)} if name == "skip" else {}


def make(name):
    """The model, with the same weights in every process."""
    torch.manual_seed(3)
    return MODELS[name]()


def batch(rows, seed=0):
    """Rows of tokens whose last ones do not count, other numbers of them in each row."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (rows, 10), generator=generator)
    labels = torch.randint(3, VOCABULARY, (rows, 10), generator=generator)
    lengths = torch.randint(2, 11, (rows,), generator=generator)
    labels[torch.arange(10) >= lengths[:, None]] = -100
    return tokens, (torch.arange(10) < lengths[:, None]).long(), labels


def arguments(name, tokens, mask, labels):
    """What the model is called with."""
    if name in ("decoder", "tied", "skip", "two streams"):
        return {"tokens": tokens, "mask": mask}
    if name == "t5":
        return {"input_ids": tokens, "attention_mask": mask, "decoder_input_ids": labels.clamp(min=0)}
    return {"input_ids": tokens, "attention_mask": mask}


def loss_sum(output, labels):
    """The sum over the tokens that count."""
    logits = getattr(output, "logits", output)
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum"
    )
