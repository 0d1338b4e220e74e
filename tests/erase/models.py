"""Small models of `transformers`, trained erased on a mesh beside plain torch."""

import copy
import warnings
from contextlib import nullcontext

import torch
import torch.distributed as dist

import shardwright as sw
from shardwright.parallel import parallelize_tensor
from shardwright.testing.meshes import rank_mesh

_SMALL = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
_LLAMA = {**_SMALL, "intermediate_size": 30, "num_key_value_heads": 2}
# Per model its class, its sizes, and how it is cut: the rows of its table of tokens among all else.
MODELS = {
    "Llama": ("LlamaForCausalLM", _LLAMA, "auto"),
    "Qwen2": ("Qwen2ForCausalLM", _LLAMA, "auto"),
    "Mixtral": (
        "MixtralForCausalLM",
        {**_LLAMA, "hidden_size": 32, "intermediate_size": 32, "num_local_experts": 4},
        "auto",
    ),
    "GPT2": (
        "GPT2LMHeadModel",
        {"vocab_size": 50, "n_embd": 24, "n_layer": 1, "n_head": 4, "n_positions": 16}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0},
        {"transformer.wte": "embedding_rowwise"},
    ),
    "T5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 50, "d_model": 24, "d_kv": 6, "d_ff": 30, "num_layers": 1, "num_heads": 4}
        | {"dropout_rate": 0.0, "decoder_start_token_id": 0},
        {"shared": "embedding_rowwise"},
    ),
    "Bert": (
        "BertForMaskedLM",
        {**_SMALL, "intermediate_size": 30, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        {"bert.embeddings.word_embeddings": "embedding_rowwise"},
    ),
}
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3),
}


def model_of(name):
    import transformers  # where it is needed: it takes seconds

    torch.manual_seed(0)
    cls, sizes, _ = MODELS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cls = getattr(transformers, cls)
        return cls(cls.config_class(**sizes))


def step_of(model, optimizer, block):
    """A step whose optimizer stands inside the block, as one writes it."""
    options = {} if type(model).__name__.startswith("Bert") else {"use_cache": False}

    def step(ids):
        with block():
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids, **options).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return loss.detach()

    return step


def replayed(name, optimizer, steps=6):
    """Losses and parameters of one device; at least half of the steps are replays."""
    plain = model_of(name)
    model, mesh = copy.deepcopy(plain), rank_mesh((dist.get_world_size(),), ("tp",))
    parallelize_tensor(model, mesh, MODELS[name][2])
    make = OPTIMIZERS[optimizer]
    one = step_of(plain, make(plain.parameters()), nullcontext)
    fast = sw.erase(step_of(model, make(model.parameters()), lambda: sw.spmd(mesh)))
    for turn in range(steps):
        ids = torch.randint(50, (2, 7), generator=torch.Generator().manual_seed(turn))
        wanted, found = one(ids), fast(ids)
        found = found.full_tensor() if isinstance(found, sw.DTensor) else found
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for (path, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            p.full_tensor(), q, rtol=1e-3, atol=1e-4, msg=lambda m, path=path: f"{path}: {m}"
        )
    return fast.report().replays, str(fast.report())
