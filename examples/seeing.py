# torchrun --standalone --nproc-per-node 4 examples/seeing.py
"""What is where, what moves, and why: traces, and pictures of layouts, plans and a model."""

import torch
from torch import nn

import shardwright as sw
from shardwright.context import REGULAR_DOMAIN, DeviceMeshParameters
from shardwright.parallel import Report, parallelize


def main() -> None:
    with DeviceMeshParameters(data_parallel_shard=2, tensor_parallel=2).build() as context:
        mesh = context.mesh_for(REGULAR_DOMAIN)[("dp_shard", "tp")]
        say = print if context.is_main else (lambda *_: None)

        say("--- a layout: who holds what")
        layout = sw.Layout(
            mesh, {"dp_shard": sw.Shard(0), "tp": sw.Interleaved(1, 2)}, (4, 8), dtype=torch.float32
        )
        say(layout)
        if context.is_main:
            sw.visualize(layout)

        say("--- a plan: what is sent, and the least that could be")
        whole = layout.with_placements((sw.Replicate(), sw.Shard(1)))
        say(sw.plan_redistribution(layout, whole))

        say("--- an op before it runs")
        rows = sw.Layout(mesh["tp"], [sw.Shard(1)], (6, 8), dtype=torch.float32)
        columns = sw.Layout(mesh["tp"], [sw.Shard(0)], (8, 4), dtype=torch.float32)
        say(sw.explain("aten::mm", rows, columns))

        say("--- a model: what became of each parameter")
        context.seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)).to(context.device)
        reports: list[Report] = []
        table = {"0": "colwise", "2": "rowwise", "": "fsdp"}
        parallelize(model, context, table, report=reports.append)
        for report in reports:
            say(report)
        for name, parameter in model.named_parameters():
            say(f"{name:10}", sw.layout_of(parameter))

        say("--- a step: what it sent, with the line that asked for it")
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(context.rank // 2)).to(context.device)
        with sw.trace() as seen, sw.spmd(mesh["tp"]):
            model(x).square().sum().backward()
        say(seen.table())
        assert seen.bytes == sum(event.bytes_sent for event in seen.collectives)


if __name__ == "__main__":
    main()
