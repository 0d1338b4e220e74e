"""`shardwright train`: the settings of a run, checked before a process is started."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

NEWEST = "newest"

Number = int | None


class TrainCommand(TyperCommand):
    """Shows the defaults of `TrainConfig`, which is imported only when somebody asks for them."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options into the help."""
        from shardwright.train.config import TrainConfig

        for option in self.params:
            default = TrainConfig.model_fields[option.name].default if option.name != "help" else None
            if isinstance(option, TyperOption) and default not in (None, False):
                option.show_default = str(default)
        super().format_options(ctx, formatter)


def _help(text: str, default: str | bool = False) -> Any:
    """An option that leaves `TrainConfig` its default; `default` tells it where it is no plain value."""
    return typer.Option(help=text, show_default=default)


def train(  # noqa: PLR0913  one parameter for each flag
    *,
    world: Annotated[Number, _help("Processes in all.", "product of the degrees")] = None,
    pp: Annotated[Number, _help("Pipeline stages: each holds a part of the layers.")] = None,
    dp_replicate: Annotated[Number, _help("Copies of the model, each on its own part of the batch.")] = None,
    dp_shard: Annotated[
        Number, _help("Ranks that share one copy's parameters.", "the rest of the world")
    ] = None,
    cp: Annotated[Number, _help("Context parallel ranks: each holds a part of every sequence.")] = None,
    cp_replicate: Annotated[
        Number, _help("Context parallel ranks that take other sequences instead.")
    ] = None,
    tp: Annotated[Number, _help("Tensor parallel ranks: each holds a part of every attention.")] = None,
    sp: Annotated[
        bool, typer.Option("--sp", help="Between attentions, cut sequences over the ranks of --tp too.")
    ] = False,
    ep: Annotated[Number, _help("Expert parallel ranks: each holds a part of the experts.")] = None,
    steps: Annotated[Number, _help("Steps to train.")] = None,
    batch_size: Annotated[Number, _help("Sequences in a step, over all ranks.")] = None,
    micro_batches: Annotated[
        Number, _help("Parts of a rank's batch that go through the stages of --pp.", "about twice --pp")
    ] = None,
    unit_mib: Annotated[
        float | None, _help("Up to so many MiB, sharded parameters are gathered at once; above, by layers.")
    ] = None,
    layers: Annotated[Number, _help("Layers of the model.")] = None,
    seq_len: Annotated[Number, _help("Bytes in a sequence.")] = None,
    experts: Annotated[Number, _help("Experts in a layer.")] = None,
    top_k: Annotated[Number, _help("Experts that each byte goes to.")] = None,
    lr: Annotated[float | None, _help("Learning rate at its highest.")] = None,
    dtype: Annotated[str | None, _help("float32 or bfloat16.")] = None,
    device: Annotated[str | None, _help("cpu or cuda.")] = None,
    seed: Annotated[Number, _help("Decides the first values and every batch.")] = None,
    data: Annotated[
        str | None, _help("A file or a folder of text.", "the sources of Python's standard library")
    ] = None,
    out: Annotated[
        str | None,
        _help("Where metrics, curve, layouts, sample and checkpoints go.", "a new folder in runs/"),
    ] = None,
    resume: Annotated[
        str | None,
        _help("Go on from a checkpoint in --out: alone, from the newest finished one; or name one."),
    ] = None,
    checkpoint_every: Annotated[Number, _help("Steps between checkpoints; 0: only the last.")] = None,
    timeout: Annotated[
        float | None, _help("Seconds without progress, after the first step, that end the run.")
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Train the same on one device too, compare, exit 1 if it differs."),
    ] = False,
) -> int:
    """Train a mixture-of-experts language model under N-D parallelism.

    Starts the processes on this machine, or takes those that torchrun has started. The first Ctrl-C
    finishes the step, saves and exits with 130; the second aborts.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    return run(given)


def run(settings: dict[str, Any]) -> int:
    """Check everything that can be checked without a process, then train; returns the exit code.

    Raises: ShardwrightError: one line for the person who gave the settings.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy makes threads that a fork would lose

    # Here: --help must not wait for these imports, and a wrong setting not for torch's.
    from shardwright.launch.environment import given_ranks
    from shardwright.train.config import TrainConfig

    config = TrainConfig.parse(**settings).check(given_ranks())

    from shardwright.launch.launch import launch
    from shardwright.train.launch_checks import check_devices, check_start, how_to_go_on
    from shardwright.train.runner import main_rank

    folder = check_start(config)
    if given_ranks() is None:
        check_devices(config)
        config = config.model_copy(update={"out": folder})
    return launch(config, main_rank, advice=lambda: how_to_go_on(folder))
