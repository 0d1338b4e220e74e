"""Strategies as they are often written. Each breaks one promise: the checks must go red on it."""

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.nn.utils import parametrize

from shardwright.errors import ParallelError


def _replicated(p, mesh):
    return nn.Parameter(
        distribute_tensor(p.detach(), mesh, [Replicate()] * mesh.ndim), requires_grad=p.requires_grad
    )


def _replace(module, mesh):
    """All parameters, ties kept."""
    made = {}
    for owner in module.modules():
        for name, p in list(owner._parameters.items()):
            if p is not None:
                made.setdefault(p, None)
                made[p] = made[p] if made[p] is not None else _replicated(p, mesh)
                owner._parameters[name] = made[p]
    return module


def swap_in_hooks(module, mesh, grad=Partial):
    """Distributed parameters outside of the root's forward, local tensors inside it, by hooks."""
    _replace(module, mesh)
    kept = []

    def enter(_module, _inputs):
        local = {}
        for owner in module.modules():
            for name, p in list(owner._parameters.items()):
                if isinstance(p, DTensor):
                    kept.append((owner, name, p))
                    local.setdefault(p, p.to_local(grad_placements=[grad()] * mesh.ndim))
                    del owner._parameters[name]
                    object.__setattr__(owner, name, local[p])

    def leave(_module, _inputs, _outputs):
        while kept:
            owner, name, p = kept.pop()
            object.__delattr__(owner, name)
            owner._parameters[name] = p

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)
    return module


def swap_class(module, mesh):
    """Every module's class is exchanged during its own forward for one whose weights are local."""
    _replace(module, mesh)
    for owner in module.modules():
        if owner._parameters:
            _swap_class_of(owner, mesh)
    return module


def _swap_class_of(owner, mesh):
    cls = type(owner)

    def getter(name):
        return property(lambda self: self._parameters[name].to_local(grad_placements=[Partial()] * mesh.ndim))

    placed = [name for name, p in owner._parameters.items() if p is not None]
    local = type(f"Local{cls.__name__}", (cls,), {name: getter(name) for name in placed})
    owner.register_forward_pre_hook(lambda m, _: setattr(m, "__class__", local))
    owner.register_forward_hook(lambda m, _, __: setattr(m, "__class__", cls))


def never_summed(module, mesh):
    """The local gradient of each rank is labelled Replicate, torch's default for `to_local`."""
    return swap_in_hooks(module, mesh, grad=Replicate)


class _Local(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh

    def forward(self, p):
        return p.to_local(grad_placements=[Partial()] * self.mesh.ndim)


def parametrized(module, mesh):
    """`parametrize` unwraps the parameters."""
    _replace(module, mesh)
    for owner in list(module.modules()):
        for name, p in list(owner._parameters.items()):
            if p is not None:
                parametrize.register_parametrization(owner, name, _Local(mesh), unsafe=True)
    return module


def unties(module, mesh):
    """Walks over the slots and replaces each on its own."""
    for owner in module.modules():
        for name, p in list(owner._parameters.items()):
            if p is not None:
                owner._parameters[name] = _replicated(p, mesh)
    return module


def drops_what_hangs_on_parameters(module, mesh):
    """A new Parameter without the attributes and hooks of the old one."""
    return _replace(module, mesh)


def distributes_buffers(module, mesh):
    """Buffers become DTensors as well, and nothing takes them back."""
    swap_in_hooks(module, mesh)
    for owner in module.modules():
        for name, b in list(owner._buffers.items()):
            owner._buffers[name] = distribute_tensor(b, mesh, [Replicate()] * mesh.ndim)
    return module


def checks_while_it_walks(module, mesh):
    """Replaces parameter by parameter, and refuses one that is placed already in the middle of it."""
    for owner in module.modules():
        for name, p in list(owner._parameters.items()):
            if isinstance(p, DTensor) and p.device_mesh.mesh_dim_names == mesh.mesh_dim_names:
                raise ParallelError(f"{name} is placed already")
            if p is not None:
                owner._parameters[name] = _replicated(p, mesh)
    return module


def applies_twice(module, mesh):
    """Takes a module again that it has placed, and says nothing."""
    for owner in module.modules():
        for name, p in list(owner._parameters.items()):
            if p is not None and not isinstance(p, DTensor):
                owner._parameters[name] = _replicated(p, mesh)
    return module


def averages(gradients, mesh):
    """What DDP does: the mean of the ranks' gradients."""
    for g in gradients:
        dist.all_reduce(g, group=mesh.get_group())
        g.div_(mesh.size())


def sums_twice(gradients, mesh):
    """Adds up what was added up already."""
    for g in gradients:
        dist.all_reduce(g, group=mesh.get_group())
        dist.all_reduce(g, group=mesh.get_group())


def sums(gradients, mesh):
    """What is right."""
    for g in gradients:
        dist.all_reduce(g, group=mesh.get_group())
