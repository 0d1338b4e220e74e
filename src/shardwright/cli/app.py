"""The commands and what becomes of their errors. Importing this imports neither torch nor rich."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from shardwright.cli import checkpoint
from shardwright.cli.doctor import doctor
from shardwright.cli.explain import explain
from shardwright.cli.plan import plan
from shardwright.cli.train import NEWEST, TrainCommand, train
from shardwright.errors import ShardwrightError, printable

USER_ERROR = 2

app = typer.Typer(
    name="shardwright",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=TrainCommand)(train)
for command in (plan, doctor):
    app.command()(command)
app.add_typer(checkpoint.app, name="checkpoint")
# A dim such as -1 is an operand; what is neither an operand nor an option is refused as an operand.
app.command(context_settings={"ignore_unknown_options": True})(explain)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardwright {sys.modules['shardwright'].__version__}")
        raise typer.Exit


@app.callback()
def shared(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Distributed tensors with open placements: train on many processes, look at plans and rules."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 2 and one line for what a person got wrong.

    Args: arguments: the words after `shardwright`; None: those of this process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    words = _with_values(given) or ["--help"]
    try:
        code = typer.main.get_command(app).main(args=words, prog_name="shardwright", standalone_mode=False)
    except ShardwrightError as error:
        return _refuse(str(error))
    except typer.Abort:
        return 130
    except OSError as error:  # a file or a pipe of this process; what a run writes has words of its own
        return _refuse(str(error), everywhere=True)
    except Exception as error:
        message = getattr(error, "format_message", None)  # what the parser of the command line raises
        if message is None:
            raise
        context = getattr(error, "ctx", None)  # of the command whose help tells more
        command = context.command_path if context else "shardwright"
        return _refuse(f"{message().rstrip('.')}: see {command} --help")
    return int(code or 0)


def _with_values(arguments: Sequence[str]) -> list[str]:
    """`--resume` may stand alone; it then means the newest checkpoint."""
    words: list[str] = []
    for index, word in enumerate(arguments):
        words.append(word)
        following = arguments[index + 1] if index + 1 < len(arguments) else "-"
        if word == "--resume" and following.startswith("-"):
            words.append(NEWEST)
    return words


def _refuse(message: str, *, everywhere: bool = False) -> int:
    """Say what is wrong in one line. Ranks of one torchrun share their arguments, so the first one speaks."""
    if everywhere or os.environ.get("LOCAL_RANK", "0") == "0":
        with contextlib.suppress(OSError, AttributeError):  # closed, or full
            sys.stderr.write(f"shardwright: {printable(' '.join(message.split()))}\n")
    return USER_ERROR
