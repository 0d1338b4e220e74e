"""`shardwright explain`: what an op does with operands of some layouts."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli.meshes import parse_mesh
from shardwright.errors import ConfigError

if TYPE_CHECKING:
    from shardwright.layout.mesh_shape import MeshShape


def explain(
    op: Annotated[str, typer.Argument(metavar="OP", help="An op, such as aten::mm or aten::add.Tensor.")],
    operands: Annotated[
        list[str],
        typer.Argument(
            metavar="OPERAND...",
            help='Layouts ("f32[8@dp, 16]"), values (2, 0.5, "[1, 2]"), lists ("[f32[8@dp], f32[8]]").',
        ),
    ],
    mesh: Annotated[str, typer.Option(help='Axes and sizes, such as "dp=2,tp=4".')],
) -> None:
    """Show which rule an op uses on these operands, what it moves, and what comes out; nothing is run."""
    from shardwright.show.op import explain as explained  # here: --help must not wait for torch

    shape = parse_mesh(mesh)
    typer.echo(str(explained(op, *(parse_operand(one, shape) for one in operands))))


def parse_operand(text: str, mesh: MeshShape) -> Any:
    """A layout, a list of operands, or else a Python value.

    Raises: LayoutError, ConfigError: it is none of them.
    """
    from shardwright.layout.layout import Layout
    from shardwright.layout.text import between_commas

    text = text.strip()
    if "[" in text and not text.startswith("["):
        return Layout.parse(text, mesh)
    if text.startswith("[") and text.endswith("]"):
        items = between_commas(text[1:-1])
        return [parse_operand(item, mesh) for item in (items if items[-1].strip() else items[:-1])]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise ConfigError(
            f'operand {text!r} is neither a layout ("f32[8@dp, 16]") nor a value (2, 0.5, True, "[1, 2]")'
        ) from None
