"""Plans reach what wrappers hold: activation checkpointing, torch.compile, layers of adapters."""

import re
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import shardwright as sw
from shardwright.parallel import parallelize_tensor
from shardwright.parallel.names import matches
from shardwright.testing.meshes import rank_mesh
from tests.models.configs import batch_of
from tests.witness.witness import Witness

from .programs import architecture_of


class Adapted(nn.Module):
    """A linear with one of low rank beside it, by the names that PEFT gives."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 3, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(3, base.out_features, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class Handing(nn.Module):
    """A model inside of another, which hands on all that it is asked for."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model

    def forward(self, **batch):
        return self.base_model(**batch)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)


def _checkpointed(model):
    for layer in model.model.layers:
        layer.mlp = checkpoint_wrapper(layer.mlp)
    model.model.layers = nn.ModuleList([checkpoint_wrapper(layer) for layer in model.model.layers])
    return model


def _adapted(model):
    for layer in model.model.layers:
        for part, name in ((layer.self_attn, "q_proj"), (layer.self_attn, "o_proj"), (layer.mlp, "up_proj")):
            setattr(part, name, Adapted(getattr(part, name)))
    return model


WRAPPED = {
    "checkpointed": _checkpointed,
    "adapted and handed on": lambda model: Handing(_adapted(model)),
    "all": lambda model: Handing(_checkpointed(_adapted(model))),
}


def _built(wrap):
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    return wrap(architecture_of("llama, odd").build())


def _sent(mesh, model, batch):
    """What a forward sends, the second time: kinds and bytes."""
    with torch.no_grad(), sw.spmd(mesh, check=False):
        model(**batch)
        with Witness() as witness:
            model(**batch)
    return sorted((call.kind, call.given) for call in witness.asked)


def _step(how, sequence):
    """Where each matrix lives, and what a forward sends, with wrappers and without; beside one device."""
    mesh, batch = rank_mesh((2,), ("tp",)), batch_of(architecture_of("llama, odd"), 2)
    whole, model, plain = (_built(wrap) for wrap in (WRAPPED[how], WRAPPED[how], lambda model: model))
    for one in (model, plain):
        parallelize_tensor(one, mesh, "auto", sequence_parallel=sequence)
    wanted = whole(**batch).loss
    wanted.backward()
    with sw.spmd(mesh):
        loss = model(**batch).loss
        loss.backward()
    torch.testing.assert_close(loss.full_tensor(), wanted, rtol=1e-5, atol=0)
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        most = 1e-4 * q.grad.abs().max().item()
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=0, atol=most, msg=name)
    cuts = ({n: p.placements[0] for n, p in one.named_parameters()} for one in (model, plain))
    return *cuts, _sent(mesh, model, batch), _sent(mesh, plain, batch)


_PUT_IN = re.compile(r"base_model\.|_checkpoint_wrapped_module\.|base_layer\.|layers\.\d+\.")
# What is cut of an adapter, and whose cut it has: of heads of which one rank has more.
_OF_ADAPTERS = {
    "q_proj.lora_B": "model.self_attn.q_proj.weight",
    "o_proj.lora_A": "model.self_attn.o_proj.weight",
    "up_proj.lora_B": "model.mlp.up_proj.weight",
}


@pytest.mark.parametrize(
    ("how", "sequence"), [("checkpointed", True), ("adapted and handed on", False), ("all", True)]
)
def test_the_plan_of_a_model_reaches_what_wrappers_hold(ranks, how, sequence):
    for found, plain, sent, wanted in ranks(2, _step, how, sequence, timeout=170):
        named = {_PUT_IN.sub("", name): placement for name, placement in found.items()}
        adapters = {name: named.pop(name) for name in list(named) if "lora" in name}
        assert named == {_PUT_IN.sub("", name): placement for name, placement in plain.items()}
        cut = {".".join(n.split(".")[2:4]): p for n, p in adapters.items() if p.is_partition}
        assert cut == ({n: named[of] for n, of in _OF_ADAPTERS.items()} if adapters else {})
        assert sent == wanted


def _by_words():
    """An adapter's own word counts before that of the matrix; a compiled model's plan is its own."""
    mesh = rank_mesh((2,), ("tp",))
    words = {"up": "colwise", "up.lora_B.default": "replicate", "down.base_layer": "rowwise"}
    model = nn.ModuleDict({name: Adapted(nn.Linear(4, 4)) for name in ("up", "down")})
    parallelize_tensor(model, mesh, words)
    compiled = torch.compile(_built(lambda model: model), backend="eager")
    parallelize_tensor(compiled, mesh, "auto")
    return [
        {n for n, p in one.named_parameters() if p.placements[0].is_partition} for one in (model, compiled)
    ]


def test_an_adapter_has_its_own_word_where_the_plan_has_one(ranks):
    for words, compiled in ranks(2, _by_words):
        assert words == {
            "up.base_layer.weight", "up.base_layer.bias",
            "down.base_layer.weight", "down.lora_A.default.weight",
        }  # fmt: skip
        assert "_orig_mod.model.layers.0.self_attn.q_proj.weight" in compiled


def test_what_a_wrapper_holds_is_named_by_the_wrapper():
    assert matches("layers.0._checkpoint_wrapped_module.up", "layers.*.up")
    assert matches("layers.0._checkpoint_wrapped_module", "layers.*._checkpoint_wrapped_module")
    assert not matches("layers.0._checkpoint_wrapped_module", "layers.*")  # else a hook would hang twice
    assert not matches("layers.base_layers.up", "layers.up")
