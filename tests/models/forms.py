"""The ways in which people use a model of `transformers`, each as they write it, beside one device.

A form is a function of a `Run`: the same lines for one device and for a sharded model.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.grads import GradientSynchronizer
from shardwright.testing.meshes import rank_mesh

from .check import ROWS, TENSOR, TOLERANCE, compare
from .configs import batch_of
from .use import REPLICATE, Found, Run

Form = Callable[[Run], Found]


def step(run: Run, batch: dict[str, Any] | None = None, **more: Any) -> Found:
    """Forward with the model's own loss, backward."""
    found: dict[str, list[Any]] = {"loss": [], "logits": []}
    with run.inside():
        for part in run.parts(batch):
            out = run.model(**part, **more)
            out.loss.backward()
            found["loss"].append(out.loss.detach())
            found["logits"].append(out.logits.detach())
            for name in ("hidden_states", "attentions"):
                for i, x in enumerate(out.get(name) or ()):
                    found.setdefault(f"{name}.{i}", []).append(x.detach())
        return run.whole({**found, **run.gradients()})


def _half(dtype: torch.dtype) -> Form:
    def form(run: Run) -> Found:
        run.start(run.build().to(dtype))
        return step(run)

    return form


def _started(form: Form, **config: Any) -> Form:
    def started(run: Run) -> Found:
        run.start(**config)
        return form(run)

    return started


def _padded(side: str, **more: Any) -> Form:
    def form(run: Run) -> Found:
        batch = _masked(run, side)
        if "positions" in more:
            batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        return step(run, batch)

    return form


def _masked(run: Run, side: str) -> dict[str, Any]:
    batch = batch_of(run.architecture, ROWS)
    n = batch["input_ids"].shape[1]
    at = torch.arange(n)
    mask = torch.stack([at >= k if side == "left" else at < n - k for k in (2, 0, 3)]).long()
    batch["attention_mask"] = mask
    if batch["labels"].shape == mask.shape:
        batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
    return batch


def _cache(make: Callable[[Run], Any]) -> Form:
    def form(run: Run) -> Found:
        found: dict[str, list[Any]] = {}
        run.model.eval()
        with run.inside():
            for part in run.parts():
                tokens, cache = part["input_ids"], make(run)
                steps = []
                for a, b in ((0, 4), (4, 5), (5, 6), (6, 7)):
                    with torch.no_grad():
                        out = run.model(input_ids=tokens[:, a:b], past_key_values=cache, use_cache=True)
                    steps.append(out.logits)
                found.setdefault("logits", []).append(torch.cat(steps, 1))
            return run.whole(found)

    return form


def _dynamic(run: Run) -> Any:
    return transformers.DynamicCache()


def _dynamic_of_config(run: Run) -> Any:
    return transformers.DynamicCache(config=run.model.config)


def _static(run: Run) -> Any:
    return transformers.StaticCache(config=run.model.config, max_cache_len=12)


def _checkpointed(use_reentrant: bool) -> Form:
    def form(run: Run) -> Found:
        run.model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        return step(run, use_cache=False)

    return form


def _checkpointed_first(use_reentrant: bool) -> Form:
    def form(run: Run) -> Found:
        model = run.build()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        run.start(model)
        return step(run, use_cache=False)

    return form


def _generated(**how: Any) -> Form:
    def form(run: Run) -> Found:
        run.model.eval()
        tokens = []
        batch = batch_of(run.architecture, ROWS)
        batch.pop("labels")
        if how.get("padded"):
            batch = _masked(run, "left")
            batch.pop("labels")
        more = {n: v for n, v in how.items() if n != "padded"}
        with run.inside():
            for part in run.parts(batch):
                torch.manual_seed(7)
                out = run.model.generate(**part, max_new_tokens=5, min_new_tokens=5, **more)
                tokens.append(out)
            return run.whole({"tokens": tokens})

    return form


def _assisted(run: Run) -> Found:
    run.model.eval()
    helper = run.build().eval()
    with torch.no_grad():
        for p in helper.parameters():
            p.add_(0.02)
    tokens = []
    batch = batch_of(run.architecture, 1)
    batch.pop("labels")
    if run.own_rows:
        batch = {n: v.repeat(2, 1) for n, v in batch.items()}
    with run.inside():
        for part in run.parts(batch):
            torch.manual_seed(7)
            tokens.append(
                run.model.generate(
                    **part, max_new_tokens=5, min_new_tokens=5, do_sample=False, assistant_model=helper
                )
            )
        return run.whole({"tokens": tokens})


def _inference(run: Run) -> Found:
    run.model.eval()
    with run.inside(), torch.inference_mode():
        return run.whole({"logits": [run.model(**part).logits for part in run.parts()]})


def _seen(run: Run) -> Found:
    return step(run, output_hidden_states=True, output_attentions=True)


def _resized(run: Run) -> Found:
    torch.manual_seed(5)
    model = run.build()
    model.resize_token_embeddings(44, mean_resizing=False)
    run.start(model)
    return step(run)


class Adapted(nn.Module):
    """A frozen linear layer and a trainable product of two small ones."""

    def __init__(self, base: nn.Module, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        out, inner = base.weight.shape
        self.low = nn.Parameter(torch.randn(rank, inner))
        self.high = nn.Parameter(torch.randn(out, rank) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (x @ self.low.mT) @ self.high.mT


def _adapted(run: Run) -> Found:
    model = run.build()
    for p in model.parameters():
        p.requires_grad_(False)
    torch.manual_seed(3)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name in {
                "q_proj",
                "v_proj",
                "o_proj",
                "q",
                "v",
                "o",
                "down_proj",
                "up_proj",
            }:
                setattr(module, name, Adapted(child))
    run.start(model)
    return step(run)


def _trained(make: Callable[[Any], Any], clip: bool = True, steps: int = 3, **how: Any) -> Form:
    def form(run: Run) -> Found:
        optimizer = make(run.model.parameters())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if how.get("scaled") else None
        norms = []
        synchronizer = _synchronizer(run)
        for _ in range(steps):
            with run.inside():
                for part in run.parts():
                    loss = run.model(**part).loss
                    (loss if scaler is None else scaler.scale(loss)).backward()
                synchronizer()
                if scaler is not None:
                    scaler.unscale_(optimizer)
                if clip:
                    norms.append(torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0).detach())
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()
                schedule.step()
                optimizer.zero_grad()
        with run.inside():
            return run.whole(
                {f"norm {i}": x for i, x in enumerate(norms)}
                | {f"parameter {n}": p.detach() for n, p in run.model.named_parameters()}
            )

    return form


def _synchronizer(run: Run) -> Callable[[], None]:
    if run.mesh is None or run.sharding != REPLICATE:
        return lambda: None
    return GradientSynchronizer(run.model).synchronize


def _sgd(parameters: Any, **how: Any) -> Any:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, **how)


def _adamw(parameters: Any, **how: Any) -> Any:
    return torch.optim.AdamW(parameters, 1e-2, eps=1e-2, **how)


def _state(run: Run) -> Found:
    state = run.model.state_dict()
    kept = {n: v.clone() for n, v in state.items()}
    with torch.no_grad():
        for p in run.model.parameters():
            p.mul_(0.0)
    run.model.load_state_dict(kept)
    return step(run)


def _saved(run: Run) -> Found:
    """Whole tensors in a file of `transformers`, and a model of it: on one device that is the same model."""
    if run.mesh is None:
        return {n: p.detach() for n, p in run.model.named_parameters()}
    folder = [tempfile.mkdtemp()]
    if run.mesh is not None:
        dist.broadcast_object_list(folder, 0)
    state = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in run.model.state_dict().items()}
    run.model.save_pretrained(
        folder[0], state_dict=state, is_main_process=run.mesh is None or dist.get_rank() == 0
    )
    if run.mesh is not None:
        dist.barrier()
    loaded = type(run.model).from_pretrained(folder[0])
    if run.mesh is not None:
        dist.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)
    return {n: p.detach() for n, p in loaded.named_parameters()}


def _accumulated(run: Run) -> Found:
    step(run)
    return step(run)


def _autocast(run: Run) -> Found:
    with torch.autocast("cpu", torch.bfloat16):
        return step(run)


FORMS: dict[str, Form] = {
    "bfloat16": _half(torch.bfloat16),
    "float16": _half(torch.float16),
    "float64": _half(torch.float64),
    "autocast": _started(_autocast),
    "labels": _started(step),
    "accumulated": _started(_accumulated),
    "padded left": _started(_padded("left")),
    "padded right": _started(_padded("right")),
    "positions": _started(_padded("left", positions=True)),
    "dynamic cache": _started(_cache(_dynamic)),
    "dynamic cache of the config": _started(_cache(_dynamic_of_config)),
    "static cache": _started(_cache(_static)),
    "checkpointed": _started(_checkpointed(False)),
    "checkpointed, reentrant": _started(_checkpointed(True)),
    "checkpointed first, reentrant": _checkpointed_first(True),
    "sampled": _started(_generated(do_sample=True)),
    "sampled, top k": _started(_generated(do_sample=True, top_k=5, top_p=0.8, temperature=0.7)),
    "beams": _started(_generated(do_sample=False, num_beams=3)),
    "several sequences": _started(_generated(do_sample=True, num_return_sequences=2)),
    "greedy, padded": _started(_generated(do_sample=False, padded=True)),
    "greedy, static": _started(
        _generated(do_sample=False, cache_implementation="static", disable_compile=True)
    ),
    "greedy, penalties": _started(
        _generated(do_sample=False, repetition_penalty=1.3, no_repeat_ngram_size=2)
    ),
    "assisted": _started(_assisted),
    "inference mode": _started(_inference),
    "eager": _started(step, attn_implementation="eager"),
    "sdpa": _started(step, attn_implementation="sdpa"),
    "everything seen": _started(_seen, attn_implementation="eager"),
    "resized": _resized,
    "adapters": _adapted,
    "sgd": _started(_trained(_sgd)),
    "sgd, foreach": _started(_trained(lambda p: _sgd(p, foreach=True))),
    "sgd, fused": _started(_trained(lambda p: _sgd(p, fused=True))),
    "adamw": _started(_trained(_adamw)),
    "adamw, foreach": _started(_trained(lambda p: _adamw(p, foreach=True))),
    "adamw, fused": _started(_trained(lambda p: _adamw(p, fused=True))),
    "scaled": _started(_trained(_sgd, scaled=True)),
    "state": _started(_state),
    "saved": _started(_saved),
}
BOUNDS = {"bfloat16": 4e-2, "float16": 5e-3, "autocast": 4e-2}


def check_form(name: str, form: str, sharding: str) -> list[str]:
    """What differs from one device, as lines; nothing if all is right."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    mesh = rank_mesh((dist.get_world_size(),), ("tp" if sharding == TENSOR else "dp",))
    wanted = FORMS[form](Run(name, sharding, None))
    found = FORMS[form](Run(name, sharding, mesh))
    return list(compare(found, wanted, BOUNDS.get(form, TOLERANCE)))
