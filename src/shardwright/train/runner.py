"""What each rank of a run does between joining the world and leaving it."""

from __future__ import annotations

import sys
import time

from shardwright.context.context import DistributedContext
from shardwright.context.parameters import DeviceMeshParameters
from shardwright.context.process import world_size_of_launch
from shardwright.launch import supervise
from shardwright.train.agreement import from_first_rank
from shardwright.train.config import TrainConfig
from shardwright.train.data import Corpus, load_corpus
from shardwright.train.loop import run
from shardwright.train.metrics import StepRecord
from shardwright.train.optim import Kind, make_optimizer
from shardwright.train.parallelize import build_model
from shardwright.train.progress import Display
from shardwright.train.reference_run import ReferenceRun
from shardwright.train.step import Trainer
from shardwright.train.verify import Findings, Verifier

SHOWN = 20  # facts of one kind


def main_rank(config: TrainConfig) -> int:
    """Train, or train and verify, on this rank of the world that the environment describes.

    Returns: the exit code of the run, the same on every rank.
    Raises: ShardwrightError: the run cannot be what was asked for; the same on every rank.
    """
    config = config.check(given_ranks=world_size_of_launch())
    with degrees(config).build(device=config.device) as context:
        return verified_run(config, context) if config.verify else run(config, context)


def degrees(config: TrainConfig) -> DeviceMeshParameters:
    """The degrees of a checked config."""
    return DeviceMeshParameters(
        pipeline_parallel=config.pp,
        data_parallel_replicate=config.dp_replicate,
        data_parallel_shard=config.dp_shard or 1,
        context_parallel_shard=config.cp,
        context_parallel_replicate=config.cp_replicate,
        tensor_parallel=config.tp,
        expert_parallel=config.ep,
    )


def verified_run(config: TrainConfig, context: DistributedContext) -> int:
    """Train with AdamW as usual and once more with SGD, each beside one device; print the result.

    Returns: 0, 1 if a bound is broken, or 128 + signal after a stop, which ends the comparison.
    """
    findings = Findings()
    corpus = load_corpus(config.data, config.seq_len)
    with supervise.long_operation():
        code = run(config, context, [_verifier(config, context, corpus, findings, "adamw")], corpus)
        if code == 0:
            code = _run_sgd(config, context, corpus, findings)
    if code:
        return code
    if context.is_main:
        report(findings)
    return from_first_rank(context, lambda: int(bool(findings.broken)))


def report(findings: Findings) -> None:
    """Print reasons, broken bounds and, last, the one line that sums them up."""
    lines = _first("rounding", findings.reasons) + _first("BROKEN", findings.broken)
    sys.stdout.write("\n".join([*lines, findings.last_line()]) + "\n")
    sys.stdout.flush()


def _first(kind: str, facts: list[str]) -> list[str]:
    more = [f"verify: {kind}: and {len(facts) - SHOWN} more"] if len(facts) > SHOWN else []
    return [f"verify: {kind}: {fact}" for fact in facts[:SHOWN]] + more


def _run_sgd(config: TrainConfig, context: DistributedContext, corpus: Corpus, findings: Findings) -> int:
    """The same steps with plain SGD and no clipping: a wrong scale, which AdamW hides, shows there."""
    model = build_model(config, context)
    trainer = Trainer(config, context, corpus, model, make_optimizer(model, config, "sgd"), "sgd")
    trainer.observers.append(_verifier(config, context, corpus, findings, "sgd"))
    began = ended = time.perf_counter()
    with Display(config.steps, config.experts, quiet=not context.is_main) as display:
        display.start(0, "verify: the same steps with plain SGD")
        for step in range(1, config.steps + 1):
            result, before = trainer.step(step, supervise.stop_requested), ended
            ended = time.perf_counter()
            speed = config.batch_size * config.seq_len / (ended - before)
            display.show(StepRecord.of(step, result, None, speed, ended - began))
            if result.stop:
                return supervise.stop_exit_code()
    return 0


def _verifier(
    config: TrainConfig, context: DistributedContext, corpus: Corpus, findings: Findings, kind: Kind
) -> Verifier:
    if not context.is_main:
        return Verifier(findings, None, kind)
    return Verifier(findings, ReferenceRun(config, corpus, kind, context.device), kind)
