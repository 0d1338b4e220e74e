"""The training run of one rank: from settings to an exit code."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint.folder import NEWEST, choose, step_path
from shardwright.checkpoint.load import load
from shardwright.checkpoint.save import save
from shardwright.context.context import DistributedContext
from shardwright.launch import supervise
from shardwright.show.table import LayoutTable, layout_table
from shardwright.train.agreement import from_first_rank
from shardwright.train.config import TrainConfig
from shardwright.train.data import Corpus, load_corpus
from shardwright.train.gather import full_parameters, of_all_stages
from shardwright.train.metrics import StepRecord
from shardwright.train.model import Decoder, ModelShape, count_parameters
from shardwright.train.optim import make_optimizer
from shardwright.train.parallelize import build_model
from shardwright.train.progress import Display
from shardwright.train.run_folder import LAYOUTS, SAMPLE, RunFolder, choose_folder, set_aside
from shardwright.train.sample import write_text
from shardwright.train.step import Observer, Trainer

# Settings that decide what a step does, whatever the mesh. `data_sum` is of the text itself.
DECIDING = frozenset(
    ("steps", "batch_size", "seq_len", "lr", "warmup", "weight_decay", "clip", "dtype", "seed", "data_sum")
)


def run(
    config: TrainConfig,
    context: DistributedContext,
    observers: Iterable[Observer] = (),
    corpus: Corpus | None = None,
) -> int:
    """Train as `config` says, on every rank of `context` at once.

    Args: observers: look at each step. corpus: the text of `config`, where the caller has loaded it already.
    Returns: the exit code: 0, or 128 + signal when a rank was asked to stop (the step is finished and saved).
    Raises: ShardwrightError, the same on every rank: a setting, a folder or a checkpoint cannot be used.
    """
    return TrainingRun(config, context, open_folder(config, context), observers, corpus).run()


def open_folder(config: TrainConfig, context: DistributedContext) -> RunFolder:
    """The run's folder, the same on every rank; nothing is written yet. Collective."""
    return RunFolder(from_first_rank(context, lambda: choose_folder(config)), writes=context.is_main)


def told_changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What makes a run that goes on another one than the run that saved, a line for each setting."""
    changed = [name for name in was if name in DECIDING and was[name] != now[name]]
    return [f"{name} was {was[name]}, and is {now[name]} from here on" for name in changed]


class TrainingRun:
    """One rank's loop over the steps, with what it shows and keeps."""

    def __init__(
        self,
        config: TrainConfig,
        context: DistributedContext,
        folder: RunFolder,
        observers: Iterable[Observer] = (),
        corpus: Corpus | None = None,
    ) -> None:
        self.config, self.context, self.folder = config, context, folder
        corpus = corpus or load_corpus(config.data, config.seq_len)
        model = build_model(config, context)
        self.trainer = Trainer(config, context, corpus, model, make_optimizer(model, config))
        self.trainer.observers.extend(observers)
        self._began = time.perf_counter()

    def run(self) -> int:
        """Train until the last step or a stop, and leave the folder complete."""
        display = Display(self.config.steps, self.config.experts, quiet=not self.context.is_main)
        from_first_rank(self.context, self.folder.lock)
        with contextlib.closing(self.folder), display:
            done = self._resume(display) if self.config.resume else 0
            lost = from_first_rank(self.context, lambda: self.folder.open(self.config, done))
            if lost:
                display.say(
                    f"resume: metrics.jsonl lacks {lost} of the {done} steps done; going on without them"
                )
            self.folder.write(LAYOUTS, self._layouts())
            display.start(done, self._headline())
            stopped = self._steps(done, display)
            if not stopped:
                self._finish(display)
        return supervise.stop_exit_code() if stopped else 0

    def _resume(self, display: Display) -> int:
        """Load the checkpoint that `--resume` means; the number of steps that it has behind it."""
        config = self.config
        choice = from_first_rank(self.context, lambda: choose(self.folder.path, config.resume or NEWEST))
        for skipped in choice.skipped:
            display.say(f"resume: {skipped}")
        loaded = load(choice.path, model=self.trainer.model, optimizer=self.trainer.optimizer)
        done = loaded.step or 0
        display.say(f"resume: {choice.path.name}, {done} of {config.steps} steps done")
        for line in told_changes(loaded.config, self._settings()):
            display.say(f"resume: {line}")
        for name in from_first_rank(self.context, lambda: set_aside(self.folder.path, done)):
            display.say(f"resume: {name} is of later steps, which are trained anew: now discarded-{name}")
        return done

    def _layouts(self) -> str:
        """The layouts of all parameters, those of each stage as its first rank has them. Collective."""
        model = self.trainer.model
        tables = of_all_stages(model, layout_table(model.named_parameters()))
        return LayoutTable(tuple(row for table in tables for row in table.rows)).text

    def _headline(self) -> str:
        config, corpus = self.config, self.trainer.corpus
        with torch.device("meta"):
            whole = Decoder(ModelShape.of(config))
        degrees = {
            "pp": config.pp,
            "dp_replicate": config.dp_replicate,
            "dp_shard": config.dp_shard,
            "cp": config.cp,
            "cp_replicate": config.cp_replicate,
            "tp": config.tp,
            "ep": config.ep,
        }
        spread = ", ".join(f"{name} {degree}" for name, degree in degrees.items() if degree != 1)
        spread += ", sp" if config.sp else ""
        where = f"{config.world} ranks ({spread})" if spread else "one device"
        return (
            f"{count_parameters(whole):,} parameters on {where}; "
            f"{len(corpus.train):,} bytes of {corpus.source}, {len(corpus.held_out):,} held out"
        )

    def _steps(self, done: int, display: Display) -> bool:
        """Run the steps after `done`; True if a rank was asked to stop."""
        for step in range(done + 1, self.config.steps + 1):
            began = time.perf_counter()
            result = self.trainer.step(step, supervise.stop_requested)
            took = time.perf_counter() - began
            last = result.stop or step == self.config.steps
            measured = last or step % self.config.eval_every == 0
            held_out = self.trainer.held_out_loss() if measured else None
            tokens = self.config.batch_size * self.config.seq_len
            record = StepRecord.of(step, result, held_out, tokens / took, time.perf_counter() - self._began)
            self.folder.log(record)
            display.show(record)
            if last or self._saves_at(step):
                self._save(step)
            supervise.heartbeat(step)
            if result.stop:
                display.say(f"stopped after step {step}; go on with --resume --out {self.folder.path}")
                return True
        return False

    def _saves_at(self, step: int) -> bool:
        every = self.config.checkpoint_every
        return every > 0 and step % every == 0

    def _save(self, step: int) -> None:
        with supervise.long_operation():
            from_first_rank(self.context, self.folder.check)
            save(
                step_path(self.folder.path, step),
                model=self.trainer.model,
                optimizer=self.trainer.optimizer,
                step=step,
                config=self._settings(),
            )

    def _settings(self) -> dict[str, Any]:
        return {**self.config.model_dump(mode="json"), "data_sum": self.trainer.corpus.sum}

    def _finish(self, display: Display) -> None:
        """Leave the curve and a sample. The other ranks are done once the weights have been gathered."""
        with supervise.long_operation():
            weights = full_parameters(self.trainer.model)
            if not self.context.is_main:
                return
            self.folder.write(SAMPLE, self._sample(weights))
            left = ["metrics", "layouts", "sample"]
            if self.folder.draw():
                left.insert(1, "loss curve")
            else:
                display.say("no loss curve: matplotlib is not installed (pip install 'shardwright[plot]')")
            left += ["checkpoints"] if self.config.steps else []
            display.say(f"{', '.join(left[:-1])} and {left[-1]} are in {self.folder.path}")

    def _sample(self, weights: dict[str, Tensor]) -> str:
        model = Decoder(ModelShape.of(self.config))
        model.load_state_dict(weights)
        return write_text(model.to(self.context.device), self.config.sample_length, self.config.seed) + "\n"
