"""`shardwright doctor`: whether this machine can run what this library does."""

from __future__ import annotations

import typer


def doctor() -> int:
    """Look at versions, backends, memory and the connection of two processes here; say what is wrong.

    Exits with 1 if something will not work.
    """
    from shardwright.cli.doctor_checks import examine  # here: --help must not wait for torch

    wrong = False
    for finding in examine():
        wrong = wrong or finding.wrong
        typer.echo(str(finding))
    typer.echo("something will not work: see the lines marked !!" if wrong else "all is well")
    return int(wrong)
