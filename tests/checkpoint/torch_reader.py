"""A program of torch alone: reads a folder that this library wrote for it, and takes a step.

    python tests/checkpoint/torch_reader.py FOLDER OUT [RANK WORLD]

On several ranks the model is one of `fully_shard`. `OUT` gets every tensor, whole, before and after the step.
"""

import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A tied weight, a buffer, two groups."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 6, bias=False), nn.Linear(6, 7))
    model[3].weight = model[0].weight
    rest = [one for name, one in model.named_parameters() if name != "0.weight"]
    groups = [{"params": [model[0].weight], "lr": 0.5}, {"params": rest, "lr": 0.25}]
    return model, torch.optim.AdamW(groups, lr=0.125)


def fill(model: nn.Module) -> None:
    """Gradients that follow from the values, so that they are the same on every mesh."""
    for one in model.parameters():
        one.grad = one.detach() * 0.5


def whole(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


def told(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    names = {id(one): name for name, one in model.named_parameters()}
    found = {name: whole(one) for name, one in model.state_dict().items()}
    for parameter, state in optimizer.state.items():
        found |= {f"{names[id(parameter)]}/{key}": whole(one) for key, one in state.items()}
    rates = [group["lr"] for group in optimizer.param_groups]
    return {**found, "rates": torch.tensor(rates)}


def main(folder: str, out: str, rank: int = 0, world: int = 1) -> None:
    warnings.simplefilter("ignore")
    if world > 1:
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo", init_method=f"file://{out}.rendezvous", rank=rank, world_size=world)
    model, optimizer = make()
    with torch.no_grad():
        for one in model.parameters():
            one.zero_()
    if world > 1:
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (world,)))
        optimizer = torch.optim.AdamW(
            [{"params": [model[0].weight]}, {"params": [*model.parameters()][1:]}], lr=0.125
        )
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id=folder, no_dist=world == 1)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    before = told(model, optimizer)
    fill(model)
    optimizer.step()
    after = told(model, optimizer)
    if rank == 0:
        torch.save({"before": before, "after": after}, out)
    assert not [name for name in sys.modules if name.startswith("shardwright")]
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
