"""What a strategy must not break, each a function of the strategy that raises where the promise is broken."""

import copy

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardwright.testing.meshes import rank_mesh

from .models import (
    check_full_gradients,
    check_pending,
    one_device_gradients,
    part_of,
    sum_loss,
    token_batch,
    tricky,
)


def _mesh():
    return rank_mesh((2,), ("dp",))


def _data(model):
    batch = token_batch(3)
    return part_of(batch, (2, 1), torch.distributed.get_rank()), one_device_gradients(model, batch)


def gradients_are_those_of_one_device(place):
    plain = tricky()
    local, wanted = _data(plain)
    model = place(plain, _mesh())
    sum_loss(model, local, 12).backward()
    check_full_gradients(model, wanted)
    check_pending(model, ("dp",))
    sum_loss(model, local, 12).backward()
    check_full_gradients(model, wanted, scale=2)


def an_exception_in_the_forward_leaves_it_usable(place):
    plain = tricky()
    local, wanted = _data(plain)
    model = place(plain, _mesh())
    with pytest.raises(RuntimeError):
        model.first(torch.randn(3, 5))
    assert type(model.first) is torch.nn.Linear
    for broken in (local[0].float(), torch.full((1, 2), 99)):
        with pytest.raises((RuntimeError, IndexError)):
            model(broken)
    handle = model.norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(local[0])
    handle.remove()
    distributed = [isinstance(p, torch.distributed.tensor.DTensor) for p in model.parameters()]
    assert distributed == [True] * 7
    sum_loss(model, local, 12).backward()
    check_full_gradients(model, wanted)


class _Recomputing(torch.nn.Module):
    """The model, and one of its children, under activation checkpointing."""

    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, tokens):
        hidden = self.inner.embed(tokens)
        hidden = checkpoint(self.inner.first, hidden, use_reentrant=self.reentrant)
        return checkpoint(self._scaled, hidden, use_reentrant=self.reentrant)

    def _scaled(self, hidden):
        return self.inner.head(hidden) * self.inner.gain


def _recomputes(place, reentrant):
    plain = _Recomputing(tricky(), reentrant)
    local, wanted = _data(plain)
    model = place(plain, _mesh())
    sum_loss(model, local, 12).backward()
    check_full_gradients(model, wanted)
    whole = place(tricky(), _mesh())
    local, wanted = _data(tricky())
    tokens, targets = local
    logits = checkpoint(whole, tokens, use_reentrant=False)
    loss = functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum") / 12
    loss.backward()
    check_full_gradients(whole, wanted)


def recomputation_with_saved_tensors_works(place):
    _recomputes(place, reentrant=False)


def reentrant_recomputation_works(place):
    _recomputes(place, reentrant=True)


class _CallsItself(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(5, 5))

    def forward(self, x, depth):
        if depth:
            x = self(x, depth - 1)
        return functional.linear(x, self.weight)


def a_module_that_calls_itself_works(place):
    torch.manual_seed(0)
    plain = _CallsItself()
    x = torch.randn(3, 5)
    wanted = copy.deepcopy(plain)
    wanted(x, 3).sum().backward()
    model = place(plain, _mesh())
    (model(x, 3).sum() / 2).backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), wanted.weight.grad)


def a_child_called_directly_works(place):
    plain = tricky()
    x = torch.randn(3, 6)
    wanted = copy.deepcopy(plain)
    wanted.first(x).sum().backward()
    model = place(plain, _mesh())
    out = model.first(x)
    assert type(out) is torch.Tensor
    (out.sum() / 2).backward()
    torch.testing.assert_close(model.first.weight.grad.full_tensor(), wanted.first.weight.grad)


class _ReadsItsChild(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.child = torch.nn.Linear(5, 5)

    def forward(self, x):
        return functional.linear(self.child(x), self.child.weight, self.child.bias)


def a_parent_that_reads_its_childs_weight_works(place):
    torch.manual_seed(0)
    plain = _ReadsItsChild()
    x = torch.randn(3, 5)
    wanted = copy.deepcopy(plain)
    wanted(x).sum().backward()
    model = place(plain, _mesh())
    (model(x).sum() / 2).backward()
    torch.testing.assert_close(model.child.weight.grad.full_tensor(), wanted.child.weight.grad)


def tied_weights_stay_tied(place):
    model = place(tricky(), _mesh())
    assert model.head.weight is model.embed.weight
    assert len(list(model.parameters())) == len(list(tricky().parameters()))


def buffers_stay_plain(place):
    plain = tricky()
    buffer = plain.shift
    model = place(plain, _mesh())
    assert model.shift is buffer
    assert type(model.shift) is torch.Tensor
    model(token_batch(1)[0])


def state_dict_keys_stay(place):
    plain = tricky()
    keys, names = list(plain.state_dict()), [n for n, _ in plain.named_parameters()]
    model = place(plain, _mesh())
    assert list(model.state_dict()) == keys
    assert [n for n, _ in model.named_parameters()] == names
    model.load_state_dict(model.state_dict())


def classes_stay(place):
    plain = tricky()
    classes = [type(m) for m in plain.modules()]
    seen = []
    plain.first.register_forward_hook(lambda *_: seen.extend(type(m) for m in plain.modules()))
    model = place(plain, _mesh())
    model.first(torch.randn(2, 6))
    assert seen == classes, "during a forward"
    assert [type(m) for m in model.modules()] == classes


def attributes_and_hooks_of_parameters_stay(place):
    plain = tricky()
    plain.first.weight.decay = 0.25
    calls = []
    plain.first.weight.register_hook(lambda g: calls.append("gradient") or g * 2)
    plain.first.weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    plain.frozen.special = "kept"
    local, wanted = _data(tricky())
    model = place(plain, _mesh())
    assert model.first.weight.decay == 0.25
    assert model.frozen.special == "kept"
    sum_loss(model, local, 12).backward()
    assert calls == ["gradient", "accumulated"]
    torch.testing.assert_close(model.first.weight.grad.full_tensor(), 2 * wanted["first.weight"])


def a_second_application_is_refused_unchanged(place):
    model = place(tricky(), _mesh())
    _is_refused_unchanged(place, model)


def a_failure_half_way_changes_nothing(place):
    """A later parameter is placed on the axis already, the first ones are not."""
    model = tricky()
    place(model.norm, _mesh())
    _is_refused_unchanged(place, model)


def _is_refused_unchanged(place, model):
    before = dict(model.named_parameters(remove_duplicate=False))
    with pytest.raises(ValueError, match=r"dp|placed already"):
        place(model, _mesh())
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    assert not model._forward_pre_hooks


def frozen_parameters_stay_frozen(place):
    model = place(tricky(), _mesh())
    sum_loss(model, token_batch(1), 4).backward()
    assert not model.frozen.requires_grad
    assert model.frozen.grad is None
