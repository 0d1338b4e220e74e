"""The ways in which people use a model, on a sequence that is cut: masks, packing, copies, tokens."""

import copy
import dataclasses

import pytest
import torch

import shardwright as sw
from shardwright.parallel import parallelize_context
from shardwright.testing import rank_mesh
from tests.models.configs import BY_NAME, batch_of
from tests.tiers import only

from .models import differing

LENGTH = 13
LLAMA = BY_NAME["llama"]


def _line():
    return rank_mesh((torch.distributed.get_world_size(),), ("cp",))


def _placed(**options):
    return lambda model: parallelize_context(model, _line(), **options)


def _padded(side):
    at = torch.arange(LENGTH)
    batch = batch_of(LLAMA, 2, LENGTH)
    mask = torch.stack([at >= 3 if side == "left" else at < LENGTH - 3, at >= 0]).long()
    labels = batch["labels"].masked_fill(mask == 0, -100)
    return differing(
        LLAMA, _placed(attention="ring"), LENGTH, {**batch, "attention_mask": mask, "labels": labels}
    )


def _packed():
    """Positions that begin anew say where a document begins."""
    at = [torch.cat([torch.arange(n), torch.arange(LENGTH - n)]) for n in (5, 8)]
    batch = {**batch_of(LLAMA, 2, LENGTH), "position_ids": torch.stack(at)}
    return differing(LLAMA, _placed(attention="ring"), LENGTH, batch)


def _checkpointed(reentrant):
    """What is run again in the backward goes the way that was asked for, beside the way of fewer bytes."""

    def place(model):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        parallelize_context(model, _line(), attention="all_to_all")

    with sw.trace() as t:
        found = differing(LLAMA, place, LENGTH)
    ways = {d.reason.split(" ")[0] for d in t.decisions if d.op == "scaled_dot_product_attention"}
    return found + ([] if ways == {"all_to_all"} else [f"went {ways}"])


def _copied():
    """A copy of the module has blocks of its own calls, and leaves those of the first alone."""

    def place(model):
        parallelize_context(model, _line())
        copy.deepcopy(model)(**batch_of(LLAMA, 2, LENGTH)).loss.backward()

    return differing(LLAMA, place, LENGTH)


def _dropped():
    """The masks of dropout are one device's: keys are gathered where they are drawn."""
    dropping = dataclasses.replace(LLAMA, sizes={**LLAMA.sizes, "attention_dropout": 0.3})
    batch, losses = batch_of(dropping, 2, LENGTH), []
    for place in (lambda model: model, _placed()):
        model = dropping.build()
        place(model)
        torch.manual_seed(7)
        loss = model(**batch).loss.detach()
        losses.append(float(loss.full_tensor() if isinstance(loss, sw.DTensor) else loss))
    return [] if abs(losses[0] - losses[1]) <= 1e-5 * losses[0] else [str(losses)]


def _generated(output):
    """Tokens, with a cache whose first part is cut."""
    ids = batch_of(LLAMA, 2, LENGTH)["input_ids"]
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    wanted = LLAMA.build().eval().generate(input_ids=ids, **options)
    model = LLAMA.build().eval()
    parallelize_context(model, _line(), output=output)
    if output == "whole":
        found = model.generate(input_ids=ids, **options)
    else:
        with sw.spmd(_line()):
            found = model.generate(input_ids=ids, **options)
    found = found.full_tensor() if isinstance(found, sw.DTensor) else found
    return [] if torch.equal(found, wanted) else [f"{found.tolist()}, one device {wanted.tolist()}"]


def _in_bfloat16():
    plain, model = LLAMA.build().bfloat16(), LLAMA.build().bfloat16()
    parallelize_context(model, _line())
    batch = batch_of(LLAMA, 2, LENGTH)
    loss, wanted = model(**batch).loss, plain(**batch).loss
    loss.backward()
    wanted.backward()
    off = [
        (p.grad.full_tensor() - q.grad).abs().max() / q.grad.abs().max()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    ]
    right = max(off) <= 3e-2 and abs(loss.full_tensor() - wanted) <= 1e-2 * wanted
    return [] if right else [f"{loss}, {wanted}, {max(off)}"]


FORMS = {
    "padded left": (_padded, "left"),
    "padded right": (_padded, "right"),
    "packed": (_packed,),
    "checkpointed": (_checkpointed, False),
    "checkpointed, reentrant": (_checkpointed, True),
    "copied": (_copied,),
    "dropout": (_dropped,),
    "generate, whole": (_generated, "whole"),
    "generate in spmd": (_generated, "cut"),
    "bfloat16": (_in_bfloat16,),
    "plain cut": (lambda: differing(LLAMA, _placed(placement=sw.Shard), LENGTH),),
    "labels cut": (lambda: differing(LLAMA, _placed(cut={"input_ids": 1, "labels": 1}), LENGTH),),
}


def _formed(name):
    function, *given = FORMS[name]
    return function(*given)


@pytest.mark.parametrize("form", only(["padded left", "packed", "checkpointed, reentrant", "dropout"], FORMS))
def test_a_form_of_use_is_one_device(ranks, form):
    assert ranks(2, _formed, form, timeout=170) == [[]] * 2
