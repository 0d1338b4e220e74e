"""`shardwright plan`: how one layout becomes another."""

from __future__ import annotations

from typing import Annotated

import typer

from shardwright.cli.meshes import parse_mesh
from shardwright.errors import ConfigError


def plan(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help='A layout, such as "f32[8@dp, 16]".')],
    target: Annotated[str, typer.Argument(metavar="TARGET", help='A layout, such as "f32[8, 16@dp]".')],
    mesh: Annotated[str, typer.Option(help='Axes and sizes, such as "dp=2,tp=4".')],
    to_mesh: Annotated[
        str | None, typer.Option(help="The mesh of TARGET, if it is another one; see --to-rank.")
    ] = None,
    to_rank: Annotated[
        int | None,
        typer.Option(min=0, help="The first rank of --to-mesh; the others follow.", show_default="0"),
    ] = None,
) -> None:
    """Show what a redistribution moves, in how many rounds, and the least that could be moved.

    A layout is written as it is printed: `f32[8@(tp, dp), 16] {cp: Partial(sum)}` (a dim that tp cuts
    first, then dp; a sum over cp that is still to be made).
    """
    from shardwright.layout.layout import Layout  # here: --help must not wait for torch
    from shardwright.plan.decide import plan_redistribution

    if to_mesh is None and to_rank is not None:
        raise ConfigError(
            f"--to-rank {to_rank} is the first rank of --to-mesh: add --to-mesh, or leave it out"
        )
    here = parse_mesh(mesh)
    there = here if to_mesh is None else parse_mesh(to_mesh, option="--to-mesh", first_rank=to_rank or 0)
    typer.echo(str(plan_redistribution(Layout.parse(source, here), Layout.parse(target, there))))
