"""What a training run is asked to do. Text enters here, is validated once, and is frozen."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from shardwright.errors import ConfigError

Degree = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=1)]


class TrainConfig(BaseModel):
    """Every setting of `shardwright train`; the command's flags are the same names with dashes.

    Make one with `TrainConfig.parse(...)`, which reports all wrong fields in one line, then call `check()`,
    which fits the degrees to the world. Neither touches a process group; only `check()` reads the file
    system.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    # ranks; None: what the other settings imply (see `check`)
    world: Degree | None = None
    pp: Degree = 1
    dp_replicate: Degree = 1
    dp_shard: Degree | None = None
    cp: Degree = 1
    cp_replicate: Degree = 1
    tp: Degree = 1
    sp: bool = False
    ep: Degree = 1

    # run
    steps: Annotated[int, Field(ge=0)] = 200
    batch_size: Count = 32
    micro_batches: Count | None = None
    unit_mib: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 25.0
    seq_len: Count = 128
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 4e-3
    warmup: Annotated[int, Field(ge=0)] = 20
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.05
    clip: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    eval_every: Count = 50
    eval_windows: Count = 64
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    sample_length: Annotated[int, Field(ge=0)] = 200
    data: Path | None = None

    # model
    layers: Count = 3
    hidden: Count = 128
    heads: Count = 4
    experts: Count = 8
    top_k: Count = 2
    expert_hidden: Count = 160

    # files and supervision
    out: Path | None = None
    resume: Annotated[str, Field(min_length=1)] | None = None
    checkpoint_every: Annotated[int, Field(ge=0)] = 100
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    verify: bool = False

    @field_validator("data", "out", mode="before")
    @classmethod
    def _named(cls, path: Any) -> Any:
        """An empty path is a shell variable that was never set, an address no folder."""
        if path == "":
            raise ValueError("it is empty: name a path, or leave the flag out")
        try:
            str(path).encode()
        except UnicodeEncodeError:  # it goes into files of JSON
            raise ValueError("its name is not of UTF-8: use another") from None
        if "://" not in str(path):
            return path
        from shardwright.checkpoint.storage.place import folder_of  # noqa: PLC0415 - torch comes with it

        return folder_of(path)

    @classmethod
    def parse(cls, **settings: Any) -> Self:
        """The config with these settings.

        Raises: ConfigError: one line that names every setting that is unknown or out of range.
        """
        try:
            return cls(**settings)
        except ValidationError as error:
            raise ConfigError("; ".join(_fact(one) for one in error.errors())) from None

    def check(self, given_ranks: int | None = None) -> Self:
        """This config with world and dp_shard filled in, once everything about it is known to fit.

        Args: given_ranks: the number of ranks that already run (torchrun), None when none has been started.
        Without `world`, the world is `given_ranks`, else the product of the degrees; dp_shard takes the rest.
        Raises: ConfigError: one line: what, why, what to do.
        """
        resolved = self._resolve_world(given_ranks)
        resolved._check_experts()
        resolved._check_model()
        resolved._check_sequence()
        resolved = resolved._resolve_stages()
        resolved._check_run()
        return resolved

    @property
    def batch_ranks(self) -> int:
        """How many ranks take different sequences: data parallel ranks, and those of `--cp-replicate`."""
        return self.dp_replicate * (self.dp_shard or 1) * self.cp_replicate

    def _resolve_world(self, given_ranks: int | None) -> Self:
        known = {
            "--pp": self.pp,
            "--dp-replicate": self.dp_replicate,
            "--cp": self.cp,
            "--cp-replicate": self.cp_replicate,
            "--tp": self.tp,
        }
        known = {flag: n for flag, n in known.items() if n > 1 or flag not in ("--pp", "--cp")}
        if self.dp_shard is not None:
            known["--dp-shard"] = self.dp_shard
        product = math.prod(known.values())
        world = self.world or given_ranks or product
        if given_ranks is not None and world != given_ranks:
            raise ConfigError(
                f"--world {world} but {given_ranks} ranks are running: leave --world out under torchrun, "
                f"or start torchrun with {world} processes"
            )
        spelled = " ".join(f"{flag} {degree}" for flag, degree in known.items())
        if world % product:
            raise ConfigError(
                f"{spelled} multiply to {product}, which does not divide --world {world}: "
                f"choose degrees whose product divides {world}, or --world {product}"
            )
        if self.dp_shard is not None and product != world:
            raise ConfigError(
                f"{spelled} multiply to {product}, not to --world {world}: "
                f"use --world {product}, or leave --dp-shard out and it takes the rest"
            )
        return self.model_copy(update={"world": world, "dp_shard": self.dp_shard or world // product})

    def _check_experts(self) -> None:
        ranks = self.batch_ranks * self.cp
        if ranks % self.ep:
            cut = f" x cp {self.cp}" if self.cp > 1 else ""
            raise ConfigError(
                f"--ep {self.ep} does not divide the {ranks} data and context parallel ranks "
                f"(dp_replicate {self.dp_replicate} x dp_shard {self.dp_shard}{cut} x cp_replicate "
                f"{self.cp_replicate}): choose --ep from {_divisors(ranks)}"
            )
        if self.experts % self.ep:
            raise ConfigError(
                f"--experts {self.experts} cannot be shared out evenly over --ep {self.ep}: "
                f"choose --experts as a multiple of {self.ep}, or --ep from {_divisors(self.experts)}"
            )
        if self.top_k > self.experts:
            raise ConfigError(
                f"--top-k {self.top_k} is more than the --experts {self.experts} there are to choose from: "
                f"choose --top-k of at most {self.experts}"
            )

    def _check_model(self) -> None:
        if self.heads % self.tp:
            raise ConfigError(
                f"--tp {self.tp} does not divide the {self.heads} attention heads: "
                f"choose --tp from {_divisors(self.heads)}"
            )
        if self.hidden % (2 * self.heads):
            raise ConfigError(
                f"a hidden size of {self.hidden} does not split into {self.heads} heads of an even size, as "
                f"rotary positions need: choose a hidden size that is a multiple of {2 * self.heads}"
            )

    def _check_sequence(self) -> None:
        """Each rank of a sequence takes two pieces of it, and of these each rank of `--sp` one part."""
        if self.sp and self.tp == 1:
            raise ConfigError(
                "--sp cuts what the ranks of --tp hold between attentions: add --tp of at least 2"
            )
        parts = 2 * self.cp if self.cp > 1 else 1
        flags = f"--cp {self.cp}" if self.cp > 1 else "--sp"
        if self.sp:
            parts *= self.tp
            flags += f" --tp {self.tp}"
        if self.seq_len % parts:
            raise ConfigError(
                f"{flags} cut a sequence into {parts} parts, which do not divide --seq-len {self.seq_len}: "
                f"choose --seq-len as a multiple of {parts}"
            )

    def _resolve_stages(self) -> Self:
        """The number of micro-batches; those of one rank are of one size."""
        if self.pp == 1:
            if self.micro_batches is not None:
                raise ConfigError("--micro-batches are what a pipeline runs: add --pp, or leave them out")
            return self
        if self.layers < self.pp:
            raise ConfigError(
                f"--pp {self.pp} has more stages than the model's {self.layers} layers: choose --pp of at "
                f"most {self.layers}, or more --layers"
            )
        rows, left = divmod(self.batch_size, self.batch_ranks)
        if left:
            raise ConfigError(
                f"--batch-size {self.batch_size} does not share out evenly over the {self.batch_ranks} ranks "
                f"that read sequences, and --pp cuts each rank's into micro-batches: choose a multiple of "
                f"{self.batch_ranks}"
            )
        micro = self.micro_batches or max(n for n in range(1, 2 * self.pp + 1) if rows % n == 0)
        if rows % micro:
            raise ConfigError(
                f"--micro-batches {micro} do not divide the {rows} sequences of a rank: choose from "
                f"{_divisors(rows)}"
            )
        if micro < self.pp:
            raise ConfigError(
                f"--pp {self.pp} needs as many micro-batches, and a rank's {rows} sequences make {micro}: "
                f"choose --batch-size as a multiple of {self.batch_ranks * self.pp}, and --micro-batches of "
                f"at least {self.pp}"
            )
        return self.model_copy(update={"micro_batches": micro})

    def _check_run(self) -> None:
        if self.verify and self.dtype != "float32":
            raise ConfigError(
                f"--verify compares to float32 rounding, which --dtype {self.dtype} does not have: "
                "leave --dtype out"
            )
        if self.verify and self.resume:
            raise ConfigError("--verify trains from the first step, so it cannot --resume: leave one out")
        if self.resume and self.out is None:
            raise ConfigError("--resume needs the folder of the run to go on with: add --out FOLDER")
        if self.verify and self.steps < 1:
            raise ConfigError("--verify has nothing to compare at --steps 0: choose --steps of at least 1")
        check_text(self.data, self.seq_len)
        if self.device == "cuda":
            self._check_cuda()

    def _check_cuda(self) -> None:
        import torch  # noqa: PLC0415  importing torch takes a second that --help must not pay

        if not torch.cuda.is_available():
            raise ConfigError("--device cuda but torch sees no CUDA device here: use --device cpu")


def _fact(error: Any) -> str:
    name = "--" + "-".join(str(part).replace("_", "-") for part in error["loc"][:1])
    if error["type"] == "extra_forbidden":
        return f"{name} is not a setting of train: see shardwright train --help"
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{name} {error['input']!r} cannot be used: {message[:1].lower()}{message[1:]}"


def least_text(seq_len: int) -> int:
    """How many bytes of text are enough for windows of `seq_len` in both parts of a corpus."""
    return 160 * (seq_len + 1)


def check_text(path: Path | None, seq_len: int) -> None:
    """Refuse a `--data` that cannot be enough, by file sizes alone; None is the default corpus.

    Raises: ConfigError: nothing there, or too little for `seq_len`.
    """
    if path is None:
        return
    with reading(path):
        if not path.exists():
            raise ConfigError(f"--data {path} does not exist: name a text file or a folder of text files")
        if not (path.is_file() or path.is_dir()):
            raise ConfigError(f"--data {path} is a pipe or a device, which each rank would read: name a file")
        size = sum(file.stat().st_size for file in text_files(path))
    if size == 0:
        raise ConfigError(f"--data {path} holds no text: name a file or a folder with text in it")
    if size < least_text(seq_len):
        raise too_little(f"--data {path}", size, seq_len)


@contextlib.contextmanager
def reading(path: Path | None) -> Iterator[None]:
    """Raises: ConfigError: the system refuses to read what is at `--data`, and why."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"--data: {error.filename or path!s:.200} cannot be read: {error.strerror or error}; "
            "name a file or a folder that you may read"
        ) from None


def text_files(path: Path, ending: str = "") -> list[Path]:
    """The file, or the files below the folder. Raises: OSError: a folder cannot be read."""

    def refuse(error: OSError) -> None:
        raise error

    if path.is_file():
        return [path]
    found = (Path(at, name) for at, _, names in os.walk(path, onerror=refuse) for name in names)
    return [file for file in found if file.name.endswith(ending) and file.is_file()]


def too_little(source: str, size: int, seq_len: int) -> ConfigError:
    """The error for a corpus that is too small."""
    return ConfigError(
        f"{source}: {size:,} bytes of text are too few for windows of --seq-len {seq_len} with a part held "
        f"out: give at least {least_text(seq_len):,} bytes with --data, or a smaller --seq-len"
    )


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
