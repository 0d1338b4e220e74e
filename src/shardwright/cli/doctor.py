"""`shardwright doctor`: whether this machine can run what this library does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def doctor(
    *,
    save: Annotated[
        Path | None, typer.Option(help="Write what was measured of the network, for shardwright.use_network.")
    ] = None,
) -> int:
    """Look at versions, backends, memory and the connection of two processes here; say what is wrong.

    Exits with 1 if something will not work.
    """
    if save is not None and (save.is_dir() or not os.access(save.parent, os.W_OK)):
        raise typer.BadParameter(f"--save {save} cannot be written: name a file in a folder that is there")

    from shardwright.cli.doctor_checks import examine  # here: --help must not wait for torch

    wrong = False
    for finding in examine():
        wrong = wrong or finding.wrong
        typer.echo(str(finding))
        if finding.network is not None and save is not None:
            save.write_text(finding.network.to_json() + "\n", encoding="utf-8")
    typer.echo("something will not work: see the lines marked !!" if wrong else "all is well")
    return int(wrong)
